// What linear layers from quantised weights need of an instruction set beyond vector.h: products of
// bytes and conversions. The files that include this are compiled without contraction of floating
// point operations, so that rounding to 8 bits is the same everywhere; sums use `fma` explicitly.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "half.h"
#include "vector.h"

// The loop over the vectors of a group: the generic one is too large to be unrolled.
#if defined(__AVX2__)
#define QUIRE_UNROLL_VECTORS QUIRE_UNROLL
#else
#define QUIRE_UNROLL_VECTORS
#endif

namespace quire {
namespace {

// Four bytes for each lane.
typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
// One byte for each lane.
typedef uint8_t NarrowBytes __attribute__((vector_size(kLanes)));
typedef int8_t NarrowSigned __attribute__((vector_size(kLanes)));

QUIRE_INLINE Bytes load_bytes(const uint8_t* p) {
  return *reinterpret_cast<const UnalignedBytes*>(p);
}
QUIRE_INLINE Ints splat_int(int32_t x) { return x - Ints{}; }

QUIRE_INLINE int32_t load_int(const uint8_t* p) {
  int32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

QUIRE_INLINE float load_float(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

QUIRE_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// The narrow vectors are loaded by lanes that the compiler turns into one widening load.
template <typename Narrow>
QUIRE_INLINE Floats load_narrow(const uint8_t* p) {
  Narrow narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return to_floats(__builtin_convertvector(narrow, Ints));
}

#if defined(__AVX512VNNI__)

QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
QUIRE_INLINE Ints round(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }
QUIRE_INLINE Floats load_halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#elif defined(__AVX2__)

QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE Ints round(Floats x) { return (Ints)_mm256_cvtps_epi32(x); }
QUIRE_INLINE Floats load_halves(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#else

QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }

// For numbers of at most 22 bits; halves go to even, as the processor's own conversions do.
QUIRE_INLINE Ints round(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23
  const Floats shifted = x + shift;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4b400000;
}

QUIRE_INLINE Floats load_halves(const uint8_t* p) {
  Floats values;
  for (int i = 0; i < kLanes; ++i) values[i] = load_half(p + 2 * i);
  return values;
}

#endif

// dot<BITS, QUADS, T>: for each of T tokens and each lane the sum over QUADS quads of the products
// of weights (unsigned, below 2^BITS) and inputs x (int8[QUADS][T][4]), plus `start` of the token.
// start[t] takes back the offset of the weights. With BITS of 8 they have an offset of 128.
#if defined(__AVX512VNNI__)

template <int BITS, int QUADS, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start, Ints (&sums)[T]) {
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t) sums[t] = start ? splat_int(load_int(start + 4 * t)) : Ints{};
  QUIRE_UNROLL
  for (int q = 0; q < QUADS; ++q) {
    const __m512i w = (__m512i)weights(q);
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t)
      sums[t] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[t], w,
                                          _mm512_set1_epi32(load_int(x + 4 * (q * T + t))));
  }
}

#elif defined(__AVX2__)

// maddubs adds pairs of products in 16 bits and saturates. With 8 bits only the magnitudes of the
// weights (at most 128) fit, and their signs go to the inputs; with fewer, several sums fit.
template <int BITS, int QUADS, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start, Ints (&sums)[T]) {
  constexpr int kSummed = BITS == 8 ? 1 : BITS == 6 ? 2 : 8;  // quads whose products fit 16 bits
  constexpr int kStep = kSummed < QUADS ? kSummed : QUADS;
  const __m256i ones = _mm256_set1_epi16(1);
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t)
    sums[t] = start && BITS != 8 ? splat_int(load_int(start + 4 * t)) : Ints{};
  QUIRE_UNROLL
  for (int first = 0; first < QUADS; first += kStep) {
    __m256i products[T];
    QUIRE_UNROLL
    for (int q = first; q < first + kStep; ++q) {
      __m256i w = (__m256i)weights(q), sign = w;
      if (BITS == 8) {
        sign = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        w = _mm256_abs_epi8(sign);
      }
      QUIRE_UNROLL
      for (int t = 0; t < T; ++t) {
        __m256i input = _mm256_set1_epi32(load_int(x + 4 * (q * T + t)));
        if (BITS == 8) input = _mm256_sign_epi8(input, sign);
        const __m256i pairs = _mm256_maddubs_epi16(w, input);
        products[t] = q == first ? pairs : _mm256_add_epi16(products[t], pairs);
      }
    }
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) sums[t] += (Ints)_mm256_madd_epi16(products[t], ones);
  }
}

#else

typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UnsignedInts __attribute__((vector_size(4 * kLanes)));

// Sums of neighbouring products, each of which fits 16 bits.
QUIRE_INLINE Ints add_pairs(Shorts a, Shorts b) {
#if defined(__SSE2__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  const UnsignedInts products = (UnsignedInts)(a * b);
  return ((Ints)(products << 16) >> 16) + ((Ints)products >> 16);
#endif
}

template <int BITS, int QUADS, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start, Ints (&sums)[T]) {
  for (int t = 0; t < T; ++t) sums[t] = start ? splat_int(load_int(start + 4 * t)) : Ints{};
  for (int q = 0; q < QUADS; ++q) {
    const Bytes w = weights(q);
    const Shorts even = (Shorts)w & 255, odd = (Shorts)((UnsignedShorts)w >> 8);
    for (int t = 0; t < T; ++t) {
      const Ints input = splat_int(load_int(x + 4 * (q * T + t)));
      const Shorts high = (Shorts)input >> 8, low = (Shorts)((UnsignedShorts)input << 8) >> 8;
      sums[t] += add_pairs(even, low) + add_pairs(odd, high);
    }
  }
}

#endif

}  // namespace
}  // namespace quire
