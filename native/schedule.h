// From a whole call to the kernels' units of work: who computes what, in which order.
#pragma once
#include "attention.h"

namespace attnworks {

struct Operands {
  const void *q, *k, *v;
  void* out;
  float* lse;  // may be null
  ModifierOperands modifiers = {};
};

void run_forward(const Kernels&, const ForwardProblem&, const Operands&, int threads);

// Packed sequences: cu_seqlens have batch + 1 entries, the batch strides are ignored.
void run_forward_varlen(const Kernels&, const ForwardProblem&, const Operands&, const int64_t* cu_seqlens_q, const int64_t* cu_seqlens_kv,
                        int threads);

struct BackwardOperands {
  const void *q, *k, *v, *out, *d_out;
  const float *lse, *d_lse;  // d_lse may be null
  void *d_q, *d_k, *d_v;     // each may be null: not asked for
  ModifierOperands modifiers = {};
  BiasGradient d_bias[MAX_STEPS] = {};  // zeros at first; by steps
};

// cu_seqlens as above for packed sequences, null for dense tensors.
void run_backward(const Kernels&, const BackwardProblem&, const BackwardOperands&, const int64_t* cu_seqlens_q, const int64_t* cu_seqlens_kv,
                  int threads);

// KV heads that one task of a decode goes over together.
int64_t decode_heads(const DecodeProblem&);

// page_table (batch rows, page_table_stride apart) is null for dense caches.
void run_decode(const Kernels&, const DecodeProblem&, const Operands&, const int64_t* kv_lens, const int64_t* page_table,
                int64_t page_table_stride, int threads);

}  // namespace attnworks
