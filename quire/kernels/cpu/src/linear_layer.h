// Linear layers with what comes before and after them, for any form of the weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "phase.h"
#include "quantized.h"

namespace quire {

struct Layer {
  const float* x;  // [num_tokens, num_inputs]
  int64_t x_stride;
  int64_t num_tokens;
  // With a norm, x + residual is what is normalised, and it becomes the residual. Without a residual
  // that is x.
  const float* norm_weight;  // or null
  float eps;
  float* residual;    // [num_tokens, num_inputs], contiguous, or null
  const float* bias;  // or null
  bool is_gated;      // the outputs are gates, then as many values: out = silu(gate) * value
  float* out;
  int64_t out_stride;
  int32_t num_threads;
};

// A weight in float32, packed as float_linear.h says.
class FloatProduct {
 public:
  static constexpr int32_t kGroupRows = kPacked;

  FloatProduct(const FloatLinearCall& call, const Kernel& kernel) : call_(call), kernel_(kernel) {}

  int32_t num_inputs() const { return call_.num_inputs; }
  int32_t num_outputs() const { return call_.num_outputs; }
  int64_t num_tiles() const { return tiles().count; }
  int64_t first_token(int64_t tile) const { return tiles().first(static_cast<int32_t>(tile)); }
  size_t laid_bytes() const { return 0; }
  void set_memory(const float* x, int64_t x_stride, void*, float* out, int64_t out_stride) {
    call_.x = x;
    call_.x_stride = x_stride;
    call_.out = out;
    call_.out_stride = out_stride;
  }
  void lay(int64_t) const {}
  void multiply(int64_t first_group, int64_t end_group, int64_t, int64_t) const {
    kernel_.multiply(call_, static_cast<int32_t>(first_group), static_cast<int32_t>(end_group));
  }
  // Groups and tiles of a piece. The kernel takes all tokens at once; a few groups of weights stay in
  // the cache meanwhile.
  int64_t piece_groups(int64_t num_groups, int64_t threads) const {
    if (call_.num_tokens > 1) return kTaskGroups;
    return divide_up(divide_up(num_groups, threads * kPieces), kTaskGroups) * kTaskGroups;
  }
  int64_t piece_tiles(int64_t, int64_t, int64_t) const { return num_tiles(); }

 private:
  static constexpr int64_t kPieces = 8;

  TokenTiles tiles() const { return TokenTiles(call_.num_tokens, kernel_.tile_tokens); }

  FloatLinearCall call_;
  const Kernel& kernel_;
};

// A weight in quantised blocks.
class BlockProduct {
 public:
  static constexpr int32_t kGroupRows = kRows;

  BlockProduct(const PackedMatrix& matrix, const float* bias, int64_t num_tokens,
               const LinearKernel& kernel)
      : call_{matrix, nullptr, 0, bias, nullptr, 0, num_tokens, nullptr}, kernel_(kernel) {}

  int32_t num_inputs() const { return call_.matrix.num_inputs; }
  int32_t num_outputs() const { return call_.matrix.num_outputs; }
  int64_t num_tiles() const { return divide_up(call_.num_tokens, kernel_.tile_tokens); }
  int64_t first_token(int64_t tile) const {
    const int64_t token = tile * kernel_.tile_tokens;
    return token < call_.num_tokens ? token : call_.num_tokens;
  }
  size_t laid_bytes() const {
    return static_cast<size_t>(call_.num_tokens * num_inputs() / kBlock *
                               activation_bytes(call_.matrix.kind));
  }
  void set_memory(const float* x, int64_t x_stride, void* laid, float* out, int64_t out_stride) {
    call_.x = x;
    call_.x_stride = x_stride;
    call_.activations = static_cast<uint8_t*>(laid);
    call_.out = out;
    call_.out_stride = out_stride;
  }
  void lay(int64_t tile) const { kernel_.round_inputs(call_, tile, tile + 1); }
  void multiply(int64_t first_group, int64_t end_group, int64_t first_tile, int64_t end_tile) const {
    kernel_.multiply(call_, first_group, end_group, first_tile, end_tile);
  }
  int64_t piece_groups(int64_t num_groups, int64_t threads) const {
    return divide_up(num_groups, threads * kPieces);
  }
  // Where there are few groups, pieces have a part of the tokens.
  int64_t piece_tiles(int64_t num_groups, int64_t groups, int64_t threads) const {
    return divide_up(num_tiles(), divide_up(threads * kPieces, divide_up(num_groups, groups)));
  }

 private:
  // Per thread: enough for threads that are held up to fall behind without being waited for.
  static constexpr int64_t kPieces = 8;

  LinearCall call_;
  const LinearKernel& kernel_;
};

}  // namespace quire
