// Lines of logits, and where to write what their log-probabilities need.
#pragma once

#include <cstdint>

namespace quire {

struct LogprobsCall {
  const float* logits;
  int64_t stride;
  int64_t num_lines;
  // One token for each line, whose rank is asked for.
  const int32_t* tokens;
  float* best;
  // log of the sum of exp(logit - best).
  float* log_total;
  int32_t* ranks;
  // The tokens of the highest logits, num_top for each line; at most `width`.
  int32_t* top_ids;
  int32_t num_top;
  int32_t width;
  int32_t num_threads;
};

}  // namespace quire
