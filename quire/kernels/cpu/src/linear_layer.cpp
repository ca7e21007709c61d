// The entry points for linear layers: shares the inputs, then the outputs, among threads.

#include "linear_layer.h"

#include <cstdlib>

#include "dispatch.h"
#include "pointwise.h"

namespace quire {
namespace {

// Below this many multiply-adds waking other threads costs more than it gains.
constexpr int64_t kSerialProducts = 100000;
// Inputs that are prepared by one thread without asking others to help.
constexpr int64_t kInputsAtOnce = 4096;

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

template <typename Product>
struct Job {
  const Layer& layer;
  const Product& product;
  const Pointwise& pointwise;
  float* normal;  // [num_tokens, num_inputs], with a norm
  float* wide;    // [num_tokens, num_outputs], with gates
  bool fills_groups;  // there are gates, and a piece has those of its values
  int64_t num_groups, groups, num_tiles, tiles;
  Phase laying, multiplying;

  void lay(int64_t tile) const {
    if (layer.norm_weight) {
      const int32_t n = product.num_inputs();
      const int64_t end = product.first_token(tile + 1);
      for (int64_t token = product.first_token(tile); token < end; ++token) {
        float* residual = layer.residual ? layer.residual + token * n : nullptr;
        pointwise.normalize(layer.x + token * layer.x_stride, residual, layer.norm_weight, layer.eps,
                            n, residual, normal + token * n);
      }
    }
    product.lay(tile);
  }

  // Pieces are rectangles of groups and tiles; those of the same groups follow each other.
  void multiply(int64_t piece) const {
    const int64_t across = divide_up(num_tiles, tiles);
    const int64_t group = piece / across * groups, tile = piece % across * tiles;
    const int64_t end_group = group + groups < num_groups ? group + groups : num_groups;
    const int64_t end_tile = tile + tiles < num_tiles ? tile + tiles : num_tiles;
    product.multiply(group, end_group, tile, end_tile);
    if (!fills_groups) return;
    product.multiply(group + num_groups, end_group + num_groups, tile, end_tile);
    gate(group * Product::kGroupRows, end_group * Product::kGroupRows, product.first_token(tile),
         product.first_token(end_tile));
  }

  // Applies some of the gates of some tokens.
  void gate(int64_t first, int64_t end, int64_t first_token, int64_t end_token) const {
    const int64_t width = product.num_outputs();
    for (int64_t token = first_token; token < end_token; ++token) {
      const float* gates = wide + token * width + first;
      pointwise.silu_and_mul(gates, gates + width / 2, static_cast<int32_t>(end - first),
                             layer.out + token * layer.out_stride + first);
    }
  }
};

template <typename Product>
void work(void* data) {
  Job<Product>& job = *static_cast<Job<Product>*>(data);
  job.laying.run([&](int64_t first, int64_t end) {
    for (int64_t tile = first; tile < end; ++tile) job.lay(tile);
  });
  job.laying.wait();
  job.multiplying.run([&](int64_t first, int64_t end) {
    for (int64_t piece = first; piece < end; ++piece) job.multiply(piece);
  });
}

// Returns 0, or -1 if there is no memory.
template <typename Product>
int compute(const Layer& layer, Product product) {
  const int64_t num_inputs = layer.num_tokens * product.num_inputs();
  if (layer.num_tokens == 0 || product.num_outputs() == 0) return 0;
  const size_t laid = padded(product.laid_bytes());
  const size_t normal =
      layer.norm_weight ? padded(sizeof(float) * static_cast<size_t>(num_inputs)) : 0;
  const size_t wide = layer.is_gated ? sizeof(float) * static_cast<size_t>(layer.num_tokens) *
                                           static_cast<size_t>(product.num_outputs())
                                     : 0;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, laid + normal + wide + 64) != 0) return -1;
  char* at = static_cast<char*>(memory);
  float* normal_at = reinterpret_cast<float*>(at + laid);
  float* wide_at = reinterpret_cast<float*>(at + laid + normal);
  product.set_memory(layer.norm_weight ? normal_at : layer.x,
                     layer.norm_weight ? product.num_inputs() : layer.x_stride, at,
                     layer.is_gated ? wide_at : layer.out,
                     layer.is_gated ? product.num_outputs() : layer.out_stride);

  const bool is_small = num_inputs * product.num_outputs() < kSerialProducts;
  const int64_t threads = is_small || layer.num_threads < 1 ? 1 : layer.num_threads;
  const bool fills_groups = layer.is_gated && product.num_outputs() % (2 * Product::kGroupRows) == 0;
  const int64_t rows = fills_groups ? product.num_outputs() / 2 : product.num_outputs();
  const int64_t num_groups = divide_up(rows, Product::kGroupRows);
  const int64_t groups = product.piece_groups(num_groups, threads);
  const int64_t num_tiles = product.num_tiles();
  const int64_t tiles = product.piece_tiles(num_groups, groups, threads);
  const int64_t num_pieces = divide_up(num_groups, groups) * divide_up(num_tiles, tiles);
  const int64_t tiles_at_once = kInputsAtOnce * num_tiles / num_inputs;
  Job<Product> job = {layer,
                      product,
                      chosen_pointwise(),
                      normal_at,
                      wide_at,
                      fills_groups,
                      num_groups,
                      groups,
                      num_tiles,
                      tiles,
                      Phase(num_tiles, tiles_at_once),
                      Phase(num_pieces, 1)};
  run_parallel(work<Product>, &job, static_cast<int32_t>(threads));
  // Rare: what no piece could do because groups have gates and values.
  if (layer.is_gated && !fills_groups) job.gate(0, product.num_outputs() / 2, 0, layer.num_tokens);
  std::free(memory);
  return 0;
}

const LinearKernel& chosen_blocks() {
#if defined(__x86_64__)
  static const bool has_vnni =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
  if (chosen_isa() == 2 && has_vnni) return linear_vnni;
  if (chosen_isa() >= 1) return linear_avx2;
#endif
  return linear_generic;
}

int compute_blocks(const PackedMatrix& matrix, const Layer& layer) {
  return compute(layer, BlockProduct(matrix, layer.bias, layer.num_tokens, chosen_blocks()));
}

int compute_floats(const FloatLinearCall& call, const Layer& layer) {
  return compute(layer, FloatProduct(call, chosen_kernel()));
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// out = x W^T + bias. Strides count floats. Returns 0, or -1 if there is no memory.
int quire_packed_linear(const quire::PackedMatrix* matrix, const float* x, int64_t x_stride,
                        int64_t num_tokens, const float* bias, float* out, int64_t out_stride,
                        int32_t num_threads) {
  const quire::Layer layer = {x,    x_stride, num_tokens, nullptr,    0.0f,       nullptr,
                              bias, false,    out,        out_stride, num_threads};
  return quire::compute_blocks(*matrix, layer);
}

// The same for a weight in float32.
int quire_float_linear(const quire::FloatLinearCall* call) {
  const quire::Layer layer = {call->x, call->x_stride, call->num_tokens, nullptr,
                              0.0f,    nullptr,        call->bias,       false,
                              call->out, call->out_stride, call->num_threads};
  return quire::compute_floats(*call, layer);
}

// A linear layer after a norm, and with gates if `layer` says so. The matrix is of quantised blocks,
// or of packed floats if its kind is -1.
int quire_norm_linear(const quire::PackedMatrix* matrix, const quire::Layer* layer) {
  using namespace quire;
  if (static_cast<int32_t>(matrix->kind) >= 0) return compute_blocks(*matrix, *layer);
  const FloatLinearCall call = {layer->x,
                                reinterpret_cast<const float*>(matrix->data),
                                layer->bias,
                                layer->out,
                                layer->x_stride,
                                layer->out_stride,
                                static_cast<int32_t>(layer->num_tokens),
                                matrix->num_outputs,
                                matrix->num_inputs,
                                layer->num_threads};
  return compute_floats(call, *layer);
}

}  // extern "C"
#pragma GCC visibility pop
