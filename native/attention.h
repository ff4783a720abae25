// The plain structs that Python's description of a problem becomes, and the table of kernels that every instruction set exports.
// No torch, no Python and no std templates here: the per-ISA files include it (see isa_generic.cpp for why).
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace attnworks {

enum class DType { float32, bfloat16, float16 };

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Distances between neighbours in ELEMENTS; the last dimension is contiguous.
struct Strides {
  int64_t batch, head, row;
};

// Query row i sees keys j with i + shift - left <= j <= i + shift + right, shift = 0 if top_left else seq_kv - seq_q.
// left and right are >= 0; "unlimited" is 2^40, so that no sum of them overflows.
struct Bounds {
  int64_t left, right;
  bool top_left;

  // always_inline: a copy for the linker to merge could hold another target's instructions.
  __attribute__((always_inline)) inline int64_t shift(int64_t seq_q, int64_t seq_kv) const { return top_left ? 0 : seq_kv - seq_q; }
};

struct ForwardProblem {
  DType dtype;
  int64_t batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v;
  Strides q, k, v, out, lse;
  float scale;
  Bounds bounds;
  int64_t tile_q, tile_kv;
};

constexpr int64_t MAX_TILE_Q = 1024, MAX_TILE_KV = 512;  // larger tiles are cut to these

// One unit of work of the forward: at most tile_q query rows [row_begin, row_end) of one head. The pointers are at row 0 of this sequence and head,
// so that the kernel knows neither batch nor cu_seqlens. lse may be null.
struct ForwardTask {
  const void *q, *k, *v;
  void* out;
  float* lse;
  int64_t seq_q, seq_kv, row_begin, row_end;
};

struct DecodeProblem {
  DType dtype;
  int64_t batch, seq_q, heads_q, heads_kv, head_dim, head_dim_v;
  Strides q, k, v, out, lse;  // of k and v: (page, head, row) if paged
  int64_t page_size;          // 0: dense caches
  float scale;
  Bounds bounds;
  int64_t split_kv;
};

// Decode goes over the keys in blocks, so that K and V of one and what is fetched ahead stay in half of an L2 (512 KiB on Zen 3, shared with
// whatever runs on the core's other thread): at least DECODE_BLOCK_KEYS keys of all heads of a task, which is what bounds those.
constexpr int64_t DECODE_BLOCK_BYTES = 128 << 10, DECODE_BLOCK_KEYS = 16;
// Of one head it fetches so much ahead: two of these and q and acc of a few rows fit an L1 of 32 KiB, and to compute with one takes several
// times as long as memory takes to answer.
constexpr int64_t DECODE_CHUNK_BYTES = 8 << 10;

// One unit of work of the decode: keys [key_begin, key_end) of `heads` KV heads, each for all rows that share it:
// row r = query * group + g, with group = heads_q / heads_kv, query in [0, seq_q) and g the query head inside the group.
// q, out and lse point at query 0 of the first head's first query head; query heads are problem.q.head (out.head, lse.head) apart.
// Dense: k and v point at key 0 of this sequence and the first head, pages is null.
// Paged: k and v point at page 0 of the first head; key j is row j % page_size of page pages[j / page_size];
//        pages holds exactly ceil(kv_len / page_size) entries that may be read.
struct DecodeTask {
  const void *q, *k, *v;
  void* out;
  float* lse;  // may be null
  const int64_t* pages;
  int64_t heads, kv_len, key_begin, key_end;
};

// Everything that is compiled once per instruction set. Scratch is uninitialised, 64-byte aligned, private to the calling thread.
struct Kernels {
  const char* isa;

  size_t (*forward_scratch)(const ForwardProblem&);  // bytes
  void (*forward)(const ForwardProblem&, const ForwardTask&, void* scratch);

  size_t (*decode_scratch)(const DecodeProblem&, int64_t heads);  // bytes
  size_t (*decode_partial)(const DecodeProblem&);  // floats of one head's partial result (acc, running_max, running_sum of every row)
  // Writes one partial result for each head of the task, `stride` floats apart.
  void (*decode_split)(const DecodeProblem&, const DecodeTask&, float* partials, int64_t stride, void* scratch);
  // Writes out and lse of all rows of the task's first head from `splits` partial results, that lie decode_partial floats apart in the
  // order of their keys, and are used up by it. splits may be 0 (no visible key: out 0, lse -inf).
  void (*decode_merge)(const DecodeProblem&, const DecodeTask&, float* partials, int64_t splits);

  double (*flops)(DType, int64_t iterations);               // runs that many rounds of independent multiply-adds; FLOPs done
  float (*read)(const void* memory, int64_t bytes);         // reads every byte once; the sum keeps the compiler honest
};

}  // namespace attnworks
