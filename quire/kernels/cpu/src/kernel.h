// The kernel of the instruction set this file is compiled for, ready to be put in its `Kernel`.
#pragma once

#include "dims.h"
#include "float_tiles.h"
#include "rows.h"

namespace quire {
namespace {

size_t scratch_floats(int32_t head_dim) {
  const size_t rows = rows_scratch_floats(head_dim), dims = dims_scratch_floats(head_dim);
  return rows > dims ? rows : dims;
}

// Calls the dims kernel that was compiled for the task's number of rows.
template <typename E, int R = 1>
void attend_few(const AttentionCall& call, const Task& task, float* scratch) {
  if constexpr (R < kFewRows)
    if (task.num_rows > R) return attend_few<E, R + 1>(call, task, scratch);
  attend_dims<E, R>(call, task, scratch);
}

// Calls the rows kernel that was compiled for the task's number of vectors.
template <typename E, int V = 1>
void attend_many(const AttentionCall& call, const Task& task, float* scratch) {
  if constexpr (V < kRowVectors)
    if (task.num_rows > V * kLanes) return attend_many<E, V + 1>(call, task, scratch);
  attend_rows<E, V>(call, task, scratch);
}

template <typename E>
void attend_to(const AttentionCall& call, const Task& task, float* scratch) {
  if (task.num_rows <= kFewRows)
    attend_few<E>(call, task, scratch);
  else
    attend_many<E>(call, task, scratch);
}

void attend(const AttentionCall& call, const Task& task, float* scratch) {
  if (call.stored == Stored::kFloat16)
    attend_to<Half>(call, task, scratch);
  else
    attend_to<float>(call, task, scratch);
}

void merge(const AttentionCall& call, const Task& task, const float* partials, int32_t count) {
  const Rows rows{call, task};
  const size_t stride = partial_floats(task.num_rows, call.head_dim);
  for (int row = 0; row < task.num_rows; ++row) {
    RowSums sums;
    sums.values = rows.out(row);
    for (int part = 0; part < count; ++part) {
      const float* partial = partials + part * stride;
      const float* values = partial + 2 * task.num_rows + static_cast<size_t>(row) * call.head_dim;
      const float maximum = partial[row], sum = partial[task.num_rows + row];
      if (part == 0)
        sums.set(maximum, sum, values, call.head_dim);
      else
        sums.fold(maximum, sum, values, call.head_dim);
    }
    const float factor = rows.factor(row, sums.maximum, sums.sum);
    for (int d = 0; d < call.head_dim; ++d) sums.values[d] *= factor;
  }
}

constexpr Kernel kKernel = {kFewRows, kRowVectors * kLanes, scratch_floats, attend,
                            merge,    kTileTokens,          multiply_groups};

}  // namespace
}  // namespace quire
