// The layers of a decoder one after the other: attention and a gated network, each after a norm.
#pragma once

#include <cstdint>

#include "adapters.h"
#include "attention.h"
#include "quantized.h"

namespace quire {

// `DecoderLayer` in ../decoder.py mirrors this struct field by field, and so does `DecoderCall`.
struct DecoderLayer {
  PackedMatrix qkv, output, gate_up, down;  // of kind -1 in float32
  const float* qkv_bias;                    // biases may be null
  const float* output_bias;
  const float* gate_up_bias;
  const float* down_bias;
  const float* attention_norm;
  const float* network_norm;
  const float* q_norm;  // of heads, or null
  const float* k_norm;
  const Adapters* qkv_adapters;  // or null
  const Adapters* output_adapters;
  const Adapters* gate_up_adapters;
  const Adapters* down_adapters;
  float attention_eps;
  float network_eps;
  float head_eps;
  float scale;
  float softcap;
  int32_t window;
};

struct DecoderCall {
  const DecoderLayer* layers;
  void* const* caches;  // keys and values of each layer, as the calls of a step say
  float* residual;       // [num_tokens, hidden]: the input; in the end the sum before the last addend
  float* addend;         // as residual: what the last layer adds
  float* qkv;            // working space: [num_tokens, outputs of qkv]
  float* attended;       // [num_tokens, num_heads * head_dim]
  float* inner;          // [num_tokens, inputs of down]
  const int32_t* slots;  // of each token: its adapter, -1 for none; null if none has one
  int64_t num_tokens;
  int32_t num_layers;
  int32_t num_threads;
};

}  // namespace quire
