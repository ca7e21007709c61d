// The entry point that turns stored blocks of a GGUF file into float32, as they are loaded.

#include "dispatch.h"
#include "half.h"
#include "phase.h"
#include "quantized.h"

namespace quire {
namespace {

constexpr int64_t kPiece = 4096;  // blocks

// Bytes of a stored block of 32 numbers, of which the scales come first.
constexpr int block_bytes(Kind kind) {
  return kind == Kind::kQ8_0 ? 34 : kind == Kind::kQ4_0 ? 18 : 20;
}

template <Kind kKind>
void decode(const uint8_t* block, float* out) {
  const float scale = load_half(block);
  if (kKind == Kind::kQ8_0) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(block + 2);
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(numbers[i]) * scale;
    return;
  }
  // The first 16 numbers are in the low halves of the bytes, the others in the high ones.
  constexpr bool kHasMinimum = kKind == Kind::kQ4_1;
  const uint8_t* numbers = block + (kHasMinimum ? 4 : 2);
  const float minimum = kHasMinimum ? load_half(block + 2) : 0.0f;
  constexpr int kOffset = kHasMinimum ? 0 : layout_of(kKind).offset;
  for (int i = 0; i < kBlock / 2; ++i) {
    const float low = static_cast<float>((numbers[i] & 15) - kOffset) * scale;
    const float high = static_cast<float>((numbers[i] >> 4) - kOffset) * scale;
    out[i] = kHasMinimum ? low + minimum : low;
    out[i + kBlock / 2] = kHasMinimum ? high + minimum : high;
  }
}

struct Job {
  const uint8_t* blocks;
  float* out;
  Phase phase;
};

template <Kind kKind>
void run(void* data) {
  Job& job = *static_cast<Job*>(data);
  job.phase.run([&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i)
      decode<kKind>(job.blocks + i * block_bytes(kKind), job.out + i * kBlock);
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Blocks of Q8_0, Q4_0 or Q4_1; -1 if the kind is another one.
int quire_dequantize(int32_t kind, const uint8_t* blocks, int64_t num_blocks, float* out,
                     int32_t num_threads) {
  using namespace quire;
  Job job = {blocks, out, Phase(num_blocks, kPiece)};
  switch (static_cast<Kind>(kind)) {
    case Kind::kQ8_0: run_parallel(run<Kind::kQ8_0>, &job, num_threads); return 0;
    case Kind::kQ4_0: run_parallel(run<Kind::kQ4_0>, &job, num_threads); return 0;
    case Kind::kQ4_1: run_parallel(run<Kind::kQ4_1>, &job, num_threads); return 0;
    default: return -1;
  }
}

}  // extern "C"
#pragma GCC visibility pop
