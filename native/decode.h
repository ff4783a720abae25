// Decode: few query rows against a long KV cache. Bound by the bytes of K and V, so all rows that share a KV head go over it together,
// and the next rows of V and K are on their way from memory while these are computed with. One call handles one split of the keys;
// decode_merge joins the splits by their log-sum-exp (Flash-Decoding). Inside: online softmax (Milakov & Gimelshein 2018, algorithm 3)
// over blocks of keys. Scores are kept in units of log2, scaled before the maximum is taken: so the largest one's exponent is exactly 0.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exp2.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int TILE_ROWS = 32;                     // query rows whose q and acc stay on chip during one pass over a split
constexpr int BLOCK_ROWS = W >= 16 ? 8 : 4;       // most rows that share one product's registers
constexpr int SUMS = W >= 16 ? W : 8;             // accumulating registers of a product: enough to hide the latency of an FMA
constexpr int BLOCK_KEYS = 128;                   // most keys between two updates of running_max
constexpr int64_t BLOCK_BYTES = 256 << 10;        // K and V of one block, so that they and the next block's K stay in L2
static_assert(SUMS % W == 0 && BLOCK_KEYS % (2 * W) == 0);

// Elements of a cache row enter products as floats, or as pairs of bf16 where the CPU multiplies those.
template <typename T>
constexpr bool PAIRS = false;
template <>
constexpr bool PAIRS<bf16> = HAS_BF16_DOT;
template <typename T>
constexpr int STEP = PAIRS<T> ? 2 * W : W;  // elements in a Vec

template <typename T>
ATTNWORKS_INLINE Vec load_step(const T* p) {
  if constexpr (PAIRS<T>)
    return load_pairs(p);
  else
    return load_as_float(p);
}
template <typename T>
ATTNWORKS_INLINE Vec load_step_n(const T* p, int n) {
  if constexpr (PAIRS<T>)
    return load_pairs_n(p, n);
  else
    return load_as_float_n(p, n);
}
template <typename T>
ATTNWORKS_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
  if constexpr (PAIRS<T>)
    return dot_bf16(sum, a, b);
  else
    return fma(a, b, sum);
}

ATTNWORKS_INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
ATTNWORKS_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ATTNWORKS_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows to fetch into L2, a cache line at a time and in order, spread evenly over the arithmetic on the rows before them. The hardware's
// prefetchers stop at every page and see too many streams.
struct Ahead {
  const void* const* row;
  const void* const* end;
  int64_t bytes, offset;  // of one row

  template <int LINES>
  __attribute__((always_inline)) void step() {
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) {
      if (row == end) return;
      prefetch((const char*)*row + offset);
      offset += 64;
      if (offset >= bytes) {
        offset = 0;
        row++;
      }
    }
  }
};
// Lines to fetch while `bytes` bytes are consumed.
constexpr int lines(int64_t bytes) { return bytes < 64 ? 1 : (int)(bytes / 64); }

// Addresses of cache rows [first, first + count), then the last one again up to BLOCK_KEYS: kernels may read beyond count, but only there.
template <typename T>
static void find_rows(const DecodeTask& task, const T* cache, const Strides& strides, int64_t page_size, int64_t first, int count,
                      const T** rows) {
  int j = 0;
  if (task.pages) {
    int64_t page = first / page_size, slot = first % page_size;
    for (; j < count; page++, slot = 0) {
      const T* row = cache + task.pages[page] * strides.batch + slot * strides.row;
      const int end = (int)smaller(count, j + page_size - slot);
      for (; j < end; j++, row += strides.row) rows[j] = row;
    }
  } else {
    for (; j < count; j++) rows[j] = cache + (first + j) * strides.row;
  }
  for (; j < BLOCK_KEYS; j++) rows[j] = rows[count - 1];
}

// scores[r][j] = factor * q[r] . keys[j] for R rows. Writes up to a multiple of SUMS / R keys.
template <typename T, int R>
static void score_block(const float* q, int64_t q_stride, const T* const* keys, int count, int64_t head_dim, float factor,
                        float (*scores)[BLOCK_KEYS], Ahead ahead) {
  constexpr int KEYS = SUMS / R;
  for (int j = 0; j < count; j += KEYS) {
    Vec sums[SUMS / W][W];  // sum number r * KEYS + i belongs to row r and key j + i
#pragma GCC unroll 16
    for (int n = 0; n < SUMS; n++) sums[n / W][n % W] = zero();
    int64_t d = 0;
    const float* query = q;
    for (; d + STEP<T> <= head_dim; d += STEP<T>, query += W) {
      ahead.step<lines(KEYS * STEP<T> * sizeof(T))>();
      Vec key[KEYS];
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) key[i] = load_step(keys[j + i] + d);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Vec x = load(query + r * q_stride);
#pragma GCC unroll 16
        for (int i = 0; i < KEYS; i++) {
          Vec& sum = sums[(r * KEYS + i) / W][(r * KEYS + i) % W];
          sum = multiply_add<T>(x, key[i], sum);
        }
      }
    }
    if (d < head_dim) {
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) {
        const Vec key = load_step_n(keys[j + i] + d, (int)(head_dim - d));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          Vec& sum = sums[(r * KEYS + i) / W][(r * KEYS + i) % W];
          sum = multiply_add<T>(load(query + r * q_stride), key, sum);
        }
      }
    }
    float totals[SUMS];
#pragma GCC unroll 2
    for (int n = 0; n < SUMS / W; n++) store(totals + n * W, mul(set1(factor), reduce_add_all(sums[n])));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) memcpy(&scores[r][j], totals + r * KEYS, KEYS * sizeof(float));
  }
}

// Turns the scores of one row into probs (pairs of bf16 if PAIRS) and updates its statistics. Only keys [begin, end) are visible; probs
// are written up to the next multiple of 2W after `count`. Returns the factor for what was accumulated before.
template <typename T>
static float softmax_block(float* scores, int count, int begin, int end, float& running_max, float& running_sum) {
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
    const Vec probs0 = exp2<5>(sub(load(scores + j), set1(shift)));
    const Vec probs1 = exp2<5>(sub(load(scores + j + W), set1(shift)));
    sum0 = add(sum0, probs0);
    sum1 = add(sum1, probs1);
    if constexpr (PAIRS<T>) {
      store(scores + j / 2, pack_bf16(probs0, probs1));
    } else {
      store(scores + j, probs0);
      store(scores + j + W, probs1);
    }
  }
  const float rescale = exp2_scalar(before - shift);
  running_sum = running_sum * rescale + reduce_add(add(sum0, sum1));
  return rescale;
}

// acc[r] = rescale[r] * acc[r] + sum over j of probs[r][j] * values[j], for N Vecs of columns (columns < N * W: only so many, N minimal).
template <typename T, int R, int N>
ATTNWORKS_INLINE void weigh_columns(const float (*probs)[BLOCK_KEYS], const T* const* values, int count, int64_t column, int columns,
                                    const float* rescale, float* acc, int64_t acc_stride, Ahead& ahead) {
  constexpr int ROWS = PAIRS<T> ? 2 : 1;  // rows of V in a step
  Vec sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) sums[r][i] = mul(set1(rescale[r]), load(acc + r * acc_stride + column + i * W));
  for (int j = 0; j < count; j += ROWS) {
    ahead.step<lines(ROWS * N * W * sizeof(T))>();
    Vec value[N];
    if constexpr (PAIRS<T>) {
#pragma GCC unroll 8
      for (int i = 0; i < N; i += 2) {
        const T *row0 = values[j] + column + i * W, *row1 = values[j + 1] + column + i * W;
        if (columns == N * W)
          interleave_bf16(load_pairs(row0), load_pairs(row1), value[i], value[i + 1]);
        else
          interleave_bf16(load_pairs_n(row0, columns), load_pairs_n(row1, columns), value[i], value[i + 1]);
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < N; i++)
        value[i] = columns == N * W ? load_as_float(values[j] + column + i * W) : load_as_float_n(values[j] + column, columns);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vec prob = set1(probs[r][j / ROWS]);
#pragma GCC unroll 16
      for (int i = 0; i < N; i++) sums[r][i] = multiply_add<T>(prob, value[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) store(acc + r * acc_stride + column + i * W, sums[r][i]);
}
// The same for all columns from `column` on: as many at once as registers allow, then fewer.
template <typename T, int R, int N = SUMS / R>
static void weigh_block(const float (*probs)[BLOCK_KEYS], const T* const* values, int count, int64_t column, int64_t head_dim_v,
                        const float* rescale, float* acc, int64_t acc_stride, Ahead& ahead) {
  for (; column + N * W <= head_dim_v; column += N * W)
    weigh_columns<T, R, N>(probs, values, count, column, N * W, rescale, acc, acc_stride, ahead);
  if (column == head_dim_v) return;
  if constexpr (N > STEP<T> / W)
    weigh_block<T, R, N / 2>(probs, values, count, column, head_dim_v, rescale, acc, acc_stride, ahead);
  else
    weigh_columns<T, R, N>(probs, values, count, column, (int)(head_dim_v - column), rescale, acc, acc_stride, ahead);
}

// Scratch of one tile of rows, in floats. acc has rows of a multiple of 2W, q of a multiple of W.
template <typename T>
struct Tile {
  int64_t q_stride, acc_stride;
  float *q, *acc, *running_max, *running_sum;
  const T* zero_row;  // for the odd last row of V where rows enter in pairs
  int64_t floats;

  Tile(const DecodeProblem& p, float* scratch) {
    q_stride = round_up(p.head_dim, STEP<T>) / STEP<T> * W;
    acc_stride = round_up(p.head_dim_v, 2 * W);
    acc = scratch;
    q = acc + TILE_ROWS * acc_stride;
    running_max = q + TILE_ROWS * q_stride;
    running_sum = running_max + TILE_ROWS;
    zero_row = (const T*)(running_sum + TILE_ROWS);
    floats = TILE_ROWS * (acc_stride + q_stride + 2) + acc_stride;
  }
};

// What one block of keys means for R rows from `row` on. begin and end: the keys that each row sees.
template <typename T, int R>
static void attend(const DecodeProblem& p, const Tile<T>& tile, int row, const T* const* keys, const T* const* values, int64_t first, int count,
                   const int64_t* begin, const int64_t* end, Ahead& values_ahead, Ahead& keys_ahead) {
  alignas(64) float scores[R][BLOCK_KEYS];
  float rescale[R];
  score_block<T, R>(tile.q + row * tile.q_stride, tile.q_stride, keys, count, p.head_dim, p.scale * LOG2E, scores, values_ahead);
  for (int r = 0; r < R; r++) {
    const int from = (int)smaller(larger(begin[row + r] - first, 0), count);
    const int to = (int)larger(smaller(end[row + r] - first, count), from);
    rescale[r] = softmax_block<T>(scores[r], count, from, to, tile.running_max[row + r], tile.running_sum[row + r]);
  }
  weigh_block<T, R>(scores, values, count, 0, p.head_dim_v, rescale, tile.acc + row * tile.acc_stride, tile.acc_stride, keys_ahead);
}

// Rows [first_row, first_row + rows) of the group against all keys of the split that any of them sees.
template <typename T>
static void decode_tile(const DecodeProblem& p, const DecodeTask& task, int64_t first_row, int rows, const Tile<T>& tile) {
  const int64_t group = p.heads_q / p.heads_kv, shift = p.bounds.shift(p.seq_q, task.kv_len);
  int64_t begin[TILE_ROWS] = {}, end[TILE_ROWS] = {};  // rows that only fill up a block see nothing
  memset(tile.acc, 0, TILE_ROWS * (tile.acc_stride + tile.q_stride) * sizeof(float));
  memset((void*)tile.zero_row, 0, tile.acc_stride * sizeof(T));
  for (int r = 0; r < TILE_ROWS; r++) {
    tile.running_max[r] = -INFINITY;
    tile.running_sum[r] = 0.f;
  }
  for (int r = 0; r < rows; r++) {
    const int64_t query = (first_row + r) / group, head = (first_row + r) % group;
    begin[r] = larger(task.key_begin, query + shift - p.bounds.left);
    end[r] = smaller(task.key_end, query + shift + p.bounds.right + 1);
    const T* q = (const T*)task.q + query * p.q.row + head * p.q.head;
    float* packed = tile.q + r * tile.q_stride;
    int64_t d = 0;
    for (; d + STEP<T> <= p.head_dim; d += STEP<T>, packed += W) store(packed, load_step(q + d));
    if (d < p.head_dim) store(packed, load_step_n(q + d, (int)(p.head_dim - d)));
  }

  const int64_t last_key = end[rows - 1];
  const int64_t key_bytes = p.head_dim * sizeof(T), value_bytes = p.head_dim_v * sizeof(T);
  const int block = (int)larger(smaller(BLOCK_BYTES / (key_bytes + value_bytes), BLOCK_KEYS) / 32 * 32, 32);
  const T *keys[2][BLOCK_KEYS], *values[BLOCK_KEYS];
  int64_t first = begin[0];
  int count = (int)smaller(block, last_key - first), now = 0;
  if (count > 0) find_rows(task, (const T*)task.k, p.k, p.page_size, first, count, keys[0]);
  for (int next; count > 0; first += count, count = next, now ^= 1) {
    find_rows(task, (const T*)task.v, p.v, p.page_size, first, count, values);
    if (PAIRS<T> && count % 2) values[count] = tile.zero_row;
    next = (int)smaller(block, last_key - first - count);
    if (next > 0) find_rows(task, (const T*)task.k, p.k, p.page_size, first + count, next, keys[now ^ 1]);
    Ahead values_ahead = {(const void**)values, (const void**)values + count, value_bytes, 0};
    Ahead keys_ahead = {(const void**)keys[now ^ 1], (const void**)keys[now ^ 1] + next, key_bytes, 0};
    for (int row = 0, size; row < rows; row += size) {
      const int left = rows - row;
      size = left > 4 ? BLOCK_ROWS : left > 2 ? 4 : left;
      const int last_row = (int)smaller(row + size, rows) - 1;
      if (begin[row] >= first + count || end[last_row] <= first) continue;
      const auto kernel = size == 8 ? attend<T, BLOCK_ROWS> : size == 4 ? attend<T, 4> : size == 2 ? attend<T, 2> : attend<T, 1>;
      kernel(p, tile, row, keys[now], values, first, count, begin, end, values_ahead, keys_ahead);
      values_ahead.row = values_ahead.end;  // once is enough
      keys_ahead.row = keys_ahead.end;
    }
  }
}

// Layout of a partial result: acc (rows, head_dim_v), running_max (rows), running_sum (rows). acc of a row whose sum is 0 is not written.
ATTNWORKS_INLINE int64_t decode_rows(const DecodeProblem& p) { return p.heads_kv ? p.seq_q * (p.heads_q / p.heads_kv) : 0; }

static size_t decode_partial(const DecodeProblem& p) { return (size_t)(decode_rows(p) * (p.head_dim_v + 2)); }

static size_t decode_scratch(const DecodeProblem& p) {
  return (size_t)(TILE_ROWS * (round_up(p.head_dim, 2 * W) + round_up(p.head_dim_v, 2 * W) + 2) + round_up(p.head_dim_v, 2 * W)) * sizeof(float);
}

template <typename T>
static void decode_split_as(const DecodeProblem& p, const DecodeTask& task, float* partial, void* scratch) {
  const int64_t rows = decode_rows(p);
  const Tile<T> tile(p, (float*)scratch);
  float *running_max = partial + rows * p.head_dim_v, *running_sum = running_max + rows;
  for (int64_t first = 0; first < rows; first += TILE_ROWS) {
    const int count = (int)smaller(TILE_ROWS, rows - first);
    decode_tile(p, task, first, count, tile);
    for (int r = 0; r < count; r++) {
      running_max[first + r] = tile.running_max[r];
      running_sum[first + r] = tile.running_sum[r];
      if (tile.running_sum[r] != 0.f)
        memcpy(partial + (first + r) * p.head_dim_v, tile.acc + r * tile.acc_stride, p.head_dim_v * sizeof(float));
    }
  }
}
static void decode_split(const DecodeProblem& p, const DecodeTask& task, float* partial, void* scratch) {
  if (p.dtype == DType::float32) decode_split_as<float>(p, task, partial, scratch);
  if (p.dtype == DType::bfloat16) decode_split_as<bf16>(p, task, partial, scratch);
  if (p.dtype == DType::float16) decode_split_as<fp16>(p, task, partial, scratch);
}

// One row of the result from its `splits` partial results, `stride` floats apart.
template <typename T>
static void merge_row(const float* acc, const float* running_max, const float* running_sum, size_t stride, int64_t splits, int64_t columns,
                      T* out, float* lse) {
  float most = -INFINITY, total = 0.f;
  for (int64_t s = 0; s < splits; s++) most = running_max[s * stride] > most ? running_max[s * stride] : most;
  const float shift = most == -INFINITY ? 0.f : most;
  for (int64_t s = 0; s < splits; s++)
    if (running_sum[s * stride] != 0.f) total += running_sum[s * stride] * exp2_scalar(running_max[s * stride] - shift);
  if (lse) *lse = total == 0.f ? -INFINITY : (shift + log2f(total)) * LN2;
  const Vec inverse = set1(total == 0.f ? 0.f : 1.f / total);
  for (int64_t c = 0; c < columns; c += 4 * W) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    const int n = (int)smaller(columns - c, 4 * W);
    for (int64_t s = 0; s < splits; s++) {
      if (running_sum[s * stride] == 0.f) continue;
      const Vec weight = set1(exp2_scalar(running_max[s * stride] - shift));
      const float* from = acc + s * stride + c;
      for (int i = 0; i < 4 && i * W < n; i++)
        sums[i] = fma(weight, (i + 1) * W <= n ? load(from + i * W) : load_n(from + i * W, n - i * W), sums[i]);
    }
    for (int i = 0; i < 4 && i * W < n; i++) {
      const Vec x = mul(sums[i], inverse);
      if ((i + 1) * W <= n)
        store_from_float(out + c + i * W, x);
      else
        store_from_float_n(out + c + i * W, x, n - i * W);
    }
  }
}
template <typename T>
static void decode_merge_as(const DecodeProblem& p, const DecodeTask& task, const float* partials, int64_t splits) {
  const int64_t rows = decode_rows(p), group = rows ? p.heads_q / p.heads_kv : 1;
  const float *running_max = partials + rows * p.head_dim_v, *running_sum = running_max + rows;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t query = r / group, head = r % group;
    merge_row(partials + r * p.head_dim_v, running_max + r, running_sum + r, decode_partial(p), splits, p.head_dim_v,
              (T*)task.out + query * p.out.row + head * p.out.head, task.lse ? task.lse + query * p.lse.row + head * p.lse.head : nullptr);
  }
}
static void decode_merge(const DecodeProblem& p, const DecodeTask& task, const float* partials, int64_t splits) {
  if (p.dtype == DType::float32) decode_merge_as<float>(p, task, partials, splits);
  if (p.dtype == DType::bfloat16) decode_merge_as<bf16>(p, task, partials, splits);
  if (p.dtype == DType::float16) decode_merge_as<fp16>(p, task, partials, splits);
}

}  // namespace attnworks::ATTNWORKS_ISA
