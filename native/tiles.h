// Intel AMX: products of whole tiles. A tile register holds 16 rows of 64 bytes; one instruction multiplies 16 rows of 16 bf16 pairs by
// 16 pair-rows of 16 columns and adds to 16 x 16 floats ("Intel Architecture Instruction Set Extensions", chapter 3). That is 16 times what an
// FMA of 16 floats does in the same time.
//
// Wider types are multiplied in pieces: x is the sum of PIECES bf16, exactly, and of the products of pieces those are added up that fp32 could
// tell from 0 (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations").
//
// A panel holds keys (of k) or columns (of v) side by side. The 32 keys of a block form pairs of (key, key + 16), so that two vectors of probs
// become pairs by a shift and a blend.
#pragma once
#include <stdint.h>

namespace attnworks::ATTNWORKS_ISA {

constexpr int PANEL = NV * W;  // keys (of k) or columns (of v) that one microkernel covers
constexpr int TILE = 16;  // rows of a tile, pairs of a row, columns of a product

// The bf16 that a T is the sum of: 8 bits of its mantissa each.
template <typename T>
constexpr int PIECES = 1;
template <>
constexpr int PIECES<fp16> = 2;
template <>
constexpr int PIECES<float> = 3;

// While one lives, the thread has its tile registers: eight, of TILE rows, or the first three of `rows`. Released, they cost nothing at a
// context switch.
template <bool TILES>
struct TileState {
  explicit TileState(int = TILE) {}
};

// x[0, count) *= factor, count a multiple of W.
ATTNWORKS_INLINE void scale_row(float* x, int64_t count, float factor) {
  for (int64_t at = 0; at < count; at += W) store(x + at, mul(set1(factor), load(x + at)));
}

// Where the pieces of an operand lie: `piece` floats apart, in rows `row` floats apart.
struct Pieces {
  const float* data;
  int64_t row, piece;
};

#ifndef ATTNWORKS_AMX
constexpr bool HAS_TILES = false;
template <int N>
void split_pairs(Vec x, Vec y, Vec (&pairs)[N]);  // declared only, never called
bool any_outlier(Vec x);
#else
constexpr bool HAS_TILES = true;

// GCC's tile intrinsics (12 and 13) don't say that they read memory: what was stored before could come after them, or never.
ATTNWORKS_INLINE void stores_come_first() { asm volatile("" ::: "memory"); }

template <>
struct TileState<true> {
  explicit TileState(int rows = TILE) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
    } config;
    for (int n = 0; n < 3; n++) config.rows[n] = (uint8_t)rows;
    asm volatile("" : : "r"(&config) : "memory");  // as stores_come_first, and config's address is known outside
    _tile_loadconfig(&config);
  }
  ~TileState() { _tile_release(); }
};

ATTNWORKS_INLINE __m512i bits_of(Vec x) { return _mm512_castps_si512(x); }
ATTNWORKS_INLINE Vec floats_of(__m512i x) { return _mm512_castsi512_ps(x); }
ATTNWORKS_INLINE Vec toward_zero(Vec x) { return floats_of(_mm512_and_si512(bits_of(x), _mm512_set1_epi32((int)0xffff0000))); }
// Of the result the upper half is x to nearest, ties away from zero.
ATTNWORKS_INLINE Vec half_added(Vec x) { return floats_of(_mm512_add_epi32(bits_of(x), _mm512_set1_epi32(0x8000))); }
ATTNWORKS_INLINE Vec to_nearest(Vec x) { return toward_zero(half_added(x)); }
// The upper halves of x (the lower of each pair) and y.
ATTNWORKS_INLINE Vec pair_halves(Vec x, Vec y) {
  return floats_of(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bits_of(x), 16), bits_of(y)));
}

// One piece after another is taken off x, the first towards zero, since rounding may make a large number infinite, the others to nearest, so
// that the products that are left out have either sign. What is left behind is exact.
template <int N>
ATTNWORKS_INLINE void split(Vec x, Vec (&pieces)[N]) {
  pieces[0] = toward_zero(x);
  if constexpr (N > 1) {
    Vec rest = sub(x, pieces[0]);
#pragma GCC unroll 4
    for (int n = 1; n < N; n++) {
      pieces[n] = n + 1 < N ? to_nearest(rest) : rest;
      rest = sub(rest, pieces[n]);
    }
  }
}
// The same, a single piece rounded. Only upper halves are meant.
template <int N>
ATTNWORKS_INLINE void split_rounded(Vec x, Vec (&pieces)[N]) {
  if constexpr (N == 1)
    pieces[0] = half_added(x);
  else
    split<N>(x, pieces);
}
// The pieces of two vectors, as pairs (x[i], y[i]).
template <int N>
ATTNWORKS_INLINE void split_pairs(Vec x, Vec y, Vec (&pairs)[N]) {
  Vec a[N], b[N];
  split_rounded<N>(x, a);
  split_rounded<N>(y, b);
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) pairs[n] = pair_halves(a[n], b[n]);
}

// scale_by_pow2 for where one FlushSubnormals lives, without the comparison: one of the eleven operations that a score costs.
ATTNWORKS_INLINE Vec scale_flushed(Vec x, Vec whole) { return _mm512_scalef_ps(x, whole); }

// While one lives, the thread's results are 0 where they would be subnormal.
struct FlushSubnormals {
  const unsigned before = _mm_getcsr();
  FlushSubnormals() {
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON);
    stores_come_first();  // and loads after
  }
  ~FlushSubnormals() {
    stores_come_first();
    _mm_setcsr(before);
  }
};

// Not if there is a NaN.
ATTNWORKS_INLINE bool all_at_most(Vec x, float most) { return _mm512_cmp_ps_mask(x, set1(most), _CMP_NLE_UQ) == 0; }

// Whether pieces don't stand for some lane of x: it is infinite or NaN, or nearer to 0 than 2^-90 without being it, so that a piece or what it
// adds to a sum may be subnormal, which tiles take for 0.
ATTNWORKS_INLINE bool any_outlier(Vec x) {
  constexpr int LEAST = (127 - 90) << 23, INFINITE = 0x7f800000;
  const __m512i size = _mm512_and_si512(bits_of(x), _mm512_set1_epi32(0x7fffffff));
  const __mmask16 odd = _mm512_cmpge_epu32_mask(_mm512_sub_epi32(size, _mm512_set1_epi32(LEAST)), _mm512_set1_epi32(INFINITE - LEAST));
  return _mm512_mask_test_epi32_mask(odd, size, size);
}

// Registers 0 1 / 2 3 hold 32 rows x 32 columns; they += a (32 rows) times b (a panel: rows of PANEL units), over one tile of units. Of pieces
// i and j those are multiplied with i + j <= LAST, in an order in which one of them can often stay where it is.
template <int N, int LAST>
ATTNWORKS_INLINE void tile_multiply_add(const float* a, int64_t a_row, int64_t a_piece, const float* b, int64_t b_piece) {
  int held = N;  // the piece of a in registers 4 and 5
#pragma GCC unroll 4
  for (int j = 0; j < N; j++) {
    const float* columns = b + j * b_piece;
    const int most = LAST - j < N ? LAST - j : N - 1;
    _tile_loadd(6, columns, PANEL * 4);
#pragma GCC unroll 4
    for (int n = 0; n <= most; n++) {
      const int i = j % 2 ? n : most - n;
      const float* rows = a + i * a_piece;
      if (i != held) _tile_loadd(4, rows, a_row * 4);
      if (n == 0) _tile_loadd(7, columns + TILE, PANEL * 4);
      _tile_dpbf16ps(0, 4, 6);
      if (i != held) _tile_loadd(5, rows + TILE * a_row, a_row * 4);
      held = i;
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

ATTNWORKS_INLINE void clear_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
ATTNWORKS_INLINE void store_tiles(float* c, int64_t c_row) {
  _tile_stored(0, c, c_row * 4);
  _tile_stored(1, c + TILE, c_row * 4);
  _tile_stored(2, c + TILE * c_row, c_row * 4);
  _tile_stored(3, c + TILE * c_row + TILE, c_row * 4);
}

// c[32][32 columns] = a b, or += a b if ADD, for 32 rows of a and one panel of b, over `units`, a multiple of TILE.
template <int N, int LAST, bool ADD>
ATTNWORKS_INLINE void tile_product(int64_t units, Pieces a, const float* b, int64_t b_piece, float* c, int64_t c_row) {
  stores_come_first();
  if (ADD) {
    _tile_loadd(0, c, c_row * 4);
    _tile_loadd(1, c + TILE, c_row * 4);
    _tile_loadd(2, c + TILE * c_row, c_row * 4);
    _tile_loadd(3, c + TILE * c_row + TILE, c_row * 4);
  } else {
    clear_tiles();
  }
  for (int64_t u = 0; u < units; u += TILE) tile_multiply_add<N, LAST>(a.data + u, a.row, a.piece, b + u * PANEL, b_piece);
  store_tiles(c, c_row);
}

// c[32][32 columns] = a b, and after each of its steps others(begin, end): `share` of `count` rows of something else. While tiles are multiplied
// vectors have one port for arithmetic, not two; but what either of them waits for from L2 the other's work hides.
template <int N, int LAST, typename Others>
ATTNWORKS_INLINE void tile_product_beside(int64_t units, Pieces a, const float* b, int64_t b_piece, float* c, int64_t c_row, int64_t share,
                                          int64_t count, Others others) {
  stores_come_first();
  clear_tiles();
  for (int64_t u = 0, begin = 0; u < units; u += TILE) {
    tile_multiply_add<N, LAST>(a.data + u, a.row, a.piece, b + u * PANEL, b_piece);
    const int64_t end = begin + share < count ? begin + share : count;
    others(begin, end);
    begin = end;
  }
  store_tiles(c, c_row);
}

static double tile_flops(int64_t iterations) {
  const TileState<true> state;
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t k = 0; k < iterations; k++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return (double)iterations * 4 * TILE * TILE * TILE * 4;
}
#endif

}  // namespace attnworks::ATTNWORKS_ISA
