// Rows with elements that pieces don't stand for, where tiles multiply in pieces: the pieces of infinity are infinity and zeros, and zero times
// infinity is NaN; those of the tiniest numbers are taken for 0. Such rows are multiplied element by element, as without tiles.
#pragma once
#include "pack.h"

namespace attnworks::ATTNWORKS_ISA {

template <typename T>
constexpr bool in_pieces = in_tiles && PIECES<T> != 1;

template <typename T>
ATTNWORKS_INLINE bool is_outlier(const T* row, int64_t dim) {
  bool odd = false;
  for (int64_t at = 0; at < dim; at += W) odd |= any_outlier(load_floats(row, at, dim));
  return odd;
}

// marks[i]: whether row i of x is an outlier. Says whether any is.
template <typename T>
static bool mark_outliers(const T* x, int64_t stride, int64_t rows, int64_t dim, uint8_t* marks) {
  bool any = false;
  for (int64_t row = 0; row < rows; row++) any |= marks[row] = is_outlier(x + row * stride, dim);
  return any;
}

// Kernels::has_outliers
#ifdef ATTNWORKS_AMX
static bool has_outliers(DType dtype, const void* rows, int64_t stride, int64_t count, int64_t dim) {
  const auto any = [&](auto* x) {
    for (int64_t row = 0; row < count; row++)
      if (is_outlier(x + row * stride, dim)) return true;
    return false;
  };
  switch (dtype) {
    case DType::float32: return any((const float*)rows);
    case DType::float16: return any((const fp16*)rows);
    case DType::bfloat16: return false;  // is one piece
  }
  return false;
}
#else
constexpr auto has_outliers = (bool (*)(DType, const void*, int64_t, int64_t, int64_t))nullptr;
#endif

// sum of factor * a[i] * b[i]
template <typename T>
static float plain_product(const T* a, const T* b, int64_t dim, float factor) {
  Vec sum = zero();
  for (int64_t at = 0; at < dim; at += W) sum = fma(mul(set1(factor), load_floats(a, at, dim)), load_floats(b, at, dim), sum);
  return reduce_add(sum);
}

// to[0, dim) += factor * row
template <typename T>
static void add_plain(float factor, const T* row, int64_t dim, float* to) {
  for (int64_t at = 0; at < dim; at += W) store(to + at, fma(set1(factor), load_floats(row, at, dim), load(to + at)));
}

// One number of those that split_pairs<N> made of two vectors.
template <int N>
static float joined(const float* pairs, int64_t piece, int64_t at) {
  float sum = 0;
  for (int n = N - 1; n >= 0; n--) {
    uint32_t bits;
    memcpy(&bits, pairs + n * piece + at / PANEL * W + at % W, 4);
    bits = at % PANEL < W ? bits << 16 : bits & 0xffff0000;
    float part;
    memcpy(&part, &bits, 4);
    sum += part;
  }
  return sum;
}

}  // namespace attnworks::ATTNWORKS_ISA
