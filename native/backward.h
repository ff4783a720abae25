// The backward for one tile of keys (FlashAttention-2, Dao 2023, algorithm 2): K and V are packed once, dK and dV grow in scratch while tiles
// of query rows go by. S is recomputed from the saved LSE; with it P, dP = dO V^T and dS = P * (dP - delta); then dV += P^T dO, dK += dS^T Q
// and dQ += dS K.
//
// A gradient depends on the sizes of the tiles alone: tiles of rows and of keys start at multiples of them, every product of two tiles is
// summed from 0, and the tiles' sums are added in the order that the scheduler keeps.
#pragma once
#include "backward_parts.h"
#include "forward.h"

namespace attnworks::ATTNWORKS_ISA {

// How a tile lies in scratch; offsets in floats, each region a multiple of 16 of them.
struct BackwardLayout {
  int64_t tile_q, tile_kv;
  int64_t units, units_v;        // of a row of q or k; of v or d_out
  int64_t sum_row, sum_row_v;    // floats of a row of dK and dQ; of dV: whole vectors
  int64_t q_panel, k_panel;      // between panels of columns of q and d_out; of k
  int64_t k, v, k_columns, q, d_out, q_columns, d_out_columns;  // packed by pack_k, pack_k, pack_v, pack_q, pack_q, pack_v, pack_v
  int64_t scores, d_probs;       // in fp32; they become probs and d_scores in place
  int64_t probs, d_scores;       // the same; with dot products of pairs, as pairs of neighbouring rows, for dV and dK
  int64_t d_score_rows;          // the same; with dot products of pairs, as pairs of neighbouring keys, for dQ
  int64_t d_k, d_v, size;
};

template <typename T>
static BackwardLayout backward_layout(const BackwardProblem& p) {
  constexpr bool PAIRS = in_pairs<T>;
  BackwardLayout l;
  l.tile_q = round_up(clamp(p.tile_q, 1, MAX_BACKWARD_TILE_Q), 2 * MR);
  l.tile_kv = round_up(clamp(p.tile_kv, 1, MAX_BACKWARD_TILE_KV), PANEL);
  l.units = row_units<T>(p.head_dim);
  l.units_v = row_units<T>(p.head_dim_v);
  l.sum_row = round_up(p.head_dim, W);
  l.sum_row_v = round_up(p.head_dim_v, W);
  l.q_panel = row_units<T>(l.tile_q) * PANEL;
  l.k_panel = row_units<T>(l.tile_kv) * PANEL;
  int64_t at = 0;
  auto region = [&at](int64_t floats) {
    const int64_t begin = at;
    at += round_up(floats, 16);
    return begin;
  };
  const int64_t panels = round_up(p.head_dim, PANEL) / PANEL, panels_v = round_up(p.head_dim_v, PANEL) / PANEL;
  l.k = region(l.tile_kv * l.units);
  l.v = region(l.tile_kv * l.units_v);
  l.k_columns = region(panels * l.k_panel);
  l.q = region(l.tile_q * l.units + W);  // pack_q overruns by less than W
  l.d_out = region(l.tile_q * l.units_v + W);
  l.q_columns = region(panels * l.q_panel);
  l.d_out_columns = region(panels_v * l.q_panel);
  l.scores = region(l.tile_q * GRADS_ROW + W) + W;  // zero_outside may begin less than W before a row
  l.d_probs = region(l.tile_q * GRADS_ROW + W) + W;
  l.probs = PAIRS ? region(l.tile_q / 2 * GRADS_ROW) : l.scores;
  l.d_scores = PAIRS ? region(l.tile_q / 2 * GRADS_ROW) : l.d_probs;
  l.d_score_rows = PAIRS ? region(l.tile_q * GRADS_ROW / 2) : l.d_probs;
  l.d_k = region(round_up(l.tile_kv, MR) * l.sum_row);
  l.d_v = region(round_up(l.tile_kv, MR) * l.sum_row_v);
  l.size = at;
  return l;
}

// fp32 probs and d_scores of the tile's first `rows` rows, an even number, as pairs: of neighbouring rows, and d_scores of neighbouring keys too.
static void pack_gradients(const BackwardLayout& l, int64_t rows, int64_t width, float* scratch) {
  for (int64_t r = 0; r < rows; r += 2) {
    const float *probs = scratch + l.scores + r * GRADS_ROW, *d_scores = scratch + l.d_probs + r * GRADS_ROW;
    float *to_probs = scratch + l.probs + r / 2 * GRADS_ROW, *to_d_scores = scratch + l.d_scores + r / 2 * GRADS_ROW;
    float* to_rows = scratch + l.d_score_rows + r * (GRADS_ROW / 2);
    for (int64_t at = 0; at < width; at += 2 * W) {
      Vec lo, hi;
      interleave_bf16(pack_bf16(load(probs + at), load(probs + at + W)),
                      pack_bf16(load(probs + GRADS_ROW + at), load(probs + GRADS_ROW + at + W)), lo, hi);
      store(to_probs + at, lo);
      store(to_probs + at + W, hi);
      const Vec first = pack_bf16(load(d_scores + at), load(d_scores + at + W));
      const Vec second = pack_bf16(load(d_scores + GRADS_ROW + at), load(d_scores + GRADS_ROW + at + W));
      store(to_rows + at / 2, first);
      store(to_rows + GRADS_ROW / 2 + at / 2, second);
      interleave_bf16(first, second, lo, hi);
      store(to_d_scores + at, lo);
      store(to_d_scores + at + W, hi);
    }
  }
}

// to[rows][keys] = a b for packed rows and keys, where a micro-block of rows sees anything of a panel of keys. The panel stays in the L1 cache.
template <typename T>
static void multiply_tiles(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t units, const float* a,
                           const float* b, float factor, float* to) {
  const VisibleKeys visible = visible_keys(p, task);
  for (int64_t key = 0; key < task.key_end - task.key_begin; key += PANEL)
    for (int64_t row = rows.row_begin; row < rows.row_end; row += MR) {
      const Keys keys = keys_of(visible, task, row, smaller(row + MR, rows.row_end) - 1);
      const int64_t block = row - rows.row_begin;
      if (keys.begin >= key + PANEL || key >= keys.end || keys.begin >= keys.end || !shows(p, task, rows, key)) continue;
      float* products = to + block * GRADS_ROW + key;
#pragma GCC unroll 16
      for (int r = 0; r < MR; r++) __builtin_prefetch(products + r * GRADS_ROW, 1);  // stored to after the product; no tile of them stays in L1
      scores_kernel<in_pairs<T>, GRADS_ROW>(units, a + block * units, b + key * units, factor, nullptr, products);
    }
}

// Scores and d_probs of a tile become probs and d_scores, 0 where a row doesn't see a key. `after` as in modified_row_gradients.
template <typename T>
static void tile_gradients(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, const BackwardLayout& l, int64_t after,
                           float* scratch) {
  constexpr bool PAIRS = in_pairs<T>;
  const int64_t width = round_up(round_up(task.key_end - task.key_begin, MR), PAIRS ? 2 * W : 1);  // what the products may read
  const int64_t padded = round_up(rows.row_end - rows.row_begin, MR);
  rows_gradients<T>(p, task, rows, rows.row_begin, rows.row_begin + padded, 0, width, 1.f, after, scratch + l.scores, scratch + l.d_probs);
  if constexpr (PAIRS) pack_gradients(l, padded, width, scratch);
}

// sums[keys][columns] += what these rows add: gradients (probs or d_scores) transposed, times packed columns of d_out or q.
template <typename T>
static void add_to_keys(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, const BackwardLayout& l,
                        const float* gradients, const float* columns, int64_t dim, int64_t sum_row, float* sums) {
  const int64_t shift = p.bounds.shift(task.seq_q, task.seq_kv);
  for (int64_t column = 0; column < dim; column += PANEL)
    for (int64_t key = 0; key < task.key_end - task.key_begin; key += MR) {
      // the rows that see one of these keys
      const int64_t at = task.key_begin + key;
      int64_t first = larger(at - shift - p.bounds.right - rows.row_begin, 0);
      const int64_t end = smaller(at + MR - shift + p.bounds.left, rows.row_end) - rows.row_begin;
      if (first >= end || !(shows(p, task, rows, key) || shows(p, task, rows, smaller(key + MR, task.key_end - task.key_begin) - 1))) continue;
      if (in_pairs<T>) first /= 2;
      const int64_t depth = row_units<T>(end) - first;
      add_product<in_pairs<T>, 1, GRADS_ROW>(smaller(NV, (sum_row - column) / W), depth, gradients + first * GRADS_ROW + key,
                                             columns + column / PANEL * l.q_panel + first * PANEL, sums + key * sum_row + column, sum_row, false);
    }
}

template <typename T>
static void backward_begin(const BackwardProblem& p, const BackwardKeys& task, float* scratch) {
  const BackwardLayout l = backward_layout<T>(p);
  const int64_t keys = task.key_end - task.key_begin;
  const T *k = (const T*)task.k + task.key_begin * p.k.row, *v = (const T*)task.v + task.key_begin * p.v.row;
  pack_k(k, p.k.row, keys, p.head_dim, scratch + l.k);
  pack_k(v, p.v.row, keys, p.head_dim_v, scratch + l.v);
  pack_v(k, p.k.row, keys, p.head_dim, scratch + l.k_columns, l.k_panel);
  memset(scratch + l.d_k, 0, round_up(keys, MR) * l.sum_row * 4);
  memset(scratch + l.d_v, 0, round_up(keys, MR) * l.sum_row_v * 4);
}

// The tile of scores and d_probs, and what its products need.
template <typename T>
static void recompute(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, const BackwardLayout& l, int64_t after,
                      float* scratch) {
  const int64_t count = rows.row_end - rows.row_begin;
  const T *q = (const T*)rows.q + rows.row_begin * p.q.row, *d_out = (const T*)rows.d_out + rows.row_begin * p.d_out.row;
  const float factor = p.modifiers.count ? p.scale : p.scale * LOG2E;  // as in the forward
  // Columns first: they read whole rows, which come from far away, and leave them in the caches.
  pack_v(q, p.q.row, count, p.head_dim, scratch + l.q_columns, l.q_panel);
  pack_v(d_out, p.d_out.row, count, p.head_dim_v, scratch + l.d_out_columns, l.q_panel);
  pack_q(q, p.q.row, count, p.head_dim, factor, scratch + l.q);
  pack_q(d_out, p.d_out.row, count, p.head_dim_v, 1.f, scratch + l.d_out);
  multiply_tiles<T>(p, task, rows, l.units, scratch + l.q, scratch + l.k, factor, scratch + l.scores);
  multiply_tiles<T>(p, task, rows, l.units_v, scratch + l.d_out, scratch + l.v, 1.f, scratch + l.d_probs);
  tile_gradients<T>(p, task, rows, l, after, scratch);
}

template <typename T>
static void backward_add_rows(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, float* scratch) {
  const BackwardLayout l = backward_layout<T>(p);
  recompute<T>(p, task, rows, l, -1, scratch);
  if (task.d_v) add_to_keys<T>(p, task, rows, l, scratch + l.probs, scratch + l.d_out_columns, p.head_dim_v, l.sum_row_v, scratch + l.d_v);
  if (task.d_k) add_to_keys<T>(p, task, rows, l, scratch + l.d_scores, scratch + l.q_columns, p.head_dim, l.sum_row, scratch + l.d_k);
}

template <typename T>
static void backward_add_d_q(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, bool first, float* scratch) {
  constexpr int ROW = in_pairs<T> ? GRADS_ROW / 2 : GRADS_ROW;
  const BackwardLayout l = backward_layout<T>(p);
  const VisibleKeys visible = visible_keys(p, task);
  for (int64_t column = 0; column < p.head_dim; column += PANEL)
    for (int64_t row = rows.row_begin; row < rows.row_end; row += MR) {
      const Keys keys = keys_of(visible, task, row, smaller(row + MR, rows.row_end) - 1);
      float* sum = rows.d_q_sum + row * l.sum_row + column;
      bool none = first;
      for (int64_t begin = keys.begin, end; begin < keys.end || none; begin = end) {  // runs of keys that a map shows
        while (begin < keys.end && !shows(p, task, rows, begin)) begin = (begin / MAP_KEYS + 1) * MAP_KEYS;
        for (end = begin; end < keys.end && shows(p, task, rows, end);)
          end = rows.modifiers.places ? smaller((end / MAP_KEYS + 1) * MAP_KEYS, keys.end) : keys.end;
        if (begin >= end && !none) break;
        const int64_t from = in_pairs<T> ? begin / 2 : begin, depth = begin < end ? row_units<T>(end) - from : 0;
        add_product<in_pairs<T>, ROW, 1>(smaller(NV, (l.sum_row - column) / W), depth,
                                         scratch + l.d_score_rows + (row - rows.row_begin) * ROW + from,
                                         scratch + l.k_columns + column / PANEL * l.k_panel + from * PANEL, sum, l.sum_row, none);
        none = false;
      }
    }
}

template <typename T>
static void backward_add_bias(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t step, const BiasGradient& to,
                              float* scratch) {
  const BackwardLayout l = backward_layout<T>(p);
  recompute<T>(p, task, rows, l, step, scratch);
  float* const column_sums = scratch + l.scores;  // probs are not needed
  memset(column_sums, 0, (task.key_end - task.key_begin) * 4);
  float whole = 0;
  add_bias_rows(task, to, rows.row_begin, rows.row_end, scratch + l.d_probs, column_sums, whole);
  finish_bias(task, to, column_sums, whole);
}

template <typename T>
static void backward_store_keys(const BackwardProblem& p, const BackwardKeys& task, float* scratch) {
  const BackwardLayout l = backward_layout<T>(p);
  for (int64_t key = task.key_begin; key < task.key_end; key++) {
    const int64_t at = key - task.key_begin;
    if (task.d_k) store_sums(scratch + l.d_k + at * l.sum_row, p.head_dim, p.scale, (T*)task.d_k + key * p.d_k.row);
    if (task.d_v) store_sums(scratch + l.d_v + at * l.sum_row_v, p.head_dim_v, 1.f, (T*)task.d_v + key * p.d_v.row);
  }
}

}  // namespace attnworks::ATTNWORKS_ISA
