// Vectors of kLanes floats in the compiler's own vector types: the same source serves every
// instruction set. All of it is in an anonymous namespace, because the linker must never take the
// AVX-512 copy of an inline function for the generic one. For the same reason nothing here uses the
// C++ library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("unroll")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 32")
#endif
#define QUIRE_INLINE inline __attribute__((always_inline))
#define QUIRE_NOINLINE __attribute__((noinline))
// Makes the compiler address memory from this very pointer, and not from loop invariants that it
// would have to spill.
#define QUIRE_KEEP_POINTER(p) asm("" : "+r"(p))
// Makes it take what it reads through this pointer from memory, and not from registers.
#define QUIRE_KEEP_STORES(p) asm("" : "+r"(p) : : "memory")

namespace quire {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int kRegisters = 16;
#else
constexpr int kRegisters = 32;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedFloats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

typedef float Floats4 __attribute__((vector_size(16)));
typedef float UnalignedFloats4 __attribute__((vector_size(16), aligned(4), may_alias));

QUIRE_INLINE Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
QUIRE_INLINE void store(float* p, Floats x) { *reinterpret_cast<UnalignedFloats*>(p) = x; }
QUIRE_INLINE Floats4 load4(const float* p) { return *reinterpret_cast<const UnalignedFloats4*>(p); }
QUIRE_INLINE void store4(float* p, Floats4 x) { *reinterpret_cast<UnalignedFloats4*>(p) = x; }
QUIRE_INLINE Floats splat(float x) { return x - Floats{}; }
QUIRE_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, rounded once where the processor can. Sums that must not depend on how the compiler sees
// the code around them use it, in files that are compiled without contraction.
#if defined(__AVX512F__)
QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
#else
QUIRE_INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__aarch64__)
QUIRE_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
QUIRE_INLINE float fma(float a, float b, float c) { return a * b + c; }
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define QUIRE_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t Ints4 __attribute__((vector_size(16)));
#define QUIRE_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Ints4{i, j, k, l})
#endif

struct Add {
  template <typename T>
  QUIRE_INLINE T operator()(const T& a, const T& b) const { return a + b; }
};

struct Max {
  template <typename T>
  QUIRE_INLINE T operator()(const T& a, const T& b) const { return a > b ? a : b; }
};

// Joins the lanes that are four apart.
template <typename Join>
QUIRE_INLINE Floats4 fold(Floats x, [[maybe_unused]] Join join) {
#if defined(__AVX512F__)
  const __m256 low = _mm512_castps512_ps256(x);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  const __m256 y = join(low, high);
  return join(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
#elif defined(__AVX2__)
  return join(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#else
  return x;
#endif
}

template <typename Join>
QUIRE_INLINE float reduce(Floats x, Join join) {
  const Floats4 y = fold(x, join);
  return join(join(y[0], y[1]), join(y[2], y[3]));
}

QUIRE_INLINE float sum(Floats x) { return reduce(x, Add()); }
QUIRE_INLINE float max(Floats x) { return reduce(x, Max()); }

// Stores the sums of four vectors of four.
QUIRE_INLINE void store_sums(float* p, Floats4 a, Floats4 b, Floats4 c, Floats4 d) {
  const Floats4 ab = QUIRE_SHUFFLE(a, b, 0, 4, 1, 5) + QUIRE_SHUFFLE(a, b, 2, 6, 3, 7);
  const Floats4 cd = QUIRE_SHUFFLE(c, d, 0, 4, 1, 5) + QUIRE_SHUFFLE(c, d, 2, 6, 3, 7);
  const Floats4 sums = QUIRE_SHUFFLE(ab, cd, 0, 1, 4, 5) + QUIRE_SHUFFLE(ab, cd, 2, 3, 6, 7);
  store4(p, sums);
}

QUIRE_INLINE void transpose(Floats4 (&x)[4]) {
  const Floats4 a = QUIRE_SHUFFLE(x[0], x[1], 0, 4, 1, 5), b = QUIRE_SHUFFLE(x[2], x[3], 0, 4, 1, 5);
  const Floats4 c = QUIRE_SHUFFLE(x[0], x[1], 2, 6, 3, 7), d = QUIRE_SHUFFLE(x[2], x[3], 2, 6, 3, 7);
  x[0] = QUIRE_SHUFFLE(a, b, 0, 1, 4, 5);
  x[1] = QUIRE_SHUFFLE(a, b, 2, 3, 6, 7);
  x[2] = QUIRE_SHUFFLE(c, d, 0, 1, 4, 5);
  x[3] = QUIRE_SHUFFLE(c, d, 2, 3, 6, 7);
}

// Takes the place of minus infinity: exp2(kMasked - m) is 0 for any real score m, and
// kMasked - kMasked is not NaN.
constexpr float kMasked = -1e30f;

// 2^x for x <= 0, with a relative error of about one unit in the last place. Below -126 the result
// is 0; NaN stays NaN. The polynomial is the minimax one of degree 6 on [-1/2, 1/2].
QUIRE_INLINE Floats exp2(Floats x) {
  const Floats clamped = x < -126.0f ? splat(-126.0f) : x;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the mantissa
  const Floats shifted = clamped + round;
  const Floats f = clamped - (shifted - round);
  Floats y = splat(0.0001534581242594868f);
  y = fma(y, f, splat(0.0013399930903688073f));
  y = fma(y, f, splat(0.009618489071726799f));
  y = fma(y, f, splat(0.05550328642129898f));
  y = fma(y, f, splat(0.24022646248340607f));
  y = fma(y, f, splat(0.6931471824645996f));
  y = fma(y, f, splat(1.0f));
  Ints power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power - 0x4b400000 + 127) << 23;
  Floats factor;
  std::memcpy(&factor, &power, sizeof factor);
  return x < -126.0f ? Floats{} : y * factor;
}

}  // namespace
}  // namespace quire
