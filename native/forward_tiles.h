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

// A row's maximum is kept, and not sought, while a block's exponentials add up to at most this in every lane: so far, fp32 and the pieces of
// bf16 are as exact as below 1. Of 256 keys a sum, and acc with it, can grow to W * KEPT_SUM / 256 = 512 times what the true maximum gives.
constexpr float KEPT_SUM = 8192;
// Larger maxima are not kept. A factor that waits until the exponential is fused with the difference there, so that a score differs from its
// equal in the block that was rounded first by half an ulp: 2^-14 here, but all there is for huge ones.
constexpr float KEPT_MAX = 1024;

// `count` scores of a row, in whole panels, become the pieces of 2^exponent(scores). Their sum comes back, in its W lanes.
template <typename T, typename Exponent>
ATTNWORKS_INLINE Vec row_pieces(const float* scores, int64_t count, float* probs, int64_t piece, Exponent exponent) {
  const auto prob = [&](const float* from) {
    Vec whole;
    const Vec mantissa = exp2_mantissa<in_pairs<T> ? 4 : 5>(exponent(load(from)), whole);
    return scale_flushed(mantissa, whole);
  };
  Vec sum0 = zero(), sum1 = zero();
#pragma GCC unroll 2
  for (const float* end = scores + count; scores < end; scores += PANEL, probs += W) {
    const Vec prob0 = prob(scores), prob1 = prob(scores + W);
    sum0 = add(sum0, prob0);
    sum1 = add(sum1, prob1);
    Vec pairs[PIECES<T>];
    split_pairs<PIECES<T>>(prob0, prob1, pairs);
#pragma GCC unroll 4
    for (int n = 0; n < PIECES<T>; n++) store(probs + n * piece, pairs[n]);
  }
  return add(sum0, sum1);
}

// A micro-block of rows, of which those up to `last` are real, against the keys [first, end) of a packed tile; `tile` is its first key.
struct TileBlock {
  int64_t row, last, tile, first_key, end_key, packed_begin;
  int64_t begin() const { return first_key / PANEL * PANEL; }
  int64_t end() const { return round_up(end_key, PANEL); }
};

// scores = q k^T. Inlined into forward_rows it took the whole forward 5 % longer (bf16, head_dim 128).
template <typename T, bool STEPS>
__attribute__((noinline)) static void scores_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l,
                                                      const TileBlock& x, float factor, Outliers outliers, float* scratch) {
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

// One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3): scores become probs in pieces, acc is rescaled. Any number near a
// row's maximum will do in its place, so that of the blocks before is tried first. Whether it did depends on the row's own scores alone.
template <typename T, bool STEPS>
static void softmax_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible,
                             const TileBlock& x, float factor, float* scratch) {
  constexpr int ROWS = BLOCK_Q<T>;
  const int64_t block = x.row - task.row_begin, begin = x.begin(), end = x.end();
  float *running_max = scratch + l.running_max + block, *running_sum = scratch + l.running_sum + block * W;
  float tile_max[ROWS], shift[ROWS], rescale[ROWS];
  const FlushSubnormals flush;
  // A positive factor can wait until the exponential: it leaves the order of scores as it is.
  const bool late = !scales_q<T> && !STEPS && factor > 0;
  const Vec multiplier = set1(late ? factor : 1.f), to_base_2 = set1(STEPS ? LOG2E : 1.f);
  int sought[ROWS], count = 0;  // rows that need their maximum
  for (int r = 0; r < ROWS; r++) {
    float* scores = scratch + l.scores + r * SCORES_ROW;
    if (!scales_q<T> && !late) scale_row(scores + begin, end - begin, factor);
    // Rows past the last are computed like the last and never stored.
    modify_row<STEPS>(p, task, visible, smaller(x.row + r, x.last), x.tile, x.first_key, x.end_key, false, scores);
    if (fabsf(running_max[r]) <= KEPT_MAX) {  // not -inf, what it is before any key
      const Vec unit = STEPS ? to_base_2 : multiplier, minus = mul(set1(-running_max[r]), to_base_2);
      const Vec sum = row_pieces<T>(scores + begin, end - begin, scratch + l.probs + r * PROBS_ROW + begin / 2, l.probs_piece,
                                    [&](Vec score) { return !STEPS && scales_q<T> ? add(score, minus) : fma(unit, score, minus); });
      if (all_at_most(sum, KEPT_SUM)) {
        store(running_sum + r * W, add(load(running_sum + r * W), sum));
        tile_max[r] = running_max[r];
        continue;
      }
    }
    tile_max[r] = row_max<NV>(scores, begin, end) * (late ? factor : 1.f);
    sought[count++] = r;
  }
  if (!count) return;
  raise_max<T, STEPS>(tile_max, running_max, shift, rescale);
  float* acc = scratch + l.acc + block * l.acc_stride;
  for (int n = 0; n < count; n++) {
    const int r = sought[n];
    const auto exponent = [&](Vec score) {
      // Rounded before the maximum is subtracted, else the largest, if it is huge, would differ from itself: in_register keeps the compiler from
      // fusing them.
      if (!STEPS && !scales_q<T>) score = in_register(mul(multiplier, score));
      const Vec difference = sub(score, set1(shift[r]));
      return STEPS ? mul(difference, to_base_2) : difference;
    };
    const Vec sum = row_pieces<T>(scratch + l.scores + r * SCORES_ROW + begin, end - begin, scratch + l.probs + r * PROBS_ROW + begin / 2,
                                  l.probs_piece, exponent);
    store(running_sum + r * W, fma(set1(rescale[r]), load(running_sum + r * W), sum));
    if (rescale[r] != 1.f) scale_row(acc + r * l.acc_stride, l.acc_stride, rescale[r]);
  }
}

// acc += probs v
template <typename T>
__attribute__((noinline)) static void values_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l,
                                                      const TileBlock& x, Outliers outliers, float* scratch) {
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
