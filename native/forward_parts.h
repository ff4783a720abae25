// What the forward's kernels share: how a problem lies in scratch, which keys a row sees, and the rows of scores.
#pragma once
#include <float.h>
#include <math.h>

#include "exp2.h"
#include "modifiers.h"
#include "outliers.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int SCORES_ROW = MAX_TILE_KV + W;  // no power of two, whose rows would share cache sets; the slack takes mask_row's overrun
constexpr int PROBS_ROW = MAX_TILE_KV / 2 + W;  // of pairs, where they don't take the scores' place
// Of pieces i and j of q and k those with i + j <= this are multiplied: all of fp16's, and those of fp32's that its products can tell from 0.
template <typename T>
constexpr int SCORE_PRODUCTS = 2;
template <>
constexpr int SCORE_PRODUCTS<bf16> = 0;
template <typename T>
constexpr int ROW_STATE = (BLOCK_Q<T> + W - 1) / W * W;  // running_max of a micro-block, in whole vectors

// How a problem lies in scratch; offsets in floats, each region a multiple of 16 of them.
struct ForwardLayout {
  int64_t tile_q, tile_kv;
  int64_t units;        // of a row of q or k
  int64_t acc_stride;   // head_dim_v, padded to whole vectors
  int64_t panel_stride; // of packed v
  int64_t q_piece, k_piece, v_piece, probs_piece;  // between the pieces that tiles multiply
  int64_t q, k, v, key_bias, acc, scores, probs, running_max, running_sum;
  int64_t q_outliers, k_outliers, v_outliers;  // marks, a byte a row
  int64_t outgrown;  // of a micro-block: for so many tiles more it is not tried to do without the scores of a whole tile
  int64_t size;
};

template <typename T>
static ForwardLayout forward_layout(const ForwardProblem& p) {
  ForwardLayout l;
  l.tile_q = round_up(smaller(larger(p.tile_q, 1), MAX_TILE_Q), BLOCK_Q<T>);
  l.tile_kv = round_up(smaller(larger(p.tile_kv, 1), MAX_TILE_KV), PANEL);
  l.units = row_units<T>(p.head_dim);
  l.acc_stride = round_up(p.head_dim_v, in_tiles ? PANEL : W);
  l.panel_stride = row_units<T>(l.tile_kv) * PANEL;
  constexpr int N = in_tiles ? PIECES<T> : 1;
  l.q_piece = l.tile_q * l.units;
  l.k_piece = l.tile_kv * l.units;
  l.v_piece = round_up(p.head_dim_v, PANEL) / PANEL * l.panel_stride;
  l.probs_piece = BLOCK_Q<T> * PROBS_ROW;
  int64_t at = 0;
  auto region = [&at](int64_t floats) {
    const int64_t begin = at;
    at += round_up(floats, 16);
    return begin;
  };
  l.q = region(N * l.q_piece + W);  // pack_q overruns by less than W
  l.k = region(N * l.k_piece);
  l.v = region(N * l.v_piece);
  l.key_bias = region(l.tile_kv);
  l.acc = region(l.tile_q * l.acc_stride);
  l.scores = region(BLOCK_Q<T> * SCORES_ROW + W) + W;
  l.probs = region(in_tiles ? N * l.probs_piece : 0);
  l.running_max = region(l.tile_q / BLOCK_Q<T> * ROW_STATE<T>);
  l.running_sum = region(l.tile_q * W);
  const int64_t marks_q = in_pieces<T> ? l.tile_q / 4 : 0, marks_kv = in_pieces<T> ? l.tile_kv / 4 : 0;
  l.q_outliers = region(marks_q);
  l.k_outliers = region(marks_kv);
  l.v_outliers = region(marks_kv);
  l.outgrown = region(in_tiles ? l.tile_q / BLOCK_Q<T> : 0);
  l.size = at;
  return l;
}

// The keys that row i sees: [begin, end), empty if end <= begin. Both ends grow with i.
struct VisibleKeys {
  Bounds bounds;
  int64_t shift, seq_kv;
  int64_t begin(int64_t row) const { return larger(0, row + shift - bounds.left); }
  int64_t end(int64_t row) const { return smaller(seq_kv, row + shift + bounds.right + 1); }
};

// Sets scores outside [visible_begin, visible_end) to -inf, in whole vectors that may overrun [begin, end) by less than one.
ATTNWORKS_INLINE void mask_row(float* scores, int64_t begin, int64_t end, int64_t visible_begin, int64_t visible_end) {
  const Vec hidden = set1(-INFINITY);
  for (int64_t at = larger(visible_end, begin); at < end; at += W) store(scores + at, hidden);
  for (int64_t at = smaller(visible_begin, end); at > begin; at -= W) store(scores + at - W, hidden);
}

template <int N>
ATTNWORKS_INLINE float row_max(const float* scores, int64_t begin, int64_t end) {
  Vec high[N];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) high[n] = load(scores + begin + n * W);
  for (int64_t at = begin + N * W; at < end; at += N * W)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) high[n] = max(high[n], load(scores + at + n * W));
#pragma GCC unroll 8
  for (int n = 1; n < N; n++) high[0] = max(high[0], high[n]);
  return reduce_max(high[0]);
}

// The largest score of the first panel that has any but -inf.
ATTNWORKS_INLINE float first_max(const float* scores, int64_t begin, int64_t end) {
  float found = -INFINITY;
  for (int64_t at = begin; at < end && found == -INFINITY; at += PANEL) found = row_max<NV>(scores, at, at + PANEL);
  return found;
}

// exp(x) of a difference x of scores, which are in base 2 unless STEPS changed them.
template <bool STEPS, int DEGREE>
ATTNWORKS_INLINE Vec prob(Vec x) {
  return exp2<DEGREE>(STEPS ? mul(x, set1(LOG2E)) : x);
}

// The maxima of a micro-block's rows after a tile's: `shift` is what is taken off its scores, `rescale` what the old sums and acc are multiplied by.
template <typename T, bool STEPS>
ATTNWORKS_INLINE void raise_max(const float* tile_max, float* running_max, float* shift, float* rescale) {
  for (int r = 0; r < ROW_STATE<T>; r += W) {
    const Vec before = load(running_max + r), after = max(before, load(tile_max + r));
    // While a row has seen nothing but -inf, a finite number stands in for its maximum: then -inf - -inf never happens, and exp2 gives 0.
    const Vec finite = max(set1(-FLT_MAX), after);
    store(running_max + r, after);
    store(shift + r, finite);
    store(rescale + r, prob<STEPS, 5>(sub(before, finite)));
  }
}

// What happens to a row's scores against keys [first_key, end_key) of a tile before their maximum is sought. `row` is at the tile's first
// key; whole vectors are written, from first_key / PANEL * PANEL on. key_bias: the first step has been done.
template <bool STEPS>
ATTNWORKS_INLINE void modify_row(const ForwardProblem& p, const ForwardTask& task, const VisibleKeys& visible, int64_t query, int64_t tile,
                                 int64_t first_key, int64_t end_key, bool key_bias, float* row) {
  const int64_t begin = first_key / PANEL * PANEL, end = round_up(end_key, PANEL);
  if constexpr (STEPS)
    apply_steps(p.modifiers, task.modifiers, query, task.seq_kv - task.seq_q, tile + begin, end_key - begin, row + begin, nullptr, 0, key_bias);
  if (task.modifiers.places) hide_row(p.modifiers.map, task.modifiers, query, tile + begin, end_key - begin, row + begin);
  const int64_t visible_begin = larger(visible.begin(query) - tile, first_key), visible_end = smaller(visible.end(query) - tile, end_key);
  if (visible_begin > begin || visible_end < end) mask_row(row, begin, end, visible_begin, visible_end);
}

}  // namespace attnworks::ATTNWORKS_ISA
