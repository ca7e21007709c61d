// Rounds the inputs of a linear layer to 8 bits, with a scale for every 32 of them.
#pragma once

#include "integers.h"
#include "quantized.h"

namespace quire {
namespace {

struct RoundedBlock {
  int8_t numbers[kBlock];
  float scale;
  int32_t sums[2];  // of the two halves
};

inline void round_block(const float* x, RoundedBlock& block) {
  constexpr int kVectors = kBlock / kLanes;
  Floats values[kVectors];
  // As integers, magnitudes order like the numbers do, and NaN is above all.
  Ints largest = {};
  for (int i = 0; i < kVectors; ++i) {
    values[i] = load(x + i * kLanes);
    const Ints bits = (Ints)values[i] & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = largest[i] > top ? largest[i] : top;
  float magnitude;
  std::memcpy(&magnitude, &top, sizeof magnitude);
  block = {};
  if (top >= 0x7f800000) {
    block.scale = __builtin_nanf("");
    return;
  }
  if (magnitude < kSmallestActivation) return;
  block.scale = magnitude / 127.0f;
  const float inverse = 127.0f / magnitude;
  Ints sums[2] = {};
  for (int i = 0; i < kVectors; ++i) {
    const Ints numbers = round(values[i] * inverse);
    sums[i * 2 / kVectors] += numbers;
    const NarrowSigned narrow = __builtin_convertvector(numbers, NarrowSigned);
    std::memcpy(block.numbers + i * kLanes, &narrow, sizeof narrow);
  }
  for (int i = 0; i < kLanes; ++i) {
    block.sums[0] += sums[0][i];
    block.sums[1] += sums[1][i];
  }
}

// Enters a rounded block as token `t` of the `count` tokens of a tile.
inline void store_block(const RoundedBlock& block, const Layout& layout, uint8_t* tile, int t,
                        int count) {
  for (int q = 0; q < kQuads; ++q)
    std::memcpy(tile + 4 * (q * count + t), block.numbers + 4 * q, 4);
  tile += kBlock * count;
  std::memcpy(tile + 4 * t, &block.scale, 4);
  tile += 4 * count;
  const int32_t total = block.sums[0] + block.sums[1];
  if (layout.has_minima) {
    const float sum = block.scale * static_cast<float>(total);
    std::memcpy(tile + 4 * t, &sum, 4);
    return;
  }
  for (int part = 0; part < layout.parts; ++part) {
    const int32_t start = -layout.offset * (layout.parts == 1 ? total : block.sums[part]);
    std::memcpy(tile + 4 * (part * count + t), &start, 4);
  }
}

void round_tiles(const LinearCall& call, int64_t first_tile, int64_t end_tile) {
  const Layout layout = layout_of(call.matrix.kind);
  const int64_t num_blocks = call.matrix.num_inputs / kBlock;
  const int64_t bytes = activation_bytes(call.matrix.kind);
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    const int64_t first = tile * kTile, left = call.num_tokens - first;
    const int count = static_cast<int>(left < kTile ? left : kTile);
    uint8_t* to = call.activations + first * num_blocks * bytes;
    for (int64_t block = 0; block < num_blocks; ++block, to += count * bytes)
      for (int t = 0; t < count; ++t) {
        RoundedBlock rounded;
        round_block(call.x + (first + t) * call.x_stride + block * kBlock, rounded);
        store_block(rounded, layout, to, t, count);
      }
  }
}

}  // namespace
}  // namespace quire
