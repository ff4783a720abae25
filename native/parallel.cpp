#include "parallel.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <exception>
#include <new>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace attnworks {
namespace {

// libgomp isn't built for the thread sanitizer, which therefore doesn't see that threads begin after the call and end before it returns:
// these say so. What the threads do to each other in between is checked.
[[maybe_unused]] char edge;
inline void released() {
#ifdef __SANITIZE_THREAD__
  __tsan_release(&edge);
#endif
}
inline void acquired() {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&edge);
#endif
}

std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });

struct Scratch {
  void* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
};
thread_local Scratch scratch;

}  // namespace

void for_each_task(int64_t tasks, int threads, const std::function<void(int64_t)>& run) {
  if (threads > tasks) threads = (int)tasks;
  if (threads <= 1 || forked) {
    for (int64_t task = 0; task < tasks; task++) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;
  released();
#pragma omp parallel num_threads(threads)
  {
    acquired();
    try {
      for (int64_t task = next++; task < tasks; task = next++) run(task);
    } catch (...) {
      next = tasks;
      if (!failed.exchange(true)) failure = std::current_exception();
    }
    released();
  }
  acquired();
  if (failed) std::rethrow_exception(failure);
}

void* thread_scratch(size_t bytes) {
  if (scratch.size < bytes) {
    free(scratch.memory);
    scratch = {};
    const size_t size = (bytes + 4095) / 4096 * 4096;
    scratch.memory = aligned_alloc(4096, size);
    if (!scratch.memory) throw std::bad_alloc();
    scratch.size = size;
  }
  return scratch.memory;
}

}  // namespace attnworks
