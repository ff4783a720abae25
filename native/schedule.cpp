#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "parallel.h"
#include "schedule_parts.h"

namespace attnworks {
namespace {

// The row that one sequence and head contributes: its base pointers and lengths, before the rows are chosen.
ForwardTask head_task(const ForwardProblem& p, const Operands& x, int64_t batch, int64_t head) {
  const int64_t head_kv = head / (p.heads_q / p.heads_kv);
  ForwardTask task = {};
  task.q = offset(x.q, batch * p.q.batch + head * p.q.head, p.dtype);
  task.k = offset(x.k, batch * p.k.batch + head_kv * p.k.head, p.dtype);
  task.v = offset(x.v, batch * p.v.batch + head_kv * p.v.head, p.dtype);
  task.out = offset(x.out, batch * p.out.batch + head * p.out.head, p.dtype);
  task.lse = x.lse ? x.lse + batch * p.lse.batch + head * p.lse.head : nullptr;
  task.seq_q = p.seq_q;
  task.seq_kv = p.seq_kv;
  task.modifiers = head_modifiers(p.modifiers, x.modifiers, batch, head);
  return task;
}

// Query rows per task: tile_q, or less where that would leave threads idle. Many rows share the cost of packing K and V, few keep the
// threads busy to the end, for which unequal tasks (causal, a map) must be more. tile_q changes no result; with a map it is a multiple of
// that one's tiles, so that a micro-block lies in one of them, the same whatever the tasks.
int64_t rows_per_task(const Kernels& kernels, const ForwardProblem& p, int64_t rows, bool mapped, int threads) {
  const int64_t unit = mapped ? MAP_ROWS : kernels.micro_rows;
  const int64_t asked = std::clamp<int64_t>(p.tile_q, 1, MAX_TILE_Q), most = mapped ? std::max(asked / unit, int64_t(1)) * unit : asked;
  if (threads <= 1) return most;
  const int64_t tasks_per_thread = mapped || p.bounds.right < p.seq_kv ? 4 : 2, grain = mapped ? unit : ceil_div(48, unit) * unit;
  const int64_t fair = ceil_div(ceil_div(rows, tasks_per_thread * threads), grain) * grain;
  const int64_t longest = std::max<int64_t>(p.seq_q, 1), blocks = ceil_div(longest, std::min(most, fair));
  return std::min(most, ceil_div(ceil_div(longest, blocks), unit) * unit);  // equal blocks
}

void run_rows(const Kernels& kernels, const ForwardProblem& p, ForwardTask task, int64_t block, int64_t blocks) {
  // The last rows see most keys under a causal mask: they go first, so that the threads finish together.
  task.row_begin = (blocks - 1 - block) * p.tile_q;
  task.row_end = std::min(task.row_begin + p.tile_q, task.seq_q);
  kernels.forward(p, task, thread_scratch(kernels.forward_scratch(p)));
}

// Multiply-adds of a call in which every row sees all keys that its bounds could show it.
double multiply_adds(const ForwardProblem& p, double rows) {
  const double keys = std::min<double>(p.seq_kv, (double)p.bounds.left + p.bounds.right + 1);
  return rows * keys * (p.head_dim + p.head_dim_v);
}

}  // namespace

void run_forward(const Kernels& kernels, const ForwardProblem& problem, const Operands& x, int threads) {
  ForwardProblem p = problem;
  const int64_t heads = p.batch * p.heads_q;
  if (heads == 0 || p.seq_q == 0) return;
  threads = worth_threads(multiply_adds(p, (double)heads * p.seq_q), threads);
  p.tile_q = rows_per_task(kernels, p, heads * p.seq_q, x.modifiers.places, threads);
  const int64_t blocks = ceil_div(p.seq_q, p.tile_q);
  for_each_task(heads * blocks, threads, [&](int64_t task) {
    const int64_t head = task / blocks;
    run_rows(kernels, p, head_task(p, x, head / p.heads_q, head % p.heads_q), task % blocks, blocks);
  });
}

void run_forward_varlen(const Kernels& kernels, const ForwardProblem& problem, const Operands& x, const int64_t* cu_seqlens_q,
                        const int64_t* cu_seqlens_kv, int threads) {
  ForwardProblem p = problem;
  p.q.batch = p.k.batch = p.v.batch = p.out.batch = p.lse.batch = 0;
  const int64_t rows = p.heads_q * cu_seqlens_q[p.batch];
  threads = worth_threads(multiply_adds(p, (double)rows), threads);
  p.tile_q = rows_per_task(kernels, p, rows, x.modifiers.places, threads);
  std::vector<int64_t> first_task(p.batch + 1, 0);
  for (int64_t b = 0; b < p.batch; b++)
    first_task[b + 1] = first_task[b] + p.heads_q * ceil_div(cu_seqlens_q[b + 1] - cu_seqlens_q[b], p.tile_q);
  for_each_task(first_task[p.batch], threads, [&](int64_t task) {
    const int64_t b = std::upper_bound(first_task.begin(), first_task.end(), task) - first_task.begin() - 1;
    const int64_t q0 = cu_seqlens_q[b], kv0 = cu_seqlens_kv[b], blocks = (first_task[b + 1] - first_task[b]) / p.heads_q;
    const int64_t head = (task - first_task[b]) / blocks;
    ForwardTask t = head_task(p, x, 0, head);
    t.q = offset(t.q, q0 * p.q.row, p.dtype);
    t.k = offset(t.k, kv0 * p.k.row, p.dtype);
    t.v = offset(t.v, kv0 * p.v.row, p.dtype);
    t.out = offset(t.out, q0 * p.out.row, p.dtype);
    if (t.lse) t.lse += q0 * p.lse.row;
    t.seq_q = cu_seqlens_q[b + 1] - q0;
    t.seq_kv = cu_seqlens_kv[b + 1] - kv0;
    t.modifiers = head_modifiers(p.modifiers, x.modifiers, b, head);
    run_rows(kernels, p, t, (task - first_task[b]) % blocks, blocks);
  });
}

namespace {

// The splits [first, last) of one sequence that hold visible keys. They start at multiples of split_kv, whatever else is in the batch.
struct Splits {
  int64_t first, last;
  int64_t count() const { return last - first; }
};
Splits splits_of(const DecodeProblem& p, int64_t kv_len) {
  const int64_t offset = p.bounds.shift(p.seq_q, kv_len);
  const int64_t begin = std::max<int64_t>(0, offset - p.bounds.left);
  const int64_t end = std::min(kv_len, p.seq_q - 1 + offset + p.bounds.right + 1);
  if (begin >= end) return {0, 0};
  return {begin / p.split_kv, ceil_div(end, p.split_kv)};
}

DecodeTask decode_task(const DecodeProblem& p, const Operands& x, const int64_t* kv_lens, const int64_t* page_table, int64_t page_table_stride,
                       const HeadModifiers* modifiers, int64_t batch, int64_t head_kv) {
  const int64_t head = head_kv * (p.heads_q / p.heads_kv), cache = p.page_size ? 0 : batch;
  DecodeTask task = {};
  task.q = offset(x.q, batch * p.q.batch + head * p.q.head, p.dtype);
  task.k = offset(x.k, cache * p.k.batch + head_kv * p.k.head, p.dtype);
  task.v = offset(x.v, cache * p.v.batch + head_kv * p.v.head, p.dtype);
  task.out = offset(x.out, batch * p.out.batch + head * p.out.head, p.dtype);
  task.lse = x.lse ? x.lse + batch * p.lse.batch + head * p.lse.head : nullptr;
  task.pages = p.page_size ? page_table + batch * page_table_stride : nullptr;
  task.kv_len = kv_lens[batch];
  task.modifiers = modifiers ? modifiers + batch * p.heads_q + head : nullptr;
  return task;
}

}  // namespace

int64_t decode_heads(const DecodeProblem& p) {
  // In a cache of rows (heads_kv, head_dim) the rows of one head are a page of memory apart. A task that went over one head alone would
  // look up a page for every key and crowd into a few sets of the caches; over all heads of a key it reads memory from end to end.
  const bool side_by_side = p.k.head == p.head_dim && p.v.head == p.head_dim_v && p.k.row >= p.heads_kv * p.head_dim;
  if (!side_by_side) return 1;
  const int64_t most = std::max<int64_t>(1, DECODE_BLOCK_BYTES / (DECODE_BLOCK_KEYS * (p.head_dim + p.head_dim_v) * element_size(p.dtype)));
  return ceil_div(p.heads_kv, ceil_div(p.heads_kv, most));  // equal parts
}

void run_decode(const Kernels& kernels, const DecodeProblem& p, const Operands& x, const int64_t* kv_lens, const int64_t* page_table,
                int64_t page_table_stride, int threads) {
  const int64_t heads = decode_heads(p), parts = ceil_div(p.heads_kv, heads);
  // A sequence without visible keys still is one task for each part: its rows must be written.
  std::vector<int64_t> first_split(p.batch + 1, 0);
  double keys = 0;
  for (int64_t b = 0; b < p.batch; b++) {
    const int64_t splits = splits_of(p, kv_lens[b]).count();
    first_split[b + 1] = first_split[b] + std::max<int64_t>(splits, 1);
    keys += (double)std::min(kv_lens[b], splits * p.split_kv);
  }
  const int64_t splits_of_all = first_split[p.batch];
  const size_t stride = kernels.decode_partial(p), scratch = kernels.decode_scratch(p, heads);
  std::unique_ptr<float[]> partials(new float[splits_of_all * p.heads_kv * stride]);
  std::vector<std::atomic<int64_t>> done(p.batch * parts);
  std::vector<HeadModifiers> modifiers;  // by batch and query head; empty if there are none
  if (p.modifiers.count || x.modifiers.sink || x.modifiers.places)
    for (int64_t row = 0; row < p.batch * p.heads_q; row++)
      modifiers.push_back(head_modifiers(p.modifiers, x.modifiers, row / p.heads_q, row % p.heads_q));
  const HeadModifiers* all_modifiers = modifiers.empty() ? nullptr : modifiers.data();
  threads = worth_threads(keys * p.heads_q * p.seq_q * (p.head_dim + p.head_dim_v), threads);

  for_each_task(splits_of_all * parts, threads, [&](int64_t task) {
    // The heads vary fastest: neighbouring tasks read neighbouring memory where a cache's rows are (heads_kv, head_dim).
    const int64_t part = task % parts, row = task / parts;
    const int64_t b = std::upper_bound(first_split.begin(), first_split.end(), row) - first_split.begin() - 1;
    const Splits splits = splits_of(p, kv_lens[b]);
    const int64_t split = row - first_split[b], per_head = first_split[b + 1] - first_split[b];
    DecodeTask t = decode_task(p, x, kv_lens, page_table, page_table_stride, all_modifiers, b, part * heads);
    t.heads = std::min(heads, p.heads_kv - part * heads);
    // One head's partial results lie side by side, in the order of their keys.
    float* first_partial = partials.get() + (first_split[b] * p.heads_kv + part * heads * per_head) * stride;
    if (splits.count() > 0) {
      t.key_begin = (splits.first + split) * p.split_kv;
      t.key_end = std::min(t.key_begin + p.split_kv, t.kv_len);
      kernels.decode_split(p, t, first_partial + split * stride, per_head * stride, thread_scratch(scratch));
    }
    if (++done[b * parts + part] < per_head) return;
    // Whoever finishes the last split merges them all.
    for (int64_t head = 0; head < t.heads; head++) {
      const DecodeTask one = decode_task(p, x, kv_lens, page_table, page_table_stride, all_modifiers, b, part * heads + head);
      kernels.decode_merge(p, one, first_partial + head * per_head * stride, splits.count());
    }
  });
}

}  // namespace attnworks
