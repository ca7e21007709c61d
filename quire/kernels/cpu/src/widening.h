// Tiles of keys and values in float32, whatever they are stored as.
#pragma once

#include "paging.h"

namespace quire {
namespace {

// Gives tiles as they lie, or copied to a buffer [kTileKeys][head_dim], which is little work beside
// meeting many rows.
template <typename E>
class Widening {
 public:
  Widening(int head_dim, float* buffer) : head_dim_(head_dim), buffer_(buffer) {}

  // The tile, of which only keys may be read until `take_values`, and only values from there on.
  const KeyTile<float>& take_keys(const KeyTile<E>& tile) {
    if constexpr (sizeof(E) == sizeof(float)) {
      return tile;
    } else {
      wide_.begin = tile.begin;
      wide_.end = tile.end;
      wide_.start = tile.start;
      wide_.stride = head_dim_;
      for (int group = first_group(tile); group < end_group(tile); ++group) {
        wide_.keys[group] = place(group * kGroup);
        for (int i = 0; i < kGroup; ++i)
          widen(tile.keys[group] + i * tile.stride, place(group * kGroup + i));
      }
      return wide_;
    }
  }

  void take_values([[maybe_unused]] const KeyTile<E>& tile) {
    if constexpr (sizeof(E) != sizeof(float))
      for (int key = tile.begin; key < tile.end; ++key) {
        wide_.values[key] = place(key);
        widen(tile.values[key], place(key));
      }
  }

 private:
  float* place(int key) const { return buffer_ + static_cast<int64_t>(key) * head_dim_; }

  void widen(const E* from, float* to) const {
    int d = 0;
    for (; d + kLanes <= head_dim_; d += kLanes) store(to + d, load(from + d));
    for (; d < head_dim_; ++d) to[d] = to_float(from[d]);
  }

  const int head_dim_;
  float* const buffer_;
  KeyTile<float> wide_;
};

}  // namespace
}  // namespace quire
