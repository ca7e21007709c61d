// The entry points for linear layers: shares the inputs, then the outputs, among threads.

#include "linear_layer.h"

#include <cstdlib>

#include "dispatch.h"
#include "pointwise.h"

namespace quire {
namespace {

// Inputs that are prepared by one thread without asking others to help.
constexpr int64_t kInputsAtOnce = 4096;
// Tokens whose gates and values are kept apart until they meet.
constexpr int64_t kGatedTokens = 48;

template <typename Product>
struct Job {
  const Layer& layer;
  const Product& product;
  const Pointwise& pointwise;
  const Deltas& deltas;
  const Pieces pieces;
  float* normal;   // [num_tokens, num_inputs], with a norm
  float* wide;     // [num_tokens, num_outputs], with gates that do not fill groups
  float* scratch;  // for each thread, with gates that fill groups
  size_t scratch_floats;
  size_t next_member;
  Phase laying, multiplying;

  void lay(int64_t first, int64_t end) const {
    if (layer.norm_weight) {
      const int32_t n = product.num_inputs();
      for (int64_t token = first; token < end; ++token) {
        float* residual = layer.residual ? layer.residual + token * n : nullptr;
        pointwise.normalize(layer.x + token * layer.x_stride, residual, layer.norm_weight, layer.eps,
                            n, residual, normal + token * n);
      }
    }
    product.lay(first, end);
    if (!deltas.exist()) return;
    const int64_t n = product.num_inputs();
    for (int64_t token = first; token < end; ++token)
      deltas.shrink(token, normal ? normal + token * n : layer.x + token * layer.x_stride);
  }

  // Adds what adapters have to outputs from `group` on that lie at `out`.
  void adapt(int64_t group, int64_t end_group, int64_t token, int64_t end_token, float* out,
             int64_t stride) const {
    if (!deltas.exist()) return;
    const int64_t first = group * Product::kGroupRows;
    const int64_t end = least(end_group * Product::kGroupRows, product.num_outputs());
    for (int64_t t = token; t < end_token; ++t)
      deltas.expand(t, first, end, out + (t - token) * stride);
  }

  void multiply(int64_t piece, float* own_scratch) const {
    const auto [group, end_group, token, end_token] = pieces.at(piece);
    if (scratch) return multiply_gated(group, end_group, token, end_token, own_scratch);
    const int64_t stride = wide ? product.num_outputs() : layer.out_stride;
    float* out = (wide ? wide : layer.out) + token * stride + group * Product::kGroupRows;
    product.multiply(group, end_group, token, end_token, out, stride);
    adapt(group, end_group, token, end_token, out, stride);
  }

  void multiply_gated(int64_t group, int64_t end_group, int64_t first, int64_t end_token,
                      float* gates) const {
    const int64_t width = (end_group - group) * Product::kGroupRows;
    const int64_t step = gated_tokens(product);
    for (int64_t token = first; token < end_token; token += step) {
      const int64_t end = least(token + step, end_token);
      product.multiply(group, end_group, token, end, gates, 2 * width);
      product.multiply(group + pieces.num_groups, end_group + pieces.num_groups, token, end,
                       gates + width, 2 * width);
      adapt(group, end_group, token, end, gates, 2 * width);
      adapt(group + pieces.num_groups, end_group + pieces.num_groups, token, end, gates + width,
            2 * width);
      for (int64_t t = token; t < end; ++t) {
        const float* from = gates + (t - token) * 2 * width;
        pointwise.silu_and_mul(from, from + width, static_cast<int32_t>(width),
                               layer.out + t * layer.out_stride + group * Product::kGroupRows);
      }
    }
  }

  // A whole number of tiles.
  static int64_t gated_tokens(const Product& product) {
    return divide_up(kGatedTokens, product.tile_tokens()) * product.tile_tokens();
  }

  // The gates that no piece could apply, because groups have gates and values.
  void apply_gates() const {
    const int64_t width = product.num_outputs();
    for (int64_t token = 0; token < layer.num_tokens; ++token)
      pointwise.silu_and_mul(wide + token * width, wide + token * width + width / 2,
                             static_cast<int32_t>(width / 2), layer.out + token * layer.out_stride);
  }
};

template <typename Product>
void work(void* data) {
  Job<Product>& job = *static_cast<Job<Product>*>(data);
  const size_t member = __atomic_fetch_add(&job.next_member, 1, __ATOMIC_RELAXED);
  float* scratch = job.scratch + member * job.scratch_floats;
  const int64_t tile = job.product.tile_tokens();
  job.laying.run([&](int64_t first, int64_t end) {
    job.lay(first * tile, least(end * tile, job.layer.num_tokens));
  });
  job.laying.wait();
  job.multiplying.run([&](int64_t first, int64_t end) {
    for (int64_t piece = first; piece < end; ++piece) job.multiply(piece, scratch);
  });
}

// Returns 0, or -1 if there is no memory.
template <typename Product>
int compute(const Layer& layer, Product product) {
  const int64_t num_tokens = layer.num_tokens, num_outputs = product.num_outputs();
  const int64_t num_inputs = num_tokens * product.num_inputs();
  if (num_tokens == 0 || num_outputs == 0) return 0;
  const bool is_small = num_inputs * num_outputs < kSerialProducts;
  const int64_t threads = is_small || layer.num_threads < 1 ? 1 : layer.num_threads;
  const bool fills_groups = layer.is_gated && num_outputs % (2 * Product::kGroupRows) == 0;
  const bool is_wide = layer.is_gated && !fills_groups;
  const int64_t tile = product.tile_tokens();
  const int64_t rows = fills_groups ? num_outputs / 2 : num_outputs;
  const Pieces pieces(divide_up(rows, Product::kGroupRows), num_tokens, Product::kTogether, tile,
                      threads * kPieces);

  const size_t scratch_floats = static_cast<size_t>(
      fills_groups ? Job<Product>::gated_tokens(product) * 2 * pieces.groups * Product::kGroupRows : 0);
  Deltas deltas(layer.adapters, layer.slots, layer.bias);
  Space space;
  const size_t laid = space.add(product.laid_bytes());
  const size_t normal = space.add(layer.norm_weight ? sizeof(float) * static_cast<size_t>(num_inputs) : 0);
  const size_t wide = space.add(is_wide ? sizeof(float) * static_cast<size_t>(num_tokens * num_outputs) : 0);
  const size_t scratch = space.add(sizeof(float) * scratch_floats * static_cast<size_t>(threads));
  const size_t between =
      space.add(sizeof(float) * static_cast<size_t>(num_tokens * deltas.width()));
  void* memory = nullptr;
  if (space.bytes && posix_memalign(&memory, 64, space.bytes) != 0) return -1;
  char* at = static_cast<char*>(memory);
  const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(at + offset); };
  product.set_inputs(layer.norm_weight ? floats(normal) : layer.x,
                     layer.norm_weight ? product.num_inputs() : layer.x_stride, at + laid);
  deltas.set_space(floats(between));
  Job<Product> job = {layer,
                      product,
                      chosen_pointwise(),
                      deltas,
                      pieces,
                      layer.norm_weight ? floats(normal) : nullptr,
                      is_wide ? floats(wide) : nullptr,
                      fills_groups ? floats(scratch) : nullptr,
                      scratch_floats,
                      0,
                      Phase(divide_up(num_tokens, tile), kInputsAtOnce / (tile * product.num_inputs())),
                      Phase(pieces.count(), 1)};
  run_parallel(work<Product>, &job, static_cast<int32_t>(threads));
  if (is_wide) job.apply_gates();
  std::free(memory);
  return 0;
}

// Matrices of one shape one behind the other, each with rows of inputs of its own.
struct ManyJob {
  const FloatLinearCall& call;
  const Kernel& kernel;
  const size_t matrix_bytes;
  const int64_t x_step, out_step;
  const Pieces pieces;  // of each
  Phase multiplying;

  void multiply(int64_t item) const {
    const int64_t which = item / pieces.count();
    FloatLinearCall one = call;
    one.x += which * x_step;
    one.weight = static_cast<const char*>(call.weight) + static_cast<size_t>(which) * matrix_bytes;
    const auto [group, end_group, token, end_token] = pieces.at(item % pieces.count());
    float* out = call.out + which * out_step + token * call.out_stride + group * kPacked;
    FloatProduct(one, kernel).multiply(group, end_group, token, end_token, out, call.out_stride);
  }
};

void work_on_many(void* data) {
  ManyJob& job = *static_cast<ManyJob*>(data);
  job.multiplying.run([&](int64_t first, int64_t end) {
    for (int64_t item = first; item < end; ++item) job.multiply(item);
  });
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
                              bias, false,    out,        out_stride, nullptr,
                              nullptr, num_threads};
  return quire::compute(layer, quire::BlockProduct(*matrix, bias, num_tokens, quire::chosen_blocks()));
}

// The same for a weight in floats.
int quire_float_linear(const quire::FloatLinearCall* call) {
  const quire::Layer layer = {call->x, call->x_stride, call->num_tokens, nullptr,
                              0.0f,    nullptr,        call->bias,       false,
                              call->out, call->out_stride, nullptr,           nullptr,
                              call->num_threads};
  return quire::compute(layer, quire::FloatProduct(*call, quire::chosen_kernel()));
}

// The same for `count` weights one behind the other, without a bias: inputs of the next one lie
// `x_step` floats behind those of the one before, and its outputs `out_step`.
void quire_float_linears(const quire::FloatLinearCall* call, int32_t count, int64_t x_step,
                         int64_t out_step) {
  using namespace quire;
  if (call->num_tokens == 0 || call->num_outputs == 0 || count == 0) return;
  const int64_t groups = count_groups(*call), tokens = call->num_tokens;
  const int64_t products = tokens * call->num_inputs * call->num_outputs * count;
  const int64_t threads = products < kSerialProducts || call->num_threads < 1 ? 1 : call->num_threads;
  const Kernel& kernel = chosen_kernel();
  const Pieces pieces(groups, tokens, FloatProduct::kTogether, kernel.tile_tokens,
                      divide_up(threads * kPieces, count));
  const size_t item_bytes = call->kind == FloatKind::kFloat32 ? 4 : 2;
  const size_t matrix_bytes = static_cast<size_t>(groups * call->num_inputs * kPacked) * item_bytes;
  ManyJob job = {*call,  kernel, matrix_bytes, x_step, out_step,
                 pieces, Phase(pieces.count() * count, 1)};
  run_parallel(work_on_many, &job, static_cast<int32_t>(threads));
}

// A linear layer after a norm, and with gates if `layer` says so. The matrix is of quantised blocks,
// or of packed floats if its kind is a FloatKind.
int quire_norm_linear(const quire::PackedMatrix* matrix, const quire::Layer* layer) {
  return quire::with_product(*matrix, layer->bias, layer->num_tokens,
                             [&](const auto& product) { return quire::compute(*layer, product); });
}

}  // extern "C"
#pragma GCC visibility pop
