// Scores to probabilities, in registers. Of a warpgroup's 64 x TILE_KV accumulator a thread holds two rows (r = 0, 1, eight
// apart): S[4 i + 2 r + e] is row r, column 8 i + 2 (lane % 4) + e. Four lanes share a row.
constexpr float RESCALE_ABOVE = 8;  // in powers of 2: so far the maximum may grow before O is rescaled

struct Rows {
  float maximum[2];  // of factor · S so far (or up to RESCALE_ABOVE less), -inf before the first key
  float sum[2];      // this lane's part of Σ 2^(factor · S - maximum)
  float scale[2];    // what O has to be multiplied by: after a tile of keys, or at the end
  bool grew;         // whether that is not 1 for a row of this warp
};

// S → 2^(factor · S - maximum). The maximum of the first tile is exact, so that no stand-in for -inf takes part; later it
// follows only where it grew by more than RESCALE_ABOVE. Other rows keep a scale of exactly 1, whoever shares their warp.
template <bool FIRST, int N> DEV void softmax(float (&S)[N], Rows& rows, float factor) {
  float now[2];
  bool grew = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = S[2 * r], y = S[2 * r + 1];
    float x2 = x, y2 = y;
#pragma unroll
    for (int i = 1; i < N / 4; i++) {
      const bool second = MAX_CHAINS == 2 && i % 2;
      (second ? x2 : x) = fmaxf(second ? x2 : x, S[4 * i + 2 * r]);
      (second ? y2 : y) = fmaxf(second ? y2 : y, S[4 * i + 2 * r + 1]);
    }
    if (MAX_CHAINS == 2) x = fmaxf(x, x2), y = fmaxf(y, y2);
    x = fmaxf(x, y);
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    now[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2)) * factor;
    if (!FIRST) {
      const bool g = !(now[r] - rows.maximum[r] <= RESCALE_ABOVE);  // also where both are -inf
      now[r] = g ? fmaxf(now[r], rows.maximum[r]) : rows.maximum[r], grew |= g;
    }
  }
  if (!FIRST) rows.grew = __any_sync(~0u, grew);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float shift = now[r] == -INFINITE ? 0.f : now[r];  // no key yet: nothing to subtract
    float even = 0, odd = 0;
    if (!FIRST) rows.scale[r] = exp2_fast(rows.maximum[r] - shift), rows.sum[r] *= rows.scale[r];
    rows.maximum[r] = now[r];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float &x = S[4 * i + 2 * r], &y = S[4 * i + 2 * r + 1];
      x = exp2_fast(x * factor - shift), y = exp2_fast(y * factor - shift);
      if (!SUM_LATER) even += x, odd += y;
    }
#pragma unroll
    for (int i = 0; SUM_LATER && i < N / 4; i++) even += S[4 * i + 2 * r], odd += S[4 * i + 2 * r + 1];
    rows.sum[r] = (FIRST ? 0.f : rows.sum[r]) + (even + odd);
  }
}

// The accumulator of one product as the register operand of the next, in the input dtype.
template <int N> DEV void to_operand(u32 (&P)[N / 2], const float (&S)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) P[i] = pack(S[2 * i], S[2 * i + 1]);
}

template <int N> DEV void rescale(float (&O)[N], const Rows& rows) {
  if (rows.grew) {
#pragma unroll
    for (int i = 0; i < N; i++) O[i] *= rows.scale[(i >> 1) & 1];
  }
}
