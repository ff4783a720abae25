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
    if (!STEPS && PIECES<T> <= 2) score0 = in_register(mul(set1(factor), score0)), score1 = in_register(mul(set1(factor), score1));
    const Vec prob0 = prob<STEPS, in_pairs<T> ? 4 : 5>(sub(score0, set1(shift)));
    const Vec prob1 = prob<STEPS, in_pairs<T> ? 4 : 5>(sub(score1, set1(shift)));
    sum0 = add(sum0, prob0);
    sum1 = add(sum1, prob1);
    Vec pairs[PIECES<T>];
    split_pairs<PIECES<T>, true>(prob0, prob1, pairs);
#pragma GCC unroll 4
    for (int n = 0; n < PIECES<T>; n++) store(probs + n * piece + at / 2, pairs[n]);
  }
  store(running_sum, add(sum0, sum1));
}

// One micro-block against keys [first_key, end_key) of the packed tile that begins at key `tile`; `row` is its first query row.
template <typename T, bool STEPS>
static void attend_keys_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible, int64_t row,
                                 int64_t tile, int64_t first_key, int64_t end_key, int64_t packed_begin, float factor, Outliers outliers,
                                 float* scratch) {
  static_assert(NV == 2);
  constexpr int N = PIECES<T>, ROWS = BLOCK_Q<T>;
  const int64_t last = smaller(row + ROWS, task.row_end) - 1, block = row - task.row_begin;
  const int64_t begin = first_key / PANEL * PANEL, end = round_up(end_key, PANEL);
  float *scores = scratch + l.scores, *probs = scratch + l.probs;

  const Pieces q = {scratch + l.q + block * l.units, l.units, l.q_piece};
  for (int64_t at = begin; at < end; at += PANEL) {
    if constexpr (STEPS) prefetch_steps(p.modifiers, task.modifiers, row, last, tile + at, PANEL);
    tile_product<N, SCORE_PRODUCTS<T>, false>(l.units, q, scratch + l.k + (at - packed_begin) * l.units, l.k_piece, scores + at, SCORES_ROW);
  }

  const uint8_t *q_marks = (const uint8_t*)(scratch + l.q_outliers) + block, *k_marks = (const uint8_t*)(scratch + l.k_outliers) - packed_begin;
  if (outliers.q || outliers.k)
    for (int64_t r = 0; r <= last - row; r++)
      for (int64_t key = first_key; key < end_key; key++)
        if (q_marks[r] || k_marks[key])
          scores[r * SCORES_ROW + key] = plain_product((const T*)task.q + (row + r) * p.q.row, (const T*)task.k + (tile + key) * p.k.row,
                                                       p.head_dim, N > 2 ? factor : 1.f);

  // One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3); rescale is what the old acc must be multiplied by.
  float *running_max = scratch + l.running_max + block, *running_sum = scratch + l.running_sum + block * W;
  float tile_max[ROWS], shift[ROWS], rescale[ROWS];
  // Of fp32 q carries the factor. A positive one of the others can wait until the exponential: it leaves the order of scores as it is.
  const bool scaled = N > 2, late = !scaled && !STEPS && factor > 0;
  for (int r = 0; r < ROWS; r++) {
    float* row_scores = scores + r * SCORES_ROW;
    if (!scaled && !late) scale_row(row_scores + begin, end - begin, factor);
    // Rows past the last are computed like the last and never stored.
    modify_row<STEPS>(p, task, visible, smaller(row + r, last), tile, first_key, end_key, false, row_scores);
    tile_max[r] = row_max<NV>(row_scores, begin, end) * (late ? factor : 1.f);
  }
  for (int r = 0; r < ROWS; r += W) {
    const Vec before = load(running_max + r), after = max(before, load(tile_max + r));
    // While a row has seen nothing but -inf, a finite number stands in for its maximum: then -inf - -inf never happens, and exp2 gives 0.
    const Vec finite = max(set1(-FLT_MAX), after);
    store(running_max + r, after);
    store(shift + r, finite);
    store(rescale + r, prob<STEPS, 5>(sub(before, finite)));
  }
  float* acc = scratch + l.acc + block * l.acc_stride;
  for (int r = 0; r < ROWS; r++) {
    row_pieces<T, STEPS>(scores + r * SCORES_ROW, begin, end, late ? factor : 1.f, shift[r], rescale[r], running_sum + r * W,
                         probs + r * PROBS_ROW, l.probs_piece);
    if (rescale[r] != 1.f) scale_row(acc + r * l.acc_stride, l.acc_stride, rescale[r]);
  }

  for (int64_t column = 0; column < p.head_dim_v; column += PANEL)
    tile_product<N, N - 1, true>((end - begin) / 2, {probs + begin / 2, PROBS_ROW, l.probs_piece},
                                scratch + l.v + column / PANEL * l.panel_stride + (begin - packed_begin) / 2 * PANEL, l.v_piece, acc + column,
                                l.acc_stride);
  const uint8_t* v_marks = (const uint8_t*)(scratch + l.v_outliers) - packed_begin;
  if (outliers.v)
    for (int64_t key = first_key; key < end_key; key++)
      for (int64_t r = 0; v_marks[key] && r <= last - row; r++)
        add_plain(joined<N>(probs + r * PROBS_ROW, l.probs_piece, key), (const T*)task.v + (tile + key) * p.v.row, p.head_dim_v,
                  acc + r * l.acc_stride);
}
#endif

}  // namespace attnworks::ATTNWORKS_ISA
