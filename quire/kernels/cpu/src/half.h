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

}  // namespace
}  // namespace quire
