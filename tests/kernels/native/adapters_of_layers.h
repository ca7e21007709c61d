// Random adapters for the outputs of a layer.
#pragma once

#include <vector>

#include "adapters.h"
#include "check.h"

namespace check {

constexpr int kAdapterSlots = 3, kAdapterChunks = 7, kMostChunks = 3;

struct RandomAdapters {
  Floats chunks;
  // Of each slot: its chunks, then, of each slice, their count, then bits of vectors.
  std::vector<int32_t> states;
  std::vector<quire::AdapterSlice> slices;
  quire::Adapters layer;

  RandomAdapters(const std::vector<int>& outputs, int inputs, Random& random) {
    const int64_t num_slices = static_cast<int64_t>(outputs.size());
    const int64_t stride = kMostChunks + 2 * num_slices;
    states.resize(static_cast<size_t>(kAdapterSlots * stride));
    int64_t at = 0, first = 0;
    for (int64_t i = 0; i < num_slices; ++i) {
      const int64_t width = outputs[static_cast<size_t>(i)];
      quire::AdapterSlice one = {};
      one.counts = states.data() + kMostChunks + i;
      one.vectors = one.counts + num_slices;
      one.a_offset = at;
      one.a_stride = inputs;
      one.b_offset = at + quire::kChunkRows * inputs;
      one.b_stride = width;
      one.bias_offset = one.b_offset + quire::kChunkRows * width;
      one.gains_offset = one.bias_offset + width;
      one.first = static_cast<int32_t>(first);
      one.num_outputs = static_cast<int32_t>(width);
      slices.push_back(one);
      at = one.gains_offset + width;
      first += width;
    }
    chunks = random.normals(static_cast<size_t>(at * kAdapterChunks));
    for (float& value : chunks) value *= 0.2f;
    for (int slot = 0; slot < kAdapterSlots; ++slot) {
      int32_t* state = states.data() + slot * stride;
      for (int i = 0; i < kMostChunks; ++i) state[i] = random.integer(0, kAdapterChunks - 1);
      for (int64_t i = 0; i < num_slices; ++i) {
        state[kMostChunks + i] = random.integer(0, kMostChunks);
        state[kMostChunks + num_slices + i] = random.integer(0, 3);
      }
    }
    layer = {slices.data(), chunks.data(), states.data(), at, stride,
             static_cast<int32_t>(num_slices), kMostChunks, inputs};
  }
};

}  // namespace check
