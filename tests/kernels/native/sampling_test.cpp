// Tokens drawn with temperature and filters, against sums over all other tokens for each of them; and
// what log-probabilities need of a line.

#include "sampling.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "logprobs.h"

extern "C" {
int quire_summarize(const quire::LogprobsCall* call);
int quire_sample(const quire::SamplingCall* call);
}

namespace check {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Masses and sums this close to each other may be ordered either way.
constexpr double kClose = 1e-5;

struct Way {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

constexpr Way kWays[] = {
    {0.0f, 3, 0.5f, 0.5f},   {1.0f, 0, 1.0f, 0.0f},    {0.7f, 0, 1.0f, 0.0f},  {1.0f, 0, 0.9f, 0.0f},
    {1.3f, 0, 0.999f, 0.0f}, {1.0f, 5, 1.0f, 0.0f},    {0.8f, 40, 0.8f, 0.0f}, {1.0f, 0, 1.0f, 0.1f},
    {1.0f, 0, 0.6f, 0.02f},  {2.0f, 300, 0.5f, 0.01f}, {1.0f, 0, 1e-6f, 0.0f}, {0.5f, 0, 0.3f, 1.0f},
};
constexpr size_t kNumWays = sizeof kWays / sizeof *kWays;

uint32_t mix(uint32_t x, uint32_t key = 0) {
  x ^= x >> 16;
  x = (x * 0x7FEB352Du) ^ key;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

double noise(uint32_t low, uint32_t high, uint32_t position, uint32_t token) {
  const uint32_t key0 = mix(low ^ mix(position + 0x9E3779B9u));
  const uint32_t key1 = mix(high ^ mix(position + key0));
  const uint32_t bits = mix(mix(token + 0x9E3779B9u) ^ key0, key1) & 0x7FFFFFFFu;
  const float w = static_cast<float>(bits) * 0x1p-31f + 0x1p-32f;
  return -std::log(-std::log1p(-static_cast<double>(std::fmin(w, 1.0f - 0x1p-24f))));
}

struct Line {
  std::vector<float> x;  // tempered
  Way way;

  float best() const {
    float highest = -kInfinity;
    for (const float value : x) highest = std::fmax(highest, value);
    return highest;
  }

  bool passes_min_p_and_top_k(float value) const {
    if (value == -kInfinity || value < best() + std::log(way.min_p)) return false;
    int32_t higher = 0;
    for (const float other : x) higher += other > value;
    return way.top_k == 0 || higher < way.top_k;
  }

  // Whether a token may be drawn, if top_p were this.
  std::vector<bool> kept(double top_p) const {
    const double highest = best();
    std::vector<bool> passes;
    double left = 0;
    for (const float value : x) {
      passes.push_back(passes_min_p_and_top_k(value));
      if (passes.back()) left += std::exp(value - highest);
    }
    std::vector<bool> result;
    for (size_t i = 0; i < x.size(); ++i) {
      double above = 0;
      for (size_t j = 0; j < x.size(); ++j)
        if (passes[j] && x[j] > x[i]) above += std::exp(x[j] - highest);
      result.push_back(passes[i] && (way.top_p >= 1 || above < top_p * left || x[i] == best()));
    }
    return result;
  }
};

struct Rows {
  std::vector<int32_t> positions, top_k;
  std::vector<uint32_t> low, high;
  Floats temperature, top_p, log_min_p;
};

Rows make_rows(Random& random) {
  Rows rows;
  for (const Way& way : kWays) {
    rows.positions.push_back(random.integer(0, 100000));
    rows.low.push_back(static_cast<uint32_t>(random.integer(0, INT32_MAX)) * 2);
    rows.high.push_back(static_cast<uint32_t>(random.integer(0, INT32_MAX)));
    rows.temperature.push_back(way.temperature);
    rows.top_k.push_back(way.top_k);
    rows.top_p.push_back(way.top_p);
    rows.log_min_p.push_back(std::log(way.min_p));
  }
  return rows;
}

void check_line(const Line& line, const Rows& rows, size_t row, int32_t found) {
  const size_t token = static_cast<size_t>(found);
  equal("a token within the vocabulary", token < line.x.size(), 1);
  if (token >= line.x.size()) return;
  if (line.way.temperature == 0) {
    equal("the highest logit", line.x[token] == line.best(), 1);
    return;
  }
  const auto sum = [&](size_t i) {
    return line.x[i] + noise(rows.low[row], rows.high[row], static_cast<uint32_t>(rows.positions[row]),
                             static_cast<uint32_t>(i));
  };
  equal("a kept token", line.kept(line.way.top_p + kClose)[token], 1);
  const std::vector<bool> surely = line.kept(line.way.top_p - kClose);
  double highest = -kInfinity;
  for (size_t i = 0; i < line.x.size(); ++i)
    if (surely[i]) highest = std::fmax(highest, sum(i));
  equal("the highest sum", sum(token) >= highest - kClose, 1);
}

void run_sampling(int width, int num_lines, float spread, Random& random) {
  const Rows rows = make_rows(random);
  const int stride = width + 3;
  Floats logits = random.normals(static_cast<size_t>(num_lines * stride - 3));
  for (float& logit : logits) logit = random.integer(0, 9) ? logit * spread : -kInfinity;
  std::vector<int64_t> row_of;
  for (int line = 0; line < num_lines; ++line) {
    row_of.push_back(random.integer(0, kNumWays - 1));
    logits[static_cast<size_t>(line * stride + random.integer(0, width - 1))] = 1.0f;
  }
  std::vector<int32_t> found(static_cast<size_t>(num_lines), -1);
  const quire::SamplingCall call = {
      logits.data(),           stride,           num_lines,           row_of.data(),
      found.data(),            rows.positions.data(),                 rows.temperature.data(),
      rows.low.data(),         rows.high.data(), rows.top_k.data(),   rows.top_p.data(),
      rows.log_min_p.data(),   width,            num_threads};
  equal("quire_sample", quire_sample(&call), 0);
  // To look at all lines of a large batch would take too long.
  const int step = num_lines > 100 ? 29 : 1;
  for (int i = 0; i < num_lines; i += step) {
    const size_t row = static_cast<size_t>(row_of[static_cast<size_t>(i)]);
    Line line = {{}, kWays[row]};
    for (int j = 0; j < width; ++j) {
      const float logit = logits[static_cast<size_t>(i * stride + j)];
      line.x.push_back(line.way.temperature > 0 ? logit / line.way.temperature : logit);
    }
    check_line(line, rows, row, found[static_cast<size_t>(i)]);
  }
}

}  // namespace

void test_sampling() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int width = 1; width <= 40; width += 3) run_sampling(width, 12, 2.0f, random);
  run_sampling(333, 400, 1.0f, random);
  run_sampling(200, 12, 12.0f, random);
}

void test_logprobs() {
  Random random(static_cast<uint32_t>(num_threads));
  for (const int width : {1, 5, 16, 33, 400}) {
    const int num_lines = width == 400 ? 300 : 4, stride = width + 1, num_top = width < 3 ? 1 : 3;
    Floats logits = random.normals(static_cast<size_t>(num_lines * stride - 1));
    for (float& logit : logits) logit = std::round(4 * logit) / 2;
    const size_t count = static_cast<size_t>(num_lines);
    const std::vector<int32_t> tokens(count, width - 1);
    std::vector<int32_t> ranks(count, -1), top(count * static_cast<size_t>(num_top), -1);
    Floats best(count), log_total(count);
    const quire::LogprobsCall call = {logits.data(), stride, num_lines, tokens.data(), best.data(),
                                      log_total.data(), ranks.data(), top.data(), num_top, width,
                                      num_threads};
    equal("quire_summarize", quire_summarize(&call), 0);
    for (size_t line = 0; line < count; ++line) {
      const float* x = logits.data() + line * static_cast<size_t>(stride);
      double total = 0;
      int rank = 1, places[3] = {-1, -1, -1};
      for (int i = 0; i < width; ++i) {
        total += std::exp(double{x[i]} - x[top[line * static_cast<size_t>(num_top)]]);
        rank += x[i] > x[width - 1];
        int place = 0;
        for (int j = 0; j < width; ++j) place += x[j] > x[i] || (x[j] == x[i] && j < i);
        if (place < num_top) places[place] = i;
      }
      near("the total", log_total[line], std::log(total), 1e-5);
      equal("a rank", ranks[line], rank);
      for (int i = 0; i < num_top; ++i)
        equal("a likely token", top[line * static_cast<size_t>(num_top) + static_cast<size_t>(i)], places[i]);
      near("the best", best[line], x[places[0]], 0);
    }
  }
}

}  // namespace check
