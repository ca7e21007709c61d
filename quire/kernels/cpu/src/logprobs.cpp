// The entry point for log-probabilities: what is to be known of a whole line of scores for them.

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "dispatch.h"
#include "filters.h"
#include "logprobs.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Below this many numbers waking other threads costs more than it gains.
constexpr int64_t kSerialNumbers = 100000;

struct Summing {
  const LogprobsCall& call;
  const ChoiceKernel& kernel;
  const Pointwise& pointwise;
  float* memory;
  std::atomic<int32_t> num_workers;
  Phase lines;
};

int32_t count_above(const float* x, int32_t n, float pivot) {
  int32_t count = 0;
  for (int32_t i = 0; i < n; ++i) count += x[i] > pivot;
  return count;
}

// The places of the `count` highest scores, of which `least` is the lowest: the highest first, equal
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

void summarize(const Summing& job, int64_t line, const Workspace& space) {
  const LogprobsCall& call = job.call;
  const float* x = call.scores + line * call.stride;
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

void summarize_lines(void* data) {
  Summing& job = *static_cast<Summing*>(data);
  const Workspace space(job.memory, job.call.width, job.num_workers.fetch_add(1));
  job.lines.run([&](int64_t first, int64_t end) {
    for (int64_t line = first; line < end; ++line) summarize(job, line, space);
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Returns 0, or -1 if there is no memory for the working space. Of a line whose best score is not
// finite it writes nothing but that.
int quire_summarize(const quire::LogprobsCall* call) {
  using namespace quire;
  const bool is_small = call->num_lines * call->width < kSerialNumbers;
  const int32_t num_threads = is_small ? 1 : call->num_threads;
  float* memory = static_cast<float*>(std::malloc(Workspace::bytes(call->width, num_threads)));
  if (!memory) return -1;
  Summing job = {*call, chosen_choice(), chosen_pointwise(), memory, {0}, Phase(call->num_lines, 1)};
  run_parallel(summarize_lines, &job, num_threads);
  std::free(memory);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
