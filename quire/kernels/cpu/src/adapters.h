// What low-rank adapters add to the outputs of linear layers: B A x for each token, with the A and B
// of its own adapter.
#pragma once

#include <cstdint>

#include "pointwise.h"

namespace quire {

// Rank rows lie in chunks of so many, anywhere in a pool.
constexpr int64_t kChunkRows = 8;

// Outputs of a layer that share a pair of A and B. `AdapterSlice` in ../lora.py mirrors this struct
// field by field, and so does `Adapters`. Offsets are those in a chunk.
struct AdapterSlice {
  const int32_t* counts;   // of each slot: chunks of its adapter; 0: it leaves these outputs alone
  const int32_t* vectors;  // of each slot: whether there is a bias (1), and gains (2)
  int64_t a_offset, a_stride;  // [kChunkRows, inputs]
  int64_t b_offset, b_stride;  // [kChunkRows, outputs]
  int64_t bias_offset;         // [outputs] in the first chunk: added to all tokens
  int64_t gains_offset;        // and what multiplies products with the weight, less one
  int32_t first, num_outputs;
};

struct Adapters {
  const AdapterSlice* slices;
  const float* chunks;
  const int32_t* tables;  // of each slot: its chunks
  int64_t chunk_stride;
  int64_t slot_stride;  // of tables, counts and vectors
  int32_t num_slices;
  int32_t max_chunks;  // of a slot
  int32_t num_inputs;
};

// The same for the tokens of a call. Each token is computed by itself, in an order of its own.
class Deltas {
 public:
  // `slots` has the adapter of each token, -1 for none; without adapters or slots nothing is added.
  Deltas(const Adapters* adapters, const int32_t* slots, const float* bias)
      : adapters_(slots ? adapters : nullptr),
        slots_(slots),
        bias_(bias),
        pointwise_(chosen_pointwise()) {}

  bool exist() const { return adapters_ != nullptr; }
  // Of the numbers between A and B of one token.
  int64_t width() const {
    return exist() ? adapters_->num_slices * adapters_->max_chunks * kChunkRows : 0;
  }
  void set_space(float* space) { space_ = space; }

  // A x of one token.
  void shrink(int64_t token, const float* x) const {
    const int32_t slot = slots_[token];
    if (slot < 0) return;
    for (int32_t i = 0; i < adapters_->num_slices; ++i) {
      const AdapterSlice& slice = adapters_->slices[i];
      const int32_t count = slice.counts[slot * adapters_->slot_stride];
      float* out = between(token, i);
      for (int32_t c = 0; c < count; ++c)
        pointwise_.multiply_rows(x, chunk(slot, c) + slice.a_offset, slice.a_stride,
                                 adapters_->num_inputs, out + c * kChunkRows);
    }
  }

  // Adds to the outputs [first, end) of one token; `out` is where the first of them is.
  void expand(int64_t token, int64_t first, int64_t end, float* out) const {
    const int32_t slot = slots_[token];
    if (slot < 0) return;
    for (int32_t i = 0; i < adapters_->num_slices; ++i) {
      const AdapterSlice& slice = adapters_->slices[i];
      const int32_t count = slice.counts[slot * adapters_->slot_stride];
      const int64_t start = slice.first > first ? slice.first : first;
      const int64_t last = slice.first + slice.num_outputs;
      const int64_t stop = last < end ? last : end;
      if (count == 0 || start >= stop) continue;
      const int64_t at = start - slice.first;
      const int32_t n = static_cast<int32_t>(stop - start);
      float* to = out + (start - first);
      add_vectors(slice, slot, at, n, bias_ ? bias_ + start : nullptr, to);
      const float* factors = between(token, i);
      for (int32_t c = 0; c < count; ++c)
        pointwise_.add_rows(chunk(slot, c) + slice.b_offset + at, slice.b_stride,
                            factors + c * kChunkRows, n, to);
    }
  }

 private:
  const float* chunk(int32_t slot, int32_t index) const {
    return adapters_->chunks +
           adapters_->tables[slot * adapters_->slot_stride + index] * adapters_->chunk_stride;
  }
  float* between(int64_t token, int32_t slice) const {
    return space_ + token * width() + slice * adapters_->max_chunks * kChunkRows;
  }
  void add_vectors(const AdapterSlice& slice, int32_t slot, int64_t at, int32_t n, const float* bias,
                   float* out) const {
    const int32_t vectors = slice.vectors[slot * adapters_->slot_stride];
    const float* first = chunk(slot, 0);
    const float* gains = first + slice.gains_offset + at;
    const float* added = first + slice.bias_offset + at;
    if (vectors & 2)
      for (int32_t i = 0; i < n; ++i) out[i] += gains[i] * (out[i] - (bias ? bias[i] : 0.0f));
    if (vectors & 1)
      for (int32_t i = 0; i < n; ++i) out[i] += added[i];
  }

  const Adapters* adapters_;
  const int32_t* slots_;
  const float* bias_;
  const Pointwise& pointwise_;
  float* space_ = nullptr;
};

}  // namespace quire
