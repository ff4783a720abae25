// The two products of decode with AMX, for bf16 and up to TILE query rows of a head. Keys are the rows of the first product's tiles, just as
// they lie in the cache, so that nothing of K's size is moved; what comes out is turned over. Values enter the second one in pairs of keys.
#pragma once
#include "decode_products.h"
#include "tiles.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int FEWEST_TILED_ROWS = 2;  // that share a head: of one row, a product of tiles wastes most. Which kernels run is the plan's choice.
constexpr int TILED_KEYS = 2 * TILE;  // keys of a product with V
template <typename T>
constexpr bool TILED = HAS_TILES && PAIRS<T>;

#ifndef ATTNWORKS_AMX
void turn_queries(float* rows, int64_t row_stride, int count);  // declared only, never called
template <typename T>
void score_in_tiles(const Queries&, int rows, const T* const* keys, const Strides&, int count, int64_t head_dim, float* scores, Ahead);
template <typename T>
void weigh_in_tiles(const float* probs, const T* const* values, int count, int64_t head_offset, int64_t head_dim_v, float* acc,
                    int64_t acc_stride, Ahead&);
void sort_columns(float* acc, int64_t count);
#else

// `count` rows of pairs become the second operand of a product, in place: of every TILE pairs of TILE rows, pair p of row r is element r of row p.
static inline void turn_queries(float* rows, int64_t row_stride, int count) {
  for (int r = 0; r < count; r += TILE)
    for (int64_t pair = 0; pair < row_stride; pair += TILE) {
      float* at = rows + r * row_stride + pair;
      Vec x[W];
      for (int i = 0; i < W; i++) x[i] = load(at + i * row_stride);
      transpose(x);
      for (int i = 0; i < W; i++) store(at + i * row_stride, x[i]);
    }
}

// Of TILE keys, the elements of one step: where they lie if they can be loaded from there, else a copy.
struct KeyTile {
  const void* rows;
  int64_t bytes;  // from row to row
};
template <typename T>
ATTNWORKS_INLINE KeyTile key_tile(const T* const* keys, int64_t offset, bool even, int64_t row, int64_t columns, float* copy) {
  if (even && columns >= STEP) return {keys[0] + offset, row * (int64_t)sizeof(T)};
  stores_come_first();  // and the loads of the tile before this one
  for (int i = 0; i < TILE; i++) store(copy + i * W, load_pairs_n(keys[i] + offset, (int)smaller(columns, STEP)));
  stores_come_first();
  return {copy, W * sizeof(float)};
}

template <typename T>
static bool evenly_spaced(const T* const* keys, int64_t row) {
  bool even = true;
  for (int i = 1; i < TILE; i++) even &= keys[i] == keys[i - 1] + row;
  return even;
}

// scores[r][0, TILE) = factor * products[0, TILE)[r] for `rows` rows, and those up to a multiple of 4 of them.
ATTNWORKS_INLINE void turn_products(const float* products, int rows, float factor, float* scores) {
  for (int r = 0; r < rows; r += 4) {
    __m512 x[4];  // lane n of x[i] belongs to key 4 n + i
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const float* from = products + i * TILE + r;
      x[i] = _mm512_castps128_ps512(_mm_load_ps(from));
      x[i] = _mm512_insertf32x4(x[i], _mm_load_ps(from + 4 * TILE), 1);
      x[i] = _mm512_insertf32x4(x[i], _mm_load_ps(from + 8 * TILE), 2);
      x[i] = mul(set1(factor), _mm512_insertf32x4(x[i], _mm_load_ps(from + 12 * TILE), 3));
    }
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1])), b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3])), d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
    float* to = scores + r * BLOCK_KEYS;
    store(to, _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
    store(to + BLOCK_KEYS, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
    store(to + 2 * BLOCK_KEYS, _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
    store(to + 3 * BLOCK_KEYS, _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
  }
}

// As score_block, for `rows` rows that turn_queries has turned. Tile registers: 3 and 6 hold keys, 7 holds q, 4 and 5 their products.
template <typename T>
static void score_in_tiles(const Queries& q, int rows, const T* const* keys, const Strides& k, int count, int64_t head_dim, float* scores,
                           Ahead ahead) {
  constexpr int HALF = lines(TILE * STEP * sizeof(T)) / 2;  // of the lines that a tile reads
  alignas(64) float products[2][TILE * TILE], copies[2][TILE * W];
  for (int j = 0; j < count; j += 2 * TILE) {
    const bool two = count - j > TILE;
    const T* const* key = keys + j;
    const bool even0 = evenly_spaced(key, k.row), even1 = two && evenly_spaced(key + TILE, k.row);
    for (int64_t head = 0; head < q.heads; head++) {
      const float* query = q.rows + head * q.head_stride;
      _tile_zero(4);
      _tile_zero(5);
      for (int64_t d = 0; d < head_dim; d += STEP, query += W) {
        ahead.step<HALF>();
        const KeyTile first = key_tile(key, head * k.head + d, even0, k.row, head_dim - d, copies[0]);
        _tile_loadd(7, query, q.row_stride * 4);
        _tile_loadd(3, first.rows, first.bytes);
        _tile_dpbf16ps(4, 3, 7);
        ahead.step<HALF>();
        if (!two) continue;
        ahead.step<HALF>();
        const KeyTile second = key_tile(key + TILE, head * k.head + d, even1, k.row, head_dim - d, copies[1]);
        _tile_loadd(6, second.rows, second.bytes);
        _tile_dpbf16ps(5, 6, 7);
        ahead.step<HALF>();
      }
      _tile_stored(4, products[0], TILE * 4);
      if (two) _tile_stored(5, products[1], TILE * 4);
      float* to = scores + head * SCORE_ROWS * BLOCK_KEYS + j;
      turn_products(products[0], rows, q.factor, to);
      if (two) turn_products(products[1], rows, q.factor, to + TILE);
    }
  }
}

// As weigh_block, for as many rows as TileState was told. Tile registers: 0 and 1 hold acc, 2 probs, 3 and 6 values. Of every 2 W columns acc
// has those first that unpacking pairs of 8 by 8 leaves in the first vector: see sort_columns.
template <typename T>
static void weigh_in_tiles(const float* probs, const T* const* values, int count, int64_t head_offset, int64_t head_dim_v, float* acc,
                           int64_t acc_stride, Ahead& fetch) {
  alignas(64) float pairs[2][TILE * W];
  Ahead ahead = fetch;
  for (int64_t column = 0; column < head_dim_v; column += STEP) {
    const int columns = (int)smaller(STEP, head_dim_v - column);
    stores_come_first();
    _tile_loadd(0, acc + column, acc_stride * 4);
    _tile_loadd(1, acc + column + W, acc_stride * 4);
    for (int j = 0; j < count; j += TILED_KEYS) {
      const int end = (int)smaller(TILED_KEYS, round_up(count - j, 2));
      const auto pair = [&](int i, Vec row0, Vec row1) __attribute__((always_inline)) {
        store(pairs[0] + i / 2 * W, floats_of(_mm512_unpacklo_epi16(bits_of(row0), bits_of(row1))));
        store(pairs[1] + i / 2 * W, floats_of(_mm512_unpackhi_epi16(bits_of(row0), bits_of(row1))));
      };
      const T* const* row = values + j;
      const int64_t offset = head_offset + column;
      if (end == TILED_KEYS && columns == STEP) {
#pragma GCC unroll 4
        for (int i = 0; i < TILED_KEYS; i += 2) {
          ahead.step<lines(2 * STEP * sizeof(T))>();
          pair(i, load_pairs(row[i] + offset), load_pairs(row[i + 1] + offset));
        }
      } else {
        for (int i = 0; i < end; i += 2) pair(i, load_pairs_n(row[i] + offset, columns), load_pairs_n(row[i + 1] + offset, columns));
        for (int i = end; i < TILED_KEYS; i += 2) pair(i, zero(), zero());
      }
      stores_come_first();
      _tile_loadd(2, probs + j / 2, BLOCK_KEYS * 4);
      _tile_loadd(3, pairs[0], W * 4);
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(6, pairs[1], W * 4);
      _tile_dpbf16ps(1, 2, 6);
      stores_come_first();
    }
    _tile_stored(0, acc + column, acc_stride * 4);
    _tile_stored(1, acc + column + W, acc_stride * 4);
  }
  fetch = ahead;
}

// A row of acc, from the order in which weigh_in_tiles leaves it: `count` columns, a multiple of 2 W.
static inline void sort_columns(float* acc, int64_t count) {
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
  for (int64_t c = 0; c < count; c += 2 * W) {
    const __m512d a = _mm512_castps_pd(load(acc + c)), b = _mm512_castps_pd(load(acc + c + W));
    store(acc + c, _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b)));
    store(acc + c + W, _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b)));
  }
}
#endif

}  // namespace attnworks::ATTNWORKS_ISA
