// The forward's inner loop with AMX.
#pragma once

#include "forward_parts.h"

namespace attnworks::ATTNWORKS_ISA {

// Which operands have any.
struct Outliers {
  bool q, k, v;
};

#ifndef ATTNWORKS_AMX
template <typename T, bool STEPS>
void attend_keys_in_tiles(const ForwardProblem&, const ForwardTask&, const ForwardLayout&, const VisibleKeys&, int64_t row, int64_t tile,
                          int64_t first_key, int64_t end_key, int64_t packed_begin, float factor, Outliers, float* scratch);  // declared only, never called
#else

// Scores [begin, end) of a row become the pieces of exp(factor * scores - shift), at probs from begin / 2 on. With a factor they are rounded
// before the maximum is subtracted, not fused with that: else the largest, if it is huge, would differ from itself. sum: its W lanes.
template <typename T, bool STEPS>
ATTNWORKS_INLINE void row_pieces(const float* scores, int64_t begin, int64_t end, float factor, float shift, float rescale, float* running_sum,
                                 float* probs, int64_t piece) {
  Vec sum0 = mul(load(running_sum), set1(rescale)), sum1 = zero();
  for (int64_t at = begin; at < end; at += PANEL) {
    Vec score0 = load(scores + at), score1 = load(scores + at + W);
    // in_register, or the compiler would fuse the product with the difference
    if (!STEPS && !scales_q<T>) score0 = in_register(mul(set1(factor), score0)), score1 = in_register(mul(set1(factor), score1));
    const Vec prob0 = prob<STEPS, in_pairs<T> ? 4 : 5>(sub(score0, set1(shift)));
    const Vec prob1 = prob<STEPS, in_pairs<T> ? 4 : 5>(sub(score1, set1(shift)));
    sum0 = add(sum0, prob0);
    sum1 = add(sum1, prob1);
    Vec pairs[PIECES<T>];
    split_pairs<PIECES<T>>(prob0, prob1, pairs);
#pragma GCC unroll 4
    for (int n = 0; n < PIECES<T>; n++) store(probs + n * piece + at / 2, pairs[n]);
  }
  store(running_sum, add(sum0, sum1));
}

// A micro-block of rows, of which those up to `last` are real, against the keys [first, end) of a packed tile; `tile` is its first key.
struct TileBlock {
  int64_t row, last, tile, first_key, end_key, packed_begin;
  int64_t begin() const { return first_key / PANEL * PANEL; }
  int64_t end() const { return round_up(end_key, PANEL); }
};

// scores = q k^T
template <typename T, bool STEPS>
static void scores_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const TileBlock& x, float factor,
                            Outliers outliers, float* scratch) {
  const int64_t block = x.row - task.row_begin;
  const Pieces q = {scratch + l.q + block * l.units, l.units, l.q_piece};
  float* scores = scratch + l.scores;
  for (int64_t at = x.begin(); at < x.end(); at += PANEL) {
    if constexpr (STEPS) prefetch_steps(p.modifiers, task.modifiers, x.row, x.last, x.tile + at, PANEL);
    tile_product<PIECES<T>, SCORE_PRODUCTS<T>, false>(l.units, q, scratch + l.k + (at - x.packed_begin) * l.units, l.k_piece, scores + at,
                                                      SCORES_ROW);
  }
  if (!outliers.q && !outliers.k) return;
  const uint8_t *q_marks = (const uint8_t*)(scratch + l.q_outliers) + block, *k_marks = (const uint8_t*)(scratch + l.k_outliers) - x.packed_begin;
  for (int64_t r = 0; r <= x.last - x.row; r++)
    for (int64_t key = x.first_key; key < x.end_key; key++)
      if (q_marks[r] || k_marks[key])
        scores[r * SCORES_ROW + key] = plain_product((const T*)task.q + (x.row + r) * p.q.row, (const T*)task.k + (x.tile + key) * p.k.row,
                                                     p.head_dim, scales_q<T> ? factor : 1.f);
}

// One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3): scores become probs in pieces, acc is rescaled.
template <typename T, bool STEPS>
static void softmax_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible,
                             const TileBlock& x, float factor, float* scratch) {
  constexpr int ROWS = BLOCK_Q<T>;
  const int64_t block = x.row - task.row_begin;
  float *running_max = scratch + l.running_max + block, *running_sum = scratch + l.running_sum + block * W;
  float tile_max[ROWS], shift[ROWS], rescale[ROWS];
  // A positive factor can wait until the exponential: it leaves the order of scores as it is.
  const bool late = !scales_q<T> && !STEPS && factor > 0;
  for (int r = 0; r < ROWS; r++) {
    float* scores = scratch + l.scores + r * SCORES_ROW;
    if (!scales_q<T> && !late) scale_row(scores + x.begin(), x.end() - x.begin(), factor);
    // Rows past the last are computed like the last and never stored.
    modify_row<STEPS>(p, task, visible, smaller(x.row + r, x.last), x.tile, x.first_key, x.end_key, false, scores);
    tile_max[r] = row_max<NV>(scores, x.begin(), x.end()) * (late ? factor : 1.f);
  }
  raise_max<T, STEPS>(tile_max, running_max, shift, rescale);
  float* acc = scratch + l.acc + block * l.acc_stride;
  for (int r = 0; r < ROWS; r++) {
    row_pieces<T, STEPS>(scratch + l.scores + r * SCORES_ROW, x.begin(), x.end(), late ? factor : 1.f, shift[r], rescale[r], running_sum + r * W,
                         scratch + l.probs + r * PROBS_ROW, l.probs_piece);
    if (rescale[r] != 1.f) scale_row(acc + r * l.acc_stride, l.acc_stride, rescale[r]);
  }
}

// acc += probs v
template <typename T>
static void values_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const TileBlock& x, Outliers outliers,
                            float* scratch) {
  constexpr int N = PIECES<T>;
  const float* probs = scratch + l.probs;
  float* acc = scratch + l.acc + (x.row - task.row_begin) * l.acc_stride;
  for (int64_t column = 0; column < p.head_dim_v; column += PANEL)
    tile_product<N, N - 1, true>((x.end() - x.begin()) / 2, {probs + x.begin() / 2, PROBS_ROW, l.probs_piece},
                                 scratch + l.v + column / PANEL * l.panel_stride + (x.begin() - x.packed_begin) / 2 * PANEL, l.v_piece,
                                 acc + column, l.acc_stride);
  if (!outliers.v) return;
  const uint8_t* v_marks = (const uint8_t*)(scratch + l.v_outliers) - x.packed_begin;
  for (int64_t key = x.first_key; key < x.end_key; key++)
    for (int64_t r = 0; v_marks[key] && r <= x.last - x.row; r++)
      add_plain(joined<N>(probs + r * PROBS_ROW, l.probs_piece, key), (const T*)task.v + (x.tile + key) * p.v.row, p.head_dim_v,
                acc + r * l.acc_stride);
}

template <typename T, bool STEPS>
static void attend_keys_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible, int64_t row,
                                 int64_t tile, int64_t first_key, int64_t end_key, int64_t packed_begin, float factor, Outliers outliers,
                                 float* scratch) {
  static_assert(NV == 2);
  const TileBlock x = {row, smaller(row + BLOCK_Q<T>, task.row_end) - 1, tile, first_key, end_key, packed_begin};
  scores_in_tiles<T, STEPS>(p, task, l, x, factor, outliers, scratch);
  softmax_in_tiles<T, STEPS>(p, task, l, visible, x, factor, scratch);
  values_in_tiles<T>(p, task, l, x, outliers, scratch);
}
#endif

}  // namespace attnworks::ATTNWORKS_ISA
