// Linear layers with what comes before and after them, for any format of the weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adapters.h"
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
  const Adapters* adapters;  // or null
  const int32_t* slots;      // of each token: its adapter; null if none has one
  int32_t num_threads;
};

// A weight in floats, packed as float_linear.h says.
class FloatProduct {
 public:
  static constexpr int32_t kGroupRows = kPacked;
  static constexpr int64_t kTogether = 2;  // groups

  FloatProduct(const FloatLinearCall& call, const Kernel& kernel) : call_(call), kernel_(kernel) {}

  int32_t num_inputs() const { return call_.num_inputs; }
  int32_t num_outputs() const { return call_.num_outputs; }
  // Tokens are prepared, and given to `multiply`, in multiples of this.
  int64_t tile_tokens() const { return kernel_.tile_tokens; }
  size_t laid_bytes() const { return 0; }
  void set_inputs(const float* x, int64_t x_stride, void*) {
    call_.x = x;
    call_.x_stride = x_stride;
  }
  void lay(int64_t, int64_t) const {}
  // `out` is where the first output of the first of these tokens goes.
  void multiply(int64_t first_group, int64_t end_group, int64_t first_token, int64_t end_token,
                float* out, int64_t out_stride) const {
    FloatLinearCall part = call_;
    part.x += first_token * call_.x_stride;
    part.num_tokens = static_cast<int32_t>(end_token - first_token);
    part.out = out - first_group * kGroupRows;
    part.out_stride = out_stride;
    kernel_.multiply(part, static_cast<int32_t>(first_group), static_cast<int32_t>(end_group));
  }

 private:
  FloatLinearCall call_;
  const Kernel& kernel_;
};

// A weight in quantised blocks.
class BlockProduct {
 public:
  static constexpr int32_t kGroupRows = kRows;
  static constexpr int64_t kTogether = 1;

  BlockProduct(const PackedMatrix& matrix, const float* bias, int64_t num_tokens,
               const LinearKernel& kernel)
      : call_{matrix, nullptr, 0, bias, nullptr, 0, num_tokens, nullptr}, kernel_(kernel) {}

  int32_t num_inputs() const { return call_.matrix.num_inputs; }
  int32_t num_outputs() const { return call_.matrix.num_outputs; }
  int64_t tile_tokens() const { return kernel_.tile_tokens; }
  size_t laid_bytes() const {
    return static_cast<size_t>(call_.num_tokens * call_.matrix.num_blocks() *
                               activation_bytes(call_.matrix.kind, call_.matrix.input_planes));
  }
  void set_inputs(const float* x, int64_t x_stride, void* laid) {
    call_.x = x;
    call_.x_stride = x_stride;
    call_.activations = static_cast<uint8_t*>(laid);
  }
  void lay(int64_t first_token, int64_t end_token) const {
    kernel_.round_inputs(call_, first_token / tile_tokens(), divide_up(end_token, tile_tokens()));
  }
  void multiply(int64_t first_group, int64_t end_group, int64_t first_token, int64_t end_token,
                float* out, int64_t out_stride) const {
    LinearCall part = call_;
    part.out = out - first_token * out_stride - first_group * kGroupRows;
    part.out_stride = out_stride;
    kernel_.multiply(part, first_group, end_group, first_token / tile_tokens(),
                     divide_up(end_token, tile_tokens()));
  }

 private:
  LinearCall call_;
  const LinearKernel& kernel_;
};

// Calls `work` with the product of a matrix of quantised blocks, or of packed floats if its kind is a
// FloatKind.
template <typename Work>
auto with_product(const PackedMatrix& matrix, const float* bias, int64_t num_tokens, Work work) {
  if (static_cast<int32_t>(matrix.kind) >= 0)
    return work(BlockProduct(matrix, bias, num_tokens, chosen_blocks()));
  const FloatLinearCall call = {nullptr,
                                matrix.data,
                                bias,
                                nullptr,
                                0,
                                0,
                                static_cast<int32_t>(num_tokens),
                                matrix.num_outputs,
                                matrix.num_inputs,
                                0,
                                static_cast<FloatKind>(matrix.kind)};
  return work(FloatProduct(call, chosen_kernel()));
}

// Below this many multiply-adds waking other threads costs more than it gains.
constexpr int64_t kSerialProducts = 100000;
// Pieces per thread: enough for threads that are held up to fall behind without being waited for.
constexpr int64_t kPieces = 8;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Some groups of outputs of some tokens.
struct Rectangle {
  int64_t group, end_group, token, end_token;
};

// How the outputs are cut into pieces: rectangles of groups and tokens.
struct Pieces {
  int64_t num_groups, groups, num_tokens, tokens;

  // Groups are worked on `together`. Where there are few of them, pieces have a part of the tokens.
  // About as many as are `wanted` come of it.
  Pieces(int64_t num_groups, int64_t num_tokens, int64_t together, int64_t tile, int64_t wanted)
      : num_groups(num_groups), num_tokens(num_tokens) {
    const int64_t steps = divide_up(num_groups, together);
    // Tokens of one tile only wait for memory, and small pieces come out even. With more, a piece has
    // groups to ask for while it works on others.
    if (num_tokens <= tile)
      groups = (steps < wanted ? 1 : steps / wanted) * together;
    else
      groups = divide_up(divide_up(num_groups, wanted), 2) * 2;
    tokens = divide_up(divide_up(num_tokens, tile), divide_up(wanted, divide_up(num_groups, groups))) *
             tile;
  }
  int64_t across() const { return divide_up(num_tokens, tokens); }
  int64_t count() const { return divide_up(num_groups, groups) * across(); }
  // Pieces of the same groups follow each other.
  Rectangle at(int64_t piece) const {
    const int64_t group = piece / across() * groups, token = piece % across() * tokens;
    return {group, least(group + groups, num_groups), token, least(token + tokens, num_tokens)};
  }
};

// Working space, cut from one piece of memory.
struct Space {
  size_t bytes = 0;
  size_t add(size_t count) {
    const size_t at = bytes;
    bytes += (count + 63) / 64 * 64;
    return at;
  }
};

}  // namespace quire
