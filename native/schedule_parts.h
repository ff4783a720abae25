// What the schedulers of the forward, the decode and the backward share.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>

#include "attention.h"

namespace attnworks {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

inline const void* offset(const void* p, int64_t elements, DType dtype) { return (const char*)p + elements * element_size(dtype); }
inline void* offset(void* p, int64_t elements, DType dtype) { return (char*)p + elements * element_size(dtype); }

inline float element(const void* p, int64_t at, DType dtype) {
  if (dtype == DType::float32) return ((const float*)p)[at];
  const uint32_t half = ((const uint16_t*)p)[at], sign = half >> 15 << 31;
  uint32_t bits = half << 16;
  if (dtype == DType::float16) {
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) return ldexpf((float)mantissa, -24) * (sign ? -1.f : 1.f);
    bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Of one sequence, number `batch` of the call, and query head.
inline HeadModifiers head_modifiers(const Modifiers& m, const ModifierOperands& x, int64_t batch, int64_t head) {
  HeadModifiers found = {};
  for (int64_t n = 0; n < m.count; n++) {
    const ScoreStep& step = m.steps[n];
    const int64_t at = batch * step.batch + head * step.head;
    if (step.kind == StepKind::alibi) found.steps[n].slope = element(x.steps[n], at, step.dtype);
    if (step.kind == StepKind::bias) found.steps[n].data = offset(x.steps[n], at, step.dtype);
  }
  found.sink = x.sink ? element(x.sink, head, x.sink_dtype) : -INFINITY;
  found.places = x.places ? x.places + batch * m.map.batch + head * m.map.head : nullptr;
  found.bits = x.bits;
  return found;
}

// Waking the pool costs about as much as this many multiply-adds: smaller calls run on the caller's thread. Results don't depend on it.
constexpr double WORK_PER_THREAD = 1 << 17;
inline int worth_threads(double multiply_adds, int threads) {
  return (int)std::clamp(multiply_adds / WORK_PER_THREAD, 1.0, (double)std::max(threads, 1));
}

}  // namespace attnworks
