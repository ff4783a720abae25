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

// With AMX the products are made of tiles, of pairs of bf16 whatever T is: more rows in a micro-block, and everything padded to whole tiles.
constexpr bool in_tiles = HAS_TILES;
template <typename T>
constexpr int BLOCK_Q = in_tiles ? 32 : MR;  // query rows of a micro-block

template <typename T>
ATTNWORKS_INLINE int64_t row_units(int64_t dim) {
  if (in_tiles) return round_up((dim + 1) / 2, 16);
  return in_pairs<T> ? (dim + 1) / 2 : dim;
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
// Up to W elements of a row, from element `at` on; past its end 0.
template <typename T>
ATTNWORKS_INLINE Vec load_floats(const T* row, int64_t at, int64_t dim) {
  return at >= dim ? zero() : dim - at >= W ? load_as_float(row + at) : load_as_float_n(row + at, (int)(dim - at));
}
// Whether q in tiles carries the factor of the scores: its pieces must have room for all of the product.
template <typename T>
constexpr bool scales_q = PIECES<T> > 2;
// load_units for tiles: all pieces, of elements times `factor` if they have room for it. Pairs are of neighbours in bf16, of elements W apart in
// wider types.
template <typename T>
ATTNWORKS_INLINE void load_pieces(const T* row, int64_t at, int64_t dim, float factor, Vec (&pieces)[PIECES<T>]) {
  if constexpr (in_pairs<T>) {
    pieces[0] = load_units(row, at, dim);
  } else {
    Vec first = load_floats(row, 2 * at, dim), second = load_floats(row, 2 * at + W, dim);
    if (scales_q<T>) first = mul(first, set1(factor)), second = mul(second, set1(factor));
    split_pairs<PIECES<T>>(first, second, pieces);
  }
}

constexpr int ROW_VECS = (MR + W - 1) / W;  // vectors that hold one number for each row of a micro-block

// rows x dim of q -> micro-blocks [rows / MR][units][MR], times `factor` (fp32 only). Rows past the last are 0. Written in ascending order
// in whole vectors, of which those at the end overrun their MR rows by less than W: so `packed` needs that much slack.
// For tiles: row by row, in pieces that are `piece` floats apart.
template <typename T>
static void pack_q(const T* q, int64_t stride, int64_t rows, int64_t dim, float factor, float* packed, [[maybe_unused]] int64_t piece = 0) {
  const int64_t units = row_units<T>(dim);
  if constexpr (in_tiles) {
    for (int64_t row = 0; row < round_up(rows, BLOCK_Q<T>); row++)
      for (int64_t at = 0; at < units; at += W) {
        Vec x[PIECES<T>] = {};
        if (row < rows) load_pieces(q + row * stride, at, dim, factor, x);
#pragma GCC unroll 4
        for (int n = 0; n < PIECES<T>; n++) store(packed + n * piece + row * units + at, x[n]);
      }
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

// keys x dim of k -> panels [ceil(keys / PANEL)][units][PANEL] (that is: k transposed); keys past the last are 0. Pieces are `piece` apart.
template <typename T>
static void pack_k(const T* k, int64_t stride, int64_t keys, int64_t dim, float* packed, [[maybe_unused]] int64_t piece = 0) {
  constexpr int N = in_tiles ? PIECES<T> : 1;
  const int64_t units = row_units<T>(dim);
  for (int64_t key = 0; key < round_up(keys, PANEL); key += W) {
    float* to = packed + key / PANEL * units * PANEL + key % PANEL;
    for (int64_t at = 0; at < units; at += W) {
      Vec x[N][W];
      const auto load_key = [&](int i) {
        if constexpr (in_tiles) {
          Vec pieces[N];
          load_pieces(k + (key + i) * stride, at, dim, 1.f, pieces);
#pragma GCC unroll 4
          for (int n = 0; n < N; n++) x[n][i] = pieces[n];
        } else {
          x[0][i] = load_units(k + (key + i) * stride, at, dim);
        }
      };
      if (key + W <= keys)
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) load_key(i);
      else
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
          if (key + i < keys) {
            load_key(i);
          } else {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) x[n][i] = zero();
          }
        }
#pragma GCC unroll 4
      for (int n = 0; n < N; n++, to += piece) {
        transpose(x[n]);
        if (at + W <= units)
#pragma GCC unroll 16
          for (int i = 0; i < W; i++) store(to + (at + i) * PANEL, x[n][i]);
        else
          for (int i = 0; i < units - at; i++) store(to + (at + i) * PANEL, x[n][i]);
      }
      to -= N * piece;
    }
  }
}

// keys x dim of v -> panels [ceil(dim / PANEL)][panel_stride = units of keys * PANEL], each [key units][PANEL]; columns past the last are 0.
// In pairs, a unit holds two neighbouring keys of one column; an odd last key is paired with 0.
// For tiles a unit holds keys `key` and key + W, the keys are filled up with 0 to a whole panel, those marked in left_out are 0 too, and there
// are pieces, `piece` floats apart.
template <typename T>
static void pack_v(const T* v, int64_t stride, int64_t keys, int64_t dim, float* packed, int64_t panel_stride, [[maybe_unused]] int64_t piece = 0,
                   [[maybe_unused]] const uint8_t* left_out = nullptr) {
  if constexpr (in_tiles) {
    for (int64_t key = 0; key < round_up(keys, PANEL); key = key % PANEL == W - 1 ? key + 1 + W : key + 1)
      for (int64_t column = 0; column < round_up(dim, PANEL); column += W) {
        const auto load_row = [&](int64_t at) { return at < keys && !(left_out && left_out[at]) ? load_floats(v + at * stride, column, dim) : zero(); };
        Vec x[PIECES<T>];
        split_pairs<PIECES<T>>(load_row(key), load_row(key + W), x);
        float* to = packed + column / PANEL * panel_stride + (key / PANEL * W + key % PANEL) * PANEL + column % PANEL;
#pragma GCC unroll 4
        for (int n = 0; n < PIECES<T>; n++) store(to + n * piece, x[n]);
      }
  } else if constexpr (in_pairs<T>) {
    static_assert(NV % 2 == 0);
    for (int64_t key = 0; key < keys; key += 2)
      for (int64_t column = 0; column < dim; column += 2 * W) {
        const Vec row = load_units(v + key * stride, column / 2, dim);
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
