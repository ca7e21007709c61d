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
  return static_cast<size_t>(3 * head_dim + kTileKeys) * kRowVectors * kLanes +
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
  float* folded;  // [head_dim][kWidth], values of the parts before this one
  float* wide;    // [kTileKeys][head_dim], keys or values in float32
  Floats maxima[V], sums[V], rescale[V];
  Floats folded_maxima[V], folded_sums[V];
  Ints positions[V];
  int first_position, last_position;
};

// The scores of the keys in COUNT groups from `group` on.
template <int V, int COUNT>
struct GroupScores {
  static constexpr int kKeys = COUNT * kGroup;
  Floats sums[kKeys][V];

  // Adds the dimensions from `d` on, STEP apart.
  template <int STEP>
  QUIRE_INLINE void add(const RowState<V>& state, const KeyTile<float>& tile, int group, int d,
                        int end) {
    for (; d < end; d += STEP) {
      Floats q[V];
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) q[v] = load(state.q + (d * V + v) * kLanes);
      QUIRE_UNROLL
      for (int i = 0; i < kKeys; ++i) {
        const Floats key = splat(tile.keys[group + i / kGroup][i % kGroup * tile.stride + d]);
        QUIRE_UNROLL
        for (int v = 0; v < V; ++v) sums[i][v] = fma(key, q[v], sums[i][v]);
      }
    }
  }
};

// The sums over the dimensions that are FIRST modulo STEP, up to `end`.
template <int V, int COUNT, int FIRST = 0, int STEP = 1>
QUIRE_INLINE GroupScores<V, COUNT> score_chains(const RowState<V>& state,
                                                const KeyTile<float>& tile, int group, int end) {
  if constexpr (STEP < kChains) {
    GroupScores<V, COUNT> a = score_chains<V, COUNT, FIRST, 2 * STEP>(state, tile, group, end);
    const GroupScores<V, COUNT> b =
        score_chains<V, COUNT, FIRST + STEP, 2 * STEP>(state, tile, group, end);
    QUIRE_UNROLL
    for (int i = 0; i < COUNT * kGroup; ++i)
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) a.sums[i][v] += b.sums[i][v];
    return a;
  } else {
    GroupScores<V, COUNT> scores = {};
    scores.template add<STEP>(state, tile, group, FIRST, end);
    return scores;
  }
}

template <int V, int COUNT>
QUIRE_INLINE void score_groups(const RowState<V>& state, const KeyTile<float>& tile, int group,
                               int head_dim) {
  const int whole = head_dim / kChains * kChains;
  GroupScores<V, COUNT> scores = score_chains<V, COUNT>(state, tile, group, whole);
  if (whole < head_dim) scores.template add<1>(state, tile, group, whole, head_dim);
  float* out = state.scores + group * kGroup * V * kLanes;
  QUIRE_UNROLL
  for (int i = 0; i < COUNT * kGroup; ++i)
    QUIRE_UNROLL
    for (int v = 0; v < V; ++v) store(out + (i * V + v) * kLanes, scores.sums[i][v]);
}

template <int V>
inline void score(const RowState<V>& state, const KeyTile<float>& tile, int head_dim) {
  constexpr int kGroups = RowState<V>::kGroups;
  int group = first_group(tile);
  for (; group + kGroups <= end_group(tile); group += kGroups)
    score_groups<V, kGroups>(state, tile, group, head_dim);
  for (; group < end_group(tile); ++group) score_groups<V, 1>(state, tile, group, head_dim);
}

template <int V>
inline void cap_scores(const RowState<V>& state, const KeyTile<float>& tile, float softcap) {
  float* scores = state.scores + tile.begin * V * kLanes;
  for (float* end = state.scores + tile.end * V * kLanes; scores < end; scores += kLanes)
    store(scores, cap(load(scores), softcap * kLog2e));
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

// The sum of the probabilities whose place in the tile is FIRST modulo STEP, in the order of `sum`;
// `p` is where those of the tile's first key lie.
template <int V, int FIRST = 0, int STEP = 4>
QUIRE_INLINE Floats add_tree(const float* p) {
  if constexpr (STEP < kLanes) {
    return add_tree<V, FIRST, 2 * STEP>(p) + add_tree<V, FIRST + STEP, 2 * STEP>(p);
  } else {
    Floats total = load(p + FIRST * V * kLanes);
    QUIRE_UNROLL
    for (int i = FIRST + STEP; i < kTileKeys; i += STEP) total += load(p + i * V * kLanes);
    return total;
  }
}

template <int V>
QUIRE_INLINE Floats add_probabilities(const float* p) {
  return (add_tree<V, 0>(p) + add_tree<V, 1>(p)) + (add_tree<V, 2>(p) + add_tree<V, 3>(p));
}

template <int V>
inline void softmax(RowState<V>& state, const KeyTile<float>& tile) {
  for (int v = 0; v < V; ++v) {
    float* scores = state.scores + v * kLanes;
    Floats top = state.maxima[v];
    for (int i = tile.begin; i < tile.end; ++i) top = max(load(scores + i * V * kLanes), top);
    state.rescale[v] = exp2(state.maxima[v] - top);
    state.maxima[v] = top;
    for (int i = 0; i < tile.begin; ++i) store(scores + i * V * kLanes, Floats{});
    for (int i = tile.begin; i < tile.end; ++i)
      store(scores + i * V * kLanes, exp2(load(scores + i * V * kLanes) - top));
    for (int i = tile.end; i < kTileKeys; ++i) store(scores + i * V * kLanes, Floats{});
    state.sums[v] = fma(state.sums[v], state.rescale[v], add_probabilities<V>(scores));
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
      const Floats value = splat(values[i]);
      QUIRE_UNROLL
      for (int v = 0; v < V; ++v) acc[i][v] = fma(value, p[v], acc[i][v]);
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

// Begins a part.
template <int V>
inline void clear(const AttentionCall& call, RowState<V>& state) {
  const size_t size = static_cast<size_t>(call.head_dim) * RowState<V>::kWidth;
  std::memset(state.out, 0, sizeof(float) * size);
  for (int v = 0; v < V; ++v) {
    state.maxima[v] = splat(kMasked);
    state.sums[v] = Floats{};
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
  state.folded = state.out + size;
  state.scores = state.folded + size;
  state.wide = state.scores + kTileKeys * kWidth;
  load_queries(call, task, state);
  state.first_position = rows.position(0);
  state.last_position = rows.position(task.num_rows - 1);
  for (int v = 0; v < V; ++v) {
    for (int i = 0; i < kLanes; ++i) {
      const int row = v * kLanes + i;
      state.positions[v][i] = row < task.num_rows ? rows.position(row) : state.last_position;
    }
  }
  clear(call, state);
}

// Folds the part that is done into those before it.
template <int V>
inline void fold_part(const AttentionCall& call, RowState<V>& state, bool is_first) {
  const size_t size = static_cast<size_t>(call.head_dim) * RowState<V>::kWidth;
  if (is_first) {
    std::memcpy(state.folded, state.out, sizeof(float) * size);
    std::memcpy(state.folded_maxima, state.maxima, sizeof state.maxima);
    std::memcpy(state.folded_sums, state.sums, sizeof state.sums);
    return;
  }
  for (int v = 0; v < V; ++v) {
    const Joint<Floats> joint(state.folded_maxima[v], state.maxima[v]);
    state.folded_maxima[v] = joint.maximum;
    state.folded_sums[v] = joint.join(state.folded_sums[v], state.sums[v]);
    for (size_t i = static_cast<size_t>(v) * kLanes; i < size; i += V * kLanes)
      store(state.folded + i, joint.join(load(state.folded + i), load(state.out + i)));
  }
}

// Gives every row the values [head_dim] that are its own, each times the row's factor.
template <int V, typename Place>
inline void scatter(int head_dim, int num_rows, const float* values, const float* factors,
                    Place place) {
  constexpr int kWidth = RowState<V>::kWidth;
  for (int row = 0; row < num_rows; row += 4) {
    const int count = num_rows - row < 4 ? num_rows - row : 4;
    float* out[4];
    for (int i = 0; i < count; ++i) out[i] = place(row + i);
    int d = 0;
    for (; d + 4 <= head_dim; d += 4) {
      Floats4 x[4];
      for (int i = 0; i < 4; ++i) x[i] = load4(values + (d + i) * kWidth + row);
      transpose(x);
      for (int i = 0; i < count; ++i) store4(out[i] + d, x[i] * factors[row + i]);
    }
    for (; d < head_dim; ++d)
      for (int i = 0; i < count; ++i) out[i][d] = values[d * kWidth + row + i] * factors[row + i];
  }
}

// Leaves the part with this number in its partial.
template <int V>
inline void store_part(const AttentionCall& call, const Task& task, const RowState<V>& state,
                       int part) {
  constexpr int kWidth = RowState<V>::kWidth;
  const Rows rows{call, task};
  float maxima[kWidth], sums[kWidth], ones[kWidth];
  std::memcpy(maxima, state.maxima, sizeof maxima);
  std::memcpy(sums, state.sums, sizeof sums);
  for (float& factor : ones) factor = 1.0f;
  scatter<V>(call.head_dim, task.num_rows, state.out, ones,
             [&](int row) { return rows.partial(part, row, maxima[row], sums[row]); });
}

// Writes the result of a task that has all parts.
template <int V>
inline void finish(const AttentionCall& call, const Task& task, const RowState<V>& state,
                   bool is_one_part) {
  const Rows rows{call, task};
  float maxima[RowState<V>::kWidth], sums[RowState<V>::kWidth], factors[RowState<V>::kWidth];
  std::memcpy(maxima, is_one_part ? state.maxima : state.folded_maxima, sizeof maxima);
  std::memcpy(sums, is_one_part ? state.sums : state.folded_sums, sizeof sums);
  for (int row = 0; row < task.num_rows; ++row)
    factors[row] = rows.factor(row, maxima[row], sums[row]);
  scatter<V>(call.head_dim, task.num_rows, is_one_part ? state.out : state.folded, factors,
             [&](int row) { return rows.out(row); });
}

template <typename E, int V>
void attend_rows(const AttentionCall& call, const Task& task, float* scratch) {
  RowState<V> state;
  start(call, task, scratch, state);
  Widening<E> widening(call.head_dim, state.wide);
  int part = 0;
  const auto finish_part = [&] {
    if (task.partial)
      store_part(call, task, state, part);
    else
      fold_part(call, state, part == 0);
  };
  for (TileWalk<E> walk(call, task); !walk.done();) {
    const KeyTile<E>& stored = walk.tile();
    if (V == 1)
      for (int group = first_group(stored); group < end_group(stored); ++group) walk.prefetch(group);
    const KeyTile<float>& tile = widening.take_keys(stored);
    score(state, tile, call.head_dim);
    if (call.softcap > 0.0f) cap_scores(state, tile, call.softcap);
    const bool all_seen = tile.start + tile.end - 1 <= state.first_position &&
                          tile.start + tile.begin > state.last_position - call.window;
    if (!all_seen) mask(state, tile, call.window);
    softmax(state, tile);
    widening.take_values(stored);
    int d = 0;
    constexpr int kDims = kGroup * RowState<V>::kGroups;
    for (; d + kDims <= call.head_dim; d += kDims) add_values<V, kDims>(state, tile, d);
    for (; d < call.head_dim; ++d) add_values<V, 1>(state, tile, d);
    walk.advance();
    if (ends_part(walk)) {
      finish_part();
      clear(call, state);
      ++part;
    }
  }
  if (part > 0 || task.partial) finish_part();
  if (!task.partial) finish(call, task, state, part == 0);
}

}  // namespace
}  // namespace quire
