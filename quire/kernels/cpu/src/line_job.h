// Work on each line of a matrix of logits, shared out among threads that each have a workspace.
#pragma once

#include <atomic>
#include <cstdlib>

#include "dispatch.h"
#include "filters.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {

// Below this many numbers waking other threads costs more than it gains.
constexpr int64_t kSerialNumbers = 100000;

template <typename Call>
struct LineJob {
  using Work = void (*)(const LineJob& job, int64_t line, const Workspace& space);

  const Call& call;
  Work work;
  const SamplingKernel& kernel;
  const Pointwise& pointwise;
  float* memory;
  std::atomic<int32_t> num_workers;
  Phase lines;

  static void take_part(void* data) {
    LineJob& job = *static_cast<LineJob*>(data);
    const Workspace space(job.memory, job.call.width, job.num_workers.fetch_add(1));
    job.lines.run([&](int64_t first, int64_t end) {
      for (int64_t line = first; line < end; ++line) job.work(job, line, space);
    });
  }
};

// Returns 0, or -1 if there is no memory for the workspaces.
template <typename Call>
int run_lines(const Call& call, typename LineJob<Call>::Work work) {
  const int32_t num_threads = call.num_lines * call.width < kSerialNumbers ? 1 : call.num_threads;
  float* memory = static_cast<float*>(std::malloc(Workspace::bytes(call.width, num_threads)));
  if (!memory) return -1;
  LineJob<Call> job = {call,   work, chosen_sampling(), chosen_pointwise(),
                       memory, {0},  Phase(call.num_lines, 1)};
  run_parallel(LineJob<Call>::take_part, &job, num_threads);
  std::free(memory);
  return 0;
}

}  // namespace quire
