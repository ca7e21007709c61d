// A linear layer with a norm before it and gates after it, and the search for the largest number.

#include <cmath>
#include <limits>

#include "check.h"
#include "linear_layer.h"

extern "C" {
int quire_norm_linear(const quire::PackedMatrix* matrix, const quire::Layer* layer);
void quire_largest(const float* x, int64_t stride, int64_t num_rows, int32_t width, int32_t* out,
                   int32_t num_threads);
}

namespace check {
namespace {

constexpr float kEpsilon = 1e-5f;

size_t size(int64_t count) { return static_cast<size_t>(count); }

struct LayerCase {
  int tokens, outputs, inputs;
  bool has_residual, is_gated;
};

// The weight is of floats: blocks differ in the product only, which has tests of its own.
void run_layer(const LayerCase& c, Random& random) {
  const int groups = (c.outputs + quire::kPacked - 1) / quire::kPacked;
  Floats packed(size(groups) * size(c.inputs) * size(quire::kPacked));
  const Floats weight = random.normals(size(c.outputs) * size(c.inputs));
  for (int o = 0; o < c.outputs; ++o)
    for (int i = 0; i < c.inputs; ++i)
      packed[size((o / quire::kPacked * c.inputs + i) * quire::kPacked + o % quire::kPacked)] =
          weight[size(o * c.inputs + i)];
  const Floats x = random.normals(size(c.tokens * c.inputs)), norm = random.normals(size(c.inputs));
  const Floats bias = random.normals(size(c.outputs));
  Floats residual = random.normals(c.has_residual ? x.size() : 0);
  const Floats before = residual;
  const int width = c.is_gated ? c.outputs / 2 : c.outputs;
  Floats out(size(c.tokens * width), std::numeric_limits<float>::quiet_NaN());
  const quire::PackedMatrix matrix = {reinterpret_cast<const uint8_t*>(packed.data()),
                                      static_cast<quire::Kind>(-1), c.outputs, c.inputs, 1, nullptr, 0, 0,
                                      0};
  const quire::Layer layer = {x.data(),   c.inputs, c.tokens, norm.data(),
                              kEpsilon,   c.has_residual ? residual.data() : nullptr,
                              bias.data(), c.is_gated, out.data(), width, nullptr, nullptr, num_threads};
  equal("quire_norm_linear", quire_norm_linear(&matrix, &layer), 0);
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<double> sum(size(c.inputs)), y(size(c.outputs));
    double squares = 0;
    for (int i = 0; i < c.inputs; ++i) {
      const size_t at = size(t * c.inputs + i);
      sum[size(i)] = double{x[at]} + (c.has_residual ? before[at] : 0.0f);
      squares += sum[size(i)] * sum[size(i)];
      if (c.has_residual) near("a residual", residual[at], sum[size(i)], 1e-6);
    }
    const double scale = 1 / std::sqrt(squares / c.inputs + kEpsilon);
    for (int o = 0; o < c.outputs; ++o) {
      y[size(o)] = bias[size(o)];
      for (int i = 0; i < c.inputs; ++i)
        y[size(o)] += sum[size(i)] * scale * norm[size(i)] * weight[size(o * c.inputs + i)];
    }
    for (int o = 0; o < width; ++o) {
      double wanted = y[size(o)];
      if (c.is_gated) wanted = wanted / (1 + std::exp(-wanted)) * y[size(o + width)];
      near("an output", out[size(t * width + o)], wanted, 1e-4 * (1 + std::fabs(wanted)));
    }
  }
}

}  // namespace

void test_norm_linear() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int outputs = 1; outputs <= 33; ++outputs)
    run_layer({outputs % 14 + 1, 2 * outputs, outputs + 3, outputs % 2 == 0, outputs % 3 != 0}, random);
  for (const bool is_gated : {false, true}) {
    run_layer({1, 640, 200, true, is_gated}, random);
    run_layer({27, 128, 60, true, is_gated}, random);
    run_layer({40, 90, 64, false, is_gated}, random);
  }
}

void test_largest() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int width : {1, 3, 16, 17, 33, 1000, 9001}) {
    const int rows = width > 1000 ? 12 : 5, stride = width + 2;
    Floats x = random.normals(size(rows * stride - 2));
    std::vector<int32_t> found(size(rows), -1);
    std::vector<int32_t> wanted(size(rows));
    for (int row = 0; row < rows; ++row) {
      wanted[size(row)] = random.integer(0, width - 1);
      for (int i = wanted[size(row)]; i < width; i += 5) x[size(row * stride + i)] = 9.0f;
    }
    quire_largest(x.data(), stride, rows, width, found.data(), num_threads);
    for (int row = 0; row < rows; ++row) equal("a place", found[size(row)], wanted[size(row)]);
  }
}

}  // namespace check
