// The Python module attnworks._native. Tensors come as addresses and strides: exchanging them by DLPack costs more than a small call.
// Shapes, dtypes and everything inside tensors are checked by the Python side; what is checked here keeps the kernels' own assumptions.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <tuple>

#include "dispatch.h"
#include "parallel.h"
#include "schedule.h"
#include "tilemap.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace attnworks {
namespace {

using StrideList = std::array<int64_t, 3>;
using Address = uintptr_t;

Strides strides(const StrideList& s) { return {s[0], s[1], s[2]}; }

DType dtype_of(const std::string& name) {
  if (name == "float32") return DType::float32;
  if (name == "bfloat16") return DType::bfloat16;
  if (name == "float16") return DType::float16;
  throw std::invalid_argument("dtype was '" + name + "', must be float32, bfloat16 or float16");
}

void require_at_least(int64_t least, std::initializer_list<std::pair<const char*, int64_t>> values) {
  for (const auto& [name, value] : values)
    if (value < least) throw std::invalid_argument(std::string(name) + " was " + std::to_string(value) + ", must be >= " + std::to_string(least));
}

template <typename Problem>
void check(const Problem& p) {
  require_at_least(0, {{"batch", p.batch}, {"seq_q", p.seq_q}, {"left", p.bounds.left}, {"right", p.bounds.right}});
  require_at_least(1, {{"head_dim", p.head_dim}, {"head_dim_v", p.head_dim_v}, {"heads_kv", p.heads_kv}});
  if (p.heads_q < 0 || p.heads_q % p.heads_kv != 0)
    throw std::invalid_argument("heads_q was " + std::to_string(p.heads_q) + ", must be a multiple of heads_kv, " + std::to_string(p.heads_kv));
}

Operands operands(Address q, Address k, Address v, Address out, Address lse, const ModifierOperands* modifiers) {
  return {(const void*)q, (const void*)k, (const void*)v, (void*)out, (float*)lse, modifiers ? *modifiers : ModifierOperands{}};
}

// (kind, cap, dtype of the operand, its distances by batch, head, row, key in elements)
using StepList = std::vector<std::tuple<std::string, float, std::string, std::array<int64_t, 4>>>;
// Of a tile map: the distances between batches and heads in places, tiles of keys, rows of a tile.
using MapList = std::array<int64_t, 4>;

Modifiers modifiers(const StepList& steps, const MapList& map) {
  if (steps.size() > MAX_STEPS)
    throw std::invalid_argument("steps were " + std::to_string(steps.size()) + ", must be at most " + std::to_string(MAX_STEPS));
  Modifiers made;
  for (const auto& [kind, cap, dtype, distances] : steps) {
    if (kind != "softcap" && kind != "alibi" && kind != "bias")
      throw std::invalid_argument("kind was '" + kind + "', must be softcap, alibi or bias");
    const StepKind step = kind == "softcap" ? StepKind::softcap : kind == "alibi" ? StepKind::alibi : StepKind::bias;
    made.steps[made.count++] = {step, cap, dtype_of(dtype), distances[0], distances[1], distances[2], distances[3]};
  }
  made.map = {map[0], map[1], map[2], map[3]};
  return made;
}

ModifierOperands modifier_operands(const std::vector<Address>& steps, Address sink, const std::string& sink_dtype, Address places, Address bits) {
  ModifierOperands made;
  for (size_t n = 0; n < steps.size() && n < MAX_STEPS; n++) made.steps[n] = (const void*)steps[n];
  made.sink = (const void*)sink;
  made.sink_dtype = dtype_of(sink_dtype);
  made.places = (const int32_t*)places;
  made.bits = (const uint64_t*)bits;
  return made;
}

void pack_mask_at(Address mask, const std::array<int64_t, 4>& shape, const std::array<int64_t, 4>& strides, int64_t tile_rows, Address places,
                  Address bits, int threads) {
  if (tile_rows != MAP_ROWS && (tile_rows != 1 || shape[2] > 1))
    throw std::invalid_argument("tile_rows was " + std::to_string(tile_rows) + ", must be " + std::to_string(MAP_ROWS) + ", or 1 for one row");
  pack_mask({(const uint8_t*)mask, shape[0], shape[1], shape[2], shape[3], strides[0], strides[1], strides[2], strides[3]}, tile_rows,
            (int32_t*)places, (uint64_t*)bits, threads);
}

struct Forward {
  const Kernels& kernels;
  ForwardProblem problem;

  Forward(const std::string& isa, const std::string& dtype, int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seq_q, int64_t seq_kv,
          int64_t head_dim, int64_t head_dim_v, const StrideList& q, const StrideList& k, const StrideList& v, const StrideList& out,
          const StrideList& lse, float scale, int64_t left, int64_t right, bool top_left, int64_t tile_q, int64_t tile_kv)
      : kernels(kernels_for(isa)),
        problem{dtype_of(dtype), batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, strides(q), strides(k), strides(v),
                strides(out), strides(lse), scale, {left, right, top_left}, tile_q, tile_kv} {
    check(problem);
    require_at_least(0, {{"seq_kv", seq_kv}});
    require_at_least(1, {{"tile_q", tile_q}, {"tile_kv", tile_kv}});
  }

  void modify(const StepList& steps, const MapList& map) { problem.modifiers = modifiers(steps, map); }
  void visit_all() { problem.visit_all = true; }
  size_t scratch_bytes() const { return kernels.forward_scratch(problem); }
  void call(Address q, Address k, Address v, Address out, Address lse, int threads, const ModifierOperands* modifiers) const {
    run_forward(kernels, problem, operands(q, k, v, out, lse, modifiers), threads);
  }
  void call_varlen(Address q, Address k, Address v, Address out, Address lse, Address cu_seqlens_q, Address cu_seqlens_kv, int threads,
                   const ModifierOperands* modifiers) const {
    run_forward_varlen(kernels, problem, operands(q, k, v, out, lse, modifiers), (const int64_t*)cu_seqlens_q, (const int64_t*)cu_seqlens_kv,
                       threads);
  }
};

// (step, address, distances by batch, head, row, key in floats)
using BiasList = std::vector<std::tuple<int64_t, Address, std::array<int64_t, 4>>>;

struct BackwardCall {
  const Kernels& kernels;
  BackwardProblem problem;

  BackwardCall(const Forward& forward, const StrideList& d_out, const StrideList& d_q, const StrideList& d_k, const StrideList& d_v)
      : kernels(forward.kernels), problem{forward.problem, strides(d_out), strides(d_q), strides(d_k), strides(d_v)} {
    if (!kernels.backward.scratch) throw std::invalid_argument(std::string("isa was '") + kernels.isa + "', which has no backward");
  }

  size_t scratch_bytes() const { return kernels.backward.scratch(problem); }
  void call(Address q, Address k, Address v, Address out, Address lse, Address d_out, Address d_lse, Address d_q, Address d_k, Address d_v,
            Address cu_seqlens_q, Address cu_seqlens_kv, int threads, const ModifierOperands* modifiers, const BiasList& d_biases) const {
    BackwardOperands x = {(const void*)q, (const void*)k, (const void*)v, (const void*)out, (const void*)d_out,
                          (const float*)lse, (const float*)d_lse, (void*)d_q, (void*)d_k, (void*)d_v,
                          modifiers ? *modifiers : ModifierOperands{}};
    for (const auto& [step, data, at] : d_biases) x.d_bias[step] = {(float*)data, at[0], at[1], at[2], at[3]};
    run_backward(kernels, problem, x, (const int64_t*)cu_seqlens_q, (const int64_t*)cu_seqlens_kv, threads);
  }
};

struct Decode {
  const Kernels& kernels;
  DecodeProblem problem;
  int64_t capacity;

  Decode(const std::string& isa, const std::string& dtype, int64_t batch, int64_t seq_q, int64_t heads_q, int64_t heads_kv, int64_t head_dim,
         int64_t head_dim_v, const StrideList& q, const StrideList& k, const StrideList& v, const StrideList& out, const StrideList& lse,
         int64_t capacity, int64_t page_size, float scale, int64_t left, int64_t right, bool top_left, int64_t split_kv)
      : kernels(kernels_for(isa)),
        problem{dtype_of(dtype), batch, seq_q, heads_q, heads_kv, head_dim, head_dim_v, strides(q), strides(k), strides(v), strides(out),
                strides(lse), page_size, scale, {left, right, top_left}, split_kv},
        capacity(capacity) {
    check(problem);
    require_at_least(0, {{"page_size", page_size}});
    require_at_least(1, {{"split_kv", split_kv}});
  }

  void modify(const StepList& steps, const MapList& map) { problem.modifiers = modifiers(steps, map); }
  size_t scratch_bytes() const { return kernels.decode_scratch(problem, decode_heads(problem)); }
  // A checked copy of a sequence's every length: what the caller writes into them meanwhile leads no kernel astray.
  std::vector<int64_t> lengths(Address kv_lens) const {
    std::vector<int64_t> lens((const int64_t*)kv_lens, (const int64_t*)kv_lens + problem.batch);
    if (lens.empty()) return lens;
    const auto [low, high] = std::minmax_element(lens.begin(), lens.end());
    if (*low < 0 || *high > capacity)
      throw std::invalid_argument("kv_lens: ranged from " + std::to_string(*low) + " to " + std::to_string(*high) + ", must lie in 0.." +
                                  std::to_string(capacity) + " (capacity " + std::to_string(capacity) + ", 0 new)");
    return lens;
  }
  void call(Address q, Address k, Address v, Address out, Address lse, Address kv_lens, Address page_table, int64_t page_table_stride,
            int threads, const ModifierOperands* modifiers) const {
    run_decode(kernels, problem, operands(q, k, v, out, lse, modifiers), lengths(kv_lens).data(), (const int64_t*)page_table, page_table_stride,
               threads);
  }
};

// Reads `bytes` of memory once, in equal parts on `threads` threads.
void read_bandwidth(Address memory, int64_t bytes, int threads) {
  const Kernels& kernels = kernels_for(supported_isas().front());
  const int64_t part = bytes / threads / 64 * 64;
  for_each_task(threads, threads, [&](int64_t t) {
    volatile float used = kernels.read((const char*)memory + t * part, t + 1 == threads ? bytes - t * part : part);
    (void)used;
  });
}

double peak_flops(const std::string& isa, const std::string& dtype, int threads, int64_t iterations) {
  const Kernels& kernels = kernels_for(isa);
  const DType type = dtype_of(dtype);
  std::vector<double> done(threads);
  for_each_task(threads, threads, [&](int64_t t) { done[t] = kernels.flops(type, iterations); });
  double total = 0;
  for (double flops : done) total += flops;
  return total;
}

}  // namespace
}  // namespace attnworks

NB_MODULE(_native, m) {
  using namespace attnworks;
  using release = nb::call_guard<nb::gil_scoped_release>;
  nb::set_leak_warnings(false);  // prepared calls are kept until the process ends, on purpose
  m.attr("ABI") = 4;
  m.attr("MAP_ROWS") = MAP_ROWS;
  m.attr("MAP_KEYS") = MAP_KEYS;
  m.attr("MAX_TILE_Q") = MAX_TILE_Q;
  m.attr("MAX_TILE_KV") = MAX_TILE_KV;
  m.attr("MAX_STEPS") = MAX_STEPS;
  m.def("compiled_isas", &compiled_isas, "Instruction sets that were compiled in, best first.");
  m.def("supported_isas", &supported_isas, "Those of them that this CPU runs, best first.");
  nb::class_<ModifierOperands>(m, "ModifierOperands", "What the score steps and the mask of a call read: addresses, 0 for none.")
      .def("__init__", [](ModifierOperands* self, const std::vector<Address>& steps, Address sink, const std::string& sink_dtype, Address places,
                          Address bits) { new (self) ModifierOperands(modifier_operands(steps, sink, sink_dtype, places, bits)); },
           "step_ptrs"_a, "sink_ptr"_a, "sink_dtype"_a, "places_ptr"_a, "bits_ptr"_a);
  m.def("pack_mask", &pack_mask_at, "mask_ptr"_a, "shape"_a, "strides"_a, "tile_rows"_a, "places_ptr"_a, "bits_ptr"_a, "threads"_a, release(),
        "Writes the tile map of a boolean tensor (batch, heads, rows, keys).");
  nb::class_<Forward>(m, "Forward", "A prefill call with everything but addresses and threads fixed. Strides are (batch, head, row) in elements.")
      .def(nb::init<const std::string&, const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const StrideList&,
                    const StrideList&, const StrideList&, const StrideList&, const StrideList&, float, int64_t, int64_t, bool, int64_t, int64_t>(),
           "isa"_a, "dtype"_a, "batch"_a, "heads_q"_a, "heads_kv"_a, "seq_q"_a, "seq_kv"_a, "head_dim"_a, "head_dim_v"_a, "q_strides"_a,
           "k_strides"_a, "v_strides"_a, "out_strides"_a, "lse_strides"_a, "scale"_a, "left"_a, "right"_a, "top_left"_a, "tile_q"_a,
           "tile_kv"_a)
      .def("modify", &Forward::modify, "steps"_a, "map"_a,
           "Gives it score steps, (kind, cap, dtype, strides of the operand), and the shape of its tile map.")
      .def("visit_all", &Forward::visit_all, "Makes it go through the tiles that the bounds hide, too.")
      .def("scratch_bytes", &Forward::scratch_bytes, "Bytes of scratch that each thread uses.")
      .def("__call__", &Forward::call, "q_ptr"_a, "k_ptr"_a, "v_ptr"_a, "out_ptr"_a, "lse_ptr"_a, "threads"_a,
           "modifiers"_a = nb::none(), release())
      .def("run_varlen", &Forward::call_varlen, "q_ptr"_a, "k_ptr"_a, "v_ptr"_a, "out_ptr"_a, "lse_ptr"_a, "cu_seqlens_q_ptr"_a,
           "cu_seqlens_kv_ptr"_a, "threads"_a, "modifiers"_a = nb::none(), release());
  nb::class_<BackwardCall>(m, "Backward",
                           "The backward of a Forward, whose tiles are the backward's. It need not have run, its results are operands here.")
      .def(nb::init<const Forward&, const StrideList&, const StrideList&, const StrideList&, const StrideList&>(), "forward"_a,
           "d_out_strides"_a, "d_q_strides"_a, "d_k_strides"_a, "d_v_strides"_a)
      .def("scratch_bytes", &BackwardCall::scratch_bytes, "Bytes of scratch that each thread uses.")
      .def("__call__", &BackwardCall::call, "q_ptr"_a, "k_ptr"_a, "v_ptr"_a, "out_ptr"_a, "lse_ptr"_a, "d_out_ptr"_a, "d_lse_ptr"_a,
           "d_q_ptr"_a, "d_k_ptr"_a, "d_v_ptr"_a, "cu_seqlens_q_ptr"_a, "cu_seqlens_kv_ptr"_a, "threads"_a, "modifiers"_a = nb::none(),
           "d_biases"_a = BiasList(), release(),
           "d_lse_ptr, d_q_ptr, d_k_ptr and d_v_ptr may be 0, as may both cu_seqlens for dense tensors. d_biases: (step, address, strides) of "
           "the biases' gradients, which are added to.");
  nb::class_<Decode>(m, "Decode", "A decode call with everything but addresses, page table and threads fixed.")
      .def(nb::init<const std::string&, const std::string&, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const StrideList&,
                    const StrideList&, const StrideList&, const StrideList&, const StrideList&, int64_t, int64_t, float, int64_t, int64_t, bool, int64_t>(),
           "isa"_a, "dtype"_a, "batch"_a, "seq_q"_a, "heads_q"_a, "heads_kv"_a, "head_dim"_a, "head_dim_v"_a, "q_strides"_a, "k_strides"_a,
           "v_strides"_a, "out_strides"_a, "lse_strides"_a, "capacity"_a, "page_size"_a, "scale"_a, "left"_a, "right"_a, "top_left"_a, "split_kv"_a)
      .def("modify", &Decode::modify, "steps"_a, "map"_a,
           "Gives it score steps, (kind, cap, dtype, strides of the operand), and the shape of its tile map.")
      .def("scratch_bytes", &Decode::scratch_bytes, "Bytes of scratch that each thread uses.")
      .def("__call__", &Decode::call, "q_ptr"_a, "k_ptr"_a, "v_ptr"_a, "out_ptr"_a, "lse_ptr"_a, "kv_lens_ptr"_a, "page_table_ptr"_a,
           "page_table_stride"_a, "threads"_a, "modifiers"_a = nb::none(), release());
  m.def("read_bandwidth", &read_bandwidth, "ptr"_a, "bytes"_a, "threads"_a, release(), "Reads memory once, as fast as plain loads can.");
  m.def("peak_flops", &peak_flops, "isa"_a, "dtype"_a, "threads"_a, "iterations"_a, release(),
        "Runs independent multiply-adds in registers; returns the FLOPs that were done (time it yourself).");
}
