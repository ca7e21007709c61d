// Attention with head dimensions in the lanes, for the few rows of a decoding request.
#pragma once

#include "paging.h"

namespace quire {
namespace {

// The most rows for which this way is the faster one.
constexpr int kFewRows = kLanes == 16 ? 8 : 4;

inline size_t dims_scratch_floats(int head_dim) {
  return static_cast<size_t>(kFewRows) * (3 * head_dim + kTileKeys);
}

// The state of R rows while they go over the keys.
template <int R>
struct DimState {
  int head_dim;
  float* q;       // [R][head_dim], scaled
  float* out;     // [R][head_dim], not normalised
  float* scores;  // [R][kTileKeys], later probabilities
  float* folded;  // [R][head_dim], values of the parts before this one
  float maxima[R], sums[R], rescale[R];
  RowSums earlier[R];  // parts
  int positions[R];
};

// Adds the dimensions that do not fill kChains to the scores of a group of keys.
template <int R, typename E>
QUIRE_NOINLINE void score_last_dims(const DimState<R>& state, const E* keys, int64_t stride,
                                    float* scores, int d) {
  for (; d < state.head_dim; ++d)
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < kGroup; ++i)
        scores[r * kTileKeys + i] = fma(to_float(keys[i * stride + d]),
                                        state.q[r * state.head_dim + d], scores[r * kTileKeys + i]);
}

// kChains dimensions of as many keys as fill a vector.
constexpr int kKeysPerVector = kLanes / kChains;
constexpr int kKeyVectors = kGroup / kKeysPerVector;  // of a group

#if defined(__AVX512F__)

QUIRE_INLINE Floats load_chains(const float* keys, int64_t stride) {
  return _mm512_castpd_ps(_mm512_insertf64x4(
      _mm512_castpd256_pd512(_mm256_castps_pd(_mm256_loadu_ps(keys))),
      _mm256_castps_pd(_mm256_loadu_ps(keys + stride)), 1));
}
QUIRE_INLINE Floats load_chains(const Half* keys, int64_t stride) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + stride));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
}
QUIRE_INLINE Floats repeat_chains(const float* q) {
  return _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(q))));
}
QUIRE_INLINE void store_scores(float* scores, const Floats (&x)[kKeyVectors]) {
  const Floats halves = _mm512_shuffle_f32x4(x[0], x[1], _MM_SHUFFLE(2, 0, 2, 0)) +
                        _mm512_shuffle_f32x4(x[0], x[1], _MM_SHUFFLE(3, 1, 3, 1));
  store_sums(scores, _mm512_castps512_ps128(halves), _mm512_extractf32x4_ps(halves, 1),
             _mm512_extractf32x4_ps(halves, 2), _mm512_extractf32x4_ps(halves, 3));
}

#else

template <typename E>
QUIRE_INLINE Floats load_chains(const E* keys, int64_t) {
  return load(keys);
}
QUIRE_INLINE Floats repeat_chains(const float* q) { return load(q); }
QUIRE_INLINE void store_scores(float* scores, const Floats (&x)[kKeyVectors]) {
  store_sums(scores, fold(x[0], Add()), fold(x[1], Add()), fold(x[2], Add()), fold(x[3], Add()));
}

#endif

// Groups of keys that meet the queries together.
constexpr int kGroupsAtOnce = kKeyVectors < 4 ? 2 : 1;

// The scores of G groups of keys for COUNT rows from FIRST on.
template <int FIRST, int COUNT, int G, int R, typename E>
QUIRE_INLINE void score_rows(const DimState<R>& state, const E* const* keys, int64_t stride,
                             float* scores) {
  Floats acc[COUNT][G][kKeyVectors] = {};
  const float* q = state.q + FIRST * state.head_dim;
  for (int d = 0; d + kChains <= state.head_dim; d += kChains) {
    Floats query[COUNT];
    QUIRE_UNROLL
    for (int r = 0; r < COUNT; ++r) query[r] = repeat_chains(q + r * state.head_dim + d);
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      QUIRE_UNROLL
      for (int i = 0; i < kKeyVectors; ++i) {
        const Floats key = load_chains(keys[g] + i * kKeysPerVector * stride + d, stride);
        QUIRE_UNROLL
        for (int r = 0; r < COUNT; ++r) acc[r][g][i] = fma(key, query[r], acc[r][g][i]);
      }
  }
  QUIRE_UNROLL
  for (int r = 0; r < COUNT; ++r)
    QUIRE_UNROLL
    for (int g = 0; g < G; ++g)
      store_scores(scores + (FIRST + r) * kTileKeys + g * kGroup, acc[r][g]);
}

// The scores of G groups of keys. There are not enough registers for more than four rows at a time.
template <int G, int R, typename E>
QUIRE_INLINE void score_groups(const DimState<R>& state, const E* const* keys, int64_t stride,
                               float* scores) {
  score_rows<0, (R < 4 ? R : 4), G>(state, keys, stride, scores);
  if constexpr (R > 4) score_rows<4, R - 4, G>(state, keys, stride, scores);
  const int d = state.head_dim / kChains * kChains;
  if (d < state.head_dim)
    for (int g = 0; g < G; ++g) score_last_dims(state, keys[g], stride, scores + g * kGroup, d);
}

// Turns the scores of one row into probabilities; what the row may not see becomes 0.
template <int R, typename E>
inline void softmax_row(DimState<R>& state, const KeyTile<E>& tile, int row, int window,
                        float softcap) {
  float* scores = state.scores + row * kTileKeys;
  if (softcap > 0.0f)
    for (int i = 0; i < kTileKeys; i += kLanes)
      store(scores + i, cap(load(scores + i), softcap * kLog2e));
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
  state.sums[row] = fma(state.sums[row], state.rescale[row], sum(total));
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
      for (int r = 0; r < R; ++r)
        acc[r][j] = fma(value, splat(state.scores[r * kTileKeys + key]), acc[r][j]);
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
        acc = fma(to_float(tile.values[key][d]), state.scores[r * kTileKeys + key], acc);
      state.out[r * state.head_dim + d] = acc;
    }
}

// Begins a part.
template <int R>
inline void clear(DimState<R>& state) {
  std::memset(state.out, 0, sizeof(float) * R * state.head_dim);
  for (int row = 0; row < R; ++row) {
    state.maxima[row] = kMasked;
    state.sums[row] = 0.0f;
  }
}

template <int R>
inline void start(const AttentionCall& call, const Task& task, float* scratch,
                  DimState<R>& state) {
  const Rows rows{call, task};
  state.head_dim = call.head_dim;
  state.q = scratch;
  state.out = state.q + R * state.head_dim;
  state.folded = state.out + R * state.head_dim;
  state.scores = state.folded + R * state.head_dim;
  const float scale = call.scale * kLog2e;
  for (int row = 0; row < R; ++row) {
    const float* q = rows.q(row);
    for (int d = 0; d < call.head_dim; ++d) state.q[row * state.head_dim + d] = q[d] * scale;
    state.positions[row] = rows.position(row);
    state.earlier[row].values = state.folded + row * state.head_dim;
  }
  clear(state);
}

// Number `part` of the task is done: leaves it in its partial, or folds it into those before it.
template <int R>
inline void finish_part(const AttentionCall& call, const Task& task, DimState<R>& state, int part) {
  const Rows rows{call, task};
  const int head_dim = state.head_dim;
  for (int row = 0; row < R; ++row) {
    const float* out = state.out + row * head_dim;
    const float maximum = state.maxima[row], sum = state.sums[row];
    if (task.partial)
      std::memcpy(rows.partial(part, row, maximum, sum), out, sizeof(float) * head_dim);
    else if (part == 0)
      state.earlier[row].set(maximum, sum, out, head_dim);
    else
      state.earlier[row].fold(maximum, sum, out, head_dim);
  }
}

// Writes the result of a task that has all parts.
template <int R>
inline void finish(const AttentionCall& call, const Task& task, const DimState<R>& state,
                   bool is_one_part) {
  const Rows rows{call, task};
  for (int row = 0; row < R; ++row) {
    const RowSums& earlier = state.earlier[row];
    const float* values = is_one_part ? state.out + row * state.head_dim : earlier.values;
    const float factor = is_one_part ? rows.factor(row, state.maxima[row], state.sums[row])
                                     : rows.factor(row, earlier.maximum, earlier.sum);
    float* out = rows.out(row);
    for (int d = 0; d < call.head_dim; ++d) out[d] = values[d] * factor;
  }
}

template <typename E, int R>
void attend_dims(const AttentionCall& call, const Task& task, float* scratch) {
  DimState<R> state;
  start(call, task, scratch, state);
  int part = 0;
  for (TileWalk<E> walk(call, task); !walk.done();) {
    const KeyTile<E>& tile = walk.tile();
    int group = first_group(tile);
    for (; group + kGroupsAtOnce <= end_group(tile); group += kGroupsAtOnce) {
      for (int g = 0; g < kGroupsAtOnce; ++g) walk.prefetch(group + g);
      score_groups<kGroupsAtOnce>(state, tile.keys + group, tile.stride,
                                  state.scores + group * kGroup);
    }
    for (; group < end_group(tile); ++group) {
      walk.prefetch(group);
      score_groups<1>(state, tile.keys + group, tile.stride, state.scores + group * kGroup);
    }
    for (int row = 0; row < R; ++row) softmax_row(state, tile, row, call.window, call.softcap);
    // Vectors of a value row that are added up in registers at a time.
    constexpr int kDimVectors = R > 4 ? 2 : kRegisters / 8;
    int d = 0;
    for (; d + kDimVectors * kLanes <= call.head_dim; d += kDimVectors * kLanes)
      add_values<kDimVectors>(state, tile, d);
    for (; d + kLanes <= call.head_dim; d += kLanes) add_values<1>(state, tile, d);
    if (d < call.head_dim) add_last_values(state, tile, d);
    walk.advance();
    if (ends_part(walk)) {
      finish_part(call, task, state, part++);
      clear(state);
    }
  }
  if (part > 0 || task.partial) finish_part(call, task, state, part);
  if (!task.partial) finish(call, task, state, part == 0);
}

}  // namespace
}  // namespace quire
