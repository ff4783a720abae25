// Decode: few query rows against a long KV cache. Bound by the bytes of K and V, so all rows that share a KV head go over it together,
// and the next rows of V and K are on their way from memory while these are computed with. One call handles one split of the keys;
// decode_merge joins the splits by their log-sum-exp (Flash-Decoding). Inside: online softmax (Milakov & Gimelshein 2018, algorithm 3)
// over blocks of keys. Scores are kept in units of log2 (in their own if modifiers change them), scaled before the maximum is taken: so the
// largest one's exponent is exactly 0.
#pragma once
#include "decode_tiles.h"
#include "modifiers.h"

namespace attnworks::ATTNWORKS_ISA {

// With AVX-512 more keys share a softmax: float32 without shared heads 4 to 8 % faster, others the same (Xeon, 2 MiB of L2).
constexpr int64_t BLOCK_BYTES = (W >= 16 ? 4 : 1) * DECODE_BLOCK_BYTES, CHUNK_BYTES = (W >= 16 ? 4 : 1) * DECODE_CHUNK_BYTES;
constexpr int TILE_ROWS = 32;  // query rows of a head whose q and acc stay on chip during one pass over a split

// Keys [first, first + count) and where they are, for the task's first head. Beyond count the last row is repeated: kernels may read on, but only there.
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
// Rows that share a KV head.
static int64_t decode_rows(const DecodeProblem& p) { return p.seq_q * (p.heads_q / p.heads_kv); }

// What a tile of rows of each of a task's KV heads keeps on chip; the keys that a row sees are the same for all heads.
template <typename T>
struct Tile {
  int64_t q_stride, acc_stride, head_stride;   // from row to row, from head to head
  float *q, *acc, *running_max, *running_sum;  // of the first head
  float* scores;                               // [heads][SCORE_ROWS][BLOCK_KEYS]
  T* zero_row;                                 // for the odd last row of V where rows enter in pairs
  int64_t *begin, *end;                        // the keys that a row sees
  bool tiled;                                  // the products are those of decode_tiles.h, and q and acc lie as they want them
  int rows;                                    // in use
  int64_t query[TILE_ROWS], head[TILE_ROWS];   // of a row: its query, and which of its group's query heads it is

  Tile(const DecodeProblem& p, int64_t heads, float* scratch) {
    q_stride = round_up(p.head_dim, STEP) / STEP * VECS<T> * W;
    acc_stride = round_up(p.head_dim_v, STEP);
    tiled = TILED<T> && decode_rows(p) >= FEWEST_TILED_ROWS;
    scores = scratch;
    acc = scores + heads * SCORE_ROWS * BLOCK_KEYS;
    q = acc + TILE_ROWS * acc_stride;
    running_max = q + TILE_ROWS * q_stride;
    running_sum = running_max + TILE_ROWS;
    head_stride = running_sum + TILE_ROWS - acc;
    begin = (int64_t*)(acc + heads * head_stride);
    end = begin + TILE_ROWS;
    zero_row = (T*)(end + TILE_ROWS);
    memset((void*)zero_row, 0, heads * acc_stride * sizeof(T));
  }
};

// The next keys in [begin, end) that a map may show to any head of the task and any of the queries [first, last].
static inline KeyRange shown_to_any(const DecodeProblem& p, const DecodeTask& task, int64_t first, int64_t last, int64_t begin, int64_t end) {
  if (!task.modifiers || !task.modifiers->places) return {begin, end};
  const int64_t heads = p.modifiers.map.head ? task.heads * (p.heads_q / p.heads_kv) : 1;
  const auto any = [&](int64_t key) {
    for (int64_t head = 0; head < heads; head++)
      if (shown(p.modifiers.map, task.modifiers[head], first, last, key)) return true;
    return false;
  };
  const auto next = [&](int64_t key) { return smaller((key / MAP_KEYS + 1) * MAP_KEYS, end); };
  while (begin < end && !any(begin)) begin = next(begin);
  int64_t stop = begin;
  while (stop < end && stop < begin + BLOCK_KEYS && any(stop)) stop = next(stop);
  return {begin, stop};
}

// The block of keys from `first` on, or from the first after it that any row of the tile may see.
template <typename T>
static void find_block(const DecodeProblem& p, const DecodeTask& task, const Tile<T>& tile, int64_t first, int64_t end, Block<T>& block) {
  const KeyRange keys = shown_to_any(p, task, tile.query[0], tile.query[tile.rows - 1], first, end);
  const int64_t key_bytes = task.heads * (p.head_dim + p.head_dim_v) * (int64_t)sizeof(T);
  const int64_t most = BLOCK_BYTES / key_bytes / DECODE_BLOCK_KEYS * DECODE_BLOCK_KEYS;
  block.first = keys.begin;
  block.count = (int)clamp(keys.end - keys.begin, 0, clamp(most, DECODE_BLOCK_KEYS, BLOCK_KEYS));
  if (block.count == 0) return;
  find_rows(task, (const T*)task.k, p.k, p.page_size, block.first, block.count, block.keys);
  find_rows(task, (const T*)task.v, p.v, p.page_size, block.first, block.count, block.values);
  if (PAIRS<T> && block.count % 2) block.values[block.count] = tile.zero_row;
}

static size_t decode_scratch(const DecodeProblem& p, int64_t heads) {
  const int64_t head_dim = round_up(p.head_dim, STEP), head_dim_v = round_up(p.head_dim_v, STEP);
  const int64_t of_head = SCORE_ROWS * BLOCK_KEYS + TILE_ROWS * (head_dim + head_dim_v + 2) + head_dim_v;
  return heads * of_head * sizeof(float) + 2 * TILE_ROWS * sizeof(int64_t);
}

// Fills the tile with rows [first_row, first_row + rows) of every head's group and an empty result.
template <typename T>
static void start_tile(const DecodeProblem& p, const DecodeTask& task, int64_t first_row, int rows, Tile<T>& tile) {
  const int64_t group = p.heads_q / p.heads_kv, shift = p.bounds.shift(p.seq_q, task.kv_len);
  const int64_t padded = round_up(rows, SCORE_ROWS);  // rows that only fill up a block are 0 and see nothing
  tile.rows = rows;
  for (int r = 0; r < padded; r++) {
    const int64_t query = (first_row + r) / group;
    tile.query[r] = query;
    tile.head[r] = (first_row + r) % group;
    tile.begin[r] = r < rows ? larger(task.key_begin, query + shift - p.bounds.left) : 0;
    tile.end[r] = r < rows ? smaller(task.key_end, query + shift + p.bounds.right + 1) : 0;
  }
  for (int64_t head_kv = 0; head_kv < task.heads; head_kv++) {
    const int64_t state = head_kv * tile.head_stride;
    memset(tile.acc + state, 0, padded * tile.acc_stride * sizeof(float));
    memset(tile.q + state + rows * tile.q_stride, 0, (padded - rows) * tile.q_stride * sizeof(float));
    for (int r = 0; r < padded; r++) {
      tile.running_max[state + r] = -INFINITY;
      tile.running_sum[state + r] = 0.f;
    }
    for (int r = 0; r < rows; r++) {
      const T* q = (const T*)task.q + tile.query[r] * p.q.row + (head_kv * group + tile.head[r]) * p.q.head;
      float* to = tile.q + state + r * tile.q_stride;
      for (int64_t d = 0; d < p.head_dim; d += STEP, to += VECS<T> * W) {
        Vec x[VECS<T>];
        load_step_n(q + d, (int)smaller(p.head_dim - d, STEP), x);
        for (int v = 0; v < VECS<T>; v++) store(to + v * W, x[v]);
      }
    }
    if constexpr (TILED<T>)
      if (tile.tiled) turn_queries(tile.q + state, tile.q_stride, (int)padded);
  }
}

// The softmax of some rows of one head: probs take the place of the scores, what was accumulated before is rescaled.
template <typename T>
static void softmax_rows(const DecodeProblem& p, const DecodeTask& task, const Tile<T>& tile, int64_t head, int row, int rows,
                         const Block<T>& block) {
  const int64_t state = head * tile.head_stride + row;
  for (int r = 0; r < rows; r++) {
    const int64_t begin = clamp(tile.begin[row + r] - block.first, 0, block.count);
    const int64_t end = clamp(tile.end[row + r] - block.first, begin, block.count);
    float* scores = tile.scores + (head * SCORE_ROWS + r) * BLOCK_KEYS;
    if (task.modifiers && begin < end) {
      const HeadModifiers& modifiers = task.modifiers[head * (p.heads_q / p.heads_kv) + tile.head[row + r]];
      const int64_t query = tile.query[row + r];
      apply_steps(p.modifiers, modifiers, query, task.kv_len - p.seq_q, block.first, end, scores);
      if (modifiers.places) hide_row(p.modifiers.map, modifiers, query, block.first, end, scores);
    }
    const float rescale = softmax_block<T>(scores, block.count, (int)begin, (int)end, p.modifiers.count ? LOG2E : 1.f,
                                           tile.running_max[state + r], tile.running_sum[state + r]);
    if (rescale == 1.f) continue;
    float* acc = tile.acc + head * tile.head_stride + (row + r) * tile.acc_stride;
    for (int64_t c = 0; c < tile.acc_stride; c += W) store(acc + c, mul(set1(rescale), load(acc + c)));
  }
}

// `columns` elements of the rows [first, first + count) of a block, as one row where they lie side by side.
template <typename T>
static Ahead fetch_rows(const DecodeProblem& p, const T* const* rows, int first, int end, int chunk, int64_t stride, int64_t columns) {
  const int count = (int)smaller(chunk, end - first);
  const bool joined = !p.page_size && stride == columns;
  return joined ? Ahead(rows + first, 1, count * columns) : Ahead(rows + first, count, columns);
}

// What one block of keys means for `rows` rows of each head from `row` on; for R of them if R is not 0, else in tiles. Keys and values are
// gone over in the order of memory where the heads of a key lie side by side. While one chunk of K or V is computed with, the next is fetched;
// after the last one, the first of `then`.
template <typename T, int R>
static void attend(const DecodeProblem& p, const DecodeTask& task, const Tile<T>& tile, int row, int rows, const Block<T>& block,
                   const Block<T>& then) {
  const int64_t heads = task.heads;
  const int64_t key_bytes = p.head_dim * (int64_t)sizeof(T), value_bytes = p.head_dim_v * (int64_t)sizeof(T);
  // Values of one head at once, then those of the next: few, so that V is read nearly in order of memory although not all columns fit the
  // registers: fewest where a key's heads take turns, for what is fetched is that many keys of all of them, and where that is into L1 it must
  // stay there beside their q and acc until it is computed with. A chunk is no less. (A product of tiles has so many keys whatever they are.)
  const int fewest = R == 1 || heads > 1 ? 8 : (int)clamp(CHUNK_BYTES / value_bytes / 8 * 8, 8, BLOCK_KEYS);
  const int few = R ? fewest : TILED_KEYS;
  const int chunk = (int)round_up(clamp(CHUNK_BYTES / (heads * larger(key_bytes, value_bytes)), 1, BLOCK_KEYS), few);
  const auto keys_of = [&](const Block<T>& b, int j) {
    return fetch_rows<T>(p, b.keys, j, b.count, chunk, p.k.row, heads * p.head_dim);
  };
  const auto values_of = [&](int j) { return fetch_rows<T>(p, block.values, j, block.count, chunk, p.v.row, heads * p.head_dim_v); };
  const Queries q = {tile.q + row * tile.q_stride, tile.q_stride, tile.head_stride, heads, p.modifiers.count ? p.scale : p.scale * LOG2E};
  for (int j = 0; j < block.count; j += chunk) {
    const int end = (int)smaller(j + chunk, block.count);
    const Ahead ahead = end < block.count ? keys_of(block, end) : values_of(0);
    if constexpr (R == 0)
      score_in_tiles(q, rows, block.keys + j, p.k, end - j, p.head_dim, tile.scores + j, ahead);
    else if constexpr (R == 1)
      score_row(q, block.keys + j, p.k.head, end - j, p.head_dim, tile.scores + j, ahead);
    else
      score_block<T, R>(q, block.keys + j, p.k.head, end - j, p.head_dim, tile.scores + j, ahead);
  }
  for (int first = 0; first < block.count; first += chunk) {
    const int end = (int)smaller(first + chunk, block.count);
    Ahead ahead = end < block.count ? values_of(end) : keys_of(then, 0);
    for (int j = first; j < end; j += few)
      for (int64_t head = 0; head < heads; head++) {
        if (j == 0) softmax_rows<T>(p, task, tile, head, row, R ? R : rows, block);
        const float* probs = tile.scores + head * SCORE_ROWS * BLOCK_KEYS + (PAIRS<T> ? j / 2 : j);
        float* acc = tile.acc + head * tile.head_stride + row * tile.acc_stride;
        const int count = (int)smaller(few, end - j);
        if constexpr (R == 0)
          weigh_in_tiles(probs, block.values + j, count, head * p.v.head, p.head_dim_v, acc, tile.acc_stride, ahead);
        else
          weigh_block<T, R>(probs, block.values + j, count, head * p.v.head, 0, p.head_dim_v, acc, tile.acc_stride, ahead);
      }
  }
}
template <typename T>
static auto attend_for(int rows, bool tiled) {
  if constexpr (TILED<T>)
    if (tiled) return attend<T, 0>;
  return rows == 8 ? attend<T, BLOCK_ROWS> : rows == 4 ? attend<T, 4> : rows == 2 ? attend<T, 2> : attend<T, 1>;
}

// A tile of rows of each head against all keys of the split that any of them sees.
template <typename T>
static void run_tile(const DecodeProblem& p, const DecodeTask& task, int rows, const Tile<T>& tile) {
  Block<T> blocks[2], *block = &blocks[0], *next = &blocks[1];
  const int64_t end = tile.end[rows - 1];
  find_block(p, task, tile, tile.begin[0], end, *block);
  while (block->count > 0) {
    find_block(p, task, tile, block->first + block->count, end, *next);
    const Block<T>& then = next->count > 0 ? *next : *block;  // after the last block there is nothing to fetch
    for (int row = 0, size; row < rows; row += size) {
      const int left = rows - row;
      size = tile.tiled ? (int)smaller(left, TILE) : left > 4 ? BLOCK_ROWS : left > 2 ? 4 : left;
      const int64_t row_end = tile.end[smaller(row + size, rows) - 1];
      if (tile.begin[row] >= block->first + block->count || row_end <= block->first) continue;
      const auto kernel = attend_for<T>(size, tile.tiled);
      kernel(p, task, tile, row, size, *block, row + size < rows ? *block : then);
    }
    Block<T>* done = block;
    block = next;
    next = done;
  }
}

// Layout of a partial result: acc (rows, head_dim_v), running_max (rows), running_sum (rows). acc of a row whose sum is 0 is not written.
static size_t decode_partial(const DecodeProblem& p) { return (size_t)(decode_rows(p) * (p.head_dim_v + 2)); }

// Writes the tile's result as rows [first, first + count) of one head's partial result.
template <typename T>
static void store_partial(const DecodeProblem& p, const Tile<T>& tile, int64_t head, int64_t first, int count, float* partial) {
  const int64_t rows = decode_rows(p), state = head * tile.head_stride;
  float *running_max = partial + rows * p.head_dim_v, *running_sum = running_max + rows;
  for (int r = 0; r < count; r++) {
    running_max[first + r] = tile.running_max[state + r];
    running_sum[first + r] = tile.running_sum[state + r];
    if (running_sum[first + r] == 0.f) continue;
    float *from = tile.acc + state + r * tile.acc_stride, *to = partial + (first + r) * p.head_dim_v;
    if constexpr (TILED<T>)
      if (tile.tiled) sort_columns(from, tile.acc_stride);
    for (int64_t c = 0; EVEN_ODD<T> && c < p.head_dim_v; c += STEP) {
      Vec a = load(from + c), b = load(from + c + W);
      interleave(a, b);
      store(from + c, a);
      store(from + c + W, b);
    }
    memcpy(to, from, p.head_dim_v * sizeof(float));
  }
}
template <typename T>
static void split_as(const DecodeProblem& p, const DecodeTask& task, float* partials, int64_t stride, float* scratch) {
  const int64_t rows = decode_rows(p);
  Tile<T> tile(p, task.heads, scratch);
  [[maybe_unused]] const TileState<TILED<T>> tile_state((int)smaller(rows, TILE));
  for (int64_t first = 0; first < rows; first += TILE_ROWS) {
    const int count = (int)smaller(TILE_ROWS, rows - first);
    start_tile(p, task, first, count, tile);
    run_tile(p, task, count, tile);
    for (int64_t head = 0; head < task.heads; head++) store_partial(p, tile, head, first, count, partials + head * stride);
  }
}
static void decode_split(const DecodeProblem& p, const DecodeTask& task, float* partials, int64_t stride, void* scratch) {
  if (p.dtype == DType::float32) split_as<float>(p, task, partials, stride, (float*)scratch);
  if (p.dtype == DType::bfloat16) split_as<bf16>(p, task, partials, stride, (float*)scratch);
  if (p.dtype == DType::float16) split_as<fp16>(p, task, partials, stride, (float*)scratch);
}

// One row of the result from its `splits` partial results, `stride` floats apart. natural: whether their scores are, or in base 2. The weight
// of each takes the place of its running_max.
template <typename T>
static void merge_row(const float* acc, float* running_max, const float* running_sum, size_t stride, int64_t splits, int64_t columns,
                      bool natural, float sink, T* out, float* lse) {
  const float unit = natural ? LOG2E : 1.f;
  float most = -INFINITY, total = 0.f, inverse;
  for (int64_t s = 0; s < splits; s++) most = running_max[s * stride] > most ? running_max[s * stride] : most;
  const float shift = most == -INFINITY ? 0.f : most;
  float* weights = running_max;
  for (int64_t s = 0; s < splits; s++) {
    weights[s * stride] = exp2_scalar((running_max[s * stride] - shift) * unit);
    if (running_sum[s * stride] != 0.f) total += running_sum[s * stride] * weights[s * stride];
  }
  const float row = row_lse(natural, most, total, sink, inverse);
  if (lse) *lse = row;
  for (int64_t c = 0; c < columns; c += 4 * W) {
    Vec sums[4] = {zero(), zero(), zero(), zero()};
    const int n = (int)smaller(columns - c, 4 * W);
    for (int64_t s = 0; s < splits; s++) {
      if (running_sum[s * stride] == 0.f) continue;
      const Vec weight = set1(weights[s * stride]);
      const float* from = acc + s * stride + c;
      for (int i = 0; i < 4 && i * W < n; i++)
        sums[i] = fma(weight, (i + 1) * W <= n ? load(from + i * W) : load_n(from + i * W, n - i * W), sums[i]);
    }
    for (int i = 0; i < 4 && i * W < n; i++) {
      const Vec x = mul(sums[i], set1(inverse));
      if ((i + 1) * W <= n)
        store_from_float(out + c + i * W, x);
      else
        store_from_float_n(out + c + i * W, x, n - i * W);
    }
  }
}
template <typename T>
static void merge_as(const DecodeProblem& p, const DecodeTask& task, float* partials, int64_t splits) {
  const int64_t rows = decode_rows(p), group = p.heads_q / p.heads_kv;
  float *running_max = partials + rows * p.head_dim_v, *running_sum = running_max + rows;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t query = r / group, head = r % group;
    merge_row(partials + r * p.head_dim_v, running_max + r, running_sum + r, decode_partial(p), splits, p.head_dim_v, p.modifiers.count > 0,
              task.modifiers ? task.modifiers[head].sink : -INFINITY, (T*)task.out + query * p.out.row + head * p.out.head,
              task.lse ? task.lse + query * p.lse.row + head * p.lse.head : nullptr);
  }
}
static void decode_merge(const DecodeProblem& p, const DecodeTask& task, float* partials, int64_t splits) {
  if (p.dtype == DType::float32) merge_as<float>(p, task, partials, splits);
  if (p.dtype == DType::bfloat16) merge_as<bf16>(p, task, partials, splits);
  if (p.dtype == DType::float16) merge_as<fp16>(p, task, partials, splits);
}

}  // namespace attnworks::ATTNWORKS_ISA
