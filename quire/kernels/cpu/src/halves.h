// Vectors of 16-bit floats in memory: scales of packed weights, weights, and keys and values.
#pragma once

#include "half.h"
#include "vector.h"

namespace quire {
namespace {

using Half = uint16_t;
constexpr float kLargestHalf = 65504.0f;

#if defined(__AVX512F__)

QUIRE_INLINE Floats load_halves(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
QUIRE_INLINE void store_nearest_halves(void* p, Floats x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__)

QUIRE_INLINE Floats load_halves(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
QUIRE_INLINE void store_nearest_halves(void* p, Floats x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

QUIRE_INLINE Floats load_halves(const void* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t*>(p))));
}
QUIRE_INLINE void store_nearest_halves(void* p, Floats x) {
  vst1_u8(static_cast<uint8_t*>(p), vreinterpret_u8_f16(vcvt_f16_f32(x)));
}

#else

typedef Half Halves __attribute__((vector_size(2 * kLanes)));

// `half_to_float` for each lane, without branches.
QUIRE_INLINE Floats load_halves(const void* p) {
  constexpr int kExponents = (127 - 15) << 23;  // between the exponents of float16 and float32
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const Ints number = __builtin_convertvector(halves, Ints), magnitude = number & 0x7fff;
  Ints bits = (magnitude << 13) + kExponents;
  bits += (magnitude >= 0x7c00) & kExponents;  // infinity and NaN
  const Floats whole = __builtin_convertvector(magnitude, Floats) * 0x1p-24f;
  Ints small;
  std::memcpy(&small, &whole, sizeof small);
  bits = (magnitude < 0x400 ? small : bits) | ((number << 16) & INT32_MIN);
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
}
QUIRE_INLINE void store_nearest_halves(void* p, Floats x) {
  for (int i = 0; i < kLanes; ++i) store_half(static_cast<uint8_t*>(p) + 2 * i, x[i]);
}

#endif

// What is beyond the range of float16 becomes its largest number; NaN stays NaN.
QUIRE_INLINE void store_halves(void* p, Floats x) {
  const Floats bounded = x > kLargestHalf ? splat(kLargestHalf) : x;
  store_nearest_halves(p, bounded < -kLargestHalf ? splat(-kLargestHalf) : bounded);
}

QUIRE_INLINE Floats load(const Half* p) { return load_halves(p); }

// The upper half of a float.
struct Bfloat {
  uint16_t bits;
};

QUIRE_INLINE Floats load(const Bfloat* p) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  typedef uint16_t Shorts16 __attribute__((vector_size(2 * kLanes)));
  Shorts16 halves;
  std::memcpy(&halves, p, sizeof halves);
  const Ints bits = __builtin_convertvector(halves, Ints) << 16;
  Floats values;
  std::memcpy(&values, &bits, sizeof values);
  return values;
#endif
}
QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(Half x) { return half_to_float(x); }

}  // namespace
}  // namespace quire
