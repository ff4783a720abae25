// The matrix products: MR rows x up to NV vectors of accumulators stay in registers while `depth` units go by.
#pragma once

namespace attnworks::ATTNWORKS_ISA {

// acc[r][n] += sum over u of a[r * ROW + u * STEP] * b[u * b_stride + n * W]; offsets into a are compile-time constants.
template <bool PAIRS, int ROW, int STEP, int N>
ATTNWORKS_INLINE void multiply_add(int64_t depth, const float* a, const float* b, int64_t b_stride, Vec (&acc)[MR][N]) {
#pragma GCC unroll 4
  for (int64_t u = 0; u < depth; u++) {
    Vec x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) x[n] = load(b + n * W);
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
      const Vec y = set1(a[r * ROW]);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        if constexpr (PAIRS)
          acc[r][n] = dot_bf16(acc[r][n], y, x[n]);
        else
          acc[r][n] = fma(y, x[n], acc[r][n]);
      }
    }
    a += STEP;
    b += b_stride;
  }
}

// scores[MR][row stride C_ROW] = q k^T for one micro-block of packed q and one panel of packed k, times `factor` if PAIRS, plus `bias` of the
// panel's keys if it is not null.
template <bool PAIRS, int C_ROW>
__attribute__((noinline)) static void scores_kernel(int64_t units, const float* q, const float* k, float factor, const float* bias,
                                                    float* scores) {
  Vec acc[MR][NV];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) acc[r][n] = zero();
  multiply_add<PAIRS, 1, MR>(units, q, k, PANEL, acc);
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) {
      if (PAIRS) acc[r][n] = mul(acc[r][n], set1(factor));
      store(scores + r * C_ROW + n * W, bias ? add(acc[r][n], load(bias + n * W)) : acc[r][n]);
    }
}

// acc[MR][row stride acc_stride] = rescale[MR] * acc + probs v for N vectors of columns.
template <bool PAIRS, int P_ROW, int N>
__attribute__((noinline)) static void values_kernel(int64_t depth, const float* probs, const float* v, int64_t v_stride, const float* rescale,
                                                    float* acc_memory, int64_t acc_stride) {
  Vec acc[MR][N];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) acc[r][n] = mul(set1(rescale[r]), load(acc_memory + r * acc_stride + n * W));
  multiply_add<PAIRS, P_ROW, 1>(depth, probs, v, v_stride, acc);
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(acc_memory + r * acc_stride + n * W, acc[r][n]);
}

// c[MR][row stride c_stride] += (or =, if `first`) a b for N vectors of columns, a as in multiply_add. The sum starts at 0 and meets c once:
// so the rounding errors of long sums grow with the number of blocks and the size of one, not with their product.
template <bool PAIRS, int ROW, int STEP, int N>
__attribute__((noinline)) static void add_product_kernel(int64_t depth, const float* a, const float* b, float* c, int64_t c_stride,
                                                         bool first) {
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++) __builtin_prefetch(c + r * c_stride, 1);  // needed after the product
  Vec acc[MR][N];
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) acc[r][n] = zero();
  multiply_add<PAIRS, ROW, STEP>(depth, a, b, PANEL, acc);
#pragma GCC unroll 16
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      float* to = c + r * c_stride + n * W;
      store(to, first ? acc[r][n] : add(load(to), acc[r][n]));
    }
}

// The same for 1 <= vectors <= NV.
template <bool PAIRS, int ROW, int STEP, int N = NV>
ATTNWORKS_INLINE void add_product(int64_t vectors, int64_t depth, const float* a, const float* b, float* c, int64_t c_stride, bool first) {
  if constexpr (N > 1) {
    if (vectors < N) return add_product<PAIRS, ROW, STEP, N - 1>(vectors, depth, a, b, c, c_stride, first);
  }
  add_product_kernel<PAIRS, ROW, STEP, N>(depth, a, b, c, c_stride, first);
}

// The same for 1 <= vectors <= NV.
template <bool PAIRS, int P_ROW, int N = NV>
ATTNWORKS_INLINE void values(int64_t vectors, int64_t depth, const float* probs, const float* v, int64_t v_stride, const float* rescale,
                             float* acc, int64_t acc_stride) {
  if constexpr (N > 1) {
    if (vectors < N) return values<PAIRS, P_ROW, N - 1>(vectors, depth, probs, v, v_stride, rescale, acc, acc_stride);
  }
  values_kernel<PAIRS, P_ROW, N>(depth, probs, v, v_stride, rescale, acc, acc_stride);
}

}  // namespace attnworks::ATTNWORKS_ISA
