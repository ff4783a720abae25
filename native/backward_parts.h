// What the backward's kernels share: rows of scores and their gradients, which keys a row sees, and how sums are stored.
#pragma once
#include <math.h>
#include <string.h>

#include "forward_parts.h"

namespace attnworks::ATTNWORKS_ISA {

// Of scores, probs and their gradients. No power of two, whose rows would share cache sets; the slack takes what zero_outside overruns.
constexpr int GRADS_ROW = MAX_BACKWARD_TILE_KV + 3 * W;

// Whether scores come as plain products, which take the factor with their first step.
template <typename T>
constexpr bool plain_products = in_tiles && !scales_q<T>;

// Scores and d_probs become probs and d_scores in place, in whole vectors. `shift` in the scores' units: natural ones with STEPS, else base 2.
template <typename T, bool STEPS>
ATTNWORKS_INLINE void row_gradients(float* scores, float* d_probs, int64_t begin, int64_t end, float factor, float shift, float delta) {
  for (int64_t at = begin; at < end; at += W) {
    Vec score = load(scores + at);
    if (plain_products<T> && !STEPS) score = in_register(mul(set1(factor), score));
    // No prob is above 1, but a forward by other sums than these may round a huge score's LSE below the score.
    const Vec probs = prob<STEPS, in_pairs<T> ? 4 : 5>(min(zero(), sub(score, set1(shift))));
    store(scores + at, probs);
    store(d_probs + at, mul(probs, sub(load(d_probs + at), set1(delta))));
  }
}

// The same where the scores go through steps and a map first. d_probs become the gradient of what comes out of step number `after`; -1: of
// scale * q k^T. Softcaps are the only steps with a derivative other than 1.
template <typename T>
static void modified_row_gradients(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t row, int64_t begin,
                                   int64_t end, float factor, int64_t after, float* scores, float* d_probs) {
  const Modifiers& m = p.modifiers;
  float slopes[MAX_STEPS * GRADS_ROW];
  const int64_t key = task.key_begin + begin;
  const float own_shift = rows.shift[row], delta = rows.delta[row];
  scores += begin;
  d_probs += begin;
  if (m.count && plain_products<T>) scale_row(scores, round_up(end - begin, W), factor);
  if (m.count) apply_steps(m, rows.modifiers, row, task.seq_kv - task.seq_q, key, end - begin, scores, slopes, GRADS_ROW);
  if (rows.modifiers.places) hide_row(m.map, rows.modifiers, row, key, end - begin, scores);
  if (m.count)
    row_gradients<T, true>(scores, d_probs, 0, end - begin, factor, own_shift, delta);
  else
    row_gradients<T, false>(scores, d_probs, 0, end - begin, factor, own_shift, delta);
  const float* slope = slopes;
  for (int64_t n = 0; n < m.count; n++) {
    if (m.steps[n].kind != StepKind::softcap) continue;
    if (n > after)
      for (int64_t at = 0; at < end - begin; at += W) store(d_probs + at, mul(load(slope + at), load(d_probs + at)));
    slope += GRADS_ROW;
  }
}

// Sets row[begin, end) outside [visible_begin, visible_end) to 0, in whole vectors that may overrun it by less than one.
ATTNWORKS_INLINE void zero_outside(float* row, int64_t begin, int64_t end, int64_t visible_begin, int64_t visible_end) {
  for (int64_t at = larger(visible_end, begin); at < end; at += W) store(row + at, zero());
  for (int64_t at = smaller(visible_begin, end); at > begin; at -= W) store(row + at - W, zero());
}

// The keys of a tile that the rows [first, last] see, from the tile's first key on; empty if end <= begin.
struct Keys {
  int64_t begin, end;
};
ATTNWORKS_INLINE Keys keys_of(const VisibleKeys& visible, const BackwardKeys& task, int64_t first, int64_t last) {
  return {larger(visible.begin(first), task.key_begin) - task.key_begin, smaller(visible.end(last), task.key_end) - task.key_begin};
}
// Whether a map shows these rows, which lie in one of its tiles, any key of its tile that key number `key` of ours is in.
ATTNWORKS_INLINE bool shows(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t key) {
  return !rows.modifiers.places || place_of(p.modifiers.map, rows.modifiers, rows.row_begin, task.key_begin + key) != PLACE_HIDDEN;
}
ATTNWORKS_INLINE VisibleKeys visible_keys(const BackwardProblem& p, const BackwardKeys& task) {
  return {p.bounds, p.bounds.shift(task.seq_q, task.seq_kv), task.seq_kv};
}

// Scores and d_probs of rows [first, last), at most up to rows.row_end of them real, become probs and d_scores: between keys `begin` and `end` of
// the tile 0 where a row doesn't see a key. The rows lie GRADS_ROW floats apart. factor: what plain products must still be multiplied by.
// `after` as in modified_row_gradients.
template <typename T>
static void rows_gradients(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t first, int64_t last,
                           int64_t begin, int64_t end, float factor, int64_t after, float* scores, float* d_probs) {
  const VisibleKeys visible = visible_keys(p, task);
  const bool modified = p.modifiers.count || rows.modifiers.places;
  for (int64_t row = first; row < last; row++, scores += GRADS_ROW, d_probs += GRADS_ROW) {
    const Keys keys = row < rows.row_end ? keys_of(visible, task, row, row) : Keys{0, 0};  // rows past the last add nothing
    const int64_t from = keys.begin / W * W;
    if (keys.begin < keys.end && !modified) row_gradients<T, false>(scores, d_probs, from, keys.end, factor, rows.shift[row], rows.delta[row]);
    for (int64_t at = from, to; modified && at < keys.end; at = to) {
      to = smaller((at / MAP_KEYS + 1) * MAP_KEYS, keys.end);
      if (shows(p, task, rows, at)) {
        modified_row_gradients<T>(p, task, rows, row, at, to, factor, after, scores, d_probs);
      } else {
        memset(scores + at, 0, (to - at) * 4);
        memset(d_probs + at, 0, (to - at) * 4);
      }
    }
    zero_outside(scores, begin, end, keys.begin, keys.end);
    zero_outside(d_probs, begin, end, keys.begin, keys.end);
  }
}

// The gradient of a bias that these rows add, in the order of rows and keys: bias gradient[row][key] += d_scores of rows [first, last). What the
// bias is broadcast along comes together in column_sums and whole, for finish_bias.
static void add_bias_rows(const BackwardKeys& task, const BiasGradient& to, int64_t first, int64_t last, const float* d_scores, float* column_sums,
                          float& whole) {
  const int64_t keys = task.key_end - task.key_begin;
  for (int64_t row = first; row < last; row++, d_scores += GRADS_ROW) {
    float* at = to.data + row * to.row + task.key_begin * to.key;
    if (to.key) {
      for (int64_t key = 0; key < keys; key++) (to.row ? at[key * to.key] : column_sums[key]) += d_scores[key];
      continue;
    }
    float sum = 0;
    for (int64_t key = 0; key < keys; key++) sum += d_scores[key];
    (to.row ? *at : whole) += sum;
  }
}
static void finish_bias(const BackwardKeys& task, const BiasGradient& to, const float* column_sums, float whole) {
  if (to.row) return;
  float* const at = to.data + task.key_begin * to.key;
  if (!to.key) *at += whole;
  for (int64_t key = 0; to.key && key < task.key_end - task.key_begin; key++) at[key * to.key] += column_sums[key];
}

// A row of fp32 sums, times factor, as a row of T.
template <typename T>
ATTNWORKS_INLINE void store_sums(const float* sums, int64_t dim, float factor, T* to) {
  int64_t column = 0;
  for (; column + W <= dim; column += W) store_from_float(to + column, mul(set1(factor), load(sums + column)));
  if (column < dim) store_from_float_n(to + column, mul(set1(factor), load(sums + column)), dim - column);
}

// Floats of a row of dQ's sums.
ATTNWORKS_INLINE int64_t d_q_sum_row(const BackwardProblem& p) { return round_up(p.head_dim, in_tiles ? PANEL : W); }

template <typename T>
static void backward_store_d_q(const BackwardProblem& p, const BackwardRows& rows, bool any) {
  const int64_t sum_row = d_q_sum_row(p);
  for (int64_t row = rows.row_begin; row < rows.row_end; row++) {
    T* to = (T*)rows.d_q + row * p.d_q.row;
    if (any)
      store_sums(rows.d_q_sum + row * sum_row, p.head_dim, p.scale, to);
    else
      memset((void*)to, 0, p.head_dim * sizeof(T));
  }
}

template <typename T>
static void backward_row_sums(const BackwardProblem& p, const BackwardRows& rows) {
  for (int64_t row = rows.row_begin; row < rows.row_end; row++) {
    const T *out = (const T*)rows.out + row * p.out.row, *d_out = (const T*)rows.d_out + row * p.d_out.row;
    Vec sum = zero();
    int64_t column = 0;
    for (; column + W <= p.head_dim_v; column += W) sum = fma(load_as_float(out + column), load_as_float(d_out + column), sum);
    const int left = (int)(p.head_dim_v - column);
    if (left) sum = fma(load_as_float_n(out + column, left), load_as_float_n(d_out + column, left), sum);
    const float lse = rows.lse[row * p.lse.row], d_lse = rows.d_lse ? rows.d_lse[row * p.lse.row] : 0.f;
    const bool sees_nothing = lse == -INFINITY;
    rows.shift[row] = sees_nothing ? INFINITY : p.modifiers.count ? lse : lse * LOG2E;
    rows.delta[row] = sees_nothing ? 0.f : reduce_add(sum) - d_lse;
  }
}

}  // namespace attnworks::ATTNWORKS_ISA
