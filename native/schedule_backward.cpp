// The backward as tasks: one for each tile of keys of each KV head, which owns its part of dK and dV. All tiles add to the same rows of dQ;
// they take turns, in the order of the keys, so that gradients don't depend on who runs what, and tiles of one head still run at once: a task
// waits only where another is not yet done with the rows at hand. Tasks go from the last rows to the first: under a causal mask a later tile
// of keys then meets no row that an earlier one has yet to reach.
#include <string.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "parallel.h"
#include "schedule.h"
#include "schedule_parts.h"

namespace attnworks {
namespace {

// One batch entry or packed sequence.
struct Sequence {
  int64_t number;          // in the call
  int64_t batch, q0, kv0;  // where it begins: batch is 0 in packed tensors, q0 and kv0 are in dense ones
  int64_t seq_q, seq_kv, shift;
  int64_t padded;      // rows of one head in the workspace
  int64_t first_row;   // of its first head there
  int64_t first_turn;  // of its first head's first tile of rows
  int64_t row_tiles, key_tiles;
};

struct Task {
  int64_t sequence, head_kv, key_tile;
};

// The tiles [first, last] that meet something; empty if last < first.
struct Tiles {
  int64_t first, last;
};

class Backward {
 public:
  Backward(const Kernels& kernels, const BackwardProblem& problem, const BackwardOperands& x, const int64_t* cu_q, const int64_t* cu_kv,
           int most_threads)
      : all(kernels),
        kernels(kernels.backward),
        micro_rows(kernels.micro_rows),
        p(problem),
        x(x),
        group(p.heads_q / p.heads_kv),
        sum_row(this->kernels.d_q_sum_row(p)) {
    p.tile_q = in_micro_blocks(std::clamp<int64_t>(p.tile_q, 1, MAX_BACKWARD_TILE_Q));
    p.tile_kv = std::clamp<int64_t>(p.tile_kv, 1, MAX_BACKWARD_TILE_KV);
    if (x.modifiers.places) {
      p.tile_q = MAP_ROWS;
      p.tile_kv = ceil_div(p.tile_kv, MAP_KEYS) * MAP_KEYS;
    }
    add_sequences(cu_q, cu_kv);
    const double keys = std::min<double>(p.seq_kv, (double)p.bounds.left + p.bounds.right + 1);
    threads = worth_threads(rows * keys * (1.5 * p.head_dim + p.head_dim_v) * 2, most_threads);
    shift.reset(new float[rows]);
    delta.reset(new float[rows]);
    if (x.d_q) d_q_sum.reset(new float[rows * sum_row]);
    turns = std::vector<std::atomic<int64_t>>(turn_count);
  }

  // Whether q, k, v or d_out has elements that these kernels can't multiply.
  bool has_outliers() const {
    if (!all.has_outliers || p.dtype == DType::bfloat16) return false;  // bf16 is one piece
    std::atomic<bool> found{false};
    for_each_task((int64_t)sequences.size() * p.heads_q, threads, [&](int64_t task) {
      if (found) return;
      const Sequence& s = sequences[task / p.heads_q];
      const int64_t head = task % p.heads_q;
      const BackwardRows r = head_rows(s, head);
      const BackwardKeys k = head_keys(s, head / group, 0);
      const auto any = [&](const void* rows, const Strides& strides, int64_t count, int64_t dim) {
        return all.has_outliers(p.dtype, rows, strides.row, count, dim);
      };
      if (any(r.q, p.q, s.seq_q, p.head_dim) || any(r.d_out, p.d_out, s.seq_q, p.head_dim_v) ||
          (head % group == 0 && (any(k.k, p.k, s.seq_kv, p.head_dim) || any(k.v, p.v, s.seq_kv, p.head_dim_v))))
        found = true;
    });
    return found;
  }

  void run() {
    for_each_task((int64_t)sequences.size() * p.heads_q, threads, [&](int64_t task) { row_sums(sequences[task / p.heads_q], task % p.heads_q); });
    const std::vector<Task> tasks = key_tasks();
    for_each_task((int64_t)tasks.size(), threads, [&](int64_t task) {
      try {
        run_keys(tasks[task]);
      } catch (...) {
        abandoned = true;  // who waits for this task's turn would wait forever
        throw;
      }
    });
    for (int64_t step = 0; step < p.modifiers.count; step++)
      if (x.d_bias[step].data) run_bias(step);
  }

 private:
  int64_t in_micro_blocks(int64_t rows) const { return ceil_div(rows, micro_rows) * micro_rows; }

  void add_sequences(const int64_t* cu_q, const int64_t* cu_kv) {
    for (int64_t b = 0; b < p.batch; b++) {
      Sequence s = {};
      s.number = b;
      if (cu_q) {
        s.q0 = cu_q[b];
        s.kv0 = cu_kv[b];
        s.seq_q = cu_q[b + 1] - s.q0;
        s.seq_kv = cu_kv[b + 1] - s.kv0;
      } else {
        s.batch = b;
        s.seq_q = p.seq_q;
        s.seq_kv = p.seq_kv;
      }
      s.shift = p.bounds.shift(s.seq_q, s.seq_kv);
      s.padded = in_micro_blocks(s.seq_q);
      s.row_tiles = ceil_div(s.seq_q, p.tile_q);
      s.key_tiles = ceil_div(s.seq_kv, p.tile_kv);
      s.first_row = rows;
      s.first_turn = turn_count;
      rows += s.padded * p.heads_q;
      turn_count += s.row_tiles * p.heads_q;
      sequences.push_back(s);
    }
  }

  // Tiles of all heads and sequences alternate, so that those of one head, which take turns, are far apart where there are many heads.
  std::vector<Task> key_tasks() const {
    int64_t most = 0;
    for (const Sequence& s : sequences) most = std::max(most, s.key_tiles);
    std::vector<Task> tasks;
    for (int64_t tile = 0; tile < most; tile++)
      for (size_t s = 0; s < sequences.size(); s++)
        for (int64_t head = 0; tile < sequences[s].key_tiles && head < p.heads_kv; head++) tasks.push_back({(int64_t)s, head, tile});
    return tasks;
  }

  BackwardRows head_rows(const Sequence& s, int64_t head) const {
    auto at = [&](auto* base, const Strides& strides) { return offset(base, s.batch * strides.batch + head * strides.head + s.q0 * strides.row, p.dtype); };
    const int64_t lse_at = s.batch * p.lse.batch + head * p.lse.head + s.q0 * p.lse.row, row = s.first_row + head * s.padded;
    BackwardRows r = {};
    r.q = at(x.q, p.q);
    r.out = at(x.out, p.out);
    r.d_out = at(x.d_out, p.d_out);
    r.d_q = x.d_q ? at(x.d_q, p.d_q) : nullptr;
    r.lse = x.lse + lse_at;
    r.d_lse = x.d_lse ? x.d_lse + lse_at : nullptr;
    r.shift = shift.get() + row;
    r.delta = delta.get() + row;
    r.d_q_sum = x.d_q ? d_q_sum.get() + row * sum_row : nullptr;
    r.modifiers = head_modifiers(p.modifiers, x.modifiers, s.number, head);
    return r;
  }

  BackwardKeys head_keys(const Sequence& s, int64_t head, int64_t tile) const {
    auto at = [&](auto* base, const Strides& strides) { return offset(base, s.batch * strides.batch + head * strides.head + s.kv0 * strides.row, p.dtype); };
    BackwardKeys k = {};
    k.k = at(x.k, p.k);
    k.v = at(x.v, p.v);
    k.d_k = x.d_k ? at(x.d_k, p.d_k) : nullptr;
    k.d_v = x.d_v ? at(x.d_v, p.d_v) : nullptr;
    k.seq_q = s.seq_q;
    k.seq_kv = s.seq_kv;
    k.key_begin = tile * p.tile_kv;
    k.key_end = std::min(k.key_begin + p.tile_kv, s.seq_kv);
    return k;
  }

  void choose_rows(BackwardRows& r, const Sequence& s, int64_t tile) const {
    r.row_begin = tile * p.tile_q;
    r.row_end = std::min(r.row_begin + p.tile_q, s.seq_q);
  }

  // Tiles of keys that a tile of rows meets: from the first row's first key to the last row's last.
  Tiles key_tiles_of(const Sequence& s, const BackwardRows& r) const {
    const int64_t begin = std::max<int64_t>(0, r.row_begin + s.shift - p.bounds.left);
    const int64_t end = std::min(s.seq_kv, r.row_end - 1 + s.shift + p.bounds.right + 1);
    if (begin >= end) return {0, -1};
    return {begin / p.tile_kv, (end - 1) / p.tile_kv};
  }

  void row_sums(const Sequence& s, int64_t head) const {
    BackwardRows r = head_rows(s, head);
    for (int64_t tile = 0; tile < s.row_tiles; tile++) {
      choose_rows(r, s, tile);
      kernels.row_sums(p, r);
      const Tiles tiles = key_tiles_of(s, r);
      if (x.d_q && tiles.last < tiles.first) kernels.store_d_q(p, r, false);
    }
  }

  void run_keys(const Task& task) {
    const Sequence& s = sequences[task.sequence];
    const BackwardKeys keys = head_keys(s, task.head_kv, task.key_tile);
    void* scratch = thread_scratch(kernels.scratch(p));
    kernels.begin(p, keys, scratch);
    for (int64_t head = task.head_kv * group; head < (task.head_kv + 1) * group; head++) {
      BackwardRows r = head_rows(s, head);
      for (int64_t tile = s.row_tiles - 1; tile >= 0; tile--) {
        choose_rows(r, s, tile);
        const Tiles tiles = key_tiles_of(s, r);
        if (task.key_tile < tiles.first || task.key_tile > tiles.last) continue;
        const bool any = shows(keys, r);
        if (any) kernels.add_rows(p, keys, r, scratch);
        if (!x.d_q) continue;
        std::atomic<int64_t>& turn = turns[s.first_turn + head * s.row_tiles + tile];
        if (!wait_for(turn, task.key_tile - tiles.first)) return;
        if (any)
          kernels.add_d_q(p, keys, r, task.key_tile == tiles.first, scratch);
        else if (task.key_tile == tiles.first)
          memset(r.d_q_sum + r.row_begin * sum_row, 0, (in_micro_blocks(r.row_end) - r.row_begin) * sum_row * 4);
        if (task.key_tile == tiles.last) kernels.store_d_q(p, r, true);
        turn.store(task.key_tile - tiles.first + 1, std::memory_order_release);
      }
    }
    kernels.store_keys(p, keys, scratch);
  }

  // Whether a map shows the rows, which lie in one of its tiles, anything of the tile of keys.
  bool shows(const BackwardKeys& keys, const BackwardRows& r) const {
    if (!r.modifiers.places) return true;
    const int32_t* places = r.modifiers.places + (p.modifiers.map.rows == 1 ? 0 : r.row_begin / MAP_ROWS) * p.modifiers.map.tiles_kv;
    for (int64_t key = keys.key_begin; key < keys.key_end; key += MAP_KEYS)
      if (places[key / MAP_KEYS] != PLACE_HIDDEN) return true;
    return false;
  }

  // The gradient of a bias, in a pass of its own: S and dP are computed once more. A task owns a part of it (a tile of keys of one batch entry
  // and head) and sums what the bias was broadcast along, always in one order.
  void run_bias(int64_t step) {
    const BiasGradient& whole = x.d_bias[step];
    const int64_t batches = whole.batch ? p.batch : std::min<int64_t>(p.batch, 1), heads = whole.head ? p.heads_q : 1;
    int64_t most = 0;
    for (const Sequence& s : sequences) most = std::max(most, s.key_tiles);
    const int64_t parts = whole.key ? most : std::min<int64_t>(most, 1);
    for_each_task(batches * heads * parts, threads, [&](int64_t task) {
      const int64_t part = task % parts, own_head = task / parts % heads, own_batch = task / parts / heads;
      for (int64_t b = own_batch; b < (whole.batch ? own_batch + 1 : p.batch); b++)
        for (int64_t h = own_head; h < (whole.head ? own_head + 1 : p.heads_q); h++)
          for (int64_t tile = part; tile < (whole.key ? std::min(part + 1, sequences[b].key_tiles) : sequences[b].key_tiles); tile++)
            add_bias(sequences[b], h, tile, step, whole);
    });
  }

  void add_bias(const Sequence& s, int64_t head, int64_t key_tile, int64_t step, const BiasGradient& whole) const {
    void* scratch = thread_scratch(kernels.scratch(p));
    const BackwardKeys keys = head_keys(s, head / group, key_tile);
    kernels.begin(p, keys, scratch);
    BackwardRows r = head_rows(s, head);
    BiasGradient own = whole;
    own.data += s.number * whole.batch + head * whole.head;
    for (int64_t tile = 0; tile < s.row_tiles; tile++) {
      choose_rows(r, s, tile);
      const Tiles tiles = key_tiles_of(s, r);
      if (key_tile >= tiles.first && key_tile <= tiles.last && shows(keys, r)) kernels.add_bias(p, keys, r, step, own, scratch);
    }
  }

  // Tasks are taken in the order of their keys, so the one that is waited for is running or done.
  bool wait_for(const std::atomic<int64_t>& turn, int64_t mine) const {
    for (int64_t tries = 0; turn.load(std::memory_order_acquire) != mine; tries++) {
      if (abandoned) return false;
      // With more threads than cores the one that is waited for may need this one's core.
      if (tries < 100)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  const Kernels& all;
  const BackwardKernels& kernels;
  const int64_t micro_rows;
  int threads;
  BackwardProblem p;
  const BackwardOperands x;
  const int64_t group, sum_row;
  std::vector<Sequence> sequences;
  int64_t rows = 0, turn_count = 0;
  std::unique_ptr<float[]> shift, delta, d_q_sum;
  std::vector<std::atomic<int64_t>> turns;  // of each head's tile of rows: how many tiles of keys have added to its dQ
  std::atomic<bool> abandoned{false};
};

}  // namespace

void run_backward(const Kernels& kernels, const BackwardProblem& problem, const BackwardOperands& x, const int64_t* cu_seqlens_q,
                  const int64_t* cu_seqlens_kv, int threads) {
  Backward backward(kernels, problem, x, cu_seqlens_q, cu_seqlens_kv, threads);
  if (backward.has_outliers()) return Backward(kernels_without_tiles(), problem, x, cu_seqlens_q, cu_seqlens_kv, threads).run();
  backward.run();
}

}  // namespace attnworks
