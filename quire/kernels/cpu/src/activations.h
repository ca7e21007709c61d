// Rounds the inputs of a linear layer to 8 or 16 bits, with a scale for every 32 of them.
#pragma once

#include "integers.h"
#include "quantized.h"

namespace quire {
namespace {

// Rounds a block as token `t` of the `count` tokens of a tile.
template <Kind K, int PLANES>
QUIRE_INLINE void round_block(const float* x, uint8_t* tile, int t, int count) {
  constexpr Layout kLayout = layout_of(K);
  constexpr int kParts = kBlock / kLanes;
  Floats values[kParts];
  // As integers, magnitudes order like the numbers do, and NaN is above all.
  Ints largest = {};
  QUIRE_UNROLL
  for (int i = 0; i < kParts; ++i) {
    values[i] = load(x + i * kLanes);
    const Ints bits = (Ints)values[i] & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const int32_t top = largest_lane(largest);
  float magnitude;
  std::memcpy(&magnitude, &top, sizeof magnitude);
  const bool is_finite = top < 0x7f800000, is_zero = magnitude < kSmallestActivation;
  constexpr float kLargest = PLANES == 1 ? 127.0f : (127 << kLowBits) + 127;
  const float scale = is_zero ? 0.0f : is_finite ? magnitude / kLargest : __builtin_nanf("");
  const Floats inverse = splat(is_zero || !is_finite ? 0.0f : kLargest / magnitude);
  if (!is_finite)  // the scale says it all
    for (int i = 0; i < kParts; ++i) values[i] = Floats{};
  int8_t numbers[PLANES][kBlock];
  Ints sums[2] = {};
  QUIRE_UNROLL
  for (int i = 0; i < kParts; ++i) {
    Ints rounded = round(values[i] * inverse);
    if constexpr (PLANES == 1) {
      store_narrow(numbers[0] + i * kLanes, rounded);
    } else {
      constexpr int kHalf = 1 << (kLowBits - 1);
      const Ints high = (rounded + kHalf) >> kLowBits;
      Ints low = rounded - (high << kLowBits);
      low = low == -kHalf ? splat_int(1 - kHalf) : low;
      rounded = (high << kLowBits) + low;
      store_narrow(numbers[0] + i * kLanes, high);
      store_narrow(numbers[1] + i * kLanes, low);
    }
    sums[i * 2 / kParts] += rounded;
  }
  QUIRE_UNROLL
  for (int plane = 0; plane < PLANES; ++plane, tile += kBlock * count)
    QUIRE_UNROLL
    for (int q = 0; q < kQuads; ++q)
      std::memcpy(tile + 4 * (q * count + t), numbers[plane] + 4 * q, 4);
  tile += 4 * t;
  std::memcpy(tile, &scale, 4);
  if constexpr (kLayout.parts == 2) {
    QUIRE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int32_t start = -kLayout.offset * sum_lanes(sums[part]);
      std::memcpy(tile + 4 * (part + 1) * count, &start, 4);
    }
    return;
  }
  const int32_t total = sum_lanes(sums[0] + sums[1]);
  if constexpr (kLayout.offset != 0) {
    const int32_t start = -kLayout.offset * total;
    std::memcpy(tile += 4 * count, &start, 4);
  }
  if constexpr (kLayout.has_minima) {
    const float sum = scale * static_cast<float>(total);
    std::memcpy(tile + 4 * count, &sum, 4);
  }
}

// The inputs of 32 columns.
inline void gather(const float* x, const int32_t* order, float (&to)[kBlock]) {
  for (int i = 0; i < kBlock; ++i) to[i] = order[i] < 0 ? 0.0f : x[order[i]];
}

template <Kind K, int PLANES>
void round_tiles(const LinearCall& call, int64_t first_tile, int64_t end_tile) {
  const int64_t num_blocks = call.matrix.num_blocks();
  const int32_t* order = call.matrix.order;
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    const int64_t first = tile * kTile, left = call.num_tokens - first;
    const int count = static_cast<int>(left < kTile ? left : kTile);
    constexpr int kBytes = activation_bytes(K, PLANES);
    uint8_t* to = call.activations + first * num_blocks * kBytes;
    for (int64_t block = 0; block < num_blocks; ++block, to += count * kBytes)
      for (int t = 0; t < count; ++t) {
        const float* x = call.x + (first + t) * call.x_stride;
        float gathered[kBlock];
        if (order) gather(x, order + block * kBlock, gathered);
        round_block<K, PLANES>(order ? gathered : x + block * kBlock, to, t, count);
      }
  }
}

}  // namespace
}  // namespace quire
