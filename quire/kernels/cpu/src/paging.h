// Where the keys and values of a tile lie, and which of them a row may see.
#pragma once

#include "attention.h"
#include "halves.h"

namespace quire {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// Both ways to attend (dims.h, rows.h) do the same operations in the same order for every row, so that
// a token gets the same bits in a chunk of any size:
//   score     kChains sums: number r is over the dimensions d with d % kChains == r, in order. The sums
//             are added as a tree: r and r + kChains / 2, and so on. Dimensions that do not fill
//             kChains follow one by one.
//   softmax   the probabilities of a tile are added up as kLanes sums, joined as `sum` does.
//   value     over the keys, in order.
//   parts     each part of kPartKeys keys starts afresh; parts are folded in order.
//   sink      joined to the sum when all parts are folded.
// A key that a row may not see counts as a probability of exactly 0, which changes no sum.
constexpr int kChains = kLanes < 8 ? 4 : 8;

// Keys are taken in tiles of this many, aligned to their absolute position, so that a request is
// always cut in the same way.
constexpr int kTileKeys = 64;
// Tokens read together. Blocks hold a multiple of it, so such a group never leaves its block.
constexpr int kGroup = 4;

// Of elements E: float or Half.
template <typename E>
struct KeyTile {
  int begin, end;  // keys wanted, counted from the tile's start
  int start;       // position of the tile's first key
  int64_t stride;  // between the keys of a group
  const E* keys[kTileKeys / kGroup];  // first token of each group
  const E* values[kTileKeys];
};

template <typename E>
QUIRE_INLINE int first_group(const KeyTile<E>& tile) {
  return tile.begin / kGroup;
}
template <typename E>
QUIRE_INLINE int end_group(const KeyTile<E>& tile) {
  return (tile.end + kGroup - 1) / kGroup;
}

// The tile that holds the key at position `key`, as far as the task wants it.
template <typename E>
inline void find_tile(const AttentionCall& call, const Task& task, int key, KeyTile<E>& tile) {
  const int32_t* table = call.block_tables + task.request * call.table_stride;
  const int shift = __builtin_ctz(static_cast<unsigned>(call.block_size));
  tile.start = key & ~(kTileKeys - 1);
  tile.begin = key - tile.start;
  const int left = task.end_key - tile.start;
  tile.end = left < kTileKeys ? left : kTileKeys;
  tile.stride = call.token_stride;
  for (int group = first_group(tile); group < end_group(tile); ++group) {
    const int position = tile.start + group * kGroup;
    const int64_t offset = table[position >> shift] * call.block_stride +
                           task.kv_head * call.head_stride +
                           (position & (call.block_size - 1)) * call.token_stride;
    tile.keys[group] = static_cast<const E*>(call.keys) + offset;
    const E* values = static_cast<const E*>(call.values) + offset;
    for (int i = 0; i < kGroup; ++i)
      tile.values[group * kGroup + i] = values + i * call.token_stride;
  }
}

// Goes over the tiles of a task. It is one tile ahead, because the processor's own prefetcher does not
// know where the next block lies.
template <typename E>
class TileWalk {
 public:
  TileWalk(const AttentionCall& call, const Task& task) : call_(call), task_(task) {
    find_tile(call, task, task.first_key, tiles_[0]);
    find_next();
  }

  bool done() const { return tile().begin == tile().end; }
  const KeyTile<E>& tile() const { return tiles_[current_]; }

  void advance() {
    current_ ^= 1;
    if (!done()) find_next();
  }

  // Asks for the values of a group of this tile, and the keys of the same group of the next one.
  QUIRE_INLINE void prefetch(int group) const {
    prefetch_group(tile().values[group * kGroup]);
    const KeyTile<E>& next = tiles_[current_ ^ 1];
    if (group < end_group(next)) prefetch_group(next.keys[group]);
  }

 private:
  void find_next() {
    KeyTile<E>& next = tiles_[current_ ^ 1];
    const int key = tile().start + kTileKeys;
    if (key < task_.end_key)
      find_tile(call_, task_, key, next);
    else
      next.begin = next.end = 0;
  }

  QUIRE_INLINE void prefetch_group(const E* tokens) const {
    constexpr int kElementsPerLine = 64 / sizeof(E);
    for (int i = 0; i < kGroup; ++i)
      for (int d = 0; d < call_.head_dim; d += kElementsPerLine)
        __builtin_prefetch(tokens + i * call_.token_stride + d);
  }

  const AttentionCall& call_;
  const Task& task_;
  KeyTile<E> tiles_[2];
  int current_ = 0;
};

// Whether the walk has come to the end of a part, with more to follow.
template <typename E>
QUIRE_INLINE bool ends_part(const TileWalk<E>& walk) {
  return !walk.done() && walk.tile().start % kPartKeys == 0;
}

// How to join two parts: both maxima become the larger one.
template <typename F>
struct Joint {
  F maximum, kept, added;  // the factors of what is there, and of what comes

  QUIRE_INLINE Joint(F there, F coming) : maximum(coming > there ? coming : there) {
    kept = power(there - maximum);
    added = power(coming - maximum);
  }
  QUIRE_INLINE F join(F there, F coming) const { return fma(there, kept, coming * added); }

 private:
  static QUIRE_INLINE Floats power(Floats x) { return exp2(x); }
  static QUIRE_INLINE float power(float x) { return exp2(splat(x))[0]; }
};

// The state of one row, and its values [head_dim], which are not normalised.
struct RowSums {
  float maximum, sum;
  float* values;

  // Takes the first part.
  void set(float part_maximum, float part_sum, const float* part_values, int head_dim) {
    maximum = part_maximum;
    sum = part_sum;
    std::memcpy(values, part_values, sizeof(float) * static_cast<size_t>(head_dim));
  }
  // Takes another part.
  void fold(float part_maximum, float part_sum, const float* part_values, int head_dim) {
    const Joint<float> joint(maximum, part_maximum);
    maximum = joint.maximum;
    sum = joint.join(sum, part_sum);
    for (int d = 0; d < head_dim; ++d) values[d] = joint.join(values[d], part_values[d]);
  }
};

// softcap * tanh(x / softcap) for scores in units of log 2, as the softcap is.
QUIRE_INLINE Floats cap(Floats x, float softcap) {
  const Floats magnitude = max(x, -x);
  const Floats t = exp2(magnitude * (-2.0f * kLog2e / softcap));
  const Floats capped = softcap * ((1.0f - t) / (1.0f + t));
  return x < 0.0f ? -capped : capped;
}

// What the packed rows of a task stand for.
struct Rows {
  const AttentionCall& call;
  const Task& task;

  int query(int row) const { return (task.first_row + row) / group_size(call); }
  int position(int row) const {
    const int32_t* start = call.query_start + task.request;
    return call.context_lens[task.request] - (start[1] - start[0]) + query(row);
  }
  const float* q(int row) const { return call.q + offset(row, call.q_stride); }
  float* out(int row) const { return call.out + offset(row, call.out_stride); }
  // What the values of a row are multiplied with in the end. Not inlined, so that no compiler makes one
  // instruction of two here and not there.
  QUIRE_NOINLINE float factor(int row, float maximum, float sum) const {
    if (!call.sinks) return 1.0f / sum;
    const Joint<float> joint(maximum, call.sinks[head(row)] * kLog2e);
    return joint.kept / joint.join(sum, 1.0f);
  }
  // Leaves a row's state in the partial of the part with this number, and returns where its values go.
  float* partial(int part, int row, float maximum, float sum) const {
    float* at = task.partial + part * partial_floats(task.num_rows, call.head_dim);
    at[row] = maximum;
    at[task.num_rows + row] = sum;
    return at + 2 * task.num_rows + static_cast<size_t>(row) * call.head_dim;
  }

 private:
  int head(int row) const {
    const int group = group_size(call);
    return task.kv_head * group + (task.first_row + row) % group;
  }
  int64_t offset(int row, int64_t stride) const {
    return (call.query_start[task.request] + query(row)) * stride +
           static_cast<int64_t>(head(row)) * call.head_dim;
  }
};

}  // namespace
}  // namespace quire
