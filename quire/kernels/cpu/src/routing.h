// The choice of experts for each token, from the logits of a router.
#pragma once

#include <cstdint>

namespace quire {

// What tokens rank experts by. The order of SCORINGS in ../experts.py.
enum class Scoring : int32_t { kSoftmax, kSoftmaxOfChosen, kSigmoid };

// `RoutingCall` in ../experts.py mirrors this struct field by field.
struct RoutingCall {
  const float* logits;  // [num_tokens, num_experts]
  const float* bias;    // [num_experts], of the choice by sigmoid
  int32_t* chosen;      // [num_tokens, top_k], the best first
  float* weights;       // [num_tokens, top_k]
  int64_t stride;
  int64_t num_tokens;
  int32_t num_experts;
  int32_t top_k;
  int32_t num_groups;  // of experts one after the other
  int32_t top_groups;  // that a token chooses from
  Scoring scoring;
  int32_t normalizes;
  float factor;
  int32_t num_threads;
};

}  // namespace quire
