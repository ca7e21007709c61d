// The entry point for drawing tokens: finds what the filters of a line keep, then draws from it.

#include "sampling.h"

#include <cmath>

#include "line_job.h"
#include "noise.h"

namespace quire {
namespace {

int32_t sample(const LineJob<SamplingCall>& job, int64_t line, const Workspace& space) {
  const SamplingCall& call = job.call;
  const int64_t row = call.rows[line];
  const int32_t n = call.width;
  const float* x = call.logits + line * call.stride;
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

void sample_line(const LineJob<SamplingCall>& job, int64_t line, const Workspace& space) {
  job.call.out[line] = sample(job, line, space);
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// One token for each line. Returns 0, or -1 if there is no memory for the working space.
int quire_sample(const quire::SamplingCall* call) {
  return quire::run_lines(*call, quire::sample_line);
}

}  // extern "C"
#pragma GCC visibility pop
