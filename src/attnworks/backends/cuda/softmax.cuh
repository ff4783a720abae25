// Scores to probabilities, in registers. Of a warpgroup's 64 x TILE_KV accumulator a thread holds two rows (r = 0, 1, eight
// apart): S[4 i + 2 r + e] is row r, column 8 i + 2 (lane % 4) + e. Four lanes share a row.
constexpr float RESCALE_ABOVE = 8;  // in powers of 2: so far the maximum may grow before O is rescaled
constexpr float MOST_SUM = 8192;    // of a lane's part of a row's probs in one tile, with the maximum of the tiles before

struct Rows {
  float maximum[2];  // of factor · S so far, or as much less as RESCALE_ABOVE and MOST_SUM let it be; -inf before any key
  float sum[2];      // this lane's part of Σ 2^(factor · S - maximum); with a minus: softmax_kept() found the maximum too low
  float scale[2];    // what O has to be multiplied by: after a tile of keys, or at the end
  bool grew;         // whether that is not 1 for a row of this warp
};

// S → 2^(factor · S - maximum). The maximum of the first tile is exact, so that no stand-in for -inf takes part; later it
// follows only where it grew by more than RESCALE_ABOVE or, with OVER, where the sum has a minus. Other rows keep a scale
// of exactly 1, whoever shares their warp.
template <bool FIRST, bool OVER = false, int N> DEV void softmax(float (&S)[N], Rows& rows, float factor) {
  float now[2];
  bool grew = false;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = S[2 * r], y = S[2 * r + 1];
#pragma unroll
    for (int i = 1; i < N / 4; i++) x = fmaxf(x, S[4 * i + 2 * r]), y = fmaxf(y, S[4 * i + 2 * r + 1]);
    x = fmaxf(x, y);
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    now[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2)) * factor;
    if (!FIRST) {
      const bool g = OVER ? signbit(rows.sum[r]) : !(now[r] - rows.maximum[r] <= RESCALE_ABOVE);  // also where both are -inf
      if (OVER) rows.sum[r] = fabsf(rows.sum[r]);
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
      even += x, odd += y;
    }
    rows.sum[r] = (FIRST ? 0.f : rows.sum[r]) + (even + odd);
  }
}

// The same with the maximum of the tiles before, which need not be the largest score: any will do from which probs and sums
// stay in range, and a sum says whether they did. So nobody looks for a maximum here, which took a quarter of the time:
// a step of 64 rows and 128 keys took 880 cycles, 1100 beside one group that only issues products and 1320 beside two; of
// a thread's instructions in it 64 comparisons by themselves 140, 260, 315, 64 multiply-adds 76, 95, 111 and 64
// exponentials 521, 648, 709 (H200, 2026-12-01). False where a row of the warp needs another one (also its first, or for
// NaN): S is lost then, and nothing else changed but such rows' sign. Which maximum a row has depends on its own scores
// alone.
template <int N> DEV bool softmax_kept(float (&S)[N], Rows& rows, float factor) {
  float even[2] = {}, odd[2] = {};
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int r = i >> 1 & 1;
    S[i] = exp2_fast(S[i] * factor - rows.maximum[r]);
    (i & 1 ? odd : even)[r] += S[i];
  }
  const float sums[2] = {even[0] + odd[0], even[1] + odd[1]};
  const bool over[2] = {!(sums[0] <= MOST_SUM), !(sums[1] <= MOST_SUM)};
  if (__any_sync(~0u, over[0] || over[1])) {
#pragma unroll
    for (int r = 0; r < 2; r++)  // a row's four lanes agree
      if (__ballot_sync(~0u, over[r]) >> (threadIdx.x & 28) & 15) rows.sum[r] = copysignf(rows.sum[r], -1.f);
    return false;
  }
  rows.sum[0] += sums[0], rows.sum[1] += sums[1], rows.grew = false;
  return true;
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
