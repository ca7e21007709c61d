// The entry point for log-probabilities: what is to be known of a whole line of logits for them.

#include "logprobs.h"

#include <algorithm>
#include <cmath>

#include "line_job.h"

namespace quire {
namespace {

int32_t count_above(const float* x, int32_t n, float pivot) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; ++i) count += x[i] > pivot;
  return count;
}

// The places of the `count` highest logits, of which `least` is the lowest: the highest first, equal
// ones in their order. Fewer than `count` may reach it; the rest is minus infinity.
void take_highest(const float* x, int32_t n, int32_t count, float least, int32_t* out) {
  int32_t num_equal = count - count_above(x, n, least), taken = 0;
  for (int32_t i = 0; i < n && taken < count; ++i) {
    if (x[i] < least || (x[i] == least && num_equal-- <= 0)) continue;
    out[taken++] = i;
  }
  std::sort(out, out + taken, [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  for (int32_t i = 0; i < n && taken < count; ++i)
    if (x[i] < least) out[taken++] = i;
}

void summarize(const LineJob<LogprobsCall>& job, int64_t line, const Workspace& space) {
  const LogprobsCall& call = job.call;
  const float* x = call.logits + line * call.stride;
  const int32_t n = call.width;
  const float best = x[job.pointwise.largest(x, n)];
  call.best[line] = best;
  if (!std::isfinite(best)) return;
  call.log_total[line] = static_cast<float>(std::log(job.kernel.weigh(x, n, best, -FLT_MAX, nullptr)));
  call.ranks[line] = count_above(x, n, x[call.tokens[line]]) + 1;
  if (call.num_top == 0) return;
  Filters filters(job.kernel, x, n, best, space);
  filters.keep_top_k(call.num_top);
  take_highest(x, n, call.num_top, filters.floor(), call.top_ids + line * call.num_top);
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Returns 0, or -1 if there is no memory for the working space. Of a line whose best logit is not
// finite it writes nothing but that.
int quire_summarize(const quire::LogprobsCall* call) {
  return quire::run_lines(*call, quire::summarize);
}

}  // extern "C"
#pragma GCC visibility pop
