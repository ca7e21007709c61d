// Linear layers against sums in double precision.

#include <cmath>
#include <cstring>
#include <limits>

#include "check.h"
#include "float_linear.h"
#include "quantized.h"

extern "C" {
int quire_float_linear(const quire::FloatLinearCall* call);
void quire_float_linears(const quire::FloatLinearCall* call, int32_t count, int64_t x_step,
                         int64_t out_step);
int quire_packed_linear(const quire::PackedMatrix* matrix, const float* x, int64_t x_stride,
                        int64_t num_tokens, const float* bias, float* out, int64_t out_stride,
                        int32_t num_threads);
int quire_packed_rows(const quire::PackedMatrix* matrix, const int64_t* ids, int64_t count,
                      float* out);
void quire_pack_int8(const float* rows, int64_t stride, int64_t num_rows, int32_t num_inputs,
                     uint8_t* groups);
void quire_pack_codes(const uint8_t* codes, int64_t stride, int64_t num_rows, int32_t num_columns,
                      int32_t bits, uint8_t* groups, int64_t group_bytes, int32_t num_threads);
}

namespace check {
namespace {

struct Shape {
  int tokens, outputs, inputs;
};

// Rows of x and out lie `kGap` floats further apart than they must; those are not to be touched.
constexpr int kGap = 3;
constexpr float kUntouched = 7.0f;

struct Tensors {
  Floats x, bias, out;
  int64_t x_stride, out_stride;

  Tensors(const Shape& shape, Random& random)
      : x(random.normals(row_floats(shape.tokens, shape.inputs))),
        bias(random.normals(static_cast<size_t>(shape.outputs))),
        out(row_floats(shape.tokens, shape.outputs), kUntouched),
        x_stride(shape.inputs + kGap),
        out_stride(shape.outputs + kGap) {
    for (int t = 0; t < shape.tokens; ++t)
      for (int o = 0; o < shape.outputs; ++o)
        out[static_cast<size_t>(t * out_stride + o)] = std::numeric_limits<float>::quiet_NaN();
  }

  // The last row has no gap.
  static size_t row_floats(int rows, int width) {
    return static_cast<size_t>(rows * (width + kGap) - kGap);
  }
};

// `weight` is [outputs, inputs]; `tolerance` is relative to the sum of the magnitudes of the products.
void compare(const Shape& shape, const Tensors& found, const Floats& x, const Floats& weight,
             bool has_bias, double tolerance) {
  for (int t = 0; t < shape.tokens; ++t) {
    for (int o = 0; o < shape.outputs; ++o) {
      double sum = has_bias ? found.bias[static_cast<size_t>(o)] : 0.0, size = std::fabs(sum);
      for (int i = 0; i < shape.inputs; ++i) {
        const double product = static_cast<double>(x[static_cast<size_t>(t * found.x_stride + i)]) *
                               weight[static_cast<size_t>(o * shape.inputs + i)];
        sum += product;
        size += std::fabs(product);
      }
      near("an output", found.out[static_cast<size_t>(t * found.out_stride + o)], sum,
           tolerance * size + 1e-30);
    }
    if (t + 1 < shape.tokens)
      for (int i = 0; i < kGap; ++i)
        near("what lies beside the outputs",
             found.out[static_cast<size_t>(t * found.out_stride + shape.outputs + i)], kUntouched, 0);
  }
}

// The upper half of a float.
uint16_t upper(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// `weight` [outputs, inputs] as the library reads it.
Floats packed_floats(const Shape& shape, const float* weight) {
  const int groups = (shape.outputs + quire::kPacked - 1) / quire::kPacked;
  Floats packed(static_cast<size_t>(groups * shape.inputs * quire::kPacked));
  for (int o = 0; o < shape.outputs; ++o)
    for (int i = 0; i < shape.inputs; ++i)
      packed[static_cast<size_t>((o / quire::kPacked * shape.inputs + i) * quire::kPacked +
                                 o % quire::kPacked)] = weight[o * shape.inputs + i];
  return packed;
}

void run_float(const Shape& shape, bool has_bias, bool is_bfloat, Random& random) {
  Tensors tensors(shape, random);
  Floats weight = random.normals(static_cast<size_t>(shape.outputs * shape.inputs));
  if (is_bfloat)
    for (float& one : weight) one = std::ldexp(std::nearbyint(std::ldexp(one, 4)), -4);  // fits
  const Floats packed = packed_floats(shape, weight.data());
  std::vector<uint16_t> narrow;
  for (float one : packed) narrow.push_back(upper(one));
  const quire::FloatLinearCall call = {
      tensors.x.data(), is_bfloat ? static_cast<const void*>(narrow.data()) : packed.data(),
      has_bias ? tensors.bias.data() : nullptr,
      tensors.out.data(), tensors.x_stride, tensors.out_stride,
      shape.tokens,     shape.outputs,      shape.inputs,
      num_threads,      is_bfloat ? quire::FloatKind::kBfloat16 : quire::FloatKind::kFloat32};
  equal("quire_float_linear", quire_float_linear(&call), 0);
  compare(shape, tensors, tensors.x, weight, has_bias, 1e-6);
}

// Matrices that each have inputs of their own: those of one follow those of the one before in a row,
// and so do the outputs.
void run_floats(const Shape& each, int count, Random& random) {
  const int inputs = count * each.inputs, outputs = count * each.outputs;
  Tensors tensors({each.tokens, outputs, inputs}, random);
  const size_t size = static_cast<size_t>(each.outputs * each.inputs);
  const Floats weights = random.normals(static_cast<size_t>(count) * size);
  Floats packed, whole(static_cast<size_t>(outputs * inputs));  // zeros beside the matrices
  for (int which = 0; which < count; ++which) {
    const float* weight = weights.data() + static_cast<size_t>(which) * size;
    const Floats one = packed_floats(each, weight);
    packed.insert(packed.end(), one.begin(), one.end());
    for (int o = 0; o < each.outputs; ++o)
      std::memcpy(&whole[static_cast<size_t>((which * each.outputs + o) * inputs + which * each.inputs)],
                  weight + o * each.inputs, sizeof(float) * static_cast<size_t>(each.inputs));
  }
  const quire::FloatLinearCall call = {
      tensors.x.data(), packed.data(), nullptr,     tensors.out.data(), tensors.x_stride,
      tensors.out_stride, each.tokens, each.outputs, each.inputs,       num_threads,
      quire::FloatKind::kFloat32};
  quire_float_linears(&call, count, each.inputs, each.outputs);
  compare({each.tokens, outputs, inputs}, tensors, tensors.x, whole, false, 1e-6);
}

constexpr uint16_t kHalfOne = 0x3c00;

void put_halves(uint8_t* at, Random& random) {
  for (int row = 0; row < quire::kRows; ++row) {
    const uint16_t half = static_cast<uint16_t>(kHalfOne - random.integer(0, 0x1000));
    std::memcpy(at + 2 * row, &half, sizeof half);
  }
}

void put_floats(uint8_t* at, Random& random) {
  for (int row = 0; row < quire::kRows; ++row) {
    const float scale = std::exp2(static_cast<float>(random.integer(-3, 3)));
    std::memcpy(at + 4 * row, &scale, sizeof scale);
  }
}

// Packed weights of random numbers and scales; all but the scales may be any bytes. Those of grouped
// kinds have 3 blocks to a scale, maybe zeros, and any number of inputs, in an order of their own.
struct Weights {
  std::vector<uint8_t> data;
  std::vector<int32_t> order;
  quire::PackedMatrix matrix;

  Weights(quire::Kind kind, int outputs, int inputs, Random& random)
      : matrix{nullptr, kind, outputs, inputs, 1, nullptr, 0, 3, 0} {
    if (quire::is_grouped(kind)) {
      matrix.has_zeros = quire::layout_of(kind).has_minima && random.integer(0, 1);
      for (int i = 0; i < inputs; ++i) order.push_back(inputs - 1 - i);
      while (order.size() % quire::kBlock) order.push_back(-1);
      matrix.order = order.data();
      matrix.num_columns = static_cast<int32_t>(order.size());
    }
    const quire::Layout layout = quire::layout_of(kind, matrix);
    const int blocks = matrix.num_blocks();
    const size_t group_bytes = layout.group_bytes(blocks);
    const int groups = (outputs + quire::kRows - 1) / quire::kRows;
    data.resize(static_cast<size_t>(groups) * group_bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.integer(0, 255));
    const int count = (blocks + layout.scale_blocks - 1) / layout.scale_blocks;
    const bool has_minima = kind == quire::Kind::kQ4_1 || kind == quire::Kind::kQ4_K;
    for (int group = 0; group < groups; ++group)
      for (int i = 0; i < count; ++i) {
        uint8_t* at = data.data() + static_cast<size_t>(group) * group_bytes +
                      layout.scales_at(blocks) + static_cast<size_t>(i * layout.scale_bytes);
        if (quire::is_grouped(kind)) put_floats(at, random);
        else put_halves(at, random);
        if (has_minima) put_halves(at + quire::kHalves, random);
      }
    matrix.data = data.data();
  }

  Floats rows() const {
    std::vector<int64_t> ids(static_cast<size_t>(matrix.num_outputs));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
    Floats result(ids.size() * static_cast<size_t>(matrix.num_inputs));
    equal("quire_packed_rows",
          quire_packed_rows(&matrix, ids.data(), matrix.num_outputs, result.data()), 0);
    return result;
  }
};

// Inputs as the library is to round them: 8 bits with a scale for every 32, in the order of columns.
Floats rounded(const Shape& shape, const Tensors& tensors, const std::vector<int32_t>& order) {
  Floats result = tensors.x;
  const auto input = [&](int i) { return order.empty() ? i : order[static_cast<size_t>(i)]; };
  for (int t = 0; t < shape.tokens; ++t)
    for (int block = 0; block < shape.inputs; block += quire::kBlock) {
      float* x = result.data() + t * tensors.x_stride;
      const int end = block + quire::kBlock < shape.inputs ? block + quire::kBlock : shape.inputs;
      float largest = 0;
      for (int i = block; i < end; ++i) largest = std::fmax(largest, std::fabs(x[input(i)]));
      const float scale = largest / 127.0f, inverse = 127.0f / largest;
      for (int i = block; i < end; ++i) x[input(i)] = std::nearbyint(x[input(i)] * inverse) * scale;
    }
  return result;
}

void run_packed(quire::Kind kind, const Shape& shape, bool has_bias, Random& random) {
  Tensors tensors(shape, random);
  const Weights weights(kind, shape.outputs, shape.inputs, random);
  const int status = quire_packed_linear(
      &weights.matrix, tensors.x.data(), tensors.x_stride, shape.tokens,
      has_bias ? tensors.bias.data() : nullptr, tensors.out.data(), tensors.out_stride, num_threads);
  equal("quire_packed_linear", status, 0);
  // Minima may cancel what they are added to.
  compare(shape, tensors, rounded(shape, tensors, weights.order), weights.rows(), has_bias, 3e-5);
}

constexpr quire::Kind kKinds[] = {quire::Kind::kQ8_0, quire::Kind::kQ4_0, quire::Kind::kQ4_1,
                                  quire::Kind::kQ4_K, quire::Kind::kQ6_K};
constexpr quire::Kind kGroupedKinds[] = {quire::Kind::kGrouped8, quire::Kind::kGrouped4,
                                         quire::Kind::kGroupedE2M1};

bool is_super(quire::Kind kind) { return quire::layout_of(kind).scale_blocks > 1; }

}  // namespace

// Every number of outputs that a group may lack, and every number of tokens that a tile may.
void test_float_linear() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int outputs = 1; outputs <= 3 * quire::kPacked; ++outputs)
    run_float({(outputs * 7 + num_threads) % 31 + 1, outputs, outputs + 2}, outputs % 2,
              outputs % 3 == 0, random);
  for (const Shape& shape : {Shape{1, 700, 150}, Shape{14, 129, 67}, Shape{60, 17, 130}})
    run_float(shape, true, shape.tokens == 14, random);
  for (const Shape& shape : {Shape{1, 64, 48}, Shape{5, 33, 20}, Shape{31, 16, 7}})
    run_floats(shape, 1 + num_threads % 4, random);
}

void test_packed_linear() {
  Random random(static_cast<uint32_t>(num_threads));
  for (quire::Kind kind : kKinds) {
    const int unit = is_super(kind) ? 256 : 32;
    for (int outputs = 1; outputs <= quire::kRows + 1; ++outputs)
      run_packed(kind, {(outputs + num_threads) % 9 + 1, outputs, unit}, outputs % 2, random);
    for (const Shape& shape : {Shape{2, 245, 256}, Shape{17, 33, 256}, Shape{59, 7, 512}})
      run_packed(kind, shape, true, random);
  }
  for (quire::Kind kind : kGroupedKinds)
    for (int outputs = 1; outputs <= 2 * quire::kRows; outputs += 3)
      run_packed(kind, {(outputs + num_threads) % 19 + 1, outputs, 7 * outputs}, outputs % 2, random);
}

void test_packed_rows() {
  Random random(static_cast<uint32_t>(num_threads));
  for (quire::Kind kind : kKinds) {
    const Weights weights(kind, 33 + num_threads, 512, random);
    const Floats rows = weights.rows();
    const int64_t ids[] = {32, 0, 31, 32 + num_threads};
    Floats found(4 * 512);
    equal("quire_packed_rows", quire_packed_rows(&weights.matrix, ids, 4, found.data()), 0);
    for (size_t i = 0; i < 4; ++i)
      equal("rows differ",
            std::memcmp(&found[i * 512], &rows[static_cast<size_t>(ids[i]) * 512], 512 * 4), 0);
    for (const int64_t wrong : {int64_t{-1}, int64_t{33 + num_threads}})
      equal("a row that is not there", quire_packed_rows(&weights.matrix, &wrong, 1, found.data()),
            -1);
  }
}

void test_pack_int8() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int rows : {1, 31, 32, 33 + num_threads}) {
    const int inputs = 64, stride = inputs + kGap, groups = (rows + 31) / 32;
    Floats weights = random.normals(static_cast<size_t>(rows * stride - kGap));
    for (int i = 0; i < 32; ++i) weights[static_cast<size_t>(i)] = 0;
    std::vector<uint8_t> data(static_cast<size_t>(groups) *
                              quire::layout_of(quire::Kind::kQ8_0).group_bytes(inputs / 32));
    quire_pack_int8(weights.data(), stride, rows, inputs, data.data());
    const quire::PackedMatrix matrix = {data.data(), quire::Kind::kQ8_0, rows, inputs, 1, nullptr, 0, 0,
                                        0};
    for (int64_t row = 0; row < rows; ++row) {
      Floats found(static_cast<size_t>(inputs));
      equal("quire_packed_rows", quire_packed_rows(&matrix, &row, 1, found.data()), 0);
      for (int i = 0; i < inputs; ++i) {
        const float* block = &weights[static_cast<size_t>(row * stride + i / 32 * 32)];
        float largest = 0;
        for (int j = 0; j < 32; ++j) largest = std::fmax(largest, std::fabs(block[j]));
        // Half of a step, and what float16 makes of the scale.
        near("a weight", found[static_cast<size_t>(i)], block[i % 32], largest * (0.5 / 127 + 1e-3));
      }
    }
  }
}

void test_pack_codes() {
  Random random(static_cast<uint32_t>(num_threads));
  for (int bits : {4, 8})
    for (int rows : {1, 31, 32, 65 + num_threads}) {
      const int columns = 96, stride = columns + kGap;
      const quire::Kind kind = bits == 4 ? quire::Kind::kGrouped4 : quire::Kind::kGrouped8;
      std::vector<uint8_t> codes(static_cast<size_t>(rows * stride - kGap));
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random.integer(0, (1 << bits) - 1));
      quire::PackedMatrix matrix = {nullptr, kind, rows, columns, 1, nullptr, 0, 3, 0};
      const quire::Layout layout = quire::layout_of(kind, matrix);
      const size_t group_bytes = layout.group_bytes(3), groups = static_cast<size_t>((rows + 31) / 32);
      std::vector<uint8_t> data(groups * group_bytes);
      quire_pack_codes(codes.data(), stride, rows, columns, bits, data.data(),
                       static_cast<int64_t>(group_bytes), num_threads);
      const float one = 1.0f;
      for (size_t group = 0; group < groups; ++group)
        for (size_t row = 0; row < 32; ++row)
          std::memcpy(&data[group * group_bytes + layout.scales_at(3) + 4 * row], &one, 4);
      matrix.data = data.data();
      for (int64_t row = 0; row < rows; ++row) {
        Floats found(static_cast<size_t>(columns));
        equal("quire_packed_rows", quire_packed_rows(&matrix, &row, 1, found.data()), 0);
        for (int i = 0; i < columns; ++i)
          near("a code", found[static_cast<size_t>(i)] + static_cast<float>(layout.offset),
               codes[static_cast<size_t>(row * stride + i)], 0);
      }
    }
}

}  // namespace check
