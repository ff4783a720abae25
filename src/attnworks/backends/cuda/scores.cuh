// The score part: what becomes of S = Q K^T before mask and softmax. How S lies in registers: softmax.cuh.

// Score modifiers without operands: 1: s · inner, where the scale is no factor of the exponents; 2: tanh(s · inner),
// softcap. tanh by its definition: the instruction's error of 2^-11 would be multiplied by the cap.
template <int N> DEV void score(float (&S)[N], const Params& p) {
#if MODIFIER == 1
#pragma unroll
  for (int i = 0; i < N; i++) S[i] *= p.inner;
#elif MODIFIER == 2
#pragma unroll
  for (int i = 0; i < N; i++) S[i] = 1 - 2 * reciprocal(exp2_fast(S[i] * p.inner) + 1);
#endif
}

#if BIAS == 1
typedef float BiasElement;
typedef float2 BiasPair;
DEV float to_float(float x) { return x; }
DEV float2 to_floats(float2 x) { return x; }
#elif BIAS
typedef unsigned short BiasElement;
typedef u32 BiasPair;
DEV float to_float(unsigned short x) {
#if BIAS == 2  // bf16
  return __uint_as_float((u32)x << 16);
#else  // fp16
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#endif
}
DEV float2 to_floats(u32 x) { return make_float2(to_float((unsigned short)(x & 0xFFFF)), to_float((unsigned short)(x >> 16))); }
#endif
#if BIAS
// Elements from one key to the next, which is known to the compiler where it is 0 or 1.
DEV i64 bias_step(const Params& p) { return BIAS_KEYS == 2 ? p.bias_key : BIAS_KEYS; }
#endif

// What is added to scores: -slope · |i + keys - rows - j|, and the bias.
struct Added {
#if ALIBI
  float slope;
  int origin;  // i + keys - rows of the thread's first row
#endif
#if BIAS
  const BiasElement* bias[2];  // of the thread's rows, at key 0 of the thread's columns
#endif
};
DEV Added added_to(const Params& p, const Work& w, int row, int lane) {
  Added a;
#if ALIBI
  a.slope = p.slopes[(i64)w.batch * p.slopes_batch + w.head], a.origin = row + w.keys - w.rows;
#endif
#if BIAS
#pragma unroll
  for (int r = 0; r < 2; r++)  // rows past the last read the last one's
    a.bias[r] = (const BiasElement*)p.bias + w.batch * p.bias_batch + w.head * p.bias_head +
                min(row + 8 * r, w.rows - 1) * p.bias_row + 2 * (lane % 4) * bias_step(p);
#endif
  return a;
}

// Asks the L2 for a tile's bias, a line of 128 bytes from each lane of a row, while others are worked on.
DEV void prefetch_bias(const Params& p, const Added& a, int place, int keys, int lane) {
#if BIAS && BIAS_KEYS == 1 && BIAS_ROWS
  constexpr int LINE = 128 / sizeof(BiasElement);
  const int key = tile_at(p, place) * TILE_KV + lane % 4 * LINE;
  if (lane % 4 * LINE < TILE_KV && key < keys)
#pragma unroll
    for (int r = 0; r < 2; r++) prefetch_l2(a.bias[r] - 2 * (lane % 4) + key);
#endif
}

// S → outer · S - slope · |distance|. Where no key lies ahead of a row, or all of a tile's do, distances are linear in the
// column: one multiplication for each score rather than three operations.
template <int N> DEV void add_slopes(float (&S)[N], const Params& p, const Added& a, int column) {
#if ALIBI
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int ahead = a.origin + 8 * r - column;  // of the thread's first column
    const bool behind = ALIBI == 2 || ahead >= TILE_KV, linear = behind || ahead <= 0;
    const float slope = behind ? a.slope : -a.slope, start = -slope * (float)ahead;
    if (ALIBI == 2 || __all_sync(~0u, linear)) {
#pragma unroll
      for (int i = 0; i < N / 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) S[4 * i + 2 * r + e] = S[4 * i + 2 * r + e] * p.outer + (slope * (8 * i + e) + start);
    } else {
#pragma unroll
      for (int i = 0; i < N / 4; i++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          S[4 * i + 2 * r + e] = S[4 * i + 2 * r + e] * p.outer - a.slope * fabsf((float)ahead - (8 * i + e));
    }
  }
#endif
}

// S → outer · S + bias, where ALiBi has not taken S to its own units yet. TAIL: there may be keys past the last, whose bias
// is not read.
template <bool TAIL, int N> DEV void add_bias(float (&S)[N], const Params& p, const Added& a, int key, int stop) {
#if BIAS
  const float outer = ALIBI ? 1 : p.outer;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const BiasElement* bias = a.bias[BIAS_ROWS ? r : 0] + key * bias_step(p);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float2 b = make_float2(0, 0);
      if (BIAS_KEYS == 0) {
        b.x = b.y = to_float(*bias);
      } else if (BIAS_PAIRS && (!TAIL || 8 * i + 1 < stop)) {
        b = to_floats(*(const BiasPair*)bias);
      } else {
        if (!TAIL || 8 * i < stop) b.x = to_float(*bias);
        if (!TAIL || 8 * i + 1 < stop) b.y = to_float(bias[bias_step(p)]);
      }
      bias += 8 * bias_step(p);
      float &x = S[4 * i + 2 * r], &y = S[4 * i + 2 * r + 1];
      x = x * outer + b.x, y = y * outer + b.y;
    }
  }
#endif
}

template <bool TAIL, int N> DEV void add(float (&S)[N], const Params& p, const Added& a, int place, int keys, int lane) {
#if ALIBI || BIAS
  const int key = tile_at(p, place) * TILE_KV, column = key + 2 * (lane % 4);
  add_slopes(S, p, a, column);
  add_bias<TAIL>(S, p, a, key, keys - column);
#endif
}
