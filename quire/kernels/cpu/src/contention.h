// How many helpers are worth asking while other programs use the cores too.
#pragma once

#include <cstdint>

namespace quire {

// A helper that loses its core in the middle of its part holds all others up, for as long as the other
// program runs: milliseconds, where a job takes a tenth of one. So one helper less is asked after that
// happened, and one more after a while, which gets longer as long as that goes wrong.
// Times are in nanoseconds.
class Contention {
 public:
  // How many of the `wanted` helpers to ask now.
  int32_t allow(int32_t wanted, int64_t now) {
    if (now >= next_try_) {
      if (num_left_out_ == 0) {
        interval_ = 0;
      } else {
        --num_left_out_;
        next_try_ = now + interval_;
      }
    }
    return wanted > num_left_out_ ? wanted - num_left_out_ : 0;
  }

  // The caller has done its part of a job in `worked` and then waited for the others, of which there
  // were `asked`. Parts are far shorter than `worked`, so who is later than that was not running.
  void note(int64_t waited, int64_t worked, int32_t asked, int32_t wanted, int64_t now) {
    if (waited < kLate || waited < worked) return;
    num_left_out_ = wanted - asked + 1;
    interval_ = interval_ == 0 ? kShortest : interval_ < kLongest ? 2 * interval_ : interval_;
    next_try_ = now + interval_;
  }

 private:
  static constexpr int64_t kLate = 100000, kShortest = 2000000, kLongest = 128000000;

  int32_t num_left_out_ = 0;
  int64_t interval_ = 0, next_try_ = 0;
};

}  // namespace quire
