// Linear layers in float32, with the weight packed once at load, in float32 or in 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// Outputs are packed in groups: weight[group][input][kPacked]. The last group is padded with zeros.
constexpr int32_t kPacked = 16;

// What a weight is stored as. The numbers take the place of a kind of blocks.
enum class FloatKind : int32_t { kFloat16 = -3, kBfloat16 = -2, kFloat32 = -1 };

// x W^T + bias. `FloatLinearCall` in ../library.py mirrors this struct field by field; strides count
// floats.
struct FloatLinearCall {
  const float* x;       // [num_tokens, num_inputs]
  const void* weight;   // packed
  const float* bias;    // [num_outputs], or null
  float* out;           // [num_tokens, num_outputs]
  int64_t x_stride;
  int64_t out_stride;
  int32_t num_tokens;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t num_threads;
  FloatKind kind;
};

inline int32_t count_groups(const FloatLinearCall& call) {
  return (call.num_outputs + kPacked - 1) / kPacked;
}

// Tokens are cut into tiles of equal height, give or take one: a last one with few would be slow.
struct TokenTiles {
  int32_t num_tokens;
  int32_t count;

  TokenTiles(int32_t num_tokens, int32_t height)
      : num_tokens(num_tokens), count((num_tokens + height - 1) / height) {}
  int32_t first(int32_t tile) const {
    return static_cast<int32_t>(int64_t{num_tokens} * tile / count);
  }
};

}  // namespace quire
