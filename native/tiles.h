// Intel AMX: products of whole tiles. A tile register holds 16 rows of 64 bytes; one instruction multiplies 16 rows of 16 bf16 pairs by
// 16 pair-rows of 16 columns and adds to 16 x 16 floats ("Intel Architecture Instruction Set Extensions", chapter 3). The layouts are those of
// the dot products of bf16 pairs; only q stays row by row, since a tile reads rows.
#pragma once
#include <stdint.h>

namespace attnworks::ATTNWORKS_ISA {

constexpr int PANEL = NV * W;  // keys (of k) or columns (of v) that one microkernel covers
constexpr int TILE = 16;  // rows of a tile, pairs of a row, columns of a product

// While one lives, the thread has its tile registers: eight of full size. Released, they cost nothing at a context switch.
template <bool TILES>
struct TileState {};

// x[0, count) *= factor, count a multiple of W.
ATTNWORKS_INLINE void scale_row(float* x, int64_t count, float factor) {
  for (int64_t at = 0; at < count; at += W) store(x + at, mul(set1(factor), load(x + at)));
}

#ifndef ATTNWORKS_AMX
constexpr bool HAS_TILES = false;
void tile_scores(int64_t units, const float* q, const float* k, float* scores, int64_t scores_row);  // declared only, never called
void tile_values(int64_t depth, const float* probs, int64_t probs_row, const float* v, float* acc, int64_t acc_stride);
#else
constexpr bool HAS_TILES = true;

template <>
struct TileState<true> {
  TileState() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileState() { _tile_release(); }
};

// Registers 0 1 / 2 3 hold 32 rows x 32 columns; they += a (32 rows, a_stride floats apart) times b (a panel: rows of PANEL units).
ATTNWORKS_INLINE void tile_multiply_add(int64_t depth, const float* a, int64_t a_stride, const float* b) {
  for (int64_t u = 0; u < depth; u += TILE) {
    _tile_loadd(4, a + u, a_stride * 4);
    _tile_loadd(6, b + u * PANEL, PANEL * 4);
    _tile_loadd(7, b + u * PANEL + TILE, PANEL * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + TILE * a_stride + u, a_stride * 4);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
ATTNWORKS_INLINE void tile_store(float* c, int64_t stride) {
  _tile_stored(0, c, stride * 4);
  _tile_stored(1, c + TILE, stride * 4);
  _tile_stored(2, c + TILE * stride, stride * 4);
  _tile_stored(3, c + TILE * stride + TILE, stride * 4);
}

// scores[32][row stride scores_row] = q k^T for one micro-block of q (row by row) and one panel of packed k. units is a multiple of 16.
static void tile_scores(int64_t units, const float* q, const float* k, float* scores, int64_t scores_row) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  tile_multiply_add(units, q, units, k);
  tile_store(scores, scores_row);
}

// acc[32][row stride acc_stride] += probs v for one panel of columns. depth is a multiple of 16.
static void tile_values(int64_t depth, const float* probs, int64_t probs_row, const float* v, float* acc, int64_t acc_stride) {
  _tile_loadd(0, acc, acc_stride * 4);
  _tile_loadd(1, acc + TILE, acc_stride * 4);
  _tile_loadd(2, acc + TILE * acc_stride, acc_stride * 4);
  _tile_loadd(3, acc + TILE * acc_stride + TILE, acc_stride * 4);
  tile_multiply_add(depth, probs, probs_row, v);
  tile_store(acc, acc_stride);
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
