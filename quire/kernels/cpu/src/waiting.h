// How threads wait for one another: awake for a moment, then asleep.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace quire {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

// Looks whether a condition is met for `awake` nanoseconds, then for `polite` more, in which it leaves its
// core to other programs; says whether it was. `started` is 0, or when the wait began.
template <typename Condition>
bool is_met_soon(Condition is_met, int64_t awake, int64_t polite, int64_t& started) {
  constexpr int kLooks = 16;  // before one at the clock
  for (int64_t waited = 0; waited < awake + polite;) {
    for (int i = 0; i < kLooks; ++i) {
      if (is_met()) return true;
      if (waited < awake)
        pause_briefly();
      else
        sched_yield();
    }
    const int64_t now = nanoseconds();
    if (started == 0) started = now;
    waited = now - started;
  }
  return false;
}

// Threads that wait for what others do. What is waited for usually comes within microseconds, and
// sleeping would take longer. If it does not, the other thread has probably lost its core to another
// program: only one that sleeps, and not one that yields, lets the system move it to this core.
//
// There is no missed wake-up because a thread is counted before it looks for the last time, and who
// brings something about looks at the count after that: all four must be sequentially consistent.
class Waiters {
 public:
  // Who has nothing to do meanwhile may stay up for `polite` nanoseconds more, in which it leaves its
  // core to other programs. Returns how many it was, or 0 if there was no need to sleep.
  template <typename Condition>
  int64_t wait(Condition is_met, int64_t polite = 0) {
    int64_t started = 0;
    if (is_met_soon(is_met, kAwake, polite, started)) return 0;
    pthread_mutex_lock(&mutex_);
    num_asleep_.fetch_add(1);
    while (!is_met()) pthread_cond_wait(&woken_, &mutex_);
    num_asleep_.fetch_sub(1);
    pthread_mutex_unlock(&mutex_);
    return nanoseconds() - started;
  }

  // To be called after what makes a condition true.
  void wake() {
    if (num_asleep_.load() == 0) return;
    pthread_mutex_lock(&mutex_);
    pthread_mutex_unlock(&mutex_);
    pthread_cond_broadcast(&woken_);
  }

 private:
  static constexpr int64_t kAwake = 100000;  // nanoseconds

  std::atomic<int> num_asleep_{0};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t woken_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace quire
