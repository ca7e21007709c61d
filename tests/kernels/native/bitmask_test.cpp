// What edits logits before a token is chosen: masks of grammars and penalties.

#include <cmath>

#include "check.h"

extern "C" {
void quire_apply_bitmask(float* logits, int64_t stride, int64_t vocab_size, const int32_t* lines,
                         const uint32_t* bits, int64_t num_lines, int64_t num_words,
                         int32_t num_threads);
void quire_penalize(float* logits, int64_t stride, int64_t vocab_size, const int64_t* rows,
                    int64_t num_lines, const int32_t* uses, const int32_t* slots,
                    const float* repetition, const float* frequency, const float* presence);
}

namespace check {

void test_bitmask() {
  Random random(5);
  for (const int num_words : {1, 2, 3}) {
    const int vocab_size = 70;
    Floats logits = random.normals(3 * vocab_size);
    const std::vector<int32_t> lines = {2, 0};
    std::vector<uint32_t> bits(static_cast<size_t>(2 * num_words));
    for (uint32_t& word : bits) word = static_cast<uint32_t>(random.integer(0, 1 << 30));
    bits[0] = UINT32_MAX;
    quire_apply_bitmask(logits.data(), vocab_size, vocab_size, lines.data(), bits.data(), 2,
                        num_words, 2);
    for (int i = 0; i < 2; ++i) {
      for (int token = 0; token < vocab_size; ++token) {
        const bool covered = token / 32 < num_words;
        const uint32_t word = covered ? bits[static_cast<size_t>(i * num_words + token / 32)] : 0;
        const int at = lines[static_cast<size_t>(i)] * vocab_size + token;
        const bool is_forbidden = std::isinf(logits[static_cast<size_t>(at)]);
        equal("a forbidden token", is_forbidden, !(word >> token % 32 & 1));
      }
    }
    for (int token = 0; token < vocab_size; ++token)
      equal("another line", std::isinf(logits[static_cast<size_t>(vocab_size + token)]), 0);
  }
}

void test_penalize() {
  Random random(6);
  const std::vector<int64_t> rows = {2, 0, 3};
  const std::vector<int32_t> slots = {0, 0, 1, 2};
  const Floats repetition = {9, 9, 1.3f, 1}, frequency = {9, 9, 0.5f, -0.25f}, presence = {9, 9, 0.1f, 2};
  for (const int vocab_size : {1, 63, 64, 65, 300}) {
    const size_t size = static_cast<size_t>(vocab_size);
    Floats logits = random.normals(3 * size);
    const Floats before = logits;
    std::vector<int32_t> uses(3 * size);
    for (int32_t& count : uses) count = random.integer(0, 9) ? 0 : random.integer(1, 7);
    quire_penalize(logits.data(), vocab_size, vocab_size, rows.data(), 3, uses.data(), slots.data(),
                   repetition.data(), frequency.data(), presence.data());
    for (size_t i = 0; i < 3 * size; ++i) {
      const size_t row = static_cast<size_t>(rows[i / size]);
      double wanted = before[i];
      if (slots[row]) {
        const int32_t count = uses[static_cast<size_t>(slots[row]) * size + i % size];
        if (count) wanted = wanted > 0 ? wanted / repetition[row] : wanted * repetition[row];
        wanted -= count / 2 * double{frequency[row]} + (count > 1 ? presence[row] : 0);
      }
      near("a logit", logits[i], wanted, 1e-5);
    }
  }
}

}  // namespace check
