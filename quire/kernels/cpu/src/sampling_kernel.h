// Sampling of a token, for the instruction set this file is compiled for.
#pragma once

#include "sampling.h"
#include "noise.h"
#include "vector.h"

namespace quire {
namespace {

// Half a vector of floats, and as many doubles.
typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));
typedef double HalfDoubles __attribute__((vector_size(4 * kLanes)));

constexpr float kInfinity = __builtin_inff();

// Whether a comparison holds in any lane.
QUIRE_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// Gives `one` every vector of n numbers and where it begins; the last is filled up with `padding`.
template <typename One>
QUIRE_INLINE void for_each_padded(const float* x, int32_t n, float padding, One one) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) one(i, load(x + i));
  if (i == n) return;
  Floats last = splat(padding);
  std::memcpy(&last, x + i, sizeof(float) * static_cast<size_t>(n - i));
  one(i, last);
}

// A sum of floats in doubles.
class Total {
 public:
  QUIRE_INLINE void add(Floats x) {
    HalfFloats halves[2];
    std::memcpy(halves, &x, sizeof halves);
    low_ += __builtin_convertvector(halves[0], HalfDoubles);
    high_ += __builtin_convertvector(halves[1], HalfDoubles);
  }
  QUIRE_INLINE double sum() const {
    double all = 0;
    for (int lane = 0; lane < kLanes / 2; ++lane) all += low_[lane] + high_[lane];
    return all;
  }

 private:
  HalfDoubles low_ = {}, high_ = {};
};

// e^x for x <= 0, with a relative error of about one unit in the last place; 0 below -87.
QUIRE_INLINE Floats exp(Floats x) {
  const float log2_of_e = 1.4426950408889634f;
  // ln 2 in two parts: the products of the first one are exact.
  const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const float round = 12582912.0f;  // see exp2
  const Floats clamped = x < -87.0f ? splat(-87.0f) : x;
  const Floats shifted = clamped * log2_of_e + round;
  const Floats whole = shifted - round;
  const Floats rest = (clamped - whole * ln2_high) - whole * ln2_low;
  Ints power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power - 0x4b400000 + 127) << 23;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  return x < -87.0f ? Floats{} : exp2(rest * log2_of_e) * factor;
}

void temper(const float* x, int32_t n, float temperature, float* out) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) / temperature);
  for (; i < n; ++i) out[i] = x[i] / temperature;
}

int32_t collect(const float* x, int32_t n, float floor, float* out) {
  int32_t count = 0;
  for_each_padded(x, n, -kInfinity, [&](int32_t, Floats value) __attribute__((always_inline)) {
    const Ints found = value >= floor;
    if (!any(found)) return;
    for (int lane = 0; lane < kLanes; ++lane) {
      out[count] = value[lane];
      count -= found[lane];  // -1 where it holds
    }
  });
  return count;
}

double weigh(const float* x, int32_t n, float best, float floor, float* masses) {
  Total total;
  for_each_padded(x, n, -kInfinity, [&](int32_t i, Floats value) __attribute__((always_inline)) {
    const Ints counts = value >= floor;
    const Floats mass = any(counts) ? (counts ? exp(value - best) : Floats{}) : Floats{};
    total.add(mass);
    if (!masses) return;
    const int32_t left = n - i < kLanes ? n - i : kLanes;
    if (left == kLanes)
      store(masses + i, mass);
    else
      std::memcpy(masses + i, &mass, sizeof(float) * static_cast<size_t>(left));
  });
  return total.sum();
}

double mass_above(const float* x, const float* masses, int32_t n, float pivot) {
  Total total;
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    total.add(load(x + i) > pivot ? load(masses + i) : Floats{});
  double sum = total.sum();
  for (; i < n; ++i) sum += x[i] > pivot ? masses[i] : 0.0f;
  return sum;
}

// What a draw has found so far.
struct Drawn {
  float sum = -kInfinity;
  int32_t token = 0;
};

// Looks closely at the lanes that may hold a new largest sum.
QUIRE_NOINLINE void look(const Floats& x, const Floats& w, const Ints& may_win, int32_t first,
                         Drawn& drawn) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!may_win[lane] || drawn.sum != drawn.sum) continue;
    const float sum = x[lane] + gumbel(w[lane]);
    if (sum <= drawn.sum) continue;
    drawn = {sum, first + lane};
  }
}

int32_t draw(const float* x, int32_t n, float cutoff, NoiseKeys keys) {
  Drawn drawn;
  for_each_padded(x, n, -kInfinity, [&](int32_t i, Floats value) __attribute__((always_inline)) {
    const Ints kept = ~(value < cutoff);
    if (!any(kept)) return;
    const Floats w = uniforms(i, keys);
    const Ints may_win = kept & ~(value + gumbel_bounds(w) <= drawn.sum);
    if (any(may_win)) look(value, w, may_win, i, drawn);
  });
  return drawn.token;
}

constexpr SamplingKernel kSampling = {temper, collect, weigh, mass_above, draw};

}  // namespace
}  // namespace quire
