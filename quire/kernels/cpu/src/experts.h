// Experts of a layer: the networks that tokens have chosen, and the weighted sums of what they give.
#pragma once

#include <cstdint>

#include "quantized.h"

namespace quire {

// `ExpertsCall` in ../experts.py mirrors this struct field by field.
struct ExpertsCall {
  const PackedMatrix* gate_up;  // [num_experts]: the outputs are gates, then as many values
  const PackedMatrix* down;     // [num_experts]
  const float* gate_up_bias;    // [num_experts, outputs], or null
  const float* down_bias;       // [num_experts, outputs], or null
  const float* x;               // [num_tokens, inputs of gate_up]
  const int32_t* chosen;        // [num_tokens, top_k]; those without a matrix here are left out
  const float* weights;         // [num_tokens, top_k]
  float* out;                   // [num_tokens, outputs of down], contiguous
  int64_t x_stride;
  int64_t num_tokens;
  int32_t first_expert;  // the number of the first matrix
  int32_t num_experts;
  int32_t top_k;
  float limit;  // of the inputs of `limited_gate` in pointwise.h; 0: the gate is silu
  float slope;  // of the same
  int32_t num_threads;
};

}  // namespace quire
