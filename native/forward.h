// Exact attention for one block of query rows (FlashAttention-2, Dao 2023, algorithm 1, on a cache hierarchy): tiles of keys and values are
// packed into the L2 cache once per block, scores and probs of one micro-block (MR rows) never leave the L1 cache.
//
// A row's result depends on tile_kv alone: not on tile_q, on the row's place in its block, on the batch or on who computes it. Tiles start
// at multiples of tile_kv, key j always falls on lane j % W, and hidden keys add exact zeros.
#pragma once
#include "forward_parts.h"
#include "forward_tiles.h"
#include "microkernel.h"

namespace attnworks::ATTNWORKS_ISA {

// Scores [begin, end) of a row become exp(scores - shift) in place, packed to bf16 pairs from begin / 2 on if PAIRS. sum: its W lanes.
template <typename T, bool STEPS>
ATTNWORKS_INLINE void row_probs(float* scores, int64_t begin, int64_t end, float shift, float rescale, float* running_sum) {
  constexpr bool PAIRS = in_pairs<T>;
  Vec sum[NV];
  sum[0] = mul(load(running_sum), set1(rescale));
#pragma GCC unroll 8
  for (int n = 1; n < NV; n++) sum[n] = zero();
  for (int64_t at = begin; at < end; at += PANEL) {
    Vec probs[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; n++) {
      probs[n] = prob<STEPS, PAIRS ? 4 : 5>(sub(load(scores + at + n * W), set1(shift)));
      sum[n] = add(sum[n], probs[n]);
    }
    if constexpr (PAIRS) {
#pragma GCC unroll 8
      for (int n = 0; n < NV; n += 2) store(scores + at / 2 + n / 2 * W, pack_bf16(probs[n], probs[n + 1]));
    } else {
#pragma GCC unroll 8
      for (int n = 0; n < NV; n++) store(scores + at + n * W, probs[n]);
    }
  }
#pragma GCC unroll 8
  for (int n = 1; n < NV; n++) sum[0] = add(sum[0], sum[n]);
  store(running_sum, sum[0]);
}

// One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3) for the rows of a micro-block: scores become probs,
// running_max and running_sum are brought up to date, rescale is what the old acc must be multiplied by. tile_max: of these scores.
template <typename T, bool STEPS>
ATTNWORKS_INLINE void softmax_step(float* scores, int64_t begin, int64_t end, const float* tile_max, float* running_max, float* running_sum,
                                   float* rescale) {
  float shift[ROW_STATE<T>];
  raise_max<T, STEPS>(tile_max, running_max, shift, rescale);
  for (int r = 0; r < BLOCK_Q<T>; r++)
    row_probs<T, STEPS>(scores + r * SCORES_ROW, begin, end, shift[r], rescale[r], running_sum + r * W);
}

// One micro-block against keys [first_key, end_key) of the packed tile that begins at key `tile`; `row` is its first query row.
template <typename T, bool STEPS>
static void attend_keys(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const VisibleKeys& visible, int64_t row,
                   int64_t tile, int64_t first_key, int64_t end_key, int64_t packed_begin, float factor, float* scratch) {
  constexpr bool PAIRS = in_pairs<T>;
  constexpr int ROWS = BLOCK_Q<T>;
  const int64_t last = smaller(row + ROWS, task.row_end) - 1;
  const int64_t begin = first_key / PANEL * PANEL, end = round_up(end_key, PANEL);
  const int64_t block = row - task.row_begin;

  const bool key_bias = STEPS && begins_with_key_bias(p.modifiers);
  float* scores = scratch + l.scores;
  for (int64_t at = begin; at < end; at += PANEL) {
    if constexpr (STEPS) prefetch_steps(p.modifiers, task.modifiers, row, last, tile + at, PANEL);
    const float *q = scratch + l.q + block * l.units, *k = scratch + l.k + (at - packed_begin) * l.units;
    scores_kernel<PAIRS, SCORES_ROW>(l.units, q, k, factor, key_bias ? scratch + l.key_bias + (at - packed_begin) : nullptr, scores + at);
  }

  float tile_max[ROW_STATE<T>], rescale[ROW_STATE<T>];
  for (int r = ROWS; r < ROW_STATE<T>; r++) tile_max[r] = 0;
  for (int r = 0; r < ROWS; r++) {
    float* row_scores = scores + r * SCORES_ROW;
    // Rows past the last are computed like the last and never stored.
    modify_row<STEPS>(p, task, visible, smaller(row + r, last), tile, first_key, end_key, key_bias, row_scores);
    tile_max[r] = row_max<NV>(row_scores, begin, end);
  }
  softmax_step<T, STEPS>(scores, begin, end, tile_max, scratch + l.running_max + block / ROWS * ROW_STATE<T>,
                  scratch + l.running_sum + block * W, rescale);

  const int64_t from = row_units<T>(first_key - first_key % 2), depth = row_units<T>(end_key) - from;
  const int64_t packed_from = from - row_units<T>(packed_begin);
  float* acc = scratch + l.acc + block * l.acc_stride;
  for (int64_t column = 0; column < p.head_dim_v; column += PANEL) {
    const float* v = scratch + l.v + column / PANEL * l.panel_stride + packed_from * PANEL;
    values<PAIRS, SCORES_ROW>(smaller(NV, (l.acc_stride - column) / W), depth, scores + from, v, PANEL, rescale, acc + column, l.acc_stride);
  }
}

// A micro-block against all keys of the tile, of which it holds `keys`, that the rows see: with a map, run after run of them.
// attend(first_key, end_key) takes them.
template <typename T, typename Attend>
ATTNWORKS_INLINE void visible_runs(const ForwardProblem& p, const ForwardTask& task, const VisibleKeys& visible, int64_t row, int64_t tile,
                                   int64_t keys, int64_t packed_begin, Attend attend) {
  const int64_t last = smaller(row + BLOCK_Q<T>, task.row_end) - 1;
  const int64_t first_key = p.visit_all ? packed_begin : larger(visible.begin(row) - tile, packed_begin);
  const int64_t end_key = p.visit_all ? keys : smaller(visible.end(last) - tile, keys);
  if (first_key >= end_key) return;
  if (!task.modifiers.places) return attend(first_key, end_key);
  for (KeyRange run = {0, tile + first_key};;) {
    run = next_keys(p.modifiers.map, task.modifiers, row, last, run.end, tile + end_key);
    if (run.begin == run.end) return;
    attend(run.begin - tile, run.end - tile);
  }
}

template <typename T, bool STEPS>
static void forward_finish(const ForwardProblem& p, const ForwardTask& task, const ForwardLayout& l, const float* scratch) {
  for (int64_t row = task.row_begin; row < task.row_end; row++) {
    const int64_t r = row - task.row_begin;
    const float sum = reduce_add(load(scratch + l.running_sum + r * W));
    float scalar;
    const float running_max = scratch[l.running_max + r / BLOCK_Q<T> * ROW_STATE<T> + r % BLOCK_Q<T>];
    const float lse = row_lse(STEPS, running_max, sum, task.modifiers.sink, scalar);
    const Vec factor = set1(scalar);
    const float* acc = scratch + l.acc + r * l.acc_stride;
    T* out = (T*)task.out + row * p.out.row;
    int64_t column = 0;
    for (; column + W <= p.head_dim_v; column += W) store_from_float(out + column, mul(factor, load(acc + column)));
    if (column < p.head_dim_v) store_from_float_n(out + column, mul(factor, load(acc + column)), p.head_dim_v - column);
    if (task.lse) task.lse[row * p.lse.row] = lse;
  }
}

template <typename T, bool STEPS>
static void forward_rows(const ForwardProblem& p, const ForwardTask& task, float* scratch) {
  [[maybe_unused]] const TileState<in_tiles> tile_state;
  const ForwardLayout l = forward_layout<T>(p);
  const VisibleKeys visible = {p.bounds, p.bounds.shift(task.seq_q, task.seq_kv), task.seq_kv};
  const int64_t rows = task.row_end - task.row_begin, blocks = round_up(rows, BLOCK_Q<T>);
  // Scores in base 2, unless steps want them as they are; q carries the factor, except in pairs, whose rounding it would double.
  const float factor = STEPS ? p.scale : p.scale * LOG2E;
  pack_q((const T*)task.q + task.row_begin * p.q.row, p.q.row, rows, p.head_dim, factor, scratch + l.q, l.q_piece);
  uint8_t* const marks[3] = {(uint8_t*)(scratch + l.q_outliers), (uint8_t*)(scratch + l.k_outliers), (uint8_t*)(scratch + l.v_outliers)};
  Outliers outliers = {};
  if constexpr (in_pieces<T>) outliers.q = mark_outliers((const T*)task.q + task.row_begin * p.q.row, p.q.row, rows, p.head_dim, marks[0]);
  memset(scratch + l.acc, 0, blocks * l.acc_stride * 4);
  memset(scratch + l.running_sum, 0, (size_t)blocks * W * 4);
  for (int64_t r = 0; r < blocks / BLOCK_Q<T> * ROW_STATE<T>; r++) scratch[l.running_max + r] = -INFINITY;
  if constexpr (in_tiles) memset(scratch + l.outgrown, 0, blocks / BLOCK_Q<T> * 4);

  const int64_t first = p.visit_all ? 0 : visible.begin(task.row_begin), end = p.visit_all ? task.seq_kv : visible.end(task.row_end - 1);
  for (int64_t tile = first / l.tile_kv * l.tile_kv; tile < end; tile += l.tile_kv) {
    KeyRange shown = {larger(first, tile), smaller(end, tile + l.tile_kv)};
    if (task.modifiers.places) shown = shown_keys(p.modifiers.map, task.modifiers, task.row_begin, task.row_end - 1, shown.begin, shown.end);
    if (shown.begin == shown.end) continue;
    const int64_t keys = shown.end - tile, packed_begin = (shown.begin - tile) / PANEL * PANEL, key = tile + packed_begin;
    const T *k = (const T*)task.k + key * p.k.row, *v = (const T*)task.v + key * p.v.row;
    if constexpr (in_pieces<T>) {
      outliers.k = mark_outliers(k, p.k.row, keys - packed_begin, p.head_dim, marks[1]);
      outliers.v = mark_outliers(v, p.v.row, keys - packed_begin, p.head_dim_v, marks[2]);
    }
    pack_k(k, p.k.row, keys - packed_begin, p.head_dim, scratch + l.k, l.k_piece);
    pack_v(v, p.v.row, keys - packed_begin, p.head_dim_v, scratch + l.v, l.panel_stride, l.v_piece, outliers.v ? marks[2] : nullptr);
    if (STEPS && !in_tiles && begins_with_key_bias(p.modifiers)) {
      float* key_bias = scratch + l.key_bias;
      memset(key_bias, 0, l.tile_kv * 4);
      add_bias(p.modifiers.steps[0], task.modifiers.steps[0].data, 0, key, keys - packed_begin, key_bias);
    }
    for (int64_t row = task.row_begin; row < task.row_end; row += BLOCK_Q<T>)
      visible_runs<T>(p, task, visible, row, tile, keys, packed_begin, [&](int64_t first_key, int64_t end_key) {
        if constexpr (in_tiles)
          attend_keys_in_tiles<T, STEPS>(p, task, l, visible, row, tile, first_key, end_key, packed_begin, factor, outliers, scratch);
        else
          attend_keys<T, STEPS>(p, task, l, visible, row, tile, first_key, end_key, packed_begin, factor, scratch);
      });
  }
  forward_finish<T, STEPS>(p, task, l, scratch);
}
template <typename T>
static void forward_as(const ForwardProblem& p, const ForwardTask& task, float* scratch) {
  return p.modifiers.count ? forward_rows<T, true>(p, task, scratch) : forward_rows<T, false>(p, task, scratch);
}

static size_t forward_scratch(const ForwardProblem& p) {
  switch (p.dtype) {
    case DType::float32: return forward_layout<float>(p).size * 4;
    case DType::bfloat16: return forward_layout<bf16>(p).size * 4;
    case DType::float16: return forward_layout<fp16>(p).size * 4;
  }
  return 0;
}

static void forward(const ForwardProblem& p, const ForwardTask& task, void* scratch) {
  switch (p.dtype) {
    case DType::float32: return forward_as<float>(p, task, (float*)scratch);
    case DType::bfloat16: return forward_as<bf16>(p, task, (float*)scratch);
    case DType::float16: return forward_as<fp16>(p, task, (float*)scratch);
  }
}

}  // namespace attnworks::ATTNWORKS_ISA
