// The entry point for all layers of a decoder.

#include "decoder.h"

#include "linear_layer.h"

extern "C" {
int quire_norm_linear(const quire::PackedMatrix* matrix, const quire::Layer* layer);
int quire_attend_qkv(const quire::QKVCall* qkv, const quire::WriteCall* write,
                       const quire::AttentionCall* call);
}

namespace quire {
namespace {

// Fills in what the layers share, and carries them out.
class Decoder {
 public:
  Decoder(const DecoderCall& call, const QKVCall& qkv, const WriteCall& write,
          const AttentionCall& attention)
      : call_(call), qkv_(qkv), write_(write), attention_(attention) {}

  // Returns 0, or -1 if there is no memory.
  int run() {
    for (int32_t i = 0; i < call_.num_layers; ++i) {
      const DecoderLayer& layer = call_.layers[i];
      if (project(layer, i == 0) || attend(layer, call_.caches + 2 * i)) return -1;
      if (multiply(layer.output, layer.output_bias, layer.output_adapters, call_.attended))
        return -1;
      if (widen(layer)) return -1;
      if (multiply(layer.down, layer.down_bias, layer.down_adapters, call_.inner)) return -1;
    }
    return 0;
  }

 private:
  Layer after_norm(const float* norm, float eps, const float* bias, const Adapters* adapters,
                   float* out, int64_t width) const {
    const int64_t hidden = call_.layers->qkv.num_inputs;
    return {call_.addend, hidden, call_.num_tokens, norm,        eps,
            call_.residual, bias, false,            out,         width,
            adapters,     call_.slots, call_.num_threads};
  }

  int project(const DecoderLayer& layer, bool is_first) const {
    Layer product = after_norm(layer.attention_norm, layer.attention_eps, layer.qkv_bias,
                               layer.qkv_adapters, call_.qkv, layer.qkv.num_outputs);
    if (is_first) {  // nothing has been added yet
      product.x = call_.residual;
      product.residual = nullptr;
    }
    return quire_norm_linear(&layer.qkv, &product);
  }

  int attend(const DecoderLayer& layer, void* const* caches) {
    const int64_t width = layer.qkv.num_outputs, q_width = int64_t{qkv_.num_heads} * write_.head_dim;
    qkv_.q = call_.qkv;
    attention_.q = call_.qkv;
    write_.k = call_.qkv + q_width;
    write_.v = write_.k + int64_t{write_.num_kv_heads} * write_.head_dim;
    qkv_.q_stride = attention_.q_stride = write_.k_stride = write_.v_stride = width;
    qkv_.q_norm = layer.q_norm;
    qkv_.k_norm = layer.k_norm;
    qkv_.eps = layer.head_eps;
    write_.keys = caches[0];
    write_.values = caches[1];
    attention_.keys = caches[0];
    attention_.values = caches[1];
    attention_.num_heads = qkv_.num_heads;
    attention_.out = call_.attended;
    attention_.out_stride = q_width;
    attention_.scale = layer.scale;
    attention_.softcap = layer.softcap;
    attention_.sinks = nullptr;
    attention_.window = layer.window;
    return quire_attend_qkv(&qkv_, &write_, &attention_);
  }

  int widen(const DecoderLayer& layer) const {
    Layer product = after_norm(layer.network_norm, layer.network_eps, layer.gate_up_bias,
                               layer.gate_up_adapters, call_.inner, layer.down.num_inputs);
    product.is_gated = true;
    return quire_norm_linear(&layer.gate_up, &product);
  }

  int multiply(const PackedMatrix& matrix, const float* bias, const Adapters* adapters,
               const float* x) const {
    const Layer product = {x,           matrix.num_inputs, call_.num_tokens, nullptr,     0.0f,
                           nullptr,     bias,              false,            call_.addend,
                           matrix.num_outputs, adapters,   call_.slots,      call_.num_threads};
    return quire_norm_linear(&matrix, &product);
  }

  const DecoderCall& call_;
  QKVCall qkv_;
  WriteCall write_;
  AttentionCall attention_;
};

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// `qkv` has the rotation and the number of query heads, `write` and `attention` what all layers
// share of a step. Returns 0, or -1 if there is no memory.
int quire_decode(const quire::DecoderCall* call, const quire::QKVCall* qkv,
                 const quire::WriteCall* write, const quire::AttentionCall* attention) {
  return quire::Decoder(*call, *qkv, *write, *attention).run();
}

}  // extern "C"
#pragma GCC visibility pop
