// The backward with AMX, for one tile of keys (FlashAttention-2, Dao 2023, algorithm 2; see backward.h). A tile multiplies rows by panels of
// pairs, so what is summed over rows of queries is computed turned over: dV^T += dO^T P and dK^T += Q^T dS. Then the vectors of P and dS
// become the panels' pairs (row, row + 16) as they are, and nothing of the size of the scores is transposed.
#pragma once
#include "backward_parts.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int BACKWARD_ROWS = 32;  // of a micro-block
constexpr int SCORE_PAIRS_ROW = MAX_BACKWARD_TILE_KV / 2 + W;  // pairs of a row of dS

// How a tile lies in scratch; offsets in floats. Of each region but the sums and scores there are PIECES.
struct TiledBackwardLayout {
  int64_t tile_q, tile_kv;
  int64_t units, units_v;     // of a row of q or k; of v or d_out
  int64_t dim, dim_v;         // head_dim and head_dim_v in whole panels
  int64_t row_pairs;          // of a tile of rows
  int64_t k_panel, probs_panel;  // between panels of k_columns; of probs and d_scores
  int64_t k, v, k_columns;       // packed by pack_k, pack_k, pack_v
  int64_t q, d_out;              // packed by pack_q
  int64_t q_turned, d_out_turned;  // rows of dim (dim_v), of row_pairs each
  int64_t probs, d_scores;       // panels of keys, of row_pairs each
  int64_t d_score_rows;          // rows of pairs of keys
  int64_t scores, d_probs;       // in fp32
  int64_t d_k, d_v;              // turned over: rows of dim (dim_v), of tile_kv keys
  int64_t column_sums, size;
  int64_t k_piece, v_piece, k_columns_piece, q_piece, d_out_piece, q_turned_piece, d_out_turned_piece, probs_piece, rows_piece;
};

template <typename T>
static TiledBackwardLayout backward_layout(const BackwardProblem& p) {
  constexpr int64_t N = PIECES<T>;
  TiledBackwardLayout l;
  l.tile_q = round_up(clamp(p.tile_q, 1, MAX_BACKWARD_TILE_Q), BACKWARD_ROWS);
  l.tile_kv = round_up(clamp(p.tile_kv, 1, MAX_BACKWARD_TILE_KV), PANEL);
  l.units = row_units<T>(p.head_dim);
  l.units_v = row_units<T>(p.head_dim_v);
  l.dim = round_up(p.head_dim, PANEL);
  l.dim_v = round_up(p.head_dim_v, PANEL);
  l.row_pairs = l.tile_q / 2;
  l.k_panel = l.tile_kv / 2 * PANEL;
  l.probs_panel = l.row_pairs * PANEL;
  l.k_piece = l.tile_kv * l.units;
  l.v_piece = l.tile_kv * l.units_v;
  l.k_columns_piece = l.dim / PANEL * l.k_panel;
  l.q_piece = l.tile_q * l.units;
  l.d_out_piece = l.tile_q * l.units_v;
  l.q_turned_piece = l.dim * l.row_pairs;
  l.d_out_turned_piece = l.dim_v * l.row_pairs;
  l.probs_piece = l.tile_kv / PANEL * l.probs_panel;
  l.rows_piece = l.tile_q * SCORE_PAIRS_ROW;
  int64_t at = 0;
  auto region = [&at](int64_t floats) {
    const int64_t begin = at;
    at += round_up(floats, 16);
    return begin;
  };
  l.k = region(N * l.k_piece);
  l.v = region(N * l.v_piece);
  l.k_columns = region(N * l.k_columns_piece);
  l.q = region(N * l.q_piece + W);
  l.d_out = region(N * l.d_out_piece + W);
  l.q_turned = region(N * l.q_turned_piece);
  l.d_out_turned = region(N * l.d_out_turned_piece);
  l.probs = region(N * l.probs_piece);
  l.d_scores = region(N * l.probs_piece);
  l.d_score_rows = region(N * l.rows_piece);
  l.scores = region(l.tile_q * GRADS_ROW + W) + W;  // zero_outside may begin less than W before a row
  l.d_probs = region(l.tile_q * GRADS_ROW + W) + W;
  l.d_k = region(l.dim * l.tile_kv);
  l.d_v = region(l.dim_v * l.tile_kv);
  l.column_sums = region(l.tile_kv);
  l.size = at;
  return l;
}

// rows x dim of x -> [dim][pairs], in pieces: row d has pair u = (row, row + 16) of column d. Rows past the last are 0, columns too.
template <typename T>
static void pack_turned(const T* x, int64_t stride, int64_t rows, int64_t dim, float* packed, int64_t pairs, int64_t piece) {
  constexpr int N = PIECES<T>;
  for (int64_t row = 0; row < rows; row += 2 * W)
    for (int64_t column = 0; column < round_up(dim, PANEL); column += W) {
      Vec turned[N][W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        const auto load_row = [&](int64_t r) { return r < rows ? load_floats(x + r * stride, column, dim) : zero(); };
        Vec pieces[N];
        split_pairs<N>(load_row(row + i), load_row(row + i + W), pieces);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) turned[n][i] = pieces[n];
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        transpose(turned[n]);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(packed + n * piece + (column + i) * pairs + row / 2, turned[n][i]);
      }
    }
}

// The keys of a tile that rows [first, first + BACKWARD_ROWS) see, in whole panels.
ATTNWORKS_INLINE Keys panels_of(const VisibleKeys& visible, const BackwardKeys& task, const BackwardRows& rows, int64_t first) {
  const Keys keys = keys_of(visible, task, first, smaller(first + BACKWARD_ROWS, rows.row_end) - 1);
  return {keys.begin / PANEL * PANEL, keys.begin < keys.end ? round_up(keys.end, PANEL) : 0};
}

// Probs and d_scores of the micro-block that begins at row `block` of the tile, between the keys, as pairs: of (row, row + 16) for sums over rows, d_scores of (key, key + 16) too.
template <typename T>
static void pack_gradients(const TiledBackwardLayout& l, int64_t block, Keys keys, float* scratch) {
  constexpr int N = PIECES<T>;
  for (int64_t r = 0; r < W; r++) {
    const float *probs = scratch + l.scores + (block + r) * GRADS_ROW, *d_scores = scratch + l.d_probs + (block + r) * GRADS_ROW;
    float* to_rows = scratch + l.d_score_rows + (block + r) * SCORE_PAIRS_ROW;
    for (int64_t key = keys.begin; key < keys.end; key += PANEL) {
      const int64_t at = key / PANEL * l.probs_panel + (block / 2 + r) * PANEL;
      Vec first[2][N], second[2][N], pairs[N];  // of row r and row r + 16; by halves of the panel
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        split_pairs<N>(load(probs + key + half * W), load(probs + W * GRADS_ROW + key + half * W), pairs);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(scratch + l.probs + n * l.probs_piece + at + half * W, pairs[n]);
        split_rounded<N>(load(d_scores + key + half * W), first[half]);
        split_rounded<N>(load(d_scores + W * GRADS_ROW + key + half * W), second[half]);
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        float* to = scratch + l.d_scores + n * l.probs_piece + at;
        store(to, pair_halves(first[0][n], second[0][n]));
        store(to + W, pair_halves(first[1][n], second[1][n]));
        store(to_rows + n * l.rows_piece + key / 2, pair_halves(first[0][n], first[1][n]));
        store(to_rows + n * l.rows_piece + W * SCORE_PAIRS_ROW + key / 2, pair_halves(second[0][n], second[1][n]));
      }
    }
  }
}

// to[rows][keys] = a b, where a micro-block of rows sees anything of a panel of keys. The panel stays in the L1 cache.
template <typename T>
static void multiply_tiles(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t units, Pieces a, const float* b,
                           int64_t b_piece, float* to) {
  const VisibleKeys visible = visible_keys(p, task);
  for (int64_t key = 0; key < task.key_end - task.key_begin; key += PANEL) {
    if (!shows(p, task, rows, key)) continue;
    for (int64_t row = rows.row_begin; row < rows.row_end; row += BACKWARD_ROWS) {
      const Keys keys = panels_of(visible, task, rows, row);
      const int64_t block = row - rows.row_begin;
      if (keys.begin <= key && key < keys.end)
        tile_product<PIECES<T>, SCORE_PRODUCTS<T>, false>(units, {a.data + block * units, units, a.piece}, b + key * units, b_piece,
                                                          to + block * GRADS_ROW + key, GRADS_ROW);
    }
  }
}

// Probs and d_scores of a tile in fp32, micro-block by micro-block: use(first row, keys) sees them.
template <typename T, typename Use>
static void recompute(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, const TiledBackwardLayout& l, int64_t after,
                      float* scratch, Use use) {
  const int64_t count = rows.row_end - rows.row_begin;
  const T *q = (const T*)rows.q + rows.row_begin * p.q.row, *d_out = (const T*)rows.d_out + rows.row_begin * p.d_out.row;
  const float factor = p.modifiers.count ? p.scale : p.scale * LOG2E;  // as in the forward
  pack_q(q, p.q.row, count, p.head_dim, factor, scratch + l.q, l.q_piece);
  pack_q(d_out, p.d_out.row, count, p.head_dim_v, 1.f, scratch + l.d_out, l.d_out_piece);
  multiply_tiles<T>(p, task, rows, l.units, {scratch + l.q, l.units, l.q_piece}, scratch + l.k, l.k_piece, scratch + l.scores);
  multiply_tiles<T>(p, task, rows, l.units_v, {scratch + l.d_out, l.units_v, l.d_out_piece}, scratch + l.v, l.v_piece, scratch + l.d_probs);
  const VisibleKeys visible = visible_keys(p, task);
  for (int64_t row = rows.row_begin; row < rows.row_end; row += BACKWARD_ROWS) {
    const Keys keys = panels_of(visible, task, rows, row);
    const int64_t at = (row - rows.row_begin) * GRADS_ROW;
    rows_gradients<T>(p, task, rows, row, row + BACKWARD_ROWS, keys.begin, keys.end, factor, after, scratch + l.scores + at,
                      scratch + l.d_probs + at);
    use(row, keys);
  }
}

// sums[dim][keys] += what these rows add: turned rows of d_out or q, times probs or d_scores.
template <typename T>
static void add_to_keys(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, const TiledBackwardLayout& l,
                        const float* turned, int64_t turned_piece, int64_t dim, const float* gradients, float* sums) {
  const VisibleKeys visible = visible_keys(p, task);
  for (int64_t key = 0; key < task.key_end - task.key_begin; key += PANEL) {
    if (!shows(p, task, rows, key)) continue;
    // the blocks of rows that see one of these keys
    int64_t first = rows.row_begin, end = rows.row_end;
    const auto sees = [&](int64_t row) {
      const Keys keys = panels_of(visible, task, rows, row);
      return keys.begin <= key && key < keys.end;
    };
    while (first < end && !sees(first)) first += BACKWARD_ROWS;
    for (end = first; end < rows.row_end && sees(end);) end += BACKWARD_ROWS;
    if (first >= end) continue;
    const int64_t from = (first - rows.row_begin) / 2, pairs = (end - first) / 2;
    for (int64_t column = 0; column < dim; column += PANEL)
      tile_product<PIECES<T>, PIECES<T> - 1, true>(pairs, {turned + column * l.row_pairs + from, l.row_pairs, turned_piece},
                                                   gradients + key / PANEL * l.probs_panel + from * PANEL, l.probs_piece,
                                                   sums + column * l.tile_kv + key, l.tile_kv);
  }
}

template <typename T>
static void backward_begin(const BackwardProblem& p, const BackwardKeys& task, float* scratch) {
  const TiledBackwardLayout l = backward_layout<T>(p);
  const int64_t keys = task.key_end - task.key_begin;
  const T *k = (const T*)task.k + task.key_begin * p.k.row, *v = (const T*)task.v + task.key_begin * p.v.row;
  pack_k(k, p.k.row, keys, p.head_dim, scratch + l.k, l.k_piece);
  pack_k(v, p.v.row, keys, p.head_dim_v, scratch + l.v, l.v_piece);
  pack_v(k, p.k.row, keys, p.head_dim, scratch + l.k_columns, l.k_panel, l.k_columns_piece);
  memset(scratch + l.d_k, 0, l.dim * l.tile_kv * 4);
  memset(scratch + l.d_v, 0, l.dim_v * l.tile_kv * 4);
}

template <typename T>
static void backward_add_rows(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, float* scratch) {
  const TileState<true> tile_state;
  const TiledBackwardLayout l = backward_layout<T>(p);
  const int64_t count = rows.row_end - rows.row_begin;
  const T *q = (const T*)rows.q + rows.row_begin * p.q.row, *d_out = (const T*)rows.d_out + rows.row_begin * p.d_out.row;
  // Turned first: they read whole rows, which come from far away, and leave them in the caches.
  if (task.d_k) pack_turned(q, p.q.row, count, p.head_dim, scratch + l.q_turned, l.row_pairs, l.q_turned_piece);
  if (task.d_v) pack_turned(d_out, p.d_out.row, count, p.head_dim_v, scratch + l.d_out_turned, l.row_pairs, l.d_out_turned_piece);
  recompute<T>(p, task, rows, l, -1, scratch,
               [&](int64_t first, Keys keys) { pack_gradients<T>(l, first - rows.row_begin, keys, scratch); });
  if (task.d_v)
    add_to_keys<T>(p, task, rows, l, scratch + l.d_out_turned, l.d_out_turned_piece, p.head_dim_v, scratch + l.probs, scratch + l.d_v);
  if (task.d_k) add_to_keys<T>(p, task, rows, l, scratch + l.q_turned, l.q_turned_piece, p.head_dim, scratch + l.d_scores, scratch + l.d_k);
}

template <typename T>
static void backward_add_d_q(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, bool first, float* scratch) {
  const TileState<true> tile_state;
  constexpr int N = PIECES<T>;
  const TiledBackwardLayout l = backward_layout<T>(p);
  const VisibleKeys visible = visible_keys(p, task);
  const int64_t sum_row = d_q_sum_row(p);
  for (int64_t column = 0; column < p.head_dim; column += PANEL)
    for (int64_t row = rows.row_begin; row < rows.row_end; row += BACKWARD_ROWS) {
      const Keys keys = panels_of(visible, task, rows, row);
      float* sum = rows.d_q_sum + row * sum_row + column;
      bool none = first;
      for (int64_t begin = keys.begin, end; begin < keys.end || none; begin = end) {  // runs of keys that a map shows
        while (begin < keys.end && !shows(p, task, rows, begin)) begin += PANEL;
        for (end = begin; end < keys.end && shows(p, task, rows, end);) end += PANEL;
        if (begin >= end && !none) break;
        const Pieces d_scores = {scratch + l.d_score_rows + (row - rows.row_begin) * SCORE_PAIRS_ROW + begin / 2, SCORE_PAIRS_ROW, l.rows_piece};
        const float* k = scratch + l.k_columns + column / PANEL * l.k_panel + begin / 2 * PANEL;
        if (none)
          tile_product<N, N - 1, false>((end - begin) / 2, d_scores, k, l.k_columns_piece, sum, sum_row);
        else
          tile_product<N, N - 1, true>((end - begin) / 2, d_scores, k, l.k_columns_piece, sum, sum_row);
        none = false;
      }
    }
}

template <typename T>
static void backward_add_bias(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t step, const BiasGradient& to,
                              float* scratch) {
  const TileState<true> tile_state;
  const TiledBackwardLayout l = backward_layout<T>(p);
  const int64_t keys = task.key_end - task.key_begin;
  float* const column_sums = scratch + l.column_sums;
  memset(column_sums, 0, keys * 4);
  float whole = 0;
  recompute<T>(p, task, rows, l, step, scratch, [&](int64_t first, Keys seen) {
    float* d_scores = scratch + l.d_probs + (first - rows.row_begin) * GRADS_ROW;
    const int64_t last = smaller(first + BACKWARD_ROWS, rows.row_end);
    for (int64_t r = 0; r < last - first; r++) zero_outside(d_scores + r * GRADS_ROW, 0, keys, seen.begin, seen.end);
    add_bias_rows(task, to, first, last, d_scores, column_sums, whole);
  });
  finish_bias(task, to, column_sums, whole);
}

// Sums [dim][keys] of a tile, times factor, as rows of T, from the tile's first key on.
template <typename T>
static void store_turned(const float* sums, int64_t sums_row, int64_t keys, int64_t dim, float factor, T* to, int64_t stride) {
  for (int64_t key = 0; key < keys; key += W)
    for (int64_t column = 0; column < dim; column += W) {
      Vec x[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) x[i] = mul(set1(factor), load(sums + (column + i) * sums_row + key));
      transpose(x);
      for (int64_t i = 0; i < smaller(W, keys - key); i++) {
        T* row = to + (key + i) * stride + column;
        if (dim - column >= W)
          store_from_float(row, x[i]);
        else
          store_from_float_n(row, x[i], (int)(dim - column));
      }
    }
}

template <typename T>
static void backward_store_keys(const BackwardProblem& p, const BackwardKeys& task, float* scratch) {
  const TiledBackwardLayout l = backward_layout<T>(p);
  const int64_t keys = task.key_end - task.key_begin, at = task.key_begin;
  if (task.d_k) store_turned(scratch + l.d_k, l.tile_kv, keys, p.head_dim, p.scale, (T*)task.d_k + at * p.d_k.row, p.d_k.row);
  if (task.d_v) store_turned(scratch + l.d_v, l.tile_kv, keys, p.head_dim_v, 1.f, (T*)task.d_v + at * p.d_v.row, p.d_v.row);
}

}  // namespace attnworks::ATTNWORKS_ISA
