// The entry point for adapters of a layer whose outputs are computed elsewhere.

#include "adapters.h"

#include <cstdlib>

#include "dispatch.h"
#include "phase.h"

namespace quire {
namespace {

// Outputs of a token that one thread works on at once.
constexpr int64_t kOutputs = 512;

struct AdapterJob {
  const Deltas& deltas;
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride, num_outputs, parts;
  Phase shrinking, expanding;

  static void work(void* data) {
    AdapterJob& job = *static_cast<AdapterJob*>(data);
    job.shrinking.run([&](int64_t token, int64_t end) {
      for (; token < end; ++token) job.deltas.shrink(token, job.x + token * job.x_stride);
    });
    job.shrinking.wait();
    job.expanding.run([&](int64_t piece, int64_t end) {
      for (; piece < end; ++piece) {
        const int64_t token = piece / job.parts, first = piece % job.parts * kOutputs;
        const int64_t last = first + kOutputs < job.num_outputs ? first + kOutputs : job.num_outputs;
        job.deltas.expand(token, first, last, job.out + token * job.out_stride + first);
      }
    });
  }
};

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Adds to out = x W^T + bias [num_tokens, num_outputs] what the adapters in `slots` add to it. Strides
// count floats. Returns 0, or -1 if there is no memory.
int quire_add_adapters(const quire::Adapters* adapters, const int32_t* slots, const float* x,
                       int64_t x_stride, int64_t num_tokens, const float* bias, float* out,
                       int64_t out_stride, int64_t num_outputs, int32_t num_threads) {
  quire::Deltas deltas(adapters, slots, bias);
  if (num_tokens == 0) return 0;
  float* space = static_cast<float*>(
      std::malloc(sizeof(float) * static_cast<size_t>(num_tokens * deltas.width())));
  if (!space) return -1;
  deltas.set_space(space);
  const int64_t parts = quire::divide_up(num_outputs, quire::kOutputs);
  quire::AdapterJob job = {deltas,     x,
                           x_stride,   out,
                           out_stride, num_outputs,
                           parts,      quire::Phase(num_tokens, 1),
                           quire::Phase(num_tokens * parts, 4)};
  quire::run_parallel(quire::AdapterJob::work, &job, num_threads);
  std::free(space);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
