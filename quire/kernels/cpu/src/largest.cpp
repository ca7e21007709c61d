// The entry point for greedy sampling.

#include "dispatch.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Below this many numbers waking other threads costs more than it gains.
constexpr int64_t kSerialNumbers = 200000;

struct Search {
  const float* x;
  int64_t stride;
  int32_t width;
  int32_t* out;
  const Pointwise& pointwise;
  Phase rows;
};

void search(void* data) {
  Search& job = *static_cast<Search*>(data);
  job.rows.run([&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row)
      job.out[row] = job.pointwise.largest(job.x + row * job.stride, job.width);
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Where the largest number of each row is, the first of equals; NaN counts as larger than all.
void quire_largest(const float* x, int64_t stride, int64_t num_rows, int32_t width, int32_t* out,
                   int32_t num_threads) {
  using namespace quire;
  Search job = {x, stride, width, out, chosen_pointwise(), Phase(num_rows, 1)};
  run_parallel(search, &job, num_rows * width < kSerialNumbers ? 1 : num_threads);
}

}  // extern "C"
#pragma GCC visibility pop
