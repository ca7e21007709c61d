// The entry point for rows of packed quantised weights: an embedding.

#include "quantized.h"

#include <cstring>

#include "half.h"

namespace quire {
namespace {

// One input of one row of a group, exactly as its format defines it.
struct RowReader {
  const uint8_t* numbers;
  const uint8_t* scales;
  Kind kind;
  Layout layout;
  bool has_zeros;
  int row;

  int number(int block, int i) const {
    const uint8_t* at = numbers + block * layout.number_bytes + row * 4 + i % 4;
    const int q = i / 4;
    if (kind == Kind::kQ8_0 || kind == Kind::kGrouped8) return at[q * kLine];
    const int low = at[q % 4 * kLine] >> (q / 4 * 4) & 15;
    if (kind == Kind::kGroupedE2M1) return kE2M1[low];
    if (kind != Kind::kQ6_K) return low;
    return low | (at[(4 + q / 4) * kLine] >> (q % 4 * 2) & 3) << 4;
  }

  void read_grouped_block(const uint8_t* at, int block, float* out) const {
    float scale;
    std::memcpy(&scale, at + 4 * row, sizeof scale);
    const int zero = layout.offset + (has_zeros ? static_cast<int8_t>(at[4 * kRows + row]) : 0);
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(number(block, i) - zero) * scale;
  }

  void read_block(int block, float* out) const {
    const uint8_t* at = scales + block / layout.scale_blocks * layout.scale_bytes;
    if (is_grouped(kind)) return read_grouped_block(at, block, out);
    const uint8_t* factors = at + kHalves + (kind == Kind::kQ4_K ? kHalves : 0) +
                             block % kBlocksInSuper * 2 * kRows + row;
    const float scale = load_half(at + 2 * row);
    float scales_of[2] = {scale, scale}, minimum = 0.0f;
    if (kind == Kind::kQ4_1) minimum = load_half(at + kHalves + 2 * row);
    if (kind == Kind::kQ4_K) {
      scales_of[0] = scales_of[1] = scale * static_cast<float>(factors[0]);
      minimum = -(load_half(at + kHalves + 2 * row) * static_cast<float>(factors[kRows]));
    }
    if (kind == Kind::kQ6_K) {
      scales_of[0] = scale * static_cast<float>(static_cast<int8_t>(factors[0]));
      scales_of[1] = scale * static_cast<float>(static_cast<int8_t>(factors[kRows]));
    }
    for (int i = 0; i < kBlock; ++i) {
      out[i] = static_cast<float>(number(block, i) - layout.offset) * scales_of[i / 16];
      if (layout.has_minima) out[i] += minimum;
    }
  }
};

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// The rows that `ids` name, into out [count, num_inputs]. Returns 0, or -1 if there is no such row.
int quire_packed_rows(const quire::PackedMatrix* matrix, const int64_t* ids, int64_t count,
                      float* out) {
  using namespace quire;
  const Layout layout = layout_of(matrix->kind, *matrix);
  const int32_t num_blocks = matrix->num_blocks();
  const size_t group_bytes = layout.group_bytes(num_blocks);
  for (int64_t i = 0; i < count; ++i, out += matrix->num_inputs) {
    if (ids[i] < 0 || ids[i] >= matrix->num_outputs) return -1;
    const uint8_t* group = matrix->data + static_cast<size_t>(ids[i] / kRows) * group_bytes;
    const RowReader reader = {group,
                              group + layout.scales_at(num_blocks),
                              matrix->kind,
                              layout,
                              matrix->has_zeros != 0,
                              static_cast<int>(ids[i] % kRows)};
    for (int block = 0; block < num_blocks; ++block) {
      if (!matrix->order) {
        reader.read_block(block, out + block * kBlock);
        continue;
      }
      float columns[kBlock];
      reader.read_block(block, columns);
      const int32_t* order = matrix->order + block * kBlock;
      for (int j = 0; j < kBlock; ++j)
        if (order[j] >= 0) out[order[j]] = columns[j];
    }
  }
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
