// What adapters add to the outputs of a layer, against sums in double precision.

#include "adapters_of_layers.h"

extern "C" {
int quire_add_adapters(const quire::Adapters* adapters, const int32_t* slots, const float* x,
                       int64_t x_stride, int64_t num_tokens, const float* bias, float* out,
                       int64_t out_stride, int64_t num_outputs, int32_t num_threads);
}

namespace check {
namespace {

size_t size(int64_t count) { return static_cast<size_t>(count); }

// What is added to one output of a token.
double added(const RandomAdapters& adapters, const quire::AdapterSlice& one, int slot,
             const float* x, int64_t output, double product) {
  const int64_t stride = adapters.layer.slot_stride;
  const int32_t* chunks = adapters.states.data() + slot * stride;
  const int32_t count = one.counts[slot * stride], vectors = one.vectors[slot * stride];
  if (count == 0) return 0;
  const float* first = adapters.chunks.data() + chunks[0] * adapters.layer.chunk_stride;
  double total = 0;
  if (vectors & 1) total += first[one.bias_offset + output];
  if (vectors & 2) total += first[one.gains_offset + output] * product;
  for (int32_t row = 0; row < count * quire::kChunkRows; ++row) {
    const float* chunk =
        adapters.chunks.data() + chunks[row / quire::kChunkRows] * adapters.layer.chunk_stride;
    const int64_t inside = row % quire::kChunkRows;
    double between = 0;
    for (int i = 0; i < adapters.layer.num_inputs; ++i)
      between += double{x[i]} * chunk[one.a_offset + inside * one.a_stride + i];
    total += between * chunk[one.b_offset + inside * one.b_stride + output];
  }
  return total;
}

void run_case(const std::vector<int>& outputs, int inputs, int tokens, bool has_bias,
              Random& random) {
  const RandomAdapters adapters(outputs, inputs, random);
  int64_t width = 0;
  for (int count : outputs) width += count;
  const int64_t x_stride = inputs + 3, out_stride = width + 2;
  const Floats x = random.normals(size(tokens * x_stride));
  const Floats bias = random.normals(size(width));
  Floats out = random.normals(size(tokens * out_stride));
  const Floats before = out;
  std::vector<int32_t> slots;
  for (int i = 0; i < tokens; ++i) slots.push_back(random.integer(-1, kAdapterSlots - 1));
  const float* own_bias = has_bias ? bias.data() : nullptr;
  equal("quire_add_adapters",
        quire_add_adapters(&adapters.layer, slots.data(), x.data(), x_stride, tokens, own_bias,
                           out.data(), out_stride, width, num_threads),
        0);
  for (int t = 0; t < tokens; ++t)
    for (const quire::AdapterSlice& one : adapters.slices)
      for (int64_t o = 0; o < one.num_outputs; ++o) {
        const size_t at = size(t * out_stride + one.first + o);
        const int slot = slots[size(t)];
        const double product = before[at] - (has_bias ? bias[size(one.first + o)] : 0.0f);
        const double wanted =
            slot < 0 ? 0 : added(adapters, one, slot, x.data() + t * x_stride, o, product);
        near("an output", out[at], before[at] + wanted, slot < 0 ? 0 : 1e-4);
      }
}

}  // namespace

void test_adapters() {
  Random random(static_cast<uint32_t>(num_threads));
  for (const bool has_bias : {false, true}) {
    run_case({64, 16, 16}, 48, 5, has_bias, random);
    run_case({7}, 5, 1, has_bias, random);
    run_case({1030, 3}, 33, 4, has_bias, random);
    run_case({20, 20}, 19, 40, has_bias, random);
  }
  run_case({4}, 4, 0, false, random);
}

}  // namespace check
