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
DEV float to_float(float x) { return x; }
#elif BIAS == 2
typedef unsigned short BiasElement;  // bf16
DEV float to_float(unsigned short x) { return __uint_as_float((u32)x << 16); }
#elif BIAS == 3
typedef unsigned short BiasElement;  // fp16
DEV float to_float(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
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

// S → outer · S + what is added. TAIL: there may be keys past the last, whose bias is not read.
template <bool TAIL, int N> DEV void add(float (&S)[N], const Params& p, const Added& a, int place, int keys, int lane) {
#if ALIBI || BIAS
  const int key = tile_at(p, place) * TILE_KV;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int column = key + 2 * (lane % 4);
#if ALIBI
    const float ahead = (float)(a.origin + 8 * r - column);
#endif
#if BIAS
    const BiasElement* bias = a.bias[r] + (i64)key * bias_step(p);
    const int stop = TAIL ? keys - column : TILE_KV;
#endif
#pragma unroll
    for (int i = 0; i < N / 4; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = S[4 * i + 2 * r + e];
        x *= p.outer;
#if ALIBI
        x -= a.slope * fabsf(ahead - (8 * i + e));
#endif
#if BIAS
        if (BIAS_KEYS == 0 || 8 * i + e < stop) x += to_float(*bias);
        bias += (e ? 7 : 1) * bias_step(p);
#endif
      }
  }
#endif
}
