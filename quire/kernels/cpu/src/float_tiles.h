// Tiles of a linear layer: some tokens times one or two groups of outputs, held in registers.
#pragma once

#include "float_linear.h"
#include "halves.h"

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

// Rows of inputs that are addressed from one pointer: it, it + stride and it + 2 * stride.
constexpr int kRowsPerPointer = 3;
// How far ahead of their use weights are asked for where all tokens fit one tile, in floats.
constexpr int64_t kFloatsAhead = 512;

// T tokens times G groups of weights of type E. Weights that lie `ahead` of those in use are asked
// for, if it is not 0.
template <typename E, int G, int T>
QUIRE_NOINLINE void multiply_tile(const FloatLinearCall& call, int32_t group, int32_t token,
                                  int64_t ahead) {
  constexpr int kPointers = (T + kRowsPerPointer - 1) / kRowsPerPointer;
  const int32_t num_inputs = call.num_inputs;
  const size_t panel = static_cast<size_t>(num_inputs) * kPacked;
  const E* weight = static_cast<const E*>(call.weight) + group * panel;
  const int64_t stride = call.x_stride;
  const float* x[kPointers];
  QUIRE_UNROLL
  for (int i = 0; i < kPointers; ++i) x[i] = call.x + (token + i * kRowsPerPointer) * stride;
  Floats sums[T][G * kPackedVectors];
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t)
    QUIRE_UNROLL
    for (int v = 0; v < G * kPackedVectors; ++v) sums[t][v] = Floats{};
  const auto add = [&](int32_t k) __attribute__((always_inline)) {
    Floats w[G * kPackedVectors];
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      QUIRE_UNROLL
      for (int v = 0; v < kPackedVectors; ++v)
        w[g * kPackedVectors + v] = load(weight + g * panel + v * kLanes);
    weight += kPacked;
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const Floats input = splat(x[t / kRowsPerPointer][t % kRowsPerPointer * stride + k]);
      QUIRE_UNROLL
      for (int v = 0; v < G * kPackedVectors; ++v) sums[t][v] = fma(w[v], input, sums[t][v]);
    }
  };
  if (ahead)
    for (int32_t k = 0; k < num_inputs; ++k) {
      QUIRE_UNROLL
      for (int g = 0; g < G; ++g) __builtin_prefetch(weight + g * panel + ahead);
      add(k);
    }
  else
    for (int32_t k = 0; k < num_inputs; ++k) add(k);
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t)
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      store_group(call, token + t, group + g, sums[t] + g * kPackedVectors);
}

// Calls the tile that was compiled for this number of tokens.
template <typename E, int G, int T = 1>
void multiply_tokens(const FloatLinearCall& call, int32_t group, int32_t token, int32_t count,
                     int64_t ahead) {
  if constexpr (T < kTileTokens)
    if (count > T) return multiply_tokens<E, G, T + 1>(call, group, token, count, ahead);
  multiply_tile<E, G, T>(call, group, token, ahead);
}

// G groups, which stay in the cache meanwhile, for the tokens of all tiles.
template <typename E, int G>
void multiply_all(const FloatLinearCall& call, int32_t group, bool has_next) {
  const TokenTiles tiles(call.num_tokens, kTileTokens);
  // Weights come from memory while earlier ones are worked with: those of the next groups if there is
  // more than one tile to do it in.
  int64_t ahead = kFloatsAhead;
  if (tiles.count > 1) ahead = has_next ? int64_t{G} * call.num_inputs * kPacked : 0;
  for (int32_t tile = 0; tile < tiles.count; ++tile) {
    const int32_t token = tiles.first(tile), height = tiles.first(tile + 1) - token;
    multiply_tokens<E, G>(call, group, token, height, tile == 0 ? ahead : 0);
  }
}

template <typename E>
void multiply_groups_of(const FloatLinearCall& call, int32_t first, int32_t end) {
  int32_t group = first;
  for (; group + kTileGroups <= end; group += kTileGroups)
    multiply_all<E, kTileGroups>(call, group, group + 2 * kTileGroups <= end);
  for (; group < end; ++group) multiply_all<E, 1>(call, group, group + 2 <= end);
}

void multiply_groups(const FloatLinearCall& call, int32_t first, int32_t end) {
  switch (call.kind) {
    case FloatKind::kFloat32: return multiply_groups_of<float>(call, first, end);
    case FloatKind::kFloat16: return multiply_groups_of<Half>(call, first, end);
    case FloatKind::kBfloat16: return multiply_groups_of<Bfloat>(call, first, end);
  }
}

}  // namespace
}  // namespace quire
