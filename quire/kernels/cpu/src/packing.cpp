// Packs weights as they are loaded: floats, rounded to 8 bits with a scale for every 32 inputs (Q8_0),
// and codes of 4 and 8 bits.

#include "dispatch.h"
#include "half.h"
#include "phase.h"
#include "quantized.h"
#include "vector.h"

namespace quire {
namespace {

constexpr int kParts = kBlock / kLanes;

// The block's largest magnitude; NaN if any of them is.
float largest_magnitude(const Floats (&values)[kParts]) {
  // As integers, magnitudes order like the numbers do, and NaN is above all.
  Ints largest = {};
  for (const Floats& part : values) {
    Ints bits;
    std::memcpy(&bits, &part, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t top = 0;
  for (int lane = 0; lane < kLanes; ++lane) top = largest[lane] > top ? largest[lane] : top;
  float magnitude;
  std::memcpy(&magnitude, &top, sizeof magnitude);
  return magnitude;
}

// Puts a block of one row into its lines and returns the scale.
float pack_block(const float* weights, uint8_t* lines) {
  Floats values[kParts];
  for (int i = 0; i < kParts; ++i) values[i] = load(weights + i * kLanes);
  const float scale = largest_magnitude(values) / 127.0f;
  const bool is_finite = scale - scale == 0.0f;  // if not, the scale says it all
  const float inverse = scale != 0.0f && is_finite ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kParts; ++i) {
    const Floats scaled = is_finite ? values[i] * inverse : Floats{};
    const Floats size = scaled < 0.0f ? -scaled : scaled;
    // Halves go away from zero, as in GGUF.
    Ints number = __builtin_convertvector(size, Ints);
    number -= size - __builtin_convertvector(number, Floats) >= 0.5f;
    number = (scaled < 0.0f ? -number : number) + layout_of(Kind::kQ8_0).offset;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int input = i * kLanes + lane;
      lines[input / 4 * kLine + input % 4] = static_cast<uint8_t>(number[lane]);
    }
  }
  return scale;
}

struct CodesJob {
  const uint8_t* codes;
  int64_t stride, num_rows;
  int32_t num_columns, bits;
  uint8_t* groups;
  int64_t group_bytes;
  Phase phase;
};

// A block of one row; the second 16 codes are in the high halves of bytes of 4 bits.
template <int BITS>
void pack_codes(const uint8_t* codes, uint8_t* lines) {
  uint8_t bytes[kBlock * BITS / 8];
  if constexpr (BITS == 8)
    std::memcpy(bytes, codes, sizeof bytes);
  else
    for (int i = 0; i < kBlock / 2; ++i)
      bytes[i] = static_cast<uint8_t>(codes[i] | codes[i + kBlock / 2] << 4);
  for (int q = 0; q < BITS; ++q) std::memcpy(lines + q * kLine, bytes + 4 * q, 4);
}

void pack_groups(void* data) {
  CodesJob& job = *static_cast<CodesJob*>(data);
  job.phase.run([&](int64_t first, int64_t end) {
    for (int64_t row = first * kRows; row < end * kRows && row < job.num_rows; ++row) {
      const uint8_t* codes = job.codes + row * job.stride;
      uint8_t* lines = job.groups + row / kRows * job.group_bytes + row % kRows * 4;
      for (int32_t i = 0; i < job.num_columns; i += kBlock, lines += job.bits * kLine)
        job.bits == 8 ? pack_codes<8>(codes + i, lines) : pack_codes<4>(codes + i, lines);
    }
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Packs rows [num_rows, num_inputs], which begin a group; `stride` counts floats.
void quire_pack_int8(const float* rows, int64_t stride, int64_t num_rows, int32_t num_inputs,
                     uint8_t* groups) {
  using namespace quire;
  constexpr Layout kLayout = layout_of(Kind::kQ8_0);
  static const float kNothing[kBlock] = {};
  for (int64_t first = 0; first < num_rows; first += kRows) {
    uint8_t* scales = groups + kLayout.scales_at(num_inputs / kBlock);
    for (int row = 0; row < kRows; ++row)
      for (int block = 0; block < num_inputs / kBlock; ++block) {
        const bool is_there = first + row < num_rows;
        const float* from = is_there ? rows + (first + row) * stride + block * kBlock : kNothing;
        const float scale = pack_block(from, groups + block * kLayout.number_bytes + 4 * row);
        store_half(scales + block * kLayout.scale_bytes + 2 * row, scale);
      }
    groups += kLayout.group_bytes(num_inputs / kBlock);
  }
}

// Packs codes [num_rows, num_columns] of 4 or 8 bits, a byte each, as the numbers of groups.
void quire_pack_codes(const uint8_t* codes, int64_t stride, int64_t num_rows, int32_t num_columns,
                      int32_t bits, uint8_t* groups, int64_t group_bytes, int32_t num_threads) {
  using namespace quire;
  CodesJob job = {codes,  stride,      num_rows, num_columns, bits,
                  groups, group_bytes, Phase(divide_up(num_rows, kRows), 1)};
  run_parallel(pack_groups, &job, num_threads);
}

}  // extern "C"
#pragma GCC visibility pop
