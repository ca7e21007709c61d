// Sampling of a token: the contract between the entry point and the kernels, which are
// compiled once per instruction set. The references quire/kernels/torch/sampling.py and noise.py
// specify both.
#pragma once

#include <cstdint>

namespace quire {

// Lines of logits, and how the rows that they belong to sample.
struct SamplingCall {
  const float* logits;
  int64_t stride;
  int64_t num_lines;
  const int64_t* rows;
  int32_t* out;
  // What follows has one number for each row.
  const int32_t* positions;
  const float* temperature;
  const uint32_t* seed_low;
  const uint32_t* seed_high;
  const int32_t* top_k;
  const float* top_p;
  const float* log_min_p;
  int32_t width;
  int32_t num_threads;
};

// What the noise of a line depends on beside the token.
struct NoiseKeys {
  uint32_t key0, key1;
};

// `collect` writes up to this many numbers behind the last one that it has found.
constexpr int32_t kMaxLanes = 16;

struct SamplingKernel {
  // out = x / temperature.
  void (*temper)(const float* x, int32_t n, float temperature, float* out);
  // The numbers that reach `floor`, which is above minus infinity, in their order; how many.
  int32_t (*collect)(const float* x, int32_t n, float floor, float* out);
  // exp(x - best) of numbers that reach `floor`, else 0; none exceeds `best`. Returns their sum, and
  // stores them if `masses` is not null.
  double (*weigh)(const float* x, int32_t n, float best, float floor, float* masses);
  // The sum of the masses of numbers above `pivot`.
  double (*mass_above)(const float* x, const float* masses, int32_t n, float pivot);
  // The place of the largest x + gumbel among the numbers that reach `cutoff`, the first of equals;
  // the first NaN if there is one, and 0 if no number reaches the cutoff.
  int32_t (*draw)(const float* x, int32_t n, float cutoff, NoiseKeys keys);
};

extern const SamplingKernel sampling_generic;
#if defined(__x86_64__)
extern const SamplingKernel sampling_avx2;
extern const SamplingKernel sampling_avx512;
#endif

// That of the instruction set in use.
const SamplingKernel& chosen_sampling();

}  // namespace quire
