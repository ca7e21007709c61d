// What linear layers from quantised weights need of an instruction set beyond vector.h: products of
// bytes and conversions. The files that include this are compiled without contraction of floating
// point operations, so that rounding to 8 bits is the same everywhere; sums use `fma` explicitly.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "halves.h"

namespace quire {
namespace {

// Four bytes for each lane.
typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(4 * kLanes), aligned(1), may_alias));
// Tokens that are worked on together: their sums are in registers.
constexpr int kTile = kLanes == 4 ? 4 : 8;
// Vectors of rows that are worked on together.
constexpr int kTogether = kLanes == 16 ? 2 : 1;

QUIRE_INLINE Bytes load_bytes(const uint8_t* p) {
  return *reinterpret_cast<const UnalignedBytes*>(p);
}
QUIRE_INLINE void store_bytes(uint8_t* p, Bytes x) { *reinterpret_cast<UnalignedBytes*>(p) = x; }

// The entries of a table that the bytes of x, all below 16, name.
QUIRE_INLINE Bytes look_up(const uint8_t (&table)[16], Bytes x) {
#if defined(__AVX512BW__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)x);
#elif defined(__AVX2__)
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)x);
#elif defined(__aarch64__)
  return vqtbl1q_u8(vld1q_u8(table), x);
#else
  for (int i = 0; i < 4 * kLanes; ++i) x[i] = table[x[i]];
  return x;
#endif
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

// Over the lanes.
QUIRE_INLINE int32_t largest_lane(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i y = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x),
                            _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
#else
  const int32_t a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
#endif
}

QUIRE_INLINE int32_t sum_lanes(Ints x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x),
                            _mm256_extracti128_si256((__m256i)x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
#else
  return x[0] + x[1] + x[2] + x[3];
#endif
}

#if defined(__AVX512VNNI__)

QUIRE_INLINE Ints round(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }

// One byte for each lane.
QUIRE_INLINE Floats load_unsigned(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
QUIRE_INLINE Floats load_signed(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
QUIRE_INLINE void store_narrow(int8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
}

#elif defined(__AVX2__)

QUIRE_INLINE Ints round(Floats x) { return (Ints)_mm256_cvtps_epi32(x); }

// One byte for each lane.
QUIRE_INLINE Floats load_unsigned(const uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
QUIRE_INLINE Floats load_signed(const uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
QUIRE_INLINE void store_narrow(int8_t* p, Ints x) {
  const __m128i low = _mm256_castsi256_si128((__m256i)x);
  const __m128i shorts = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}

#else

#if defined(__aarch64__)

QUIRE_INLINE Ints round(Floats x) { return vcvtnq_s32_f32(x); }

#else

// For numbers of at most 22 bits; halves go to even, as the processor's own conversions do.
QUIRE_INLINE Ints round(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23
  const Floats shifted = x + shift;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return bits - 0x4b400000;
}

#endif

// One byte for each lane.
QUIRE_INLINE Floats load_unsigned(const uint8_t* p) {
  return to_floats(Ints{p[0], p[1], p[2], p[3]});
}
QUIRE_INLINE Floats load_signed(const uint8_t* p) {
  int8_t bytes[kLanes];
  std::memcpy(bytes, p, sizeof bytes);
  return to_floats(Ints{bytes[0], bytes[1], bytes[2], bytes[3]});
}
QUIRE_INLINE void store_narrow(int8_t* p, Ints x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x[i]);
}

#endif

// dot<BITS, QUADS, SHIFT>: for each of T tokens and each lane of V vectors of rows the sum over QUADS
// quads of the products of weights (unsigned, below 2^BITS) and inputs x (int8[QUADS][T][4]), plus
// `start` of the token. With a SHIFT, plus the sums that are there, shifted to the left by it.
// start[t] takes back the offset of the weights. With BITS of 8 they have an offset of 128.
template <int SHIFT, int V, int T>
QUIRE_INLINE void begin(const uint8_t* start, Ints (&sums)[V][T]) {
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t) {
    const Ints first = start ? splat_int(load_int(start + 4 * t)) : Ints{};
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) sums[v][t] = SHIFT ? (sums[v][t] << SHIFT) + first : first;
  }
}

#if defined(__AVX512VNNI__)

// Every broadcast of an input is used for two vectors of rows: loads would be the bottleneck.
template <int BITS, int QUADS, int SHIFT, int V, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start,
                      Ints (&sums)[V][T]) {
  begin<SHIFT>(start, sums);
  QUIRE_UNROLL
  for (int q = 0; q < QUADS; ++q) {
    __m512i w[V];
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) w[v] = (__m512i)weights(v, q);
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const __m512i input = _mm512_set1_epi32(load_int(x + 4 * (q * T + t)));
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v)
        sums[v][t] = (Ints)_mm512_dpbusd_epi32((__m512i)sums[v][t], w[v], input);
    }
  }
}

#elif defined(__AVX2__)

// Keeps the compiler from adding up in another order, for which it would need more registers.
#define QUIRE_KEEP_ORDER(sum) asm("" : "+x"(sum))

template <int SHIFT>
QUIRE_INLINE void add(bool is_first, Ints more, Ints& sum) {
  if (!is_first)
    sum += more;
  else
    sum = SHIFT ? (sum << SHIFT) + more : more;
}

QUIRE_INLINE __m256i broadcast(const uint8_t* x) { return _mm256_set1_epi32(load_int(x)); }

// maddubs adds pairs of products in 16 bits and saturates. With 8 bits only the magnitudes of the
// weights (at most 128) fit, and their signs go to the inputs, so that there is no offset.
template <int QUADS, int SHIFT, int T, typename Weights>
QUIRE_INLINE void dot_signed(Weights weights, const uint8_t* x, Ints (&sums)[1][T]) {
  const __m256i ones = _mm256_set1_epi16(1);
  QUIRE_UNROLL
  for (int q = 0; q < QUADS; ++q) {
    const __m256i w = _mm256_xor_si256((__m256i)weights(0, q), _mm256_set1_epi8(-128));
    const __m256i magnitude = _mm256_abs_epi8(w);
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const __m256i input = _mm256_sign_epi8(broadcast(x + 4 * (q * T + t)), w);
      const __m256i pairs = _mm256_maddubs_epi16(magnitude, input);
      const Ints wide = (Ints)_mm256_madd_epi16(pairs, ones);
      add<SHIFT>(q == 0, wide, sums[0][t]);
      QUIRE_KEEP_ORDER(sums[0][t]);
    }
  }
}

// With fewer bits several sums of pairs fit 16 bits.
template <int BITS, int QUADS, int SHIFT, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start,
                      Ints (&sums)[1][T]) {
  if constexpr (BITS == 8) return dot_signed<QUADS, SHIFT>(weights, x, sums);
  constexpr int kStep = BITS == 6 ? 2 : QUADS;
  QUIRE_UNROLL
  for (int first = 0; first < QUADS; first += kStep) {
    __m256i pairs[T];
    QUIRE_UNROLL
    for (int q = first; q < first + kStep; ++q) {
      const __m256i w = (__m256i)weights(0, q);
      QUIRE_UNROLL
      for (int t = 0; t < T; ++t) {
        const __m256i products = _mm256_maddubs_epi16(w, broadcast(x + 4 * (q * T + t)));
        pairs[t] = q == first ? products : _mm256_add_epi16(pairs[t], products);
        QUIRE_KEEP_ORDER(pairs[t]);
      }
    }
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const Ints wide = (Ints)_mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
      add<SHIFT>(first == 0, wide, sums[0][t]);
      QUIRE_KEEP_ORDER(sums[0][t]);
    }
  }
  if (!start) return;
  QUIRE_UNROLL
  for (int t = 0; t < T; ++t) sums[0][t] += splat_int(load_int(start + 4 * t));
}

#elif defined(__aarch64__)

// Without its offset a weight of 8 bits is an int8 like any other.
template <int BITS, int QUADS, int SHIFT, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start,
                      Ints (&sums)[1][T]) {
  begin<SHIFT>(BITS < 8 ? start : nullptr, sums);
  QUIRE_UNROLL
  for (int q = 0; q < QUADS; ++q) {
    const Bytes bytes = BITS < 8 ? weights(0, q) : weights(0, q) ^ 128;
    const int8x16_t w = vreinterpretq_s8_u8(bytes);
    QUIRE_UNROLL
    for (int t = 0; t < T; ++t) {
      const int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(load_int(x + 4 * (q * T + t))));
      const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(input));
      const int16x8_t high = vmull_high_s8(w, input);
      sums[0][t] += (Ints)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
    }
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

template <int BITS, int QUADS, int SHIFT, int T, typename Weights>
QUIRE_INLINE void dot(Weights weights, const uint8_t* x, const uint8_t* start,
                      Ints (&sums)[1][T]) {
  begin<SHIFT>(start, sums);
  for (int q = 0; q < QUADS; ++q) {
    const Bytes w = weights(0, q);
    const Shorts even = (Shorts)w & 255, odd = (Shorts)((UnsignedShorts)w >> 8);
    for (int t = 0; t < T; ++t) {
      const Ints input = splat_int(load_int(x + 4 * (q * T + t)));
      const Shorts high = (Shorts)input >> 8, low = (Shorts)((UnsignedShorts)input << 8) >> 8;
      sums[0][t] += add_pairs(even, low) + add_pairs(odd, high);
    }
  }
}

#endif

}  // namespace
}  // namespace quire
