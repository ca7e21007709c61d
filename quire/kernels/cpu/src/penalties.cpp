// Penalties for tokens that a request has used. Compiled without contraction of floating point
// operations: logits are those of the reference, bit for bit.

#include <cstdint>

namespace {

// Tokens that are passed over together where none of them has been used.
constexpr int64_t kTogether = 64;

struct Amounts {
  float repetition, frequency, presence;
};

float penalized(float logit, int32_t uses, const Amounts& amounts) {
  logit = logit > 0 ? logit / amounts.repetition : logit * amounts.repetition;
  const float count = static_cast<float>(uses >> 1);
  logit -= count * amounts.frequency;
  return logit - (count > 1 ? 1 : count) * amounts.presence;
}

void penalize_line(float* logits, const int32_t* uses, int64_t vocab_size, const Amounts& amounts) {
  for (int64_t first = 0; first < vocab_size; first += kTogether) {
    const int64_t end = first + kTogether < vocab_size ? first + kTogether : vocab_size;
    int32_t any = 0;
    for (int64_t token = first; token < end; ++token) any |= uses[token];
    if (!any) continue;
    for (int64_t token = first; token < end; ++token)
      if (uses[token]) logits[token] = penalized(logits[token], uses[token], amounts);
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Lowers the logits of used tokens in the lines whose rows have a slot other than 0. Each slot of
// `uses` has for each token twice the number of generated uses, plus one if the prompt uses it.
void quire_penalize(float* logits, int64_t stride, int64_t vocab_size, const int64_t* rows,
                    int64_t num_lines, const int32_t* uses, const int32_t* slots,
                    const float* repetition, const float* frequency, const float* presence) {
  for (int64_t line = 0; line < num_lines; ++line) {
    const int64_t row = rows[line];
    if (slots[row] == 0) continue;
    penalize_line(logits + line * stride, uses + slots[row] * vocab_size, vocab_size,
                  {repetition[row], frequency[row], presence[row]});
  }
}

}  // extern "C"
#pragma GCC visibility pop
