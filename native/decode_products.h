// The two products of decode and the softmax between them, for a block of at most BLOCK_KEYS keys whose rows may lie anywhere (a page ends
// where it likes), and R query rows: every element of K and V that is loaded meets all R of them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exp2.h"
#include "integers.h"
#include "tiles.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int BLOCK_ROWS = W >= 16 ? 8 : 4;  // most rows that share the registers of a product
constexpr int SCORE_ROWS = HAS_TILES ? TILE : BLOCK_ROWS;  // of a head, from one head's scores to the next
constexpr int SUMS = W >= 16 ? W : 8;        // accumulating registers of a product: enough to hide the latency of an FMA
constexpr int BLOCK_KEYS = 64;               // most keys between two updates of running_max
constexpr int STEP = 2 * W;                  // elements of a row that are loaded at once
static_assert(SUMS % W == 0 && BLOCK_KEYS % STEP == 0 && SUMS / BLOCK_ROWS >= 2);

// A step enters a product as two Vecs of floats, or as one of bf16 pairs where the CPU multiplies those.
template <typename T>
constexpr bool PAIRS = false;
template <>
constexpr bool PAIRS<bf16> = HAS_BF16_DOT;
template <typename T>
constexpr bool EVEN_ODD = false;
template <>
constexpr bool EVEN_ODD<bf16> = !HAS_BF16_DOT;
template <typename T>
constexpr int VECS = PAIRS<T> ? 1 : 2;

// bf16 comes apart into even and odd elements, whatever meets it must be in that order: q is, and acc is put right at the end.
template <typename T>
ATTNWORKS_INLINE void load_step(const T* p, Vec* x) {
  x[0] = load_as_float(p);
  x[1] = load_as_float(p + W);
}
ATTNWORKS_INLINE void load_step(const bf16* p, Vec* x) {
  if constexpr (HAS_BF16_DOT)
    x[0] = load_pairs(p);
  else
    load_even_odd(p, x[0], x[1]);
}
// The first n elements of a step, the rest 0.
template <typename T>
ATTNWORKS_INLINE void load_step_n(const T* p, int n, Vec* x) {
  x[0] = load_as_float_n(p, n < W ? n : W);
  x[1] = n > W ? load_as_float_n(p + W, n - W) : zero();
}
ATTNWORKS_INLINE void load_step_n(const bf16* p, int n, Vec* x) {
  if constexpr (HAS_BF16_DOT)
    x[0] = load_pairs_n(p, n);
  else
    load_even_odd_n(p, n, x[0], x[1]);
}
template <typename T>
ATTNWORKS_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
  if constexpr (PAIRS<T>)
    return dot_bf16(sum, a, b);
  else
    return fma(a, b, sum);
}

// Rows to fetch, a cache line at a time and in order, spread evenly over the arithmetic on the rows before them: in bursts they would keep
// loads waiting. The hardware's prefetchers stop at every page and see too many streams. After the last row it begins again, which costs
// less than to ask each time.
class Ahead {
  const char *at = nullptr, *stop = nullptr;
  const void *const *row = nullptr, *const *first = nullptr, *const *end = nullptr;
  int64_t bytes = 0;  // of one row

  __attribute__((always_inline)) void next_row() {
    if (row == end) row = first;
    at = (const char*)*row++;
    stop = at + bytes;
  }

 public:
  template <typename T>
  Ahead(const T* const* rows, int count, int64_t columns)
      : row((const void* const*)rows), first(row), end(row + count), bytes(columns * (int64_t)sizeof(T)) {
    next_row();
  }
  template <int LINES>
  __attribute__((always_inline)) void step() {
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) {
      prefetch_early(at);
      at += 64;
      if (__builtin_expect(at >= stop, 0)) next_row();
    }
  }
};
// Lines to fetch while `bytes` bytes are consumed.
constexpr int lines(int64_t bytes) { return bytes < 64 ? 1 : (int)(bytes / 64); }

// Some rows of q of each head, row_stride and head_stride floats apart; `factor` goes onto their products.
struct Queries {
  const float* rows;
  int64_t row_stride, head_stride, heads;
  float factor;
};

// scores[head][r][j] = factor * q[head][r] . keys[j][head] for R rows, in rows of BLOCK_KEYS and SCORE_ROWS rows a head; the heads of a key are
// key_stride elements apart. Writes up to a multiple of SUMS / R keys.
template <typename T, int R>
static void score_block(const Queries& q, const T* const* keys, int64_t key_stride, int count, int64_t head_dim, float* scores, Ahead ahead) {
  constexpr int KEYS = SUMS / R;
  for (int j = 0; j < count; j += KEYS)
    for (int64_t head = 0; head < q.heads; head++) {
      Vec sums[SUMS / W][W];  // sum number r * KEYS + i belongs to row r and key j + i
#pragma GCC unroll 16
      for (int n = 0; n < SUMS; n++) sums[n / W][n % W] = zero();
      const auto accumulate = [&](const Vec (&key)[KEYS][VECS<T>], const float* query) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int v = 0; v < VECS<T>; v++) {
            const Vec x = in_register(load(query + r * q.row_stride + v * W));
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++) {
              Vec& sum = sums[(r * KEYS + i) / W][(r * KEYS + i) % W];
              sum = multiply_add<T>(x, key[i][v], sum);
            }
          }
      };
      Vec key[KEYS][VECS<T>];
      const float* query = q.rows + head * q.head_stride;
      int64_t d = 0;
      for (; d + STEP <= head_dim; d += STEP, query += VECS<T> * W) {
        ahead.step<lines(KEYS * STEP * sizeof(T))>();
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) load_step(keys[j + i] + head * key_stride + d, key[i]);
        accumulate(key, query);
      }
      if (d < head_dim) {
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) load_step_n(keys[j + i] + head * key_stride + d, (int)(head_dim - d), key[i]);
        accumulate(key, query);
      }
      float totals[SUMS];
#pragma GCC unroll 2
      for (int n = 0; n < SUMS / W; n++) store(totals + n * W, mul(set1(q.factor), reduce_add_all(sums[n])));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) memcpy(scores + (head * SCORE_ROWS + r) * BLOCK_KEYS + j, totals + r * KEYS, KEYS * sizeof(float));
    }
}
// The same for one row of each head: all heads of a key, then the next key.
template <typename T>
static void score_row(const Queries& q, const T* const* keys, int64_t key_stride, int count, int64_t head_dim, float* scores, Ahead ahead) {
  const int items = count * (int)q.heads;
  int j = 0, head = 0;
  for (int first = 0; first < items; first += W) {
    Vec sums[W];
    float* to[W];  // where each product belongs
#pragma GCC unroll 1
    for (int i = 0; i < W; i++) {
      const T* key = keys[j] + head * key_stride;
      Vec x[2 * VECS<T>], parts[2 * VECS<T>];
#pragma GCC unroll 4
      for (int v = 0; v < 2 * VECS<T>; v++) parts[v] = zero();
      const float* query = q.rows + head * q.head_stride;
      int64_t d = 0;
      for (; d + 2 * STEP <= head_dim; d += 2 * STEP, query += 2 * VECS<T> * W) {
        ahead.step<lines(2 * STEP * sizeof(T))>();
        load_step(key + d, x);
        load_step(key + d + STEP, x + VECS<T>);
#pragma GCC unroll 4
        for (int v = 0; v < 2 * VECS<T>; v++) parts[v] = multiply_add<T>(load(query + v * W), x[v], parts[v]);
      }
      for (; d < head_dim; d += STEP, query += VECS<T> * W) {
        load_step_n(key + d, (int)smaller(head_dim - d, STEP), x);
#pragma GCC unroll 2
        for (int v = 0; v < VECS<T>; v++) parts[v] = multiply_add<T>(load(query + v * W), x[v], parts[v]);
      }
      sums[i] = parts[0];
#pragma GCC unroll 4
      for (int v = 1; v < 2 * VECS<T>; v++) sums[i] = add(sums[i], parts[v]);
      to[i] = scores + head * SCORE_ROWS * BLOCK_KEYS + j;
      if (++head == q.heads) head = 0, j += j + 1 < count;  // past the end the last key is repeated
    }
    float totals[W];
    store(totals, mul(set1(q.factor), reduce_add_all(sums)));
    for (int i = 0; i < W && first + i < items; i++) *to[i] = totals[i];
  }
}

// Turns the scores of one row into probs (pairs of bf16 if PAIRS) and updates its statistics. Only keys [begin, end) are visible; probs
// are written up to the next multiple of 2W after `count`. `unit` times a difference of scores is one in base 2. Returns the factor for
// what was accumulated before.
template <typename T>
static float softmax_block(float* scores, int count, int begin, int end, float unit, float& running_max, float& running_sum) {
  const int padded = (int)round_up(count, 2 * W);
  for (int j = 0; j < begin; j++) scores[j] = -INFINITY;
  for (int j = end; j < padded; j++) scores[j] = -INFINITY;
  Vec most = load(scores);
  for (int j = W; j < padded; j += W) most = max(most, load(scores + j));
  // A NaN may get lost in a maximum, but not in the probs: so "nothing seen yet" is running_sum == 0, never a maximum of -inf.
  const float block_max = reduce_max(most), before = running_max;
  running_max = block_max > before ? block_max : before;
  const float shift = running_max == -INFINITY ? 0.f : running_max;
  Vec sum0 = zero(), sum1 = zero();
  for (int j = 0; j < padded; j += 2 * W) {
    const Vec probs0 = exp2<5>(mul(set1(unit), sub(load(scores + j), set1(shift))));
    const Vec probs1 = exp2<5>(mul(set1(unit), sub(load(scores + j + W), set1(shift))));
    sum0 = add(sum0, probs0);
    sum1 = add(sum1, probs1);
    if constexpr (PAIRS<T>) {
      store(scores + j / 2, pack_bf16(probs0, probs1));
    } else {
      store(scores + j, probs0);
      store(scores + j + W, probs1);
    }
  }
  const float rescale = before == shift ? 1.f : exp2_scalar((before - shift) * unit);  // the same, without waiting for it
  running_sum = running_sum * rescale + reduce_add(add(sum0, sum1));
  return rescale;
}

// acc[r] += sum over j of probs[r][j] * values[j][head_offset ...], for N Vecs of columns (the first `columns` <= N * W of them, N = 2 if fewer).
template <typename T, int R, int N>
ATTNWORKS_INLINE void weigh_columns(const float* probs, const T* const* values, int count, int64_t head_offset, int64_t column,
                                    int columns, float* acc, int64_t acc_stride, Ahead& fetch) {
  constexpr int ROWS = PAIRS<T> ? 2 : 1, UNROLL = 4;  // rows of V in a product, products between two looks at the loop's end
  Vec sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) sums[r][i] = load(acc + r * acc_stride + column + i * W);
  const auto accumulate = [&](int j) __attribute__((always_inline)) {
    Vec value[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i += 2) {
      const T* row = values[j] + head_offset + column + i * W;
      if constexpr (PAIRS<T>) {
        const T* row1 = values[j + 1] + head_offset + column + i * W;
        if (columns == N * W)
          interleave_bf16(load_pairs(row), load_pairs(row1), value[i], value[i + 1]);
        else
          interleave_bf16(load_pairs_n(row, columns), load_pairs_n(row1, columns), value[i], value[i + 1]);
      } else if (columns == N * W) {
        load_step(row, value + i);
      } else {
        load_step_n(row, columns, value + i);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec prob = set1(probs[r * BLOCK_KEYS + j / ROWS]);
#pragma GCC unroll 16
      for (int i = 0; i < N; i++) sums[r][i] = multiply_add<T>(prob, value[i], sums[r][i]);
    }
  };
  Ahead ahead = fetch;
  int j = 0;
  for (; j + UNROLL * ROWS <= count; j += UNROLL * ROWS) {
    ahead.step<lines(UNROLL * ROWS * N * W * sizeof(T))>();
#pragma GCC unroll 4
    for (int i = 0; i < UNROLL; i++) accumulate(j + i * ROWS);
  }
  fetch = ahead;
#pragma GCC unroll 1
  for (; j < count; j += ROWS) accumulate(j);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) store(acc + r * acc_stride + column + i * W, sums[r][i]);
}
// The same for all columns from `column` on: as many at once as registers allow, then fewer.
template <typename T, int R, int N = SUMS / R>
static void weigh_block(const float* probs, const T* const* values, int count, int64_t head_offset, int64_t column, int64_t head_dim_v,
                        float* acc, int64_t acc_stride, Ahead& ahead) {
  for (; column + N * W <= head_dim_v; column += N * W)
    weigh_columns<T, R, N>(probs, values, count, head_offset, column, N * W, acc, acc_stride, ahead);
  if (column == head_dim_v) return;
  if constexpr (N > 2)
    weigh_block<T, R, N / 2>(probs, values, count, head_offset, column, head_dim_v, acc, acc_stride, ahead);
  else
    weigh_columns<T, R, N>(probs, values, count, head_offset, column, (int)(head_dim_v - column), acc, acc_stride, ahead);
}

}  // namespace attnworks::ATTNWORKS_ISA
