// Masks of grammars: a bit for each token, 0 where it is forbidden.

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "dispatch.h"
#include "phase.h"

namespace quire {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr int kWordBits = 32;

constexpr std::array<uint32_t, kWordBits> each_bit() {
  std::array<uint32_t, kWordBits> bits{};
  for (int i = 0; i < kWordBits; ++i) bits[i] = 1u << i;
  return bits;
}
constexpr std::array<uint32_t, kWordBits> kBits = each_bit();

void apply_word(float* logits, uint32_t word) {
  if (word == UINT32_MAX) return;
  if (word == 0) {
    std::fill_n(logits, kWordBits, kForbidden);
    return;
  }
  // Bits are compared in their places: shifting each by another number is slow.
  for (int i = 0; i < kWordBits; ++i) logits[i] = word & kBits[i] ? logits[i] : kForbidden;
}

struct MaskJob {
  float* logits;
  int64_t stride, vocab_size;
  const int32_t* lines;
  const uint32_t* bits;
  int64_t num_words;
  Phase phase;

  void apply(int64_t i) const {
    float* line = logits + lines[i] * stride;
    const uint32_t* words = bits + i * num_words;
    const int64_t covered = std::min(vocab_size, num_words * kWordBits);
    for (int64_t first = 0; first + kWordBits <= covered; first += kWordBits)
      apply_word(line + first, words[first / kWordBits]);
    for (int64_t token = covered - covered % kWordBits; token < covered; ++token)
      if (!(words[token / kWordBits] >> token % kWordBits & 1)) line[token] = kForbidden;
    std::fill(line + covered, line + vocab_size, kForbidden);
  }

  static void take_part(void* data) {
    MaskJob& job = *static_cast<MaskJob*>(data);
    job.phase.run([&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; ++i) job.apply(i);
    });
  }
};

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Forbids in line lines[i] of `logits` every token whose bit in bits[i] is 0, and those that no
// word covers.
void quire_apply_bitmask(float* logits, int64_t stride, int64_t vocab_size, const int32_t* lines,
                         const uint32_t* bits, int64_t num_lines, int64_t num_words,
                         int32_t num_threads) {
  using namespace quire;
  MaskJob job = {logits, stride, vocab_size, lines, bits, num_words, Phase(num_lines, 1)};
  run_parallel(MaskJob::take_part, &job, num_threads);
}

}  // extern "C"
#pragma GCC visibility pop
