// What happens to the numbers of a token between its matrix products: the contract between the entry
// points and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstdint>

namespace quire {

struct Pointwise {
  // total = x + residual (or x without a residual, then total is not written);
  // out = total / rms(total) * weight. All have n numbers; total may be the residual itself, and out
  // may be x.
  void (*normalize)(const float* x, const float* residual, const float* weight, float eps, int32_t n,
                    float* total, float* out);
  // out = gate / (1 + exp(-gate)) * up; out may be gate.
  void (*silu_and_mul)(const float* gate, const float* up, int32_t n, float* out);
  // out = g / (1 + exp(-slope g)) * (u + 1), for g the gate, at most `limit`, and u up, in [-limit,
  // limit]; out may be gate.
  void (*limited_gate)(const float* gate, const float* up, float limit, float slope, int32_t n,
                       float* out);
  // out = 1 / (1 + exp(-x)).
  void (*sigmoid)(const float* x, int32_t n, float* out);
  // out = exp(x - most), for x at most `most`; out may be x.
  void (*exponentials)(const float* x, float most, int32_t n, float* out);
  // out += factor * x.
  void (*add_scaled)(const float* x, float factor, int32_t n, float* out);
  // out = the products of x with 8 rows, each `stride` behind the other.
  void (*multiply_rows)(const float* x, const float* rows, int64_t stride, int32_t n, float* out);
  // out += the sum of 8 rows times a factor each.
  void (*add_rows)(const float* rows, int64_t stride, const float* factors, int32_t n, float* out);
  // Turns element i of the first half of x with element i of the second; out may be x.
  void (*rotate)(const float* x, const float* cos, const float* sin, int32_t half, float* out);
  // out = x as float16: the nearest, and beyond its range the largest.
  void (*to_halves)(const float* x, int32_t n, uint16_t* out);
  // The first of the largest numbers, or the first NaN. n is at least 1.
  int32_t (*largest)(const float* x, int32_t n);
};

extern const Pointwise pointwise_generic;
#if defined(__x86_64__)
extern const Pointwise pointwise_avx2;
extern const Pointwise pointwise_avx512;
#endif

// That of the instruction set in use.
const Pointwise& chosen_pointwise();

}  // namespace quire
