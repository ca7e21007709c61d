// Looks for the lowest logit that the filters of a line keep, without sorting the line.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstring>

#include "sampling.h"

namespace quire {

// How far below the best logit the cutoff is looked for; then all the way down.
inline constexpr float kWindows[] = {4.0f, 8.0f, 16.0f, 32.0f};

// The number that is as far up among all floats as `order` says, and back.
inline float float_at(int32_t order) {
  const int32_t bits = order < 0 ? order ^ INT32_MAX : order;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline int32_t order_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits < 0 ? bits ^ INT32_MAX : bits;
}

// Where one thread works; each part has room for a line.
class Workspace {
 public:
  Workspace(float* memory, int32_t width, int32_t worker)
      : tempered(memory + kParts * room(width) * static_cast<size_t>(worker)),
        found(tempered + room(width)),
        masses(found + room(width)) {}

  static size_t bytes(int32_t width, int32_t num_workers) {
    return sizeof(float) * kParts * room(width) * static_cast<size_t>(num_workers);
  }

  float* const tempered;
  float* const found;
  float* const masses;

 private:
  static constexpr size_t kParts = 3;
  static size_t room(int32_t width) { return static_cast<size_t>(width) + kMaxLanes; }
};

// What top_k, top_p and min_p keep of a line: the logits from a floor on. None of the logits is NaN,
// and the best of them is finite.
class Filters {
 public:
  Filters(const SamplingKernel& kernel, const float* x, int32_t n, float best,
          const Workspace& space)
      : kernel_(kernel), x_(x), n_(n), best_(best), floor_(-FLT_MAX), space_(space) {}

  void keep_min_p(float log_min_p) { raise(best_ + log_min_p); }

  void keep_top_k(int32_t top_k) {
    for_each_window([&](float from) {
      collect(from);
      for (int32_t i = 0; i < num_found_; ++i) space_.masses[i] = 1.0f;
      return num_found_ >= top_k;
    });
    raise(lowest_kept(top_k));
    has_all_ = true;
  }

  void keep_top_p(float top_p) {
    const double left = has_all_ ? weigh() : kernel_.weigh(x_, n_, best_, floor_, nullptr);
    const double share = static_cast<double>(top_p) * left;
    if (!has_all_)
      for_each_window([&](float from) {
        collect(from);
        return weigh() >= share;
      });
    raise(lowest_kept(share));
  }

  float floor() const { return floor_; }

 private:
  void raise(float floor) { floor_ = floor > floor_ ? floor : floor_; }

  // Until `is_enough` holds of the numbers from `from` on, or these are all from the floor on.
  template <typename IsEnough>
  void for_each_window(IsEnough is_enough) {
    for (const float window : kWindows)
      if (best_ - window > floor_ && is_enough(best_ - window)) return;
    is_enough(floor_);
  }

  void collect(float from) { num_found_ = kernel_.collect(x_, n_, from, space_.found); }

  double weigh() {
    return kernel_.weigh(space_.found, num_found_, best_, floor_, space_.masses);
  }

  // The lowest number, not below the floor, for which those above it have less than `share` of the
  // masses; the best one if there is none.
  float lowest_kept(double share) const {
    int64_t low = order_of(floor_), high = order_of(best_);
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      const float pivot = float_at(static_cast<int32_t>(middle));
      if (kernel_.mass_above(space_.found, space_.masses, num_found_, pivot) < share)
        high = middle;
      else
        low = middle + 1;
    }
    return float_at(static_cast<int32_t>(high));
  }

  const SamplingKernel& kernel_;
  const float* const x_;
  const int32_t n_;
  const float best_;
  float floor_;
  const Workspace& space_;
  int32_t num_found_ = 0;
  bool has_all_ = false;  // that reach the floor
};

}  // namespace quire
