#include <cstring>

#include "check.h"

extern "C" {
int quire_dequantize(int32_t kind, const uint8_t* blocks, int64_t num_blocks, float* out,
                     int32_t num_threads);
}

namespace check {
namespace {

constexpr int kNumbers = 32;
// Powers of two as float16: 0.5, 1, 2, 4.
constexpr uint16_t kScales[] = {0x3800, 0x3c00, 0x4000, 0x4400};

float scale_of(int index) { return 0.5f * static_cast<float>(1 << index); }

}  // namespace

void test_dequantize() {
  Random random(7);
  const struct {
    int32_t kind;
    int bytes, numbers_at, offset;
    bool has_minimum;
  } formats[] = {{0, 34, 2, 0, false}, {1, 18, 2, 8, false}, {2, 20, 4, 0, true}};
  for (const auto& format : formats)
    for (const int num_blocks : {1, 3, 4097}) {
      std::vector<uint8_t> blocks(static_cast<size_t>(num_blocks * format.bytes));
      for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random.integer(0, 255));
      std::vector<int> scales, minima;
      for (int i = 0; i < num_blocks; ++i) {
        scales.push_back(random.integer(0, 3));
        minima.push_back(random.integer(0, 3));
        uint8_t* block = blocks.data() + i * format.bytes;
        std::memcpy(block, &kScales[scales.back()], 2);
        if (format.has_minimum) std::memcpy(block + 2, &kScales[minima.back()], 2);
      }
      Floats out(static_cast<size_t>(num_blocks * kNumbers));
      equal("the status", quire_dequantize(format.kind, blocks.data(), num_blocks, out.data(),
                                           num_threads), 0);
      for (int i = 0; i < num_blocks; ++i)
        for (int j = 0; j < kNumbers; ++j) {
          const uint8_t* numbers = blocks.data() + i * format.bytes + format.numbers_at;
          const int number = format.kind == 0 ? static_cast<int8_t>(numbers[j])
                             : j < 16         ? numbers[j] & 15
                                              : numbers[j - 16] >> 4;
          float expected = static_cast<float>(number - format.offset) *
                           scale_of(scales[static_cast<size_t>(i)]);
          if (format.has_minimum) expected += scale_of(minima[static_cast<size_t>(i)]);
          near("a number", out[static_cast<size_t>(i * kNumbers + j)], expected, 0.0);
        }
    }
  Floats none(1);
  equal("another kind", quire_dequantize(3, nullptr, 0, none.data(), num_threads), -1);
}

}  // namespace check
