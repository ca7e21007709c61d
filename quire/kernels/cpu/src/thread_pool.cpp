#include "thread_pool.h"

#include <new>

#include "dispatch.h"

namespace quire {
namespace {

constexpr uint64_t kOneInside = 1, kOnePlace = uint64_t{1} << 16, kOneJob = uint64_t{1} << 32;
constexpr uint64_t kInside = kOnePlace - 1, kPlaces = kOneJob - kOnePlace;
constexpr int32_t kMostHelpers = 1023;
// What the engine does from one call to the next takes less, also where it makes masks of grammars
// for a hundred requests, in nanoseconds. Being woken takes 200000 on a virtual machine.
constexpr int64_t kBetweenCalls = 5000000;

ThreadPool pool;
Parallel stand_in = nullptr;

// A forked child has the memory of the pool but not its threads.
void forget_threads() {
  new (&pool) ThreadPool;
  new (&phase_waiters) Waiters;
}

}  // namespace

Waiters phase_waiters;

void ThreadPool::run(Body body, void* data, int32_t num_threads) {
  if (num_threads < 2 || is_taken_.exchange(true, std::memory_order_acquire)) return body(data);
  const int32_t wanted = num_threads - 1 < kMostHelpers ? num_threads - 1 : kMostHelpers;
  const int64_t started = nanoseconds();
  const int32_t asked = contention_.allow(wanted, started);
  if (asked > 0) open(body, data, asked);
  body(data);
  if (asked > 0) {
    if (const int64_t waited = close()) {
      const int64_t now = nanoseconds();
      contention_.note(waited, now - started - waited, asked, wanted, now);
    }
  }
  is_taken_.store(false, std::memory_order_release);
}

void ThreadPool::open(Body body, void* data, int32_t num_places) {
  grow(num_places);
  body_ = body;
  data_ = data;
  const uint64_t number = job_.load(std::memory_order_relaxed) / kOneJob + 1;
  job_.store(number * kOneJob + static_cast<uint64_t>(num_places) * kOnePlace);
  helpers_.wake();
}

int64_t ThreadPool::close() {
  job_.fetch_and(~kPlaces);
  return caller_.wait([this] { return (job_.load() & kInside) == 0; });
}

void ThreadPool::help() {
  for (uint64_t last = 0;;) {
    uint64_t job = 0;
    const auto may_join = [&] {
      job = job_.load();
      return job / kOneJob != last && (job & kPlaces) != 0;
    };
    helpers_.wait(may_join, kBetweenCalls);
    if (!job_.compare_exchange_strong(job, job - kOnePlace + kOneInside)) continue;
    last = job / kOneJob;
    body_(data_);
    if ((job_.fetch_sub(kOneInside) & (kPlaces | kInside)) == kOneInside) caller_.wake();
  }
}

void* ThreadPool::start(void* pool) { static_cast<ThreadPool*>(pool)->help(); }

// Threads that the system does not give are not missed.
void ThreadPool::grow(int32_t num_helpers) {
  while (num_helpers_ < num_helpers) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, start, this) != 0) return;
    pthread_detach(thread);
    if (num_helpers_++ == 0) pthread_atfork(nullptr, nullptr, forget_threads);
  }
}

void run_parallel(Body body, void* data, int32_t num_threads) {
  if (stand_in && num_threads > 1)
    stand_in(body, data, num_threads);
  else
    pool.run(body, data, num_threads);
}

}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Lets tests run jobs on threads of their own; null goes back to the library's.
void quire_set_parallel(quire::Parallel parallel) { quire::stand_in = parallel; }

}  // extern "C"
#pragma GCC visibility pop
