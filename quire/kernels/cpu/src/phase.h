// Work that the threads of one parallel region share, one phase after the other.
#pragma once

#include <sched.h>

#include <cstdint>

namespace quire {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// `count` items, taken in pieces. It waits for items and not for threads, and so works with as many
// threads as the runtime gives.
class Phase {
 public:
  Phase(int64_t count, int64_t piece) : count_(count), piece_(piece > 0 ? piece : 1) {}

  // Takes pieces until there are none left: work(first, end).
  template <typename Work>
  void run(Work work) {
    for (;;) {
      const int64_t first = __atomic_fetch_add(&next_, piece_, __ATOMIC_RELAXED);
      if (first >= count_) return;
      const int64_t end = first + piece_ < count_ ? first + piece_ : count_;
      work(first, end);
      __atomic_fetch_add(&done_, end - first, __ATOMIC_RELEASE);
    }
  }

  // Until what others have taken is done too. They are at it, so it will not be long, unless the
  // system took their core away.
  void wait() const {
    for (int i = 0; __atomic_load_n(&done_, __ATOMIC_ACQUIRE) < count_; ++i) {
      if (i < kPauses)
        pause_briefly();
      else
        sched_yield();
    }
  }

 private:
  static constexpr int kPauses = 2000;

  const int64_t count_, piece_;
  alignas(64) int64_t next_ = 0;
  alignas(64) int64_t done_ = 0;
};

}  // namespace quire
