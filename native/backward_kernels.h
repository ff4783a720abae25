// The table of the backward's kernels, whose templates backward.h or backward_tiles.h has.
#pragma once

namespace attnworks::ATTNWORKS_ISA {

#define ATTNWORKS_BY_DTYPE(dtype, call)                  \
  switch (dtype) {                                       \
    case DType::float32: { using T = float; call; break; }  \
    case DType::bfloat16: { using T = bf16; call; break; }  \
    case DType::float16: { using T = fp16; call; break; }   \
  }

static size_t backward_scratch(const BackwardProblem& p) {
  ATTNWORKS_BY_DTYPE(p.dtype, return backward_layout<T>(p).size * 4)
  return 0;
}
static int64_t backward_d_q_sum_row(const BackwardProblem& p) { return d_q_sum_row(p); }
static void backward_row_sums(const BackwardProblem& p, const BackwardRows& rows) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_row_sums<T>(p, rows))
}
static void backward_begin(const BackwardProblem& p, const BackwardKeys& task, void* scratch) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_begin<T>(p, task, (float*)scratch))
}
static void backward_add_rows(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, void* scratch) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_add_rows<T>(p, task, rows, (float*)scratch))
}
static void backward_add_d_q(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, bool first, void* scratch) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_add_d_q<T>(p, task, rows, first, (float*)scratch))
}
static void backward_store_keys(const BackwardProblem& p, const BackwardKeys& task, void* scratch) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_store_keys<T>(p, task, (float*)scratch))
}
static void backward_add_bias(const BackwardProblem& p, const BackwardKeys& task, const BackwardRows& rows, int64_t step, const BiasGradient& to,
                              void* scratch) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_add_bias<T>(p, task, rows, step, to, (float*)scratch))
}
static void backward_store_d_q(const BackwardProblem& p, const BackwardRows& rows, bool any) {
  ATTNWORKS_BY_DTYPE(p.dtype, backward_store_d_q<T>(p, rows, any))
}
#undef ATTNWORKS_BY_DTYPE

constexpr BackwardKernels backward_kernels = {backward_scratch,  backward_d_q_sum_row, backward_row_sums,   backward_begin,
                                              backward_add_rows, backward_add_d_q,     backward_store_keys, backward_store_d_q,
                                              backward_add_bias};

}  // namespace attnworks::ATTNWORKS_ISA
