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

// What happens to a score, scale * q k^T, before it is masked: `count` steps in their order. modifiers.h applies them.
enum class StepKind { softcap, alibi, bias };
struct ScoreStep {
  StepKind kind;
  float cap;                       // softcap: s becomes cap * tanh(s / cap)
  DType dtype;                     // of the operand of alibi (slopes by batch and head) and bias
  int64_t batch, head, row, key;   // distances between neighbours of that operand in elements, 0 where it is broadcast
};
constexpr int MAX_STEPS = 8;

// Which keys a mask shows besides its bounds, in tiles of `rows` queries and MAP_KEYS keys: places[batch][head][tile of queries][tile of keys]
// says that a tile is hidden, or full (nothing in it is hidden), or where its bits are: bits[place * rows + row], bit j for its key j.
constexpr int64_t MAP_ROWS = 96, MAP_KEYS = 64;  // MAP_ROWS is a multiple of every kernel's micro-block
constexpr int32_t PLACE_HIDDEN = -1, PLACE_FULL = -2;
struct TileMap {
  int64_t batch, head;  // distances in places, 0 where all see the same
  int64_t tiles_kv;     // the distance from one tile of queries to the next
  int64_t rows;         // MAP_ROWS; or 1 where all queries see the same, who are one tile then
};

struct Modifiers {
  int64_t count = 0;
  ScoreStep steps[MAX_STEPS] = {};
  TileMap map = {};
};
// What they read at a call. A sink is one more logit of a row, in the denominator and the LSE alone.
struct ModifierOperands {
  const void* steps[MAX_STEPS] = {};
  const void* sink = nullptr;  // (heads_q,), contiguous; null without one
  DType sink_dtype = DType::float32;
  const int32_t* places = nullptr;  // null: the mask has nothing but bounds
  const uint64_t* bits = nullptr;
};
// The same for one sequence and head: row and key 0 of a bias, a number for a slope. A sink of -inf is none.
struct HeadModifiers {
  struct {
    const void* data;
    float slope;
  } steps[MAX_STEPS];
  float sink;
  const int32_t* places;
  const uint64_t* bits;
};

struct ForwardProblem {
  DType dtype;
  int64_t batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v;
  Strides q, k, v, out, lse;
  float scale;
  Bounds bounds;
  int64_t tile_q, tile_kv;
  Modifiers modifiers = {};
  bool visit_all = false;  // go through the tiles that the bounds hide, too, to see what leaving them out is worth
};

constexpr int64_t MAX_TILE_Q = 1024, MAX_TILE_KV = 512;  // larger tiles are cut to these

// One unit of work of the forward: at most tile_q query rows [row_begin, row_end) of one head. The pointers are at row 0 of this sequence and head,
// so that the kernel knows neither batch nor cu_seqlens. lse may be null.
struct ForwardTask {
  const void *q, *k, *v;
  void* out;
  float* lse;
  int64_t seq_q, seq_kv, row_begin, row_end;
  HeadModifiers modifiers;
};

// Everything of the forward, and where the cotangent is and the gradients go. out and lse are those that the forward gave; d_lse, a cotangent
// of the LSE, has lse's strides. tile_q, tile_kv are the backward's own.
struct BackwardProblem : ForwardProblem {
  Strides d_out, d_q, d_k, d_v;
};

constexpr int64_t MAX_BACKWARD_TILE_Q = 192, MAX_BACKWARD_TILE_KV = 256;  // larger tiles are cut to these

// Rows [row_begin, row_end) of one head, at most a tile of them. The pointers are at row 0 of this sequence and head. d_lse may be null.
// shift, delta and d_q_sum are the backward's own: shift the LSE in the units of the scores, which are in base 2 unless steps change them (+inf
// for a row that sees no key, so that its probs are 0), delta rowsum(dO * O) less the LSE's cotangent, both one number a row; d_q_sum dQ / scale
// in fp32, in rows of d_q_sum_row() floats that are filled up to whole micro-blocks.
struct BackwardRows {
  const void *q, *out, *d_out;
  const float *lse, *d_lse;
  float *shift, *delta, *d_q_sum;
  void* d_q;
  int64_t row_begin, row_end;
  HeadModifiers modifiers;
};

// One tile of keys [key_begin, key_end) of one KV head; the pointers are at row 0 of this sequence and head. d_k, d_v may be null.
struct BackwardKeys {
  const void *k, *v;
  void *d_k, *d_v;
  int64_t seq_q, seq_kv, key_begin, key_end;
};

// The gradient of the bias that is step number `step`: in fp32, with distances between neighbours in elements, 0 where the bias is broadcast.
struct BiasGradient {
  float* data;  // null: not asked for. In add_bias, of this sequence and head.
  int64_t batch, head, row, key;
};

// The parts of a backward. Who takes them in which order is the scheduler's business: see schedule_backward.cpp. Scratch holds a tile of keys
// from begin to store_keys. With a tile map, tiles of rows and keys start at multiples of its own.
struct BackwardKernels {
  size_t (*scratch)(const BackwardProblem&);     // bytes
  int64_t (*d_q_sum_row)(const BackwardProblem&);  // floats
  void (*row_sums)(const BackwardProblem&, const BackwardRows&);  // shift and delta
  void (*begin)(const BackwardProblem&, const BackwardKeys&, void* scratch);
  void (*add_rows)(const BackwardProblem&, const BackwardKeys&, const BackwardRows&, void* scratch);  // what these rows add to dK and dV
  // d_q_sum becomes (first) or grows by what this tile of keys adds to dQ of the rows that add_rows was called with last.
  void (*add_d_q)(const BackwardProblem&, const BackwardKeys&, const BackwardRows&, bool first, void* scratch);
  void (*store_keys)(const BackwardProblem&, const BackwardKeys&, void* scratch);  // d_k and d_v
  void (*store_d_q)(const BackwardProblem&, const BackwardRows&, bool any);        // from d_q_sum; zeros if no tile added anything
  void (*add_bias)(const BackwardProblem&, const BackwardKeys&, const BackwardRows&, int64_t step, const BiasGradient&, void* scratch);
};

struct DecodeProblem {
  DType dtype;
  int64_t batch, seq_q, heads_q, heads_kv, head_dim, head_dim_v;
  Strides q, k, v, out, lse;  // of k and v: (page, head, row) if paged
  int64_t page_size;          // 0: dense caches
  float scale;
  Bounds bounds;
  int64_t split_kv;
  Modifiers modifiers = {};
};

// Decode goes over the keys in blocks, so that K and V of one and what is fetched ahead stay in half of an L2 (512 KiB on Zen 3, shared with
// whatever runs on the core's other thread): at least DECODE_BLOCK_KEYS keys of all heads of a task, which is what bounds those. Where
// vectors are of 64 bytes L2s have 1 MiB and more: four times as much (decode.h).
constexpr int64_t DECODE_BLOCK_BYTES = 128 << 10, DECODE_BLOCK_KEYS = 16;
// Of one head it fetches so much ahead: to compute with it takes several times as long as memory takes to answer; and where it is fetched
// into L1 (prefetch_early), two of these and q and acc of a few rows fit 32 KiB.
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
  const HeadModifiers* modifiers;  // of the first head's first query head and those after it; null if there are none
};

// Everything that is compiled once per instruction set. Scratch is uninitialised, 64-byte aligned, private to the calling thread.
struct Kernels {
  const char* isa;
  int64_t micro_rows;  // rows of a micro-block or a multiple of them: tiles of rows are multiples of it

  size_t (*forward_scratch)(const ForwardProblem&);  // bytes
  void (*forward)(const ForwardProblem&, const ForwardTask&, void* scratch);

  size_t (*decode_scratch)(const DecodeProblem&, int64_t heads);  // bytes
  size_t (*decode_partial)(const DecodeProblem&);  // floats of one head's partial result (acc, running_max, running_sum of every row)
  // Writes one partial result for each head of the task, `stride` floats apart.
  void (*decode_split)(const DecodeProblem&, const DecodeTask&, float* partials, int64_t stride, void* scratch);
  // Writes out and lse of all rows of the task's first head from `splits` partial results, that lie decode_partial floats apart in the
  // order of their keys, and are used up by it. splits may be 0 (no visible key: out 0, lse -inf).
  void (*decode_merge)(const DecodeProblem&, const DecodeTask&, float* partials, int64_t splits);

  BackwardKernels backward;
  // Whether rows of an operand have elements that the backward can't multiply (outliers.h); null where it can multiply all.
  bool (*has_outliers)(DType, const void* rows, int64_t stride, int64_t count, int64_t dim);

  double (*flops)(DType, int64_t iterations);               // runs that many rounds of independent multiply-adds; FLOPs done
  float (*read)(const void* memory, int64_t bytes);         // reads every byte once; the sum keeps the compiler honest
};

}  // namespace attnworks
