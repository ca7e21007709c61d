// Experts of a layer against double precision, and the choice of experts against a sort.

#include "experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "check.h"
#include "linear_layer.h"
#include "routing.h"

extern "C" {
int quire_experts(const quire::ExpertsCall* call);
int quire_route(const quire::RoutingCall* call);
void quire_sigmoid(const float* x, int64_t n, float* out);
void quire_pack_int8(const float* rows, int64_t stride, int64_t num_rows, int32_t num_inputs,
                     uint8_t* groups);
}

namespace check {
namespace {

size_t size(int64_t count) { return static_cast<size_t>(count); }

// A matrix in floats, or in 8 bits.
struct Weight {
  Floats numbers;  // [outputs, inputs]
  Floats floats;
  std::vector<uint8_t> blocks;
  quire::PackedMatrix matrix;

  Weight(int outputs, int inputs, bool is_int8, Random& random)
      : numbers(random.normals(size(outputs * inputs))) {
    for (float& number : numbers) number /= std::sqrt(static_cast<float>(inputs));
    if (is_int8) {
      const quire::Layout layout = quire::layout_of(quire::Kind::kQ8_0);
      const int groups = (outputs + quire::kRows - 1) / quire::kRows;
      blocks.resize(size(groups) * layout.group_bytes(inputs / quire::kBlock));
      quire_pack_int8(numbers.data(), inputs, outputs, inputs, blocks.data());
      matrix = {blocks.data(), quire::Kind::kQ8_0, outputs, inputs, 1, nullptr, 0, 1, 0};
      return;
    }
    const int groups = (outputs + quire::kPacked - 1) / quire::kPacked;
    floats.resize(size(groups * inputs) * size(quire::kPacked));
    for (int o = 0; o < outputs; ++o)
      for (int i = 0; i < inputs; ++i)
        floats[size((o / quire::kPacked * inputs + i) * quire::kPacked + o % quire::kPacked)] =
            numbers[size(o * inputs + i)];
    matrix = {reinterpret_cast<const uint8_t*>(floats.data()), static_cast<quire::Kind>(-1),
              outputs, inputs, 1, nullptr, 0, 0, 0};
  }
};

struct ExpertsCase {
  int tokens, experts, top_k, hidden, width;
  bool is_int8;
  float limit;
};

double gated(double gate, double up, double limit) {
  if (limit == 0) return gate / (1 + std::exp(-gate)) * up;
  gate = std::min(gate, limit);
  up = std::max(std::min(up, limit), -limit);
  return gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
}

void run_experts(const ExpertsCase& c, Random& random) {
  const int first = 1, kept = c.experts - 1;  // another rank has the first one
  std::vector<Weight> wide, narrow;
  std::vector<quire::PackedMatrix> gate_up, down;
  for (int e = 0; e < kept; ++e) {
    wide.emplace_back(2 * c.width, c.hidden, c.is_int8, random);
    narrow.emplace_back(c.hidden, c.width, c.is_int8, random);
  }
  for (int e = 0; e < kept; ++e) {
    gate_up.push_back(wide[size(e)].matrix);
    down.push_back(narrow[size(e)].matrix);
  }
  const Floats wide_bias = random.normals(size(kept * 2 * c.width));
  const Floats narrow_bias = random.normals(size(kept * c.hidden));
  const Floats x = random.normals(size(c.tokens * c.hidden)), weights = random.normals(size(c.tokens * c.top_k));
  std::vector<int32_t> chosen;
  for (int t = 0; t < c.tokens; ++t)
    for (int k = 0; k < c.top_k; ++k) chosen.push_back((t * 5 + k * (t % 2 + 1)) % c.experts);
  Floats out(size(c.tokens * c.hidden), std::numeric_limits<float>::quiet_NaN());
  const bool biased = c.limit > 0.0f;
  const quire::ExpertsCall call = {gate_up.data(),
                                   down.data(),
                                   biased ? wide_bias.data() : nullptr,
                                   biased ? narrow_bias.data() : nullptr,
                                   x.data(),
                                   chosen.data(),
                                   weights.data(),
                                   out.data(),
                                   c.hidden,
                                   c.tokens,
                                   first,
                                   kept,
                                   c.top_k,
                                   c.limit,
                                   1.702f,
                                   num_threads};
  equal("quire_experts", quire_experts(&call), 0);
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<double> sum(size(c.hidden));
    for (int k = 0; k < c.top_k; ++k) {
      const int e = chosen[size(t * c.top_k + k)] - first;
      if (e < 0) continue;
      std::vector<double> y(size(2 * c.width));
      for (int o = 0; o < 2 * c.width; ++o) {
        y[size(o)] = biased ? wide_bias[size(e * 2 * c.width + o)] : 0;
        for (int i = 0; i < c.hidden; ++i)
          y[size(o)] += double{x[size(t * c.hidden + i)]} * wide[size(e)].numbers[size(o * c.hidden + i)];
      }
      for (int o = 0; o < c.hidden; ++o) {
        double result = biased ? narrow_bias[size(e * c.hidden + o)] : 0;
        for (int i = 0; i < c.width; ++i)
          result += gated(y[size(i)], y[size(c.width + i)], double{c.limit}) *
                    narrow[size(e)].numbers[size(o * c.width + i)];
        sum[size(o)] += weights[size(t * c.top_k + k)] * result;
      }
    }
    for (int o = 0; o < c.hidden; ++o)
      near("a sum", out[size(t * c.hidden + o)], sum[size(o)], c.is_int8 ? 0.3 : 1e-4 * (1 + std::fabs(sum[size(o)])));
  }
}

struct RoutingCase {
  int tokens, experts, top_k, groups, top_groups;
  quire::Scoring scoring;
};

void run_routing(const RoutingCase& c, Random& random) {
  const bool is_sigmoid = c.scoring == quire::Scoring::kSigmoid;
  const Floats logits = random.normals(size(c.tokens * c.experts));
  const Floats bias = random.normals(size(c.experts));
  std::vector<int32_t> chosen(size(c.tokens * c.top_k), -1);
  Floats weights(chosen.size(), std::numeric_limits<float>::quiet_NaN());
  const quire::RoutingCall call = {logits.data(),  is_sigmoid ? bias.data() : nullptr,
                                   chosen.data(),  weights.data(),
                                   c.experts,      c.tokens,
                                   c.experts,      c.top_k,
                                   c.groups,       c.top_groups,
                                   c.scoring,      1,
                                   2.0f,           num_threads};
  equal("quire_route", quire_route(&call), 0);
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<double> ranked(size(c.experts));
    for (int e = 0; e < c.experts; ++e) {
      ranked[size(e)] = logits[size(t * c.experts + e)];
      if (is_sigmoid) ranked[size(e)] = 1 / (1 + std::exp(-ranked[size(e)])) + bias[size(e)];
    }
    const int per_group = c.experts / c.groups;
    std::vector<std::pair<double, int>> groups;
    for (int g = 0; g < c.groups; ++g) {
      std::vector<double> own(ranked.begin() + g * per_group, ranked.begin() + (g + 1) * per_group);
      std::sort(own.rbegin(), own.rend());
      groups.emplace_back(is_sigmoid && per_group > 1 ? own[0] + own[1] : own[0], g);
    }
    std::sort(groups.rbegin(), groups.rend());
    std::vector<std::pair<double, int>> open;
    for (int g = 0; g < c.top_groups; ++g)
      for (int e = groups[size(g)].second * per_group; e < (groups[size(g)].second + 1) * per_group; ++e)
        open.emplace_back(ranked[size(e)], e);
    std::sort(open.rbegin(), open.rend());
    double sum = 0;
    for (int k = 0; k < c.top_k; ++k) {
      equal("an expert", chosen[size(t * c.top_k + k)], open[size(k)].second);
      sum += weights[size(t * c.top_k + k)];
    }
    near("the sum of weights", sum, 2, 1e-5);
  }
}

}  // namespace

void test_experts() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int width : {1, 17, 32})
    for (const float limit : {0.0f, 0.7f}) {
      run_experts({1, 9, 4, 21, width, false, limit}, random);
      run_experts({13, 5, 2, 33, width, false, limit}, random);
    }
  run_experts({1, 9, 4, 64, 96, true, 0.0f}, random);
  run_experts({30, 4, 3, 64, 32, true, 0.7f}, random);
  run_experts({0, 4, 3, 16, 16, false, 0.0f}, random);
}

void test_route() {
  Random random(static_cast<uint32_t>(num_threads));
  for (const auto scoring : {quire::Scoring::kSoftmax, quire::Scoring::kSoftmaxOfChosen, quire::Scoring::kSigmoid}) {
    run_routing({1, 7, 3, 1, 1, scoring}, random);
    run_routing({200, 60, 4, 1, 1, scoring}, random);
    run_routing({5, 24, 6, 4, 2, scoring}, random);
    run_routing({5, 8, 3, 8, 3, scoring}, random);
  }
}

void test_sigmoid() {
  Random random(1);
  const Floats x = random.normals(37);
  Floats out(x.size());
  quire_sigmoid(x.data(), 37, out.data());
  for (size_t i = 0; i < x.size(); ++i) near("a sigmoid", out[i], 1 / (1 + std::exp(-x[i])), 1e-6);
}

}  // namespace check
