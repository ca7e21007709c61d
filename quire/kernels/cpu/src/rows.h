// Attention with one query row per lane, for prefill chunks.
//
// Queries are transposed once; then scores, probabilities and results all have rows as their last
// dimension. Every operation is vertical: a key or value element is read as float32 from its page or
// a copy, broadcast, and meets a whole vector of rows, so neither head size nor block size needs a
// tail.
#pragma once

#include "widening.h"

namespace quire {
namespace {

// Vectors of rows in one task. Each element read from a page is used this many times.
constexpr int kRowVectors = kRegisters == 32 ? 4 : 2;

inline size_t rows_scratch_floats(int head_dim) {
  return static_cast<size_t>(2 * head_dim + kTileKeys) * kRowVectors * kLanes +
         static_cast<size_t>(head_dim) * kTileKeys;
}

// The state of V vectors of rows while they go over the keys.
template <int V>
struct RowState {
  static constexpr int kWidth = V * kLanes;
  // Groups of keys (or of dimensions) worked on together: half the registers hold running sums.
  static constexpr int kGroups = V * kGroup * 2 > kRegisters / 2 ? 1 : kRegisters / 2 / (V * kGroup);
  float* q;       // [head_dim][kWidth], scaled
  float* out;     // [head_dim][kWidth], not normalised
  float* scores;  // [kTileKeys][kWidth], later probabilities
  float* wide;    // [kTileKeys][head_dim], keys or values in float32
  Floats maxima[V], sums[V], rescale[V];
  Ints positions[V];
  int first_position, last_position;
};

// The scores of the keys in COUNT groups from `group` on.
template <int V, int COUNT>
QUIRE_INLINE void score_groups(const RowState<V>& state, const KeyTile<float>& tile, int group,
                               int head_dim) {
  Floats acc[COUNT * kGroup][V] = {};
  for (int d = 0; d < head_dim; ++d) {
    Floats q[V];
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) q[v] = load(state.q + (d * V + v) * kLanes);
    QUIRE_UNROLL
    for (int i = 0; i < COUNT * kGroup; ++i) {
      const float key = tile.keys[group + i / kGroup][i % kGroup * tile.stride + d];
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) acc[i][v] += key * q[v];
    }
  }
  float* scores = state.scores + group * kGroup * V * kLanes;
  QUIRE_UNROLL
  for (int i = 0; i < COUNT * kGroup; ++i)
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) store(scores + (i * V + v) * kLanes, acc[i][v]);
}

template <int V>
inline void score(const RowState<V>& state, const KeyTile<float>& tile, int head_dim) {
  constexpr int kGroups = RowState<V>::kGroups;
  int group = first_group(tile);
  for (; group + kGroups <= end_group(tile); group += kGroups)
    score_groups<V, kGroups>(state, tile, group, head_dim);
  for (; group < end_group(tile); ++group) score_groups<V, 1>(state, tile, group, head_dim);
}

// Replaces the scores of keys that a row may not see.
template <int V>
inline void mask(const RowState<V>& state, const KeyTile<float>& tile, int window) {
  for (int i = tile.begin; i < tile.end; ++i) {
    const Ints key = (tile.start + i) - Ints{};
    for (int v = 0; v < V; ++v) {
      float* p = state.scores + (i * V + v) * kLanes;
      const Ints seen = (key <= state.positions[v]) & (key > state.positions[v] - window);
      store(p, seen ? load(p) : splat(kMasked));
    }
  }
}

template <int V>
inline void softmax(RowState<V>& state, const KeyTile<float>& tile) {
  for (int v = 0; v < V; ++v) {
    float* scores = state.scores + v * kLanes;
    Floats top = state.maxima[v];
    for (int i = tile.begin; i < tile.end; ++i) top = max(load(scores + i * V * kLanes), top);
    state.rescale[v] = exp2(state.maxima[v] - top);
    state.maxima[v] = top;
    Floats total = state.sums[v] * state.rescale[v];
    for (int i = tile.begin; i < tile.end; ++i) {
      const Floats p = exp2(load(scores + i * V * kLanes) - top);
      total += p;
      store(scores + i * V * kLanes, p);
    }
    state.sums[v] = total;
  }
}

// Adds the values of the tile to DIMS dimensions of the result, starting at d.
template <int V, int DIMS>
QUIRE_INLINE void add_values(const RowState<V>& state, const KeyTile<float>& tile, int d) {
  float* out = state.out + d * V * kLanes;
  Floats acc[DIMS][V];
  QUIRE_UNROLL
  for (int i = 0; i < DIMS; ++i)
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) acc[i][v] = load(out + (i * V + v) * kLanes) * state.rescale[v];
  for (int key = tile.begin; key < tile.end; ++key) {
    const float* values = tile.values[key] + d;
    QUIRE_KEEP_POINTER(values);
    Floats p[V];
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) p[v] = load(state.scores + (key * V + v) * kLanes);
    QUIRE_UNROLL
    for (int i = 0; i < DIMS; ++i) {
      const float value = values[i];
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) acc[i][v] += value * p[v];
    }
  }
  QUIRE_UNROLL
  for (int i = 0; i < DIMS; ++i)
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) store(out + (i * V + v) * kLanes, acc[i][v]);
}

// Transposes and scales the queries. Lanes without a row get zeros.
template <int V>
inline void load_queries(const AttentionCall& call, const Task& task, const RowState<V>& state) {
  constexpr int kWidth = RowState<V>::kWidth;
  const Rows rows{call, task};
  const float scale = call.scale * kLog2e;
  for (int row = 0; row < kWidth; row += 4) {
    const float* q[4];
    for (int i = 0; i < 4; ++i) q[i] = rows.q(row + i < task.num_rows ? row + i : 0);
    const int count = task.num_rows - row;
    float factor[4];
    for (int i = 0; i < 4; ++i) factor[i] = i < count ? scale : 0.0f;
    int d = 0;
    for (; d + 4 <= call.head_dim; d += 4) {
      Floats4 x[4];
      for (int i = 0; i < 4; ++i) x[i] = load4(q[i] + d) * factor[i];
      transpose(x);
      for (int i = 0; i < 4; ++i) store4(state.q + (d + i) * kWidth + row, x[i]);
    }
    for (; d < call.head_dim; ++d)
      for (int i = 0; i < 4; ++i) state.q[d * kWidth + row + i] = q[i][d] * factor[i];
  }
}

template <int V>
inline void start(const AttentionCall& call, const Task& task, float* scratch,
                  RowState<V>& state) {
  constexpr int kWidth = RowState<V>::kWidth;
  const Rows rows{call, task};
  const size_t size = static_cast<size_t>(call.head_dim) * kWidth;
  state.q = scratch;
  state.out = state.q + size;
  state.scores = state.out + size;
  state.wide = state.scores + kTileKeys * kWidth;
  load_queries(call, task, state);
  std::memset(state.out, 0, sizeof(float) * size);
  state.first_position = rows.position(0);
  state.last_position = rows.position(task.num_rows - 1);
  for (int v = 0; v < V; ++v) {
    state.maxima[v] = splat(kMasked);
    state.sums[v] = Floats{};
    for (int i = 0; i < kLanes; ++i) {
      const int row = v * kLanes + i;
      state.positions[v][i] = row < task.num_rows ? rows.position(row) : state.last_position;
    }
  }
}

template <int V>
inline void finish(const AttentionCall& call, const Task& task, const RowState<V>& state) {
  constexpr int kWidth = RowState<V>::kWidth;
  const Rows rows{call, task};
  float maxima[kWidth], sums[kWidth];
  std::memcpy(maxima, state.maxima, sizeof maxima);
  std::memcpy(sums, state.sums, sizeof sums);
  for (int row = 0; row < task.num_rows; row += 4) {
    const int count = task.num_rows - row < 4 ? task.num_rows - row : 4;
    float* out[4];
    float factor[4];
    for (int i = 0; i < count; ++i) {
      out[i] = rows.result(row + i, maxima[row + i], sums[row + i]);
      factor[i] = task.partial ? 1.0f : 1.0f / sums[row + i];
    }
    int d = 0;
    for (; d + 4 <= call.head_dim; d += 4) {
      Floats4 x[4];
      for (int i = 0; i < 4; ++i) x[i] = load4(state.out + (d + i) * kWidth + row);
      transpose(x);
      for (int i = 0; i < count; ++i) store4(out[i] + d, x[i] * factor[i]);
    }
    for (; d < call.head_dim; ++d)
      for (int i = 0; i < count; ++i) out[i][d] = state.out[d * kWidth + row + i] * factor[i];
  }
}

template <typename E, int V>
void attend_rows(const AttentionCall& call, const Task& task, float* scratch) {
  RowState<V> state;
  start(call, task, scratch, state);
  Widening<E> widening(call.head_dim, state.wide);
  for (TileWalk<E> walk(call, task); !walk.done(); walk.advance()) {
    const KeyTile<E>& stored = walk.tile();
    if (V == 1)
      for (int group = first_group(stored); group < end_group(stored); ++group) walk.prefetch(group);
    const KeyTile<float>& tile = widening.take_keys(stored);
    score(state, tile, call.head_dim);
    const bool all_seen = tile.start + tile.end - 1 <= state.first_position &&
                          tile.start + tile.begin > state.last_position - call.window;
    if (!all_seen) mask(state, tile, call.window);
    softmax(state, tile);
    widening.take_values(stored);
    int d = 0;
    constexpr int kDims = kGroup * RowState<V>::kGroups;
    for (; d + kDims <= call.head_dim; d += kDims) add_values<V, kDims>(state, tile, d);
    for (; d < call.head_dim; ++d) add_values<V, 1>(state, tile, d);
  }
  finish(call, task, state);
}

}  // namespace
}  // namespace quire
