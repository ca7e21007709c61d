// Work that the threads of one parallel region share, one phase after the other.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace quire {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `count` items, taken in pieces. It waits for items and not for threads, and so works with as many
// threads as the runtime gives.
class Phase {
 public:
  Phase(int64_t count, int64_t piece) : count_(count), piece_(piece > 0 ? piece : 1) {}

  // Takes pieces until there are none left: work(first, end).
  template <typename Work>
  void run(Work work) {
    for (;;) {
      const int64_t first = next_.fetch_add(piece_, std::memory_order_relaxed);
      if (first >= count_) return;
      const int64_t end = first + piece_ < count_ ? first + piece_ : count_;
      work(first, end);
      if (done_.fetch_add(end - first) + end - first == count_) phase_waiters.wake();
    }
  }

  // Until what others have taken is done too.
  void wait() const {
    phase_waiters.wait([this] { return done_.load() >= count_; });
  }

 private:
  const int64_t count_, piece_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace quire
