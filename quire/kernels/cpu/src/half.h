// float16 without hardware support.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire {
namespace {

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {  // infinity or NaN
    bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + ((127 - 15) << 23));
  } else {  // a whole number of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float load_half(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half_to_float(half);
}

// To the nearest float16, of two equally near to the even one.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {  // NaN
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // from halfway beyond the largest number on: infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {
    const uint32_t shifted = magnitude - ((127 - 15) << 23);
    half = (shifted + 0xfff + (shifted >> 13 & 1)) >> 13;
  } else {  // adding 0.5 leaves a whole number of 2^-24 in the mantissa
    float small;
    std::memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    std::memcpy(&half, &small, sizeof half);
    half -= 0x3f000000;
  }
  return static_cast<uint16_t>(sign | half);
}

inline void store_half(uint8_t* p, float value) {
  const uint16_t half = float_to_half(value);
  std::memcpy(p, &half, sizeof half);
}

}  // namespace
}  // namespace quire
