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

// `count` scores of a row, in whole panels, become the pieces of 2^exponent(scores). Returns `sum` and theirs, in its W lanes.
template <typename T, typename Exponent>
ATTNWORKS_INLINE Vec row_pieces(Vec sum, const float* scores, int64_t count, float* probs, int64_t piece, Exponent exponent) {
  const auto prob = [&](const float* from) {
    Vec whole;
    const Vec mantissa = exp2_mantissa<in_pairs<T> ? 4 : 5>(exponent(load(from)), whole);
    return scale_flushed(mantissa, whole);
  };
#pragma GCC unroll 2
  for (const float* end = scores + count; scores < end; scores += PANEL, probs += W) {
    const Vec prob0 = prob(scores), prob1 = prob(scores + W);
    sum = add(sum, add(prob0, prob1));
    Vec pairs[PIECES<T>];
    split_pairs<PIECES<T>>(prob0, prob1, pairs);
#pragma GCC unroll 4
    for (int n = 0; n < PIECES<T>; n++) store(probs + n * piece, pairs[n]);
  }
  return sum;
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

// A score, in base 2 once `multiplier` is applied, as the exponent of its prob. Not fused a row's largest score is its own exponent 0, however
// large it is.
template <typename T>
ATTNWORKS_INLINE Vec exponent_of(Vec score, Vec multiplier, Vec shift) {
  return sub(scales_q<T> ? score : in_register(mul(multiplier, score)), shift);
}
template <typename T>
ATTNWORKS_INLINE Vec fused_exponent_of(Vec score, Vec multiplier, Vec minus_shift) {
  return scales_q<T> ? add(score, minus_shift) : fma(multiplier, score, minus_shift);
}

// probs = pieces of 2^(q k^T - shift), a panel's exponentials beside the next one's products, so that scores never leave L1. A row's shift is its
// maximum of the blocks before or, of FIRST ones, of the panel that is multiplied first. Returns how many rows' did not serve, and puts them
// into `sought`; or ALL, where none was tried: rows are at different stages, or have no number to try.
constexpr int ALL = -1;
template <typename T, bool FIRST>
__attribute__((noinline)) static int probs_in_tiles(const ForwardTask& task, const ForwardLayout& l,
                                                    const VisibleKeys& visible, const TileBlock& x, float factor, float* scratch, int* sought) {
  constexpr int ROWS = BLOCK_Q<T>;
  constexpr int64_t ROW = PANEL + W;  // mask_row's overrun
  const int64_t block = x.row - task.row_begin, begin = x.begin(), end = x.end();
  const int64_t whole_begin = larger(visible.begin(x.last) - x.tile, x.first_key), whole_end = smaller(visible.end(x.row) - x.tile, x.end_key);
  float *running_max = scratch + l.running_max + block, *running_sum = scratch + l.running_sum + block * W;
  alignas(64) float sums[ROWS * W], tried[ROWS];
  float *fresh = scratch + l.scores, *ready = fresh + ROWS * ROW;
  const FlushSubnormals flush;
  const Pieces q = {scratch + l.q + block * l.units, l.units, l.q_piece};
  const Vec multiplier = set1(scales_q<T> ? 1.f : factor);

  // Of `ready`, which has the scores of the panel at `at`.
  const auto hide = [&](int64_t at, int64_t from, int64_t until) {
    if (at >= whole_begin && at + PANEL <= whole_end) return;
    for (int64_t r = from; r < until; r++) {
      const int64_t query = smaller(x.row + r, x.last);
      const int64_t visible_begin = visible.begin(query) - x.tile, visible_end = visible.end(query) - x.tile;
      mask_row(ready + r * ROW - at, at, at + PANEL, larger(visible_begin, x.first_key), smaller(visible_end, x.end_key));
    }
  };
  const auto exponentials = [&](int64_t at, int64_t from, int64_t until) __attribute__((always_inline)) {
    float* probs = scratch + l.probs + at / 2;
    hide(at, from, until);
    for (int64_t r = from; r < until; r++) {
      const Vec shift = set1(FIRST ? tried[r] : -tried[r]);
      const auto exponent = [&](Vec score) {
        return FIRST ? exponent_of<T>(score, multiplier, shift) : fused_exponent_of<T>(score, multiplier, shift);
      };
      store(sums + r * W, row_pieces<T>(load(sums + r * W), ready + r * ROW, PANEL, probs + r * PROBS_ROW, l.probs_piece, exponent));
    }
  };

  const int64_t steps = l.units / TILE, share = (ROWS + steps - 1) / steps;
  for (int64_t at = begin; at < end; at += PANEL) {
    tile_product_beside<PIECES<T>, SCORE_PRODUCTS<T>>(l.units, q, scratch + l.k + (at - x.packed_begin) * l.units, l.k_piece, fresh, ROW, share,
                                                      at > begin ? ROWS : 0,
                                                      [&](int64_t from, int64_t until) { exponentials(at - PANEL, from, until); });
    stores_come_first();
    float* const other = ready;
    ready = fresh, fresh = other;
    if (at > begin) continue;
    hide(at, 0, ROWS);
    for (int r = 0; r < ROWS; r++) {
      tried[r] = FIRST ? first_max(ready + r * ROW, 0, PANEL) * (scales_q<T> ? 1.f : factor) : running_max[r];
      if (!(fabsf(tried[r]) <= KEPT_MAX) || FIRST != (running_max[r] == -INFINITY)) return ALL;
      store(sums + r * W, zero());
    }
  }
  exponentials(end - PANEL, 0, ROWS);
  int count = 0;
  for (int r = 0; r < ROWS; r++) {
    const Vec sum = load(sums + r * W);
    if (all_at_most(sum, KEPT_SUM))
      running_max[r] = tried[r], store(running_sum + r * W, add(load(running_sum + r * W), sum));
    else
      sought[count++] = r;
  }
  return count;
}

// One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3): scores become probs in pieces, acc is rescaled. Any number near a
// row's maximum will do in its place, so that of the blocks before is tried first, or of the first panel that it sees anything of. Whether it
// did depends on the row's own scores alone. Of `count` rows that have been tried they are in `sought`. Returns of how many rows it did not.
template <typename T, bool STEPS>
static int softmax_in_tiles(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible,
                             const TileBlock& x, float factor, float* scratch, int* sought, int count) {
  constexpr int ROWS = BLOCK_Q<T>;
  const int64_t block = x.row - task.row_begin, begin = x.begin(), end = x.end();
  float *running_max = scratch + l.running_max + block, *running_sum = scratch + l.running_sum + block * W;
  float tile_max[ROWS], shift[ROWS], rescale[ROWS];
  const FlushSubnormals flush;
  // A positive factor can wait until the exponential: it leaves the order of scores as it is.
  const bool late = !scales_q<T> && !STEPS && factor > 0;
  const Vec multiplier = set1(late ? factor : 1.f), to_base_2 = set1(STEPS ? LOG2E : 1.f);
  const auto exponent = [&](Vec score, Vec shift) {
    return STEPS ? mul(sub(score, shift), to_base_2) : exponent_of<T>(score, multiplier, shift);
  };
  const auto fused_exponent = [&](Vec score, Vec minus_shift) {
    return STEPS ? fma(to_base_2, score, mul(minus_shift, to_base_2)) : fused_exponent_of<T>(score, multiplier, minus_shift);
  };
  const auto pieces = [&](int r, auto exponent) __attribute__((always_inline)) {
    return row_pieces<T>(zero(), scratch + l.scores + r * SCORES_ROW + begin, end - begin, scratch + l.probs + r * PROBS_ROW + begin / 2,
                         l.probs_piece, exponent);
  };
  const bool all = count == ALL;
  if (all) count = 0;
  for (int r = 0, next = 0; r < ROWS; r++) {
    float* scores = scratch + l.scores + r * SCORES_ROW;
    tile_max[r] = running_max[r];
    if (!all && (next == count || sought[next] != r)) continue;
    if (!scales_q<T> && !late) scale_row(scores + begin, end - begin, factor);
    // Rows past the last are computed like the last and never stored.
    modify_row<STEPS>(p, task, visible, smaller(x.row + r, x.last), x.tile, x.first_key, x.end_key, false, scores);
    if (all) {
      const bool first = running_max[r] == -INFINITY;
      const float tried = first ? first_max(scores, begin, end) * (late ? factor : 1.f) : running_max[r];
      if (fabsf(tried) <= KEPT_MAX) {  // not -inf, where no key is seen
        const Vec sum = first ? pieces(r, [&](Vec score) { return exponent(score, set1(tried)); })
                              : pieces(r, [&](Vec score) { return fused_exponent(score, set1(-tried)); });
        if (all_at_most(sum, KEPT_SUM)) {
          store(running_sum + r * W, add(load(running_sum + r * W), sum));
          running_max[r] = tile_max[r] = tried;
          continue;
        }
      }
      sought[count++] = r;
    } else {
      next++;
    }
    tile_max[r] = row_max<NV>(scores, begin, end) * (late ? factor : 1.f);
  }
  if (!count) return 0;
  raise_max<T, STEPS>(tile_max, running_max, shift, rescale);
  float* acc = scratch + l.acc + block * l.acc_stride;
  for (int n = 0; n < count; n++) {
    const int r = sought[n];
    const Vec sum = pieces(r, [&](Vec score) { return exponent(score, set1(shift[r])); });
    store(running_sum + r * W, fma(set1(rescale[r]), load(running_sum + r * W), sum));
    if (rescale[r] != 1.f) scale_row(acc + r * l.acc_stride, l.acc_stride, rescale[r]);
  }
  return count;
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
  int sought[BLOCK_Q<T>], count = ALL;
  const int64_t block = row - task.row_begin;
  float& outgrown = scratch[l.outgrown + block / BLOCK_Q<T>];
  if (!STEPS && !task.modifiers.places && !outliers.q && !outliers.k && (scales_q<T> || factor > 0) && outgrown == 0)
    count = scratch[l.running_max + block] == -INFINITY ? probs_in_tiles<T, true>(task, l, visible, x, factor, scratch, sought)
                                                        : probs_in_tiles<T, false>(task, l, visible, x, factor, scratch, sought);
  if (count) {
    scores_in_tiles<T, STEPS>(p, task, l, x, factor, outliers, scratch);
    count = softmax_in_tiles<T, STEPS>(p, task, l, visible, x, factor, scratch, sought, count);
  }
  // Where maxima rise they will again, and what is tried in vain costs a tenth to a fifth.
  outgrown = count ? 4 : outgrown > 0 ? outgrown - 1 : 0;
  values_in_tiles<T>(p, task, l, x, outliers, scratch);
}
#endif

}  // namespace attnworks::ATTNWORKS_ISA
