// Score modifiers and masks on rows of scores, after Q K^T and before the softmax: S = steps(scale * Q K^T), then hidden where the mask says so.
// A caller without steps or without a map does not come here at all, and can keep its scores in base 2; these are in natural units.
//
// For a backward that recomputes S: apply_steps takes the same rows again, and keeps the derivative of every softcap if asked to. With those,
// dS goes back through the steps from the last to the first: at a bias the gradient of its elements is dS as it is there; at a softcap
// dS *= its derivative; ALiBi changes nothing. The sink's logit gets minus exp(sink - lse) * (delta - d_lse) of each row of its head.
#pragma once
#include <math.h>

#include "exp2.h"
#include "integers.h"

namespace attnworks::ATTNWORKS_ISA {

// x within [-most, most]; NaN stays NaN, as max() keeps it in its second operand.
ATTNWORKS_INLINE Vec within(float most, Vec x) {
  return sub(zero(), max(set1(-most), sub(zero(), max(set1(-most), x))));
}

// Relative error below 3e-7 of fp32 with FMA, never beyond +-1, NaN stays NaN. Minimax of tanh(x) / x in x^2, for |x| <= 9.02, from where on it
// rounds to 1.
ATTNWORKS_INLINE Vec tanh(Vec x) {
  const Vec y = within(9.02f, x);
  const Vec square = mul(y, y);
  Vec p = fma(set1(1.3319169e-8f), square, set1(2.0583557e-5f));
  p = fma(p, square, set1(3.4940394e-3f));
  p = fma(p, square, set1(0.13379723f));
  p = fma(p, square, set1(1.f));
  Vec q = fma(set1(7.762061e-7f), square, set1(3.2831007e-4f));
  q = fma(q, square, set1(0.025871092f));
  q = fma(q, square, set1(0.46713036f));
  q = fma(q, square, set1(1.f));
  return within(1.f, div(mul(y, p), q));
}

alignas(64) static const float LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};  // at least W

// scores[0, count) = cap * tanh(scores / cap), in whole vectors; slope: the derivative, if not null.
ATTNWORKS_INLINE void softcap_row(float cap, int64_t count, float* scores, float* slope) {
  for (int64_t at = 0; at < count; at += W) {
    const Vec t = tanh(div(load(scores + at), set1(cap)));
    store(scores + at, mul(set1(cap), t));
    if (slope) store(slope + at, sub(set1(1.f), mul(t, t)));
  }
}

// scores[j] -= slope * |ahead - j|, in whole vectors; `ahead`: by how many keys the query's own place is ahead of scores[0].
ATTNWORKS_INLINE void alibi_row(float slope, int64_t ahead, int64_t count, float* scores) {
  const Vec minus = set1(-slope), lanes = load(LANES);
  for (int64_t at = 0; at < count; at += W) {
    const Vec behind = sub(lanes, set1((float)(ahead - at)));
    store(scores + at, fma(minus, max(behind, sub(zero(), behind)), load(scores + at)));
  }
}

// scores[j] += bias[j * stride]; nothing is read past bias[(count - 1) * stride].
template <typename T>
ATTNWORKS_INLINE void bias_row(const T* bias, int64_t stride, int64_t count, float* scores) {
  if (stride == 1) {
    int64_t at = 0;
    for (; at + W <= count; at += W) store(scores + at, add(load(scores + at), load_as_float(bias + at)));
    if (at < count) store(scores + at, add(load(scores + at), load_as_float_n(bias + at, (int)(count - at))));
    return;
  }
  for (int64_t at = 0; at < count; at += W) {
    T near[W] = {};
    const int n = (int)smaller(W, count - at);
    for (int i = 0; i < n; i++) near[i] = bias[(at + i) * stride];
    store(scores + at, add(load(scores + at), load_as_float(near)));
  }
}

// scores[j] += the bias of `query` and key + j; nothing else of the bias is read.
ATTNWORKS_INLINE void add_bias(const ScoreStep& step, const void* bias, int64_t query, int64_t key, int64_t count, float* scores) {
  const int64_t offset = query * step.row + key * step.key;
  if (step.dtype == DType::float32) bias_row((const float*)bias + offset, step.key, count, scores);
  if (step.dtype == DType::bfloat16) bias_row((const bf16*)bias + offset, step.key, count, scores);
  if (step.dtype == DType::float16) bias_row((const fp16*)bias + offset, step.key, count, scores);
}

// Whether the first step adds the same row to every query's scores, as padding does: then whoever makes the scores can add it.
ATTNWORKS_INLINE bool begins_with_key_bias(const Modifiers& m) { return m.count && m.steps[0].kind == StepKind::bias && m.steps[0].row == 0; }

// The steps from `first` on, on scores[0, count) of one query, whose keys are [key, key + count); whole vectors, so up to W - 1 scores more may
// change. `ahead`: by how many keys query 0's own place, for ALiBi, is ahead of key 0: seq_kv - seq_q, whatever the mask's alignment.
// slopes: null, or room for the derivatives: of the n-th softcap among the steps from slopes + n * slope_stride on.
ATTNWORKS_INLINE void apply_steps(const Modifiers& m, const HeadModifiers& head, int64_t query, int64_t ahead, int64_t key, int64_t count,
                                  float* scores, float* slopes = nullptr, int64_t slope_stride = 0, int64_t first = 0) {
  for (int64_t n = first; n < m.count; n++) {
    const ScoreStep& step = m.steps[n];
    if (step.kind == StepKind::softcap) {
      softcap_row(step.cap, count, scores, slopes);
      if (slopes) slopes += slope_stride;
    } else if (step.kind == StepKind::alibi) {
      alibi_row(head.steps[n].slope, query + ahead - key, count, scores);
    } else {
      add_bias(step, head.steps[n].data, query, key, count, scores);
    }
  }
}

// Asks for what apply_steps will read for queries [first, last] and `count` keys from `key` on: rows of a bias lie far apart, where the hardware
// fetches nothing ahead. Asked for before each panel of a product, it is there when that is done.
ATTNWORKS_INLINE void prefetch_steps(const Modifiers& m, const HeadModifiers& head, int64_t first, int64_t last, int64_t key, int64_t count) {
  for (int64_t n = 0; n < m.count; n++) {
    const ScoreStep& step = m.steps[n];
    if (step.kind != StepKind::bias || step.key != 1 || step.row == 0) continue;
    const int64_t size = step.dtype == DType::float32 ? 4 : 2;
    for (int64_t query = first; query <= last; query++) {
      const char* row = (const char*)head.steps[n].data + (query * step.row + key) * size;
      for (int64_t at = 0; at < count * size; at += 64) prefetch(row + at);
    }
  }
}

// The LSE of a row from its maximum and sum, in natural units if `natural` else in base 2, and what its acc is to be multiplied by.
ATTNWORKS_INLINE float row_lse(bool natural, float running_max, float sum, float sink, float& factor) {
  if (sink == -INFINITY) {
    factor = sum == 0 ? 0.f : 1 / sum;
    if (sum == 0) return -INFINITY;
    return natural ? running_max + log2f(sum) * LN2 : (running_max + log2f(sum)) * LN2;
  }
  const float before = natural ? running_max : running_max * LN2, most = before > sink ? before : sink;
  const float weight = exp2_scalar((before - most) * LOG2E), total = sum * weight + exp2_scalar((sink - most) * LOG2E);
  factor = weight / total;
  return most + log2f(total) * LN2;
}

// ---- the tile map of one head ---------------------------------------------------------------------------------------------------------------

ATTNWORKS_INLINE int32_t place_of(const TileMap& map, const HeadModifiers& head, int64_t query, int64_t key) {
  return head.places[(map.rows == 1 ? 0 : query / MAP_ROWS) * map.tiles_kv + key / MAP_KEYS];
}

// Bit j: whether `query` sees key j of the tile that `key` is in.
ATTNWORKS_INLINE uint64_t tile_bits(const TileMap& map, const HeadModifiers& head, int64_t query, int64_t key) {
  const int32_t place = place_of(map, head, query, key);
  if (place < 0) return place == PLACE_FULL ? ~(uint64_t)0 : 0;
  return head.bits[place * map.rows + (map.rows == 1 ? 0 : query % MAP_ROWS)];
}

// The same for any of the queries [first, last], all of one tile.
ATTNWORKS_INLINE uint64_t any_tile_bits(const TileMap& map, const HeadModifiers& head, int64_t first, int64_t last, int64_t key) {
  const int32_t place = place_of(map, head, first, key);
  if (place < 0 || map.rows == 1) return tile_bits(map, head, first, key);
  uint64_t any = 0;
  for (int64_t query = first; query <= last; query++) any |= head.bits[place * map.rows + query % MAP_ROWS];
  return any;
}

struct KeyRange {
  int64_t begin, end;
};

// From key `begin` on, before `end`: the next keys that any of the queries [first, last] sees, up to the next tile that is hidden from all of
// them; begin == end if there are none. The queries are of one tile.
static inline KeyRange next_keys(const TileMap& map, const HeadModifiers& head, int64_t first, int64_t last, int64_t begin, int64_t end) {
  KeyRange found = {end, end};
  for (int64_t key = begin, next; key < end; key = next) {
    next = smaller((key / MAP_KEYS + 1) * MAP_KEYS, end);
    const int64_t tile = key / MAP_KEYS * MAP_KEYS;
    uint64_t bits = any_tile_bits(map, head, first, last, key) >> (key - tile) << (key - tile);
    if (next - tile < MAP_KEYS) bits &= ((uint64_t)1 << (next - tile)) - 1;
    if (bits == 0) {
      if (found.begin < end) return found;
      continue;
    }
    if (found.begin == end) found.begin = tile + __builtin_ctzll(bits);
    found.end = tile + MAP_KEYS - __builtin_clzll(bits);
  }
  return found;
}

// Whether any of the queries [first, last], of any tiles, may see a key of the tile that `key` is in.
static inline bool shown(const TileMap& map, const HeadModifiers& head, int64_t first, int64_t last, int64_t key) {
  for (int64_t query = first; query < last; query += MAP_ROWS)
    if (place_of(map, head, query, key) != PLACE_HIDDEN) return true;
  return place_of(map, head, last, key) != PLACE_HIDDEN;
}

// The keys in [begin, end) from the first to the last tile that is not hidden from all of the queries [first, last], of any tiles.
static inline KeyRange shown_keys(const TileMap& map, const HeadModifiers& head, int64_t first, int64_t last, int64_t begin, int64_t end) {
  while (begin < end && !shown(map, head, first, last, begin)) begin = smaller((begin / MAP_KEYS + 1) * MAP_KEYS, end);
  while (begin < end && !shown(map, head, first, last, end - 1)) end = larger((end - 1) / MAP_KEYS * MAP_KEYS, begin);
  return {begin, end};
}

// Scores of keys [key, key + count) that `query` does not see become -inf; whole vectors, so up to W - 1 scores more may.
ATTNWORKS_INLINE void hide_row(const TileMap& map, const HeadModifiers& head, int64_t query, int64_t key, int64_t count, float* scores) {
  const Vec hidden = set1(-INFINITY);
  for (int64_t at = 0; at < count; at += MAP_KEYS) {
    const int64_t first = (key + at) % MAP_KEYS, next = key + at - first + MAP_KEYS, stop = smaller(count, at + MAP_KEYS);
    uint64_t bits = tile_bits(map, head, query, key + at) >> first;
    if (first && next < key + count) bits |= tile_bits(map, head, query, next) << (MAP_KEYS - first);
    if (~bits == 0) continue;
    for (int64_t j = at; j < stop; j += W, bits >>= W) store(scores + j, choose((uint32_t)bits, load(scores + j), hidden));
  }
}

}  // namespace attnworks::ATTNWORKS_ISA
