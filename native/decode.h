// Decode: few query rows against a long KV cache. Bound by the bytes of K and V, so all rows that share a KV head go over it together,
// and the next rows of V and K are on their way from memory while these are computed with. One call handles one split of the keys;
// decode_merge joins the splits by their log-sum-exp (Flash-Decoding). Inside: online softmax (Milakov & Gimelshein 2018, algorithm 3)
// over blocks of keys. Scores are kept in units of log2, scaled before the maximum is taken: so the largest one's exponent is exactly 0.
#pragma once
#include "decode_products.h"

namespace attnworks::ATTNWORKS_ISA {

constexpr int TILE_ROWS = 32;               // query rows whose q and acc stay on chip during one pass over a split
constexpr int64_t BLOCK_BYTES = 256 << 10;  // K and V of one block, so that they and the next block's K stay in L2

// Keys [first, first + count) and where they are. Beyond count the last row is repeated: kernels may read on, but only there.
template <typename T>
struct Block {
  int64_t first;
  int count;
  const T *keys[BLOCK_KEYS], *values[BLOCK_KEYS];
};

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
template <typename T>
static void find_block(const DecodeProblem& p, const DecodeTask& task, int64_t first, int64_t end, const T* zero_row, Block<T>& block) {
  const int64_t most = BLOCK_BYTES / ((p.head_dim + p.head_dim_v) * (int64_t)sizeof(T)) / 32 * 32;
  block.first = first;
  block.count = (int)clamp(end - first, 0, clamp(most, 32, BLOCK_KEYS));
  if (block.count == 0) return;
  find_rows(task, (const T*)task.k, p.k, p.page_size, first, block.count, block.keys);
  find_rows(task, (const T*)task.v, p.v, p.page_size, first, block.count, block.values);
  if (PAIRS<T> && block.count % 2) block.values[block.count] = zero_row;
}

// Scratch of one tile of rows.
template <typename T>
struct Tile {
  int64_t q_stride, acc_stride;
  float *q, *acc, *running_max, *running_sum;
  T* zero_row;                                // for the odd last row of V where rows enter in pairs
  int64_t begin[TILE_ROWS], end[TILE_ROWS];  // the keys that a row sees

  Tile(const DecodeProblem& p, float* scratch) {
    q_stride = round_up(p.head_dim, STEP) / STEP * VECS<T> * W;
    acc_stride = round_up(p.head_dim_v, STEP);
    acc = scratch;
    q = acc + TILE_ROWS * acc_stride;
    running_max = q + TILE_ROWS * q_stride;
    running_sum = running_max + TILE_ROWS;
    zero_row = (T*)(running_sum + TILE_ROWS);
    memset((void*)zero_row, 0, acc_stride * sizeof(T));
  }
};
static size_t decode_scratch(const DecodeProblem& p) {
  const int64_t head_dim = round_up(p.head_dim, STEP), head_dim_v = round_up(p.head_dim_v, STEP);
  return (size_t)(TILE_ROWS * (head_dim + head_dim_v + 2) + head_dim_v) * sizeof(float);
}

// Fills the tile with rows [first_row, first_row + rows) of the group and an empty result.
template <typename T>
static void start_tile(const DecodeProblem& p, const DecodeTask& task, int64_t first_row, int rows, Tile<T>& tile) {
  const int64_t group = p.heads_q / p.heads_kv, shift = p.bounds.shift(p.seq_q, task.kv_len);
  const int64_t padded = round_up(rows, BLOCK_ROWS);  // rows that only fill up a block are 0 and see nothing
  memset(tile.acc, 0, padded * tile.acc_stride * sizeof(float));
  memset(tile.q + rows * tile.q_stride, 0, (padded - rows) * tile.q_stride * sizeof(float));
  for (int r = 0; r < padded; r++) {
    tile.running_max[r] = -INFINITY;
    tile.running_sum[r] = 0.f;
    tile.begin[r] = tile.end[r] = 0;
    if (r >= rows) continue;
    const int64_t query = (first_row + r) / group, head = (first_row + r) % group;
    tile.begin[r] = larger(task.key_begin, query + shift - p.bounds.left);
    tile.end[r] = smaller(task.key_end, query + shift + p.bounds.right + 1);
    const T* q = (const T*)task.q + query * p.q.row + head * p.q.head;
    float* to = tile.q + r * tile.q_stride;
    for (int64_t d = 0; d < p.head_dim; d += STEP, to += VECS<T> * W) {
      Vec x[VECS<T>];
      load_step_n(q + d, (int)smaller(p.head_dim - d, STEP), x);
      for (int v = 0; v < VECS<T>; v++) store(to + v * W, x[v]);
    }
  }
}

// What one block of keys means for R rows from `row` on.
template <typename T, int R>
static void attend(const DecodeProblem& p, const Tile<T>& tile, int row, const Block<T>& block, Ahead values_ahead, Ahead keys_ahead) {
  alignas(64) float scores[R][BLOCK_KEYS];
  const float factor = p.scale * LOG2E, *q = tile.q + row * tile.q_stride;
  float* acc = tile.acc + row * tile.acc_stride;
  if constexpr (R == 1)
    score_row(q, block.keys, block.count, p.head_dim, factor, scores[0], values_ahead);
  else
    score_block<T, R>(q, tile.q_stride, block.keys, block.count, p.head_dim, factor, scores, values_ahead);
  for (int r = 0; r < R; r++) {
    const int64_t begin = clamp(tile.begin[row + r] - block.first, 0, block.count);
    const int64_t end = clamp(tile.end[row + r] - block.first, begin, block.count);
    const float rescale = softmax_block<T>(scores[r], block.count, (int)begin, (int)end, tile.running_max[row + r], tile.running_sum[row + r]);
    if (rescale == 1.f) continue;
    for (int64_t c = r * tile.acc_stride; c < (r + 1) * tile.acc_stride; c += W) store(acc + c, mul(set1(rescale), load(acc + c)));
  }
  // A few keys at a time, so that V is read nearly in order of memory although not all columns fit the registers.
  constexpr int FEW = R == 1 ? 8 : 32;
  for (int j = 0; j < block.count; j += FEW)
    weigh_block<T, R>(scores[0] + (PAIRS<T> ? j / 2 : j), block.values + j, (int)smaller(FEW, block.count - j), 0, p.head_dim_v, acc,
                      tile.acc_stride, keys_ahead);
}

// A tile of rows against all keys of the split that any of them sees.
template <typename T>
static void run_tile(const DecodeProblem& p, const DecodeTask& task, int rows, const Tile<T>& tile) {
  Block<T> blocks[2], *block = &blocks[0], *next = &blocks[1];
  const int64_t end = tile.end[rows - 1];
  find_block(p, task, tile.begin[0], end, tile.zero_row, *block);
  while (block->count > 0) {
    find_block(p, task, block->first + block->count, end, tile.zero_row, *next);
    Ahead values_ahead(block->values, block->count, p.head_dim_v), keys_ahead(next->keys, next->count, p.head_dim);
    for (int row = 0, size; row < rows; row += size) {
      const int left = rows - row;
      size = left > 4 ? BLOCK_ROWS : left > 2 ? 4 : left;
      const int64_t row_end = tile.end[smaller(row + size, rows) - 1];
      if (tile.begin[row] >= block->first + block->count || row_end <= block->first) continue;
      const auto kernel = size == 8 ? attend<T, BLOCK_ROWS> : size == 4 ? attend<T, 4> : size == 2 ? attend<T, 2> : attend<T, 1>;
      kernel(p, tile, row, *block, values_ahead, keys_ahead);
      values_ahead = keys_ahead = Ahead();  // once is enough
    }
    Block<T>* done = block;
    block = next;
    next = done;
  }
}

// Layout of a partial result: acc (rows, head_dim_v), running_max (rows), running_sum (rows). acc of a row whose sum is 0 is not written.
static int64_t decode_rows(const DecodeProblem& p) { return p.seq_q * (p.heads_q / p.heads_kv); }
static size_t decode_partial(const DecodeProblem& p) { return (size_t)(decode_rows(p) * (p.head_dim_v + 2)); }

template <typename T>
static void split_as(const DecodeProblem& p, const DecodeTask& task, float* partial, float* scratch) {
  const int64_t rows = decode_rows(p);
  float *running_max = partial + rows * p.head_dim_v, *running_sum = running_max + rows;
  Tile<T> tile(p, scratch);
  for (int64_t first = 0; first < rows; first += TILE_ROWS) {
    const int count = (int)smaller(TILE_ROWS, rows - first);
    start_tile(p, task, first, count, tile);
    run_tile(p, task, count, tile);
    for (int r = 0; r < count; r++) {
      running_max[first + r] = tile.running_max[r];
      running_sum[first + r] = tile.running_sum[r];
      if (tile.running_sum[r] == 0.f) continue;
      float *from = tile.acc + r * tile.acc_stride, *to = partial + (first + r) * p.head_dim_v;
      for (int64_t c = 0; EVEN_ODD<T> && c < p.head_dim_v; c += STEP) {
        Vec a = load(from + c), b = load(from + c + W);
        interleave(a, b);
        store(from + c, a);
        store(from + c + W, b);
      }
      memcpy(to, from, p.head_dim_v * sizeof(float));
    }
  }
}
static void decode_split(const DecodeProblem& p, const DecodeTask& task, float* partial, void* scratch) {
  if (p.dtype == DType::float32) split_as<float>(p, task, partial, (float*)scratch);
  if (p.dtype == DType::bfloat16) split_as<bf16>(p, task, partial, (float*)scratch);
  if (p.dtype == DType::float16) split_as<fp16>(p, task, partial, (float*)scratch);
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
static void merge_as(const DecodeProblem& p, const DecodeTask& task, const float* partials, int64_t splits) {
  const int64_t rows = decode_rows(p), group = p.heads_q / p.heads_kv;
  const float *running_max = partials + rows * p.head_dim_v, *running_sum = running_max + rows;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t query = r / group, head = r % group;
    merge_row(partials + r * p.head_dim_v, running_max + r, running_sum + r, decode_partial(p), splits, p.head_dim_v,
              (T*)task.out + query * p.out.row + head * p.out.head, task.lse ? task.lse + query * p.lse.row + head * p.lse.head : nullptr);
  }
}
static void decode_merge(const DecodeProblem& p, const DecodeTask& task, const float* partials, int64_t splits) {
  if (p.dtype == DType::float32) merge_as<float>(p, task, partials, splits);
  if (p.dtype == DType::bfloat16) merge_as<bf16>(p, task, partials, splits);
  if (p.dtype == DType::float16) merge_as<fp16>(p, task, partials, splits);
}

}  // namespace attnworks::ATTNWORKS_ISA
