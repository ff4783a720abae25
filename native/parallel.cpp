#include "parallel.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <exception>
#include <new>
#ifdef __SANITIZE_THREAD__
#include <thread>
#include <vector>
#endif

namespace attnworks {
namespace {

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
  auto work = [&] {
    try {
      for (int64_t task = next++; task < tasks; task = next++) run(task);
    } catch (...) {
      next = tasks;
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
#ifdef __SANITIZE_THREAD__  // it doesn't see what libgomp, built without it, does to begin and end threads, and would call all of that races
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
#else
#pragma omp parallel num_threads(threads)
  work();
#endif
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
