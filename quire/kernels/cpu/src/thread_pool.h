// The threads that help the caller of an entry point.
#pragma once

#include <cstdint>

#include "contention.h"
#include "waiting.h"

namespace quire {

using Body = void (*)(void* data);
using Parallel = void (*)(Body body, void* data, int32_t num_threads);

// Threads that take part in one job at a time. A job must not depend on how many of them come: the
// caller does what is left, and waits only for those that have begun. So a thread that has no core
// when a job starts holds no other up.
class ThreadPool {
 public:
  // Runs `body(data)` on this thread and on up to `num_threads - 1` others, until all have returned.
  // Alone, if the pool is at work for another caller.
  void run(Body body, void* data, int32_t num_threads);

 private:
  static void* start(void* pool);
  void open(Body body, void* data, int32_t num_places);
  int64_t close();
  void grow(int32_t num_helpers);
  [[noreturn]] void help();

  // The job: its number, how many may still join, how many are at it. All in one, so that no thread
  // joins a job that has ended. Helpers look at it all the time, so nothing else is beside it.
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) Waiters helpers_;
  alignas(64) Waiters caller_;
  alignas(64) Body body_ = nullptr;
  void* data_ = nullptr;
  std::atomic<bool> is_taken_{false};
  int32_t num_helpers_ = 0;
  Contention contention_;
};

// Those who wait for the items of a phase.
extern Waiters phase_waiters;

}  // namespace quire
