// The entry point for drawing tokens: finds what the filters of a line keep, then draws from it.

#include "choice.h"

#include <cmath>
#include <cstdlib>

#include "dispatch.h"
#include "filters.h"
#include "noise.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Below this many numbers waking other threads costs more than it gains.
constexpr int64_t kSerialNumbers = 100000;

struct Choosing {
  const ChoiceCall& call;
  const ChoiceKernel& kernel;
  const Pointwise& pointwise;
  float* memory;
  std::atomic<int32_t> num_workers;
  Phase lines;
};

int32_t choose(const Choosing& job, int64_t line, const Workspace& space) {
  const ChoiceCall& call = job.call;
  const int64_t row = call.rows[line];
  const int32_t n = call.width;
  const float* x = call.scores + line * call.stride;
  const float temperature = call.temperature[row];
  if (!(temperature > 0)) return job.pointwise.largest(x, n);
  if (temperature != 1.0f) {
    job.kernel.temper(x, n, temperature, space.tempered);
    x = space.tempered;
  }
  const int32_t top_k = call.top_k[row];
  const float top_p = call.top_p[row], log_min_p = call.log_min_p[row];
  const NoiseKeys keys = noise_keys(call.seed_low[row], call.seed_high[row],
                                    static_cast<uint32_t>(call.positions[row]));
  if (top_k <= 0 && top_p >= 1 && log_min_p == -INFINITY)
    return job.kernel.draw(x, n, -FLT_MAX, keys);
  const int32_t likeliest = job.pointwise.largest(x, n);
  if (!std::isfinite(x[likeliest])) return likeliest;
  Filters filters(job.kernel, x, n, x[likeliest], space);
  filters.keep_min_p(log_min_p);
  if (top_k > 0) filters.keep_top_k(top_k);
  if (top_p < 1) filters.keep_top_p(top_p);
  return job.kernel.draw(x, n, filters.floor(), keys);
}

void choose_lines(void* data) {
  Choosing& job = *static_cast<Choosing*>(data);
  const Workspace space(job.memory, job.call.width, job.num_workers.fetch_add(1));
  job.lines.run([&](int64_t first, int64_t end) {
    for (int64_t line = first; line < end; ++line) job.call.out[line] = choose(job, line, space);
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// One token for each line. Returns 0, or -1 if there is no memory for the working space.
int quire_choose(const quire::ChoiceCall* call) {
  using namespace quire;
  const bool is_small = call->num_lines * call->width < kSerialNumbers;
  const int32_t num_threads = is_small ? 1 : call->num_threads;
  float* memory = static_cast<float*>(std::malloc(Workspace::bytes(call->width, num_threads)));
  if (!memory) return -1;
  Choosing job = {*call, chosen_choice(), chosen_pointwise(), memory, {0}, Phase(call->num_lines, 1)};
  run_parallel(choose_lines, &job, num_threads);
  std::free(memory);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
