// What the schedulers of the forward, the decode and the backward share.
#pragma once
#include <algorithm>

#include "attention.h"

namespace attnworks {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t element_size(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

inline const void* offset(const void* p, int64_t elements, DType dtype) { return (const char*)p + elements * element_size(dtype); }
inline void* offset(void* p, int64_t elements, DType dtype) { return (char*)p + elements * element_size(dtype); }

// Waking the pool costs about as much as this many multiply-adds: smaller calls run on the caller's thread. Results don't depend on it.
constexpr double WORK_PER_THREAD = 1 << 17;
inline int worth_threads(double multiply_adds, int threads) {
  return (int)std::clamp(multiply_adds / WORK_PER_THREAD, 1.0, (double)std::max(threads, 1));
}

}  // namespace attnworks
