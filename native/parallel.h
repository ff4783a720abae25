// Threads by OpenMP: the runtime that torch has already started is used, no second pool.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <functional>

namespace attnworks {

// Calls run(0), run(1), … run(tasks - 1), each once, on at most `threads` threads that take the next task as they become free.
// On one thread in a forked child: the pool of the parent doesn't exist there, and libgomp would wait for it forever.
// An exception in a task ends the loop early and is thrown again here.
void for_each_task(int64_t tasks, int threads, const std::function<void(int64_t)>& run);

// At least `bytes` of uninitialised memory, aligned to 64 and private to the calling thread; kept for its next call. Throws std::bad_alloc.
void* thread_scratch(size_t bytes);

}  // namespace attnworks
