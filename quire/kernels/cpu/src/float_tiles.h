// Tiles of a linear layer: some tokens times one or two groups of outputs, held in registers.
#pragma once

#include "float_linear.h"
#include "vector.h"

namespace quire {
namespace {

constexpr int kPackedVectors = kPacked / kLanes;
// Two groups at a time where one vector holds a group, so that the tile is not too flat.
constexpr int kTileGroups = kPackedVectors == 1 ? 2 : 1;
// The rest of the registers holds weights and an input.
constexpr int kTileTokens = (kRegisters - 4) / (kTileGroups * kPackedVectors) / 3 * 3;

QUIRE_INLINE void store_group(const FloatLinearCall& call, int32_t token, int32_t group,
                              const Floats* sums) {
  float* out = call.out + token * call.out_stride + group * kPacked;
  const float* bias = call.bias ? call.bias + group * kPacked : nullptr;
  const int32_t left = call.num_outputs - group * kPacked;
  if (left >= kPacked) {
    QUIRE_UNROLL
    for (int v = 0; v < kPackedVectors; ++v)
      store(out + v * kLanes, bias ? sums[v] + load(bias + v * kLanes) : sums[v]);
    return;
  }
  for (int i = 0; i < left; ++i)
    out[i] = sums[i / kLanes][i % kLanes] + (bias ? bias[i] : 0.0f);
}

// `columns` has the inputs of T tokens side by side, [num_inputs][T].
template <int G, int T>
QUIRE_NOINLINE void multiply_tile(const FloatLinearCall& call, const float* columns, int32_t group,
                                  int32_t token) {
  const int32_t num_inputs = call.num_inputs;
  const size_t panel = static_cast<size_t>(num_inputs) * kPacked;
  const float* weight = call.weight + group * panel;
  Floats sums[T][G * kPackedVectors];
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t)
    QUIRE_UNROLL
    for (int v = 0; v < G * kPackedVectors; ++v) sums[t][v] = Floats{};
  for (int32_t k = 0; k < num_inputs; ++k, columns += T) {
    Floats w[G * kPackedVectors];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      QUIRE_UNROLL
      for (int v = 0; v < kPackedVectors; ++v)
        w[g * kPackedVectors + v] = load(weight + g * panel + k * kPacked + v * kLanes);
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const Floats input = splat(columns[t]);
      QUIRE_UNROLL
      for (int v = 0; v < G * kPackedVectors; ++v) sums[t][v] += w[v] * input;
    }
  }
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t)
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      store_group(call, token + t, group + g, sums[t] + g * kPackedVectors);
}

// Calls the tile that was compiled for this number of tokens.
template <int G, int T = 1>
void multiply_tokens(const FloatLinearCall& call, const float* columns, int32_t group, int32_t token,
                     int32_t count) {
  if constexpr (T < kTileTokens)
    if (count > T) return multiply_tokens<G, T + 1>(call, columns, group, token, count);
  multiply_tile<G, T>(call, columns, group, token);
}

// Lays the inputs of a tile's tokens side by side.
void lay_columns(const FloatLinearCall& call, int32_t tile, float* columns) {
  const TokenTiles tiles(call.num_tokens, kTileTokens);
  const int32_t first = tiles.first(tile), height = tiles.first(tile + 1) - first;
  columns += static_cast<size_t>(first) * call.num_inputs;
  for (int32_t t = 0; t < height; ++t) {
    const float* x = call.x + (first + t) * call.x_stride;
    for (int32_t k = 0; k < call.num_inputs; ++k)
      columns[static_cast<size_t>(k) * height + t] = x[k];
  }
}

void multiply_groups(const FloatLinearCall& call, const float* columns, int32_t first, int32_t end) {
  const TokenTiles tiles(call.num_tokens, kTileTokens);
  for (int32_t tile = 0; tile < tiles.count; ++tile) {
    const int32_t token = tiles.first(tile), height = tiles.first(tile + 1) - token;
    const float* x = columns + static_cast<size_t>(token) * call.num_inputs;
    int32_t group = first;
    for (; group + kTileGroups <= end; group += kTileGroups)
      multiply_tokens<kTileGroups>(call, x, group, token, height);
    for (; group < end; ++group) multiply_tokens<1>(call, x, group, token, height);
  }
}

}  // namespace
}  // namespace quire
