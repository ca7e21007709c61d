// Packed quantised weights: the contract between the entry points (linear_layer.cpp, quantized.cpp)
// and the kernels, which are compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

// GGUF's formats, in the order of KINDS in quire/kernels/torch/linear.py, and then numbers with
// scales for groups of inputs of any size, in the order of GROUPED_KINDS in ../linear.py.
enum class Kind : int32_t { kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ6_K, kGrouped8, kGrouped4, kGroupedE2M1 };

constexpr bool is_grouped(Kind kind) { return kind >= Kind::kGrouped8; }

// Weights are packed in groups of 32 rows (outputs), the last one filled up with zeros. A group has
// its numbers, then its scales, and is padded to a whole number of cache lines.
//
// Numbers are unsigned: Q8_0 and Grouped8 have 128 added, Q4_0, Grouped4 and Q6_K the 8, 8 and 32 of
// their definition. E2M1 are floats of 4 bits, of which kE2M1 has the doubles with 12 added. They come
// in blocks of 32 inputs, each a sequence of lines of 128 bytes in which 32 rows have 4 bytes
// each, one for each of 4 consecutive inputs (a quad):
//   8 bits      8 lines, a quad each
//   4 bits      4 lines; line i has quad i in the low halves of its bytes, quad i + 4 in the high ones
//   Q6_K        4 lines with the low 4 bits, as above, and 2 lines with the high 2 bits: line j has
//               quads 4j to 4j + 3, the first in the lowest bits
//
// Scales are for 32 rows each:
//   Q8_0, Q4_0  for every block: scales (float16)
//   Q4_1        for every block: scales, minima (float16)
//   Q4_K        for every 8 blocks: scales, minima (float16), then for each of the blocks factors of
//               the scales and of the minima (uint8)
//   Q6_K        for every 8 blocks: scales (float16), then for each of the blocks factors of the first
//               and of the second 16 inputs (int8)
//   Grouped     for every `scale_blocks` of the matrix: scales (float32), then, if it has zeros, what
//               is to be taken from each number (int8)
constexpr int kRows = 32;
constexpr int kLine = 4 * kRows;
constexpr int kBlock = 32;
constexpr int kQuads = 8;  // in a block
constexpr int kHalves = 2 * kRows;  // bytes of a float16 for each row
constexpr int kBlocksInSuper = 8;

constexpr uint8_t kE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// `NativeMatrix` in ../library.py mirrors this struct field by field.
struct PackedMatrix {
  const uint8_t* data;
  Kind kind;
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t input_planes;  // 1: inputs are rounded to 8 bits, 2: to 16
  const int32_t* order;  // [num_columns]: the input of each column, -1 if it only fills a block; or
                         // null, and columns are inputs
  int32_t num_columns;   // if there is an order
  int32_t scale_blocks;  // of grouped kinds
  int32_t has_zeros;     // of grouped kinds

  int32_t num_blocks() const { return (order ? num_columns : num_inputs) / kBlock; }
};

struct Layout {
  int32_t number_bytes;  // of a block
  int32_t scale_bytes;   // of `scale_blocks` blocks
  int32_t scale_blocks;
  int32_t offset;  // what the numbers have more than their definition
  bool has_minima;
  int32_t parts;  // in which the block's inputs have scales of their own

  size_t scales_at(int32_t num_blocks) const {
    return static_cast<size_t>(num_blocks) * static_cast<size_t>(number_bytes);
  }
  size_t group_bytes(int32_t num_blocks) const {
    const int32_t count = (num_blocks + scale_blocks - 1) / scale_blocks;
    const size_t bytes =
        scales_at(num_blocks) + static_cast<size_t>(count) * static_cast<size_t>(scale_bytes);
    return (bytes + 63) / 64 * 64;
  }
};

constexpr Layout layout_of(Kind kind) {
  switch (kind) {
    case Kind::kQ8_0: return {8 * kLine, kHalves, 1, 128, false, 1};
    case Kind::kQ4_0: return {4 * kLine, kHalves, 1, 8, false, 1};
    case Kind::kQ4_1: return {4 * kLine, 2 * kHalves, 1, 0, true, 1};
    case Kind::kQ4_K: return {4 * kLine, 2 * kHalves + 16 * kRows, kBlocksInSuper, 0, true, 1};
    case Kind::kQ6_K: return {6 * kLine, kHalves + 16 * kRows, kBlocksInSuper, 32, false, 2};
    case Kind::kGrouped8: return {8 * kLine, 4 * kRows, 1, 128, true, 1};
    case Kind::kGrouped4: return {4 * kLine, 4 * kRows, 1, 8, true, 1};
    default: return {4 * kLine, 4 * kRows, 1, 12, false, 1};
  }
}

// With what only a matrix knows.
constexpr Layout layout_of(Kind kind, const PackedMatrix& matrix) {
  Layout layout = layout_of(kind);
  if (is_grouped(kind)) {
    layout.scale_blocks = matrix.scale_blocks;
    layout.scale_bytes += matrix.has_zeros ? kRows : 0;
  }
  return layout;
}

// Tokens are worked on in tiles, the last one with what is left. For every block of 32
// inputs a tile of T tokens has
//   int8[planes][8][T][4]   the inputs, rounded, quad by quad; with two planes the high 8 bits and
//                     then the low 8, in numbers from -127 to 127: there is no -128, because with
//                     weights of 8 bits not all kernels could add its products
//   float[T]          scales
//   int32[parts][T]   with an offset: minus it times the sum of the rounded inputs
//   float[T]          with minima: scale times that sum
constexpr int activation_bytes(Kind kind, int planes) {
  const Layout layout = layout_of(kind);
  return planes * kBlock + 4 + (layout.offset ? 4 * layout.parts : 0) + (layout.has_minima ? 4 : 0);
}
constexpr int kLowBits = 8;  // of inputs with two planes

// Activations below this are taken for zeros: the inverse of their scale would overflow.
constexpr float kSmallestActivation = 1e-30f;

struct LinearCall {
  const PackedMatrix& matrix;
  const float* x;  // [num_tokens, num_inputs]
  int64_t x_stride;
  const float* bias;  // [num_outputs] or null
  float* out;         // [num_tokens, num_outputs]
  int64_t out_stride;
  int64_t num_tokens;
  uint8_t* activations;  // the tiles
};

// What one instruction set offers.
struct LinearKernel {
  int32_t tile_tokens;
  // Rounds the inputs of the tokens of some tiles.
  void (*round_inputs)(const LinearCall& call, int64_t first_tile, int64_t end_tile);
  // Computes some groups of rows for the tokens of some tiles.
  void (*multiply)(const LinearCall& call, int64_t first_group, int64_t end_group,
                   int64_t first_tile, int64_t end_tile);
};

extern const LinearKernel linear_generic;
#if defined(__x86_64__)
extern const LinearKernel linear_avx2;
extern const LinearKernel linear_vnni;
#endif

// That of the instruction set in use.
const LinearKernel& chosen_blocks();

}  // namespace quire
