// The entry points for packed quantised weights: shares groups of rows among threads.

#include "quantized.h"

#include <cstdlib>

#include "dispatch.h"
#include "half.h"

namespace quire {
namespace {

// Below this many multiply-adds waking other threads costs more than it gains, ...
constexpr int64_t kSerialProducts = 100000;
// ... and below this many inputs to be rounded.
constexpr int64_t kSerialInputs = 50000;
// Pieces per thread: enough for threads that are held up to fall behind without being waited for.
constexpr int64_t kPieces = 8;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

const LinearKernel& chosen_kernel() {
#if defined(__x86_64__)
  static const bool has_vnni =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
  if (chosen_isa() == 2 && has_vnni) return linear_vnni;
  if (chosen_isa() >= 1) return linear_avx2;
#endif
  return linear_generic;
}

struct Rounding {
  const LinearCall& call;
  const LinearKernel& kernel;
  int64_t num_tiles, piece, next;
};

void round_pieces(void* data) {
  Rounding& work = *static_cast<Rounding*>(data);
  for (;;) {
    const int64_t first = __atomic_fetch_add(&work.next, work.piece, __ATOMIC_RELAXED);
    if (first >= work.num_tiles) return;
    const int64_t end = first + work.piece;
    work.kernel.round_inputs(work.call, first, end < work.num_tiles ? end : work.num_tiles);
  }
}

// Pieces are rectangles of groups and tiles; those of the same groups follow each other.
struct Product {
  const LinearCall& call;
  const LinearKernel& kernel;
  int64_t num_groups, groups, num_tiles, tiles, next;
};

void multiply_pieces(void* data) {
  Product& work = *static_cast<Product*>(data);
  const int64_t across = divide_up(work.num_tiles, work.tiles);
  for (;;) {
    const int64_t piece = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    const int64_t group = piece / across * work.groups, tile = piece % across * work.tiles;
    if (group >= work.num_groups) return;
    const int64_t end_group = group + work.groups, end_tile = tile + work.tiles;
    work.kernel.multiply(work.call, group, end_group < work.num_groups ? end_group : work.num_groups,
                         tile, end_tile < work.num_tiles ? end_tile : work.num_tiles);
  }
}

// One input of one row of a group, exactly as its format defines it.
struct RowReader {
  const uint8_t* numbers;
  const uint8_t* scales;
  Kind kind;
  int row;

  int number(int block, int i) const {
    const uint8_t* at = numbers + block * layout_of(kind).number_bytes + row * 4 + i % 4;
    const int q = i / 4;
    if (kind == Kind::kQ8_0) return at[q * kLine];
    const int low = at[q % 4 * kLine] >> (q / 4 * 4) & 15;
    if (kind != Kind::kQ6_K) return low;
    return low | (at[(4 + q / 4) * kLine] >> (q % 4 * 2) & 3) << 4;
  }

  void read_block(int block, float* out) const {
    const Layout layout = layout_of(kind);
    const uint8_t* at = scales + block / (layout.is_super ? kBlocksInSuper : 1) * layout.scale_bytes;
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

// out = x W^T + bias. Strides count floats. Returns 0, or -1 if there is no memory.
int quire_packed_linear(const quire::PackedMatrix* matrix, const float* x, int64_t x_stride,
                        int64_t num_tokens, const float* bias, float* out, int64_t out_stride,
                        int32_t num_threads) {
  using namespace quire;
  if (num_tokens == 0 || matrix->num_outputs == 0) return 0;
  const int64_t num_inputs = num_tokens * matrix->num_inputs;
  void* memory = nullptr;
  const int64_t bytes = num_inputs / kBlock * activation_bytes(matrix->kind);
  if (posix_memalign(&memory, 64, static_cast<size_t>(bytes)) != 0) return -1;
  const LinearCall call = {*matrix, x,          x_stride,   bias,
                           out,     out_stride, num_tokens, static_cast<uint8_t*>(memory)};
  const int64_t threads = num_threads > 1 ? num_threads : 1;
  const LinearKernel& kernel = chosen_kernel();
  const int64_t num_tiles = divide_up(num_tokens, kernel.tile_tokens);

  const int64_t round_threads = num_inputs < kSerialInputs ? 1 : threads;
  Rounding rounding = {call, kernel, num_tiles, divide_up(num_tiles, round_threads * kPieces), 0};
  run_parallel(round_pieces, &rounding, static_cast<int32_t>(round_threads));

  const int64_t num_groups = divide_up(matrix->num_outputs, kRows);
  const int64_t wanted = threads * kPieces;
  const int64_t groups = divide_up(num_groups, wanted);
  const int64_t columns = divide_up(wanted, divide_up(num_groups, groups));
  Product product = {call, kernel, num_groups, groups, num_tiles, divide_up(num_tiles, columns), 0};
  const bool is_small = num_inputs * matrix->num_outputs < kSerialProducts;
  run_parallel(multiply_pieces, &product, is_small ? 1 : static_cast<int32_t>(threads));
  std::free(memory);
  return 0;
}

// The rows that `ids` name, into out [count, num_inputs]. Returns 0, or -1 if there is no such row.
int quire_packed_rows(const quire::PackedMatrix* matrix, const int64_t* ids, int64_t count,
                      float* out) {
  using namespace quire;
  const Layout layout = layout_of(matrix->kind);
  const size_t group_bytes = layout.group_bytes(matrix->num_inputs);
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= matrix->num_outputs) return -1;
    const uint8_t* group = matrix->data + static_cast<size_t>(ids[i] / kRows) * group_bytes;
    const RowReader reader = {group, group + layout.scales_at(matrix->num_inputs), matrix->kind,
                              static_cast<int>(ids[i] % kRows)};
    for (int block = 0; block < matrix->num_inputs / kBlock; ++block, out += kBlock)
      reader.read_block(block, out);
  }
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
