// All layers in one call against the entry points of their parts, which have tests of their own.

#include "decoder.h"

#include <cmath>

#include <memory>

#include "adapters_of_layers.h"
#include "check.h"
#include "linear_layer.h"

extern "C" {
int quire_decode(const quire::DecoderCall* call, const quire::QKVCall* qkv_call,
                 const quire::WriteCall* write, const quire::AttentionCall* attention);
int quire_norm_linear(const quire::PackedMatrix* matrix, const quire::Layer* layer);
int quire_attend_qkv(const quire::QKVCall* qkv_call, const quire::WriteCall* write,
                       const quire::AttentionCall* call);
}

namespace check {
namespace {

constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 18, kHidden = 45, kInner = 50, kLayers = 2;
constexpr int kBlockSize = 4, kNumBlocks = 6;
constexpr int kQueryWidth = kHeads * kHeadDim, kWidth = kQueryWidth + 2 * kKvHeads * kHeadDim;
constexpr float kEpsilon = 1e-5f;

size_t size(int64_t count) { return static_cast<size_t>(count); }

// Random weights as floats, kept alive by `store`.
quire::PackedMatrix matrix(int outputs, int inputs, Random& random, std::vector<Floats>& store) {
  const int groups = (outputs + quire::kPacked - 1) / quire::kPacked;
  store.push_back(random.normals(size(groups * inputs) * size(quire::kPacked)));
  for (float& weight : store.back()) weight /= std::sqrt(static_cast<float>(inputs));
  return {reinterpret_cast<const uint8_t*>(store.back().data()), static_cast<quire::Kind>(-1), outputs,
          inputs, 1, nullptr, 0, 0, 0};
}

struct Model {
  std::vector<Floats> store;
  std::vector<std::unique_ptr<RandomAdapters>> adapters;
  std::vector<quire::DecoderLayer> layers;

  explicit Model(Random& random) {
    store.reserve(kLayers * 16);
    auto vector = [&](int count) {
      store.push_back(random.normals(size(count)));
      return store.back().data();
    };
    for (int i = 0; i < kLayers; ++i) {
      quire::DecoderLayer layer = {};
      layer.qkv = matrix(kWidth, kHidden, random, store);
      layer.output = matrix(kHidden, kQueryWidth, random, store);
      layer.gate_up = matrix(2 * kInner, kHidden, random, store);
      layer.down = matrix(kHidden, kInner, random, store);
      const auto adapt = [&](std::vector<int> outputs, int inputs) {
        adapters.push_back(std::make_unique<RandomAdapters>(outputs, inputs, random));
        return &adapters.back()->layer;
      };
      layer.qkv_adapters = adapt({kQueryWidth, kWidth - kQueryWidth}, kHidden);
      layer.output_adapters = adapt({kHidden}, kQueryWidth);
      layer.gate_up_adapters = adapt({kInner, kInner}, kHidden);
      layer.down_adapters = i == 0 ? adapt({kHidden}, kInner) : nullptr;
      layer.qkv_bias = vector(kWidth);
      layer.attention_norm = vector(kHidden);
      layer.network_norm = vector(kHidden);
      layer.q_norm = i == 0 ? vector(kHeadDim) : nullptr;
      layer.k_norm = i == 0 ? vector(kHeadDim) : nullptr;
      layer.attention_eps = layer.network_eps = layer.head_eps = kEpsilon;
      layer.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
      layer.window = i == 0 ? 1 << 30 : 3;
      layers.push_back(layer);
    }
  }
};

// A prompt and what its layers write to.
struct Step {
  int tokens;
  Floats residual, addend, qkv, attended, inner, cos, sin;
  std::vector<std::vector<uint8_t>> caches;
  std::vector<void*> cache_pointers;
  std::vector<int64_t> slots, positions;
  std::vector<int32_t> adapter_slots;
  std::vector<int32_t> query_start, context_lens, table;
  quire::QKVCall qkv_call = {};
  quire::WriteCall write = {};
  quire::AttentionCall attention = {};

  Step(int tokens, const Floats& input, quire::Stored stored, uint32_t seed)
      : tokens(tokens), residual(input), addend(input.size()), qkv(size(tokens * kWidth)),
        attended(size(tokens * kQueryWidth)), inner(size(tokens * kInner)),
        query_start{0, tokens}, context_lens{tokens} {
    Random random(seed);
    cos = random.normals(size(tokens * kHeadDim / 2));
    sin = random.normals(cos.size());
    for (int i = 0; i < kNumBlocks; ++i) table.push_back((i * 5 + 2) % kNumBlocks);
    for (int i = 0; i < tokens; ++i) {
      positions.push_back(i);
      adapter_slots.push_back(i % (kAdapterSlots + 1) - 1);
      slots.push_back(int64_t{table[size(i / kBlockSize)]} * kBlockSize + i % kBlockSize);
    }
    const size_t element = stored == quire::Stored::kFloat16 ? 2 : 4;
    const size_t elements = size(kNumBlocks * kKvHeads * kBlockSize * kHeadDim);
    for (int i = 0; i < 2 * kLayers; ++i) caches.emplace_back(elements * element, 0xff);  // NaN
    for (std::vector<uint8_t>& cache : caches) cache_pointers.push_back(cache.data());
    qkv_call.cos = cos.data();
    qkv_call.sin = sin.data();
    qkv_call.positions = positions.data();
    qkv_call.num_heads = kHeads;
    qkv_call.rotary_dim = kHeadDim;
    write.slots = slots.data();
    write.token_stride = attention.token_stride = kHeadDim;
    write.head_stride = attention.head_stride = kBlockSize * kHeadDim;
    write.block_stride = attention.block_stride = kKvHeads * kBlockSize * kHeadDim;
    write.num_tokens = tokens;
    write.num_kv_heads = attention.num_kv_heads = kKvHeads;
    write.head_dim = attention.head_dim = kHeadDim;
    write.block_size = attention.block_size = kBlockSize;
    write.num_threads = attention.num_threads = num_threads;
    write.stored = attention.stored = stored;
    attention.query_start = query_start.data();
    attention.context_lens = context_lens.data();
    attention.block_tables = table.data();
    attention.table_stride = kNumBlocks;
    attention.num_requests = 1;
  }

  void linear(const quire::PackedMatrix& weight, const Floats& x, const float* norm, Floats* sum,
              const float* bias, const quire::Adapters* adapters, bool is_gated, Floats& out) const {
    const quire::Layer layer = {x.data(), weight.num_inputs, tokens, norm, kEpsilon,
                                sum ? sum->data() : nullptr, bias, is_gated, out.data(),
                                static_cast<int64_t>(out.size()) / tokens, adapters, adapter_slots.data(),
                                num_threads};
    equal("quire_norm_linear", quire_norm_linear(&weight, &layer), 0);
  }

  void run_layer_by_layer(const Model& model) {
    for (int i = 0; i < kLayers; ++i) {
      const quire::DecoderLayer& layer = model.layers[size(i)];
      if (i == 0)
        linear(layer.qkv, residual, layer.attention_norm, nullptr, layer.qkv_bias, layer.qkv_adapters,
               false, qkv);
      else
        linear(layer.qkv, addend, layer.attention_norm, &residual, layer.qkv_bias, layer.qkv_adapters,
               false, qkv);
      qkv_call.q = qkv.data();
      attention.q = qkv.data();
      write.k = qkv.data() + kQueryWidth;
      write.v = write.k + kKvHeads * kHeadDim;
      qkv_call.q_stride = attention.q_stride = write.k_stride = write.v_stride = kWidth;
      qkv_call.q_norm = layer.q_norm;
      qkv_call.k_norm = layer.k_norm;
      qkv_call.eps = kEpsilon;
      write.keys = caches[size(2 * i)].data();
      write.values = caches[size(2 * i + 1)].data();
      attention.keys = write.keys;
      attention.values = write.values;
      attention.num_heads = kHeads;
      attention.out = attended.data();
      attention.out_stride = kQueryWidth;
      attention.scale = layer.scale;
      attention.window = layer.window;
      equal("quire_attend_qkv", quire_attend_qkv(&qkv_call, &write, &attention), 0);
      linear(layer.output, attended, nullptr, nullptr, nullptr, layer.output_adapters, false, addend);
      linear(layer.gate_up, addend, layer.network_norm, &residual, nullptr, layer.gate_up_adapters,
             true, inner);
      linear(layer.down, inner, nullptr, nullptr, nullptr, layer.down_adapters, false, addend);
    }
  }

  void run_at_once(const Model& model) {
    const quire::DecoderCall call = {model.layers.data(), cache_pointers.data(), residual.data(),
                                     addend.data(), qkv.data(), attended.data(), inner.data(),
                                     adapter_slots.data(), tokens, kLayers, num_threads};
    equal("quire_decode", quire_decode(&call, &qkv_call, &write, &attention), 0);
  }
};

}  // namespace

void test_decode() {
  Random random(static_cast<uint32_t>(num_threads));
  const Model model(random);
  for (const quire::Stored stored : {quire::Stored::kFloat32, quire::Stored::kFloat16})
    for (const int tokens : {1, 2, 7, 23}) {
      const Floats input = random.normals(size(tokens * kHidden));
      Step parts(tokens, input, stored, 1), whole(tokens, input, stored, 1);
      parts.run_layer_by_layer(model);
      whole.run_at_once(model);
      for (size_t i = 0; i < input.size(); ++i) {
        near("a residual", whole.residual[i], parts.residual[i], 0);
        near("an addend", whole.addend[i], parts.addend[i], 0);
      }
    }
}

}  // namespace check
