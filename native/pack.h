// Copies of q, k and v tiles in the order in which the microkernels read them. Conversion to fp32 and padding happen here, on chip.
#pragma once
#include <string.h>

#include "integers.h"
#include "tiles.h"

namespace attnworks::ATTNWORKS_ISA {

// With bf16 dot products a tile is kept as 32-bit pairs of bf16, else as fp32. A row of head_dim elements has row_units of either.
template <typename T>
constexpr bool in_pairs = false;
template <>
constexpr bool in_pairs<bf16> = HAS_BF16_DOT;

// With AMX the products of pairs are made of tiles: more rows in a micro-block, and everything padded to whole tiles.
template <typename T>
constexpr bool in_tiles = HAS_TILES && in_pairs<T>;
template <typename T>
constexpr int BLOCK_Q = in_tiles<T> ? 32 : MR;  // query rows of a micro-block

template <typename T>
ATTNWORKS_INLINE int64_t row_units(int64_t dim) {
  const int64_t units = in_pairs<T> ? (dim + 1) / 2 : dim;
  return in_tiles<T> ? round_up(units, 16) : units;
}

// Up to W units of a row of dim elements, from unit `at` on; past its end 0, and nothing is read there.
template <typename T>
ATTNWORKS_INLINE Vec load_units(const T* row, int64_t at, int64_t dim) {
  if constexpr (in_pairs<T>) {
    const int64_t left = dim - 2 * at;
    return left >= 2 * W ? load_pairs(row + 2 * at) : load_pairs_n(row + 2 * at, left);
  } else {
    const int64_t left = dim - at;
    return left >= W ? load_as_float(row + at) : load_as_float_n(row + at, left);
  }
}

constexpr int ROW_VECS = (MR + W - 1) / W;  // vectors that hold one number for each row of a micro-block

// rows x dim of q -> micro-blocks [rows / MR][units][MR], times `factor` (fp32 only); row by row in tiles. Rows past the last are 0. Written in
// ascending order in whole vectors, of which those at the end overrun their MR rows by less than W: so `packed` needs that much slack.
template <typename T>
static void pack_q(const T* q, int64_t stride, int64_t rows, int64_t dim, float factor, float* packed) {
  const int64_t units = row_units<T>(dim);
  if constexpr (in_tiles<T>) {
    for (int64_t row = 0; row < round_up(rows, BLOCK_Q<T>); row++)
      for (int64_t at = 0; at < units; at += W) store(packed + row * units + at, row < rows ? load_units(q + row * stride, at, dim) : zero());
    return;
  }
  for (int64_t row = 0; row < rows; row += MR) {
    for (int64_t at = 0; at < units; at += W) {
      Vec x[ROW_VECS][W];
#pragma GCC unroll 8
      for (int v = 0; v < ROW_VECS; v++) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
          const int r = v * W + i;
          x[v][i] = r < MR && row + r < rows ? load_units(q + (row + r) * stride, at, dim) : zero();
          if constexpr (!in_pairs<T>) x[v][i] = mul(x[v][i], set1(factor));
        }
        transpose(x[v]);
      }
      for (int i = 0; i < smaller(W, units - at); i++, packed += MR)
#pragma GCC unroll 8
        for (int v = 0; v < ROW_VECS; v++) store(packed + v * W, x[v][i]);
    }
  }
}

// keys x dim of k -> panels [ceil(keys / PANEL)][units][PANEL] (that is: k transposed); keys past the last are 0.
template <typename T>
static void pack_k(const T* k, int64_t stride, int64_t keys, int64_t dim, float* packed) {
  const int64_t units = row_units<T>(dim);
  for (int64_t key = 0; key < round_up(keys, PANEL); key += W) {
    float* to = packed + key / PANEL * units * PANEL + key % PANEL;
    for (int64_t at = 0; at < units; at += W) {
      Vec x[W];
      if (key + W <= keys)
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[i] = load_units(k + (key + i) * stride, at, dim);
      else
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[i] = key + i < keys ? load_units(k + (key + i) * stride, at, dim) : zero();
      transpose(x);
      if (at + W <= units)
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + (at + i) * PANEL, x[i]);
      else
        for (int i = 0; i < units - at; i++) store(to + (at + i) * PANEL, x[i]);
    }
  }
}

// keys x dim of v -> panels [ceil(dim / PANEL)][panel_stride = units of keys * PANEL], each [key units][PANEL]; columns past the last are 0.
// In pairs, a unit holds two neighbouring keys of one column; an odd last key is paired with 0.
// In tiles the keys are filled up with 0 to a whole panel: a tile multiplies all of its rows.
template <typename T>
static void pack_v(const T* v, int64_t stride, int64_t keys, int64_t dim, float* packed, int64_t panel_stride) {
  if constexpr (in_pairs<T>) {
    static_assert(NV % 2 == 0);
    for (int64_t key = 0; key < (in_tiles<T> ? round_up(keys, PANEL) : keys); key += 2)
      for (int64_t column = 0; column < dim; column += 2 * W) {
        const Vec row = key < keys ? load_units(v + key * stride, column / 2, dim) : zero();
        const Vec next = key + 1 < keys ? load_units(v + (key + 1) * stride, column / 2, dim) : zero();
        Vec lo, hi;
        interleave_bf16(row, next, lo, hi);
        float* to = packed + column / PANEL * panel_stride + key / 2 * PANEL + column % PANEL;
        store(to, lo);
        store(to + W, hi);
      }
  } else {
    for (int64_t key = 0; key < keys; key++) {
      const T* row = v + key * stride;
      float* to = packed + key * PANEL;
      int64_t column = 0;
      for (; column + PANEL <= dim; column += PANEL, to += panel_stride)
#pragma GCC unroll 8
        for (int n = 0; n < NV; n++) store(to + n * W, load_as_float(row + column + n * W));
      for (; column < dim; column += W, to += W) store(to, load_units(row, column, dim));
    }
  }
}

}  // namespace attnworks::ATTNWORKS_ISA
