#include <cmath>

#include "check.h"

extern "C" {
void quire_apply_bitmask(float* scores, int64_t stride, int64_t vocab_size, const int32_t* lines,
                         const uint32_t* bits, int64_t num_lines, int64_t num_words);
}

namespace check {

void test_bitmask() {
  Random random(5);
  for (const int num_words : {1, 2, 3}) {
    const int vocab_size = 70;
    Floats scores = random.normals(3 * vocab_size);
    const std::vector<int32_t> lines = {2, 0};
    std::vector<uint32_t> bits(static_cast<size_t>(2 * num_words));
    for (uint32_t& word : bits) word = static_cast<uint32_t>(random.integer(0, 1 << 30));
    bits[0] = UINT32_MAX;
    quire_apply_bitmask(scores.data(), vocab_size, vocab_size, lines.data(), bits.data(), 2,
                        num_words);
    for (int i = 0; i < 2; ++i) {
      for (int token = 0; token < vocab_size; ++token) {
        const bool covered = token / 32 < num_words;
        const uint32_t word = covered ? bits[static_cast<size_t>(i * num_words + token / 32)] : 0;
        const int at = lines[static_cast<size_t>(i)] * vocab_size + token;
        const bool is_forbidden = std::isinf(scores[static_cast<size_t>(at)]);
        equal("a forbidden token", is_forbidden, !(word >> token % 32 & 1));
      }
    }
    for (int token = 0; token < vocab_size; ++token)
      equal("another line", std::isinf(scores[static_cast<size_t>(vocab_size + token)]), 0);
  }
}

}  // namespace check
