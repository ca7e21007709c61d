// The random numbers of quire/kernels/torch/noise.py, which specifies them, for vectors of tokens.
#pragma once

#include "sampling.h"
#include "vector.h"

namespace quire {
namespace {

typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

constexpr uint32_t kOffset = 0x9E3779B9u;

// A key of 0 is none.
template <typename T>
QUIRE_INLINE T mix(T x, uint32_t key) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= key;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ x >> 16;
}

QUIRE_INLINE NoiseKeys noise_keys(uint32_t seed_low, uint32_t seed_high, uint32_t position) {
  const uint32_t key0 = mix(seed_low ^ mix(position + kOffset, 0), 0);
  return {key0, mix(seed_high ^ mix(position + key0, 0), 0)};
}

// `w` of as many tokens as a vector has lanes.
QUIRE_INLINE Floats uniforms(int32_t first_token, NoiseKeys keys) {
  Words tokens = {};
  QUIRE_UNROLL
  for (int lane = 0; lane < kLanes; ++lane) tokens[lane] = static_cast<uint32_t>(lane);
  tokens += static_cast<uint32_t>(first_token) + kOffset;
  const Words bits = mix(mix(tokens, 0) ^ keys.key0, keys.key1) & 0x7FFFFFFFu;
  const Floats w = __builtin_convertvector((Ints)bits, Floats) * 0x1p-31f + 0x1p-32f;
  const float below_one = 1.0f - 0x1p-24f;
  return w > below_one ? splat(below_one) : w;
}

QUIRE_INLINE float gumbel(float w) { return -__builtin_logf(-__builtin_log1pf(-w)); }

// Not below `gumbel`, and mostly less than 0.06 above it. gumbel(w) is at most -log(w), and log2(w)
// at least what the bits of w as an integer make of it: its exponent, and its fraction on the line
// between two exponents.
QUIRE_INLINE Floats gumbel_bounds(Floats w) {
  const float ln2 = 0.6931471805599453f, for_rounding = 1e-3f;
  Ints bits;
  std::memcpy(&bits, &w, sizeof bits);
  return __builtin_convertvector(bits, Floats) * (-ln2 * 0x1p-23f) + (127 * ln2 + for_rounding);
}

}  // namespace
}  // namespace quire
