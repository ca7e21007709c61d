// Pointwise work for the instruction set this file is compiled for.
#pragma once

#include "halves.h"
#include "pointwise.h"

namespace quire {
namespace {

constexpr float kLog2OfE = 1.4426950408889634f;

// The numbers that do not fill a vector, with zeros for those missing.
QUIRE_INLINE Floats load_some(const float* p, int count) {
  Floats x = {};
  std::memcpy(&x, p, sizeof(float) * static_cast<size_t>(count));
  return x;
}
QUIRE_INLINE void store_some(float* p, Floats x, int count) {
  std::memcpy(p, &x, sizeof(float) * static_cast<size_t>(count));
}

// Gives `one` every vector of n numbers: where it begins, and functions that load and store there.
template <typename One>
QUIRE_INLINE void for_each_vector(int32_t n, One one) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    one(
        i, [](const float* p) __attribute__((always_inline)) { return load(p); },
        [](float* p, Floats x) __attribute__((always_inline)) { store(p, x); });
  const int left = n - i;
  if (left > 0)
    one(
        i, [left](const float* p) __attribute__((always_inline)) { return load_some(p, left); },
        [left](float* p, Floats x) __attribute__((always_inline)) { store_some(p, x, left); });
}

void normalize(const float* x, const float* residual, const float* weight, float eps, int32_t n,
               float* total, float* out) {
  Floats squares = {};
  const float* from = residual ? total : x;
  if (residual)
    for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
      put(total + i, get(x + i) + get(residual + i));
    });
  for_each_vector(n, [&](int32_t i, auto get, auto) __attribute__((always_inline)) {
    const Floats value = get(from + i);
    squares = fma(value, value, squares);
  });
  const Floats scale = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps));
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    put(out + i, get(weight + i) * (get(from + i) * scale));
  });
}

QUIRE_INLINE Floats sigmoid(Floats x) {
  const Floats minus = x < 0.0f ? x : -x;
  const Floats e = exp2(minus * kLog2OfE);  // at most 1
  return (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
}

QUIRE_INLINE Floats silu(Floats x) { return x * sigmoid(x); }

void silu_and_mul(const float* gate, const float* up, int32_t n, float* out) {
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    put(out + i, silu(get(gate + i)) * get(up + i));
  });
}

void limited_gate(const float* gate, const float* up, float limit, float slope, int32_t n,
                  float* out) {
  const Floats most = splat(limit), steep = splat(slope);
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    Floats g = get(gate + i), u = get(up + i);
    g = g > most ? most : g;  // NaN stays
    u = u > most ? most : u;
    u = u < -most ? -most : u;
    put(out + i, g * sigmoid(g * steep) * (u + 1.0f));
  });
}

void sigmoid(const float* x, int32_t n, float* out) {
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    put(out + i, sigmoid(get(x + i)));
  });
}

void exponentials(const float* x, float most, int32_t n, float* out) {
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    put(out + i, exp2((get(x + i) - most) * kLog2OfE));
  });
}

void add_scaled(const float* x, float factor, int32_t n, float* out) {
  const Floats by = splat(factor);
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    put(out + i, fma(get(x + i), by, get(out + i)));
  });
}

constexpr int kRowsAtOnce = 8;

void multiply_rows(const float* x, const float* rows, int64_t stride, int32_t n, float* out) {
  Floats sums[kRowsAtOnce] = {};
  for_each_vector(n, [&](int32_t i, auto get, auto) __attribute__((always_inline)) {
    const Floats value = get(x + i);
    QUIRE_UNROLL
    for (int row = 0; row < kRowsAtOnce; ++row)
      sums[row] = fma(value, get(rows + row * stride + i), sums[row]);
  });
  for (int row = 0; row < kRowsAtOnce; ++row) out[row] = sum(sums[row]);
}

void add_rows(const float* rows, int64_t stride, const float* factors, int32_t n, float* out) {
  Floats by[kRowsAtOnce];
  for (int row = 0; row < kRowsAtOnce; ++row) by[row] = splat(factors[row]);
  for_each_vector(n, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    Floats total = {};
    QUIRE_UNROLL
    for (int row = 0; row < kRowsAtOnce; ++row)
      total = fma(get(rows + row * stride + i), by[row], total);
    put(out + i, get(out + i) + total);
  });
}

void rotate(const float* x, const float* cos, const float* sin, int32_t half, float* out) {
  for_each_vector(half, [&](int32_t i, auto get, auto put) __attribute__((always_inline)) {
    const Floats first = get(x + i), second = get(x + half + i);
    const Floats c = get(cos + i), s = get(sin + i);
    put(out + i, fma(first, c, -(second * s)));
    put(out + half + i, fma(second, c, first * s));
  });
}

void to_halves(const float* x, int32_t n, uint16_t* out) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_halves(out + i, load(x + i));
  Half last[kLanes];
  store_halves(last, load_some(x + i, n - i));
  std::memcpy(out + i, last, sizeof(Half) * static_cast<size_t>(n - i));
}

// The largest of n numbers, not below `least`; NaN if one of them is.
QUIRE_INLINE float largest_of(const float* x, int32_t n, float least) {
  Floats top = splat(least);
  Ints unordered = {};
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats value = load(x + i);
    top = max(value, top);
    unordered |= value != value;
  }
  float highest = max(top);
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) has_nan |= unordered[lane] != 0;
  for (; i < n; ++i) {
    has_nan |= x[i] != x[i];
    if (x[i] > highest) highest = x[i];
  }
  return has_nan ? __builtin_nanf("") : highest;
}

int32_t largest(const float* x, int32_t n) {
  constexpr int32_t kPart = 1024;
  float highest = -__builtin_inff();
  int32_t i = 0;  // before or at the place looked for
  for (int32_t first = 0; first < n; first += kPart) {
    const float found = largest_of(x + first, n - first < kPart ? n - first : kPart, highest);
    if (found == highest) continue;
    highest = found;
    i = first;
    if (found != found) break;
  }
  if (highest != highest)
    while (x[i] == x[i]) ++i;
  else
    while (x[i] != highest) ++i;
  return i;
}

constexpr Pointwise kPointwise = {normalize,     silu_and_mul, limited_gate, sigmoid,
                                  exponentials,  add_scaled,   multiply_rows, add_rows,
                                  rotate,        to_halves,    largest};

}  // namespace
}  // namespace quire
