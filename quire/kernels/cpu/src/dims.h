// Attention with head dimensions in the lanes, for the few rows of a decoding request.
#pragma once

#include "paging.h"

namespace quire {
namespace {

// The most rows for which this way is the faster one.
constexpr int kFewRows = kLanes == 16 ? 8 : 4;

inline size_t dims_scratch_floats(int head_dim) {
  return static_cast<size_t>(kFewRows) * (2 * head_dim + kTileKeys);
}

// The state of R rows while they go over the keys.
template <int R>
struct DimState {
  int head_dim;
  float* q;       // [R][head_dim], scaled
  float* out;     // [R][head_dim], not normalised
  float* scores;  // [R][kTileKeys], later probabilities
  float maxima[R], sums[R], rescale[R];
  int positions[R];
};

// Adds the dimensions that do not fill a vector to the scores of a group of keys.
template <int R, typename E>
QUIRE_NOINLINE void score_last_dims(const DimState<R>& state, const E* keys, int64_t stride,
                                    float* scores, int d) {
  for (; d < state.head_dim; ++d)
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kGroup; ++i)
        scores[r * kTileKeys + i] += to_float(keys[i * stride + d]) * state.q[r * state.head_dim + d];
}

// The scores of a group of keys for COUNT rows from FIRST on.
template <int FIRST, int COUNT, int R, typename E>
QUIRE_INLINE void score_rows(const DimState<R>& state, const E* keys, int64_t stride,
                             float* scores) {
  Floats acc[COUNT][kGroup] = {};
  const float* q = state.q + FIRST * state.head_dim;
  int d = 0;
  for (; d + kLanes <= state.head_dim; d += kLanes) {
    QUIRE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const Floats key = load(keys + i * stride + d);
      QUIRE_UNROLL
      for (int r = 0; r < COUNT; ++r) acc[r][i] += key * load(q + r * state.head_dim + d);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < COUNT; ++r) store_sums(scores + (FIRST + r) * kTileKeys, acc[r]);
}

// The scores of a group of keys. There are not enough registers for more than four rows at a time.
template <int R, typename E>
QUIRE_INLINE void score_group(const DimState<R>& state, const E* keys, int64_t stride,
                              float* scores) {
  score_rows<0, (R < 4 ? R : 4)>(state, keys, stride, scores);
  if constexpr (R > 4) score_rows<4, R - 4>(state, keys, stride, scores);
  const int d = state.head_dim / kLanes * kLanes;
  if (d < state.head_dim) score_last_dims(state, keys, stride, scores, d);
}

// Turns the scores of one row into probabilities; what the row may not see becomes 0.
template <int R, typename E>
inline void softmax_row(DimState<R>& state, const KeyTile<E>& tile, int row, int window) {
  float* scores = state.scores + row * kTileKeys;
  const int position = state.positions[row] - tile.start;
  const int oldest = position - window + 1;
  const int begin = oldest > tile.begin ? oldest : tile.begin;
  const int end = position + 1 < tile.end ? position + 1 : tile.end;
  for (int i = 0; i < begin && i < kTileKeys; ++i) scores[i] = kMasked;
  for (int i = end > 0 ? end : 0; i < kTileKeys; ++i) scores[i] = kMasked;
  Floats top = splat(state.maxima[row]);
  for (int i = 0; i < kTileKeys; i += kLanes) top = max(load(scores + i), top);
  const float maximum = max(top);
  Floats total = {};
  for (int i = 0; i < kTileKeys; i += kLanes) {
    const Floats p = exp2(load(scores + i) - maximum);
    total += p;
    store(scores + i, p);
  }
  state.rescale[row] = exp2(splat(state.maxima[row] - maximum))[0];
  state.sums[row] = state.sums[row] * state.rescale[row] + sum(total);
  state.maxima[row] = maximum;
}

// Adds the values of the tile to COUNT vectors of each row of the result, starting at dimension d.
template <int COUNT, int R, typename E>
QUIRE_INLINE void add_values(const DimState<R>& state, const KeyTile<E>& tile, int d) {
  Floats acc[R][COUNT];
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r)
    QUIRE_UNROLL
    for (int j = 0; j < COUNT; ++j)
      acc[r][j] = load(state.out + r * state.head_dim + d + j * kLanes) * state.rescale[r];
  for (int key = tile.begin; key < tile.end; ++key) {
    const E* values = tile.values[key] + d;
    QUIRE_KEEP_POINTER(values);
    QUIRE_UNROLL
    for (int j = 0; j < COUNT; ++j) {
      const Floats value = load(values + j * kLanes);
      QUIRE_UNROLL
      for (int r = 0; r < R; ++r) acc[r][j] += value * state.scores[r * kTileKeys + key];
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < R; ++r)
    QUIRE_UNROLL
    for (int j = 0; j < COUNT; ++j)
      store(state.out + r * state.head_dim + d + j * kLanes, acc[r][j]);
}

// The same for the dimensions that do not fill a vector.
template <int R, typename E>
QUIRE_NOINLINE void add_last_values(const DimState<R>& state, const KeyTile<E>& tile, int d) {
  for (; d < state.head_dim; ++d)
    for (int r = 0; r < R; ++r) {
      float acc = state.out[r * state.head_dim + d] * state.rescale[r];
      for (int key = tile.begin; key < tile.end; ++key)
        acc += to_float(tile.values[key][d]) * state.scores[r * kTileKeys + key];
      state.out[r * state.head_dim + d] = acc;
    }
}

template <int R>
inline void start(const AttentionCall& call, const Task& task, float* scratch,
                  DimState<R>& state) {
  const Rows rows{call, task};
  state.head_dim = call.head_dim;
  state.q = scratch;
  state.out = state.q + R * state.head_dim;
  state.scores = state.out + R * state.head_dim;
  std::memset(scratch, 0, sizeof(float) * 2 * R * state.head_dim);
  const float scale = call.scale * kLog2e;
  for (int row = 0; row < R; ++row) {
    const float* q = rows.q(row);
    for (int d = 0; d < call.head_dim; ++d) state.q[row * state.head_dim + d] = q[d] * scale;
    state.maxima[row] = kMasked;
    state.sums[row] = 0.0f;
    state.positions[row] = rows.position(row);
  }
}

template <int R>
inline void finish(const AttentionCall& call, const Task& task, const DimState<R>& state) {
  const Rows rows{call, task};
  for (int row = 0; row < R; ++row) {
    const float* from = state.out + row * state.head_dim;
    float* out = rows.result(row, state.maxima[row], state.sums[row]);
    const float factor = task.partial ? 1.0f : 1.0f / state.sums[row];
    for (int d = 0; d < call.head_dim; ++d) out[d] = from[d] * factor;
  }
}

template <typename E, int R>
void attend_dims(const AttentionCall& call, const Task& task, float* scratch) {
  DimState<R> state;
  start(call, task, scratch, state);
  for (TileWalk<E> walk(call, task); !walk.done(); walk.advance()) {
    const KeyTile<E>& tile = walk.tile();
    for (int group = first_group(tile); group < end_group(tile); ++group) {
      walk.prefetch(group);
      score_group(state, tile.keys[group], tile.stride, state.scores + group * kGroup);
    }
    for (int row = 0; row < R; ++row) softmax_row(state, tile, row, call.window);
    // Vectors of a value row that are added up in registers at a time.
    constexpr int kDimVectors = R > 4 ? 2 : kRegisters / 8;
    int d = 0;
    for (; d + kDimVectors * kLanes <= call.head_dim; d += kDimVectors * kLanes)
      add_values<kDimVectors>(state, tile, d);
    for (; d + kLanes <= call.head_dim; d += kLanes) add_values<1>(state, tile, d);
    if (d < call.head_dim) add_last_values(state, tile, d);
  }
  finish(call, task, state);
}

}  // namespace
}  // namespace quire
