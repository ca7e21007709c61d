// Masks of grammars: a bit for each token, 0 where it is forbidden.

#include <cstdint>
#include <limits>

namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void apply_word(float* scores, uint32_t word, int64_t count) {
  if (word == UINT32_MAX) return;
  for (int64_t i = 0; i < count; ++i) {
    if (!(word >> i & 1)) scores[i] = kForbidden;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Forbids in line lines[i] of `scores` every token whose bit in bits[i] is 0, and those that no
// word covers.
void quire_apply_bitmask(float* scores, int64_t stride, int64_t vocab_size, const int32_t* lines,
                         const uint32_t* bits, int64_t num_lines, int64_t num_words) {
  for (int64_t i = 0; i < num_lines; ++i) {
    float* line = scores + lines[i] * stride;
    const uint32_t* words = bits + i * num_words;
    for (int64_t first = 0, w = 0; first < vocab_size; first += 32, ++w) {
      const int64_t count = vocab_size - first < 32 ? vocab_size - first : 32;
      apply_word(line + first, w < num_words ? words[w] : 0, count);
    }
  }
}

}  // extern "C"
#pragma GCC visibility pop
