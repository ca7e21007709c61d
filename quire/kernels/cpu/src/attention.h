// Attention: the contract between the entry points (attention.cpp) and the kernels, which are
// compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float_linear.h"

namespace quire {

// How the cache holds keys and values.
enum class Stored : int32_t { kFloat32 = 0, kFloat16 = 1 };

// One step of one layer. `AttentionCall` in ../library.py mirrors this struct field by field.
// Strides count elements. The last dimension of every tensor is
// contiguous, and so are the heads of one token of q and out.
struct AttentionCall {
  const float* q;               // [tokens, num_heads, head_dim]
  const void* keys;             // [blocks, num_kv_heads, block_size, head_dim], as `stored` says
  const void* values;           // as keys
  float* out;                   // as q
  const int32_t* query_start;   // [num_requests + 1], first token of each request in q
  const int32_t* context_lens;  // [num_requests], tokens in the cache, those of this step included
  const int32_t* block_tables;  // [num_requests, table_stride]
  const float* sinks;           // [num_heads], a score of each head without a value, or null
  int64_t q_stride;
  int64_t out_stride;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t table_stride;
  int32_t num_requests;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;  // a power of two, at least 4
  int32_t window;      // a query at position p sees the keys in (p - window, p]; at most 2^30
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap), or 0: they stay
  int32_t num_threads;
  Stored stored;
};

// The new keys and values of a step and the places they go to. `WriteCall` mirrors this struct.
struct WriteCall {
  const float* k;  // [tokens, num_kv_heads, head_dim]
  const float* v;  // as k
  void* keys;      // [blocks, num_kv_heads, block_size, head_dim], as `stored` says
  void* values;    // as keys
  const int64_t* slots;
  int64_t k_stride;
  int64_t v_stride;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t num_tokens;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t num_threads;
  Stored stored;
};

// What is still to be done to the QKV of new tokens: queries are prepared where they are, keys on
// their way into the cache. `QKVCall` mirrors this struct.
struct QKVCall {
  float* q;  // [tokens, num_heads, head_dim]
  int64_t q_stride;
  const float* cos;  // [positions, rotary_dim / 2] or null: no rotation
  const float* sin;
  const int64_t* positions;  // [tokens]
  const float* q_norm;       // [head_dim] or null
  const float* k_norm;
  int32_t num_heads;
  int32_t rotary_dim;  // the first dimensions of a head, which are rotated
  // Dimensions 2i and 2i + 1 make a pair; else i and i + rotary_dim / 2.
  int32_t interleaved;
  float eps;
};

// The heads that share a KV head are packed as extra query rows: row = query * group + head in group.
inline int32_t group_size(const AttentionCall& call) { return call.num_heads / call.num_kv_heads; }

// The keys of a request are worked on in parts, which begin at multiples of this. What a row gets from
// each part is folded into what it has, in the order of the keys. Tasks have whole parts: which parts
// a task has changes nothing in the result.
constexpr int32_t kPartKeys = 256;

// Some packed rows of one request and KV head against some of its keys.
struct Task {
  int32_t request;
  int32_t kv_head;
  int32_t first_row;
  int32_t num_rows;
  int32_t first_key;
  int32_t end_key;
  int32_t split;  // index of the split this task belongs to; -1: the task alone gives the result
  // Where each part of a split leaves its state: maxima[rows], sums[rows], values[rows][head_dim].
  float* partial;
};

inline size_t partial_floats(int32_t num_rows, int32_t head_dim) {
  return static_cast<size_t>(num_rows) * (static_cast<size_t>(head_dim) + 2);
}

// What one instruction set offers.
struct Kernel {
  int32_t few_rows;   // up to this many rows the lanes of a vector hold head dimensions, ...
  int32_t tile_rows;  // ... above it they hold rows, at most this many in one task
  size_t (*scratch_floats)(int32_t head_dim);
  void (*attend)(const AttentionCall& call, const Task& task, float* scratch);
  // Folds consecutive partials of the rows of `task` into the result.
  void (*merge)(const AttentionCall& call, const Task& task, const float* partials, int32_t count);
  int32_t tile_tokens;  // tokens of a linear layer that are computed together
  // Computes the outputs of some groups for all tokens.
  void (*multiply)(const FloatLinearCall& call, int32_t first_group, int32_t end_group);
};

// That of the instruction set in use.
const Kernel& chosen_kernel();

extern const Kernel kernel_generic;
#if defined(__x86_64__)
extern const Kernel kernel_avx2;
extern const Kernel kernel_avx512;
#endif

}  // namespace quire
