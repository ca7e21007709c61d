// The entry points for attention: cuts a step into tasks and shares them among threads.

#include "attention.h"

#include <cstdlib>
#include <cstring>

#include "dispatch.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Tasks that a thread should have at least, so that threads end at about the same time.
constexpr int64_t kTasksPerThread = 4;
// Bounds the memory for the parts of split tiles; tiles beyond it stay whole.
constexpr size_t kMaxPartialFloats = size_t{8} << 20;
// Below this many multiply-adds waking other threads costs more than it gains.
constexpr int64_t kSerialWork = 100000;

// A tile whose keys are shared out to several tasks.
struct Split {
  const float* partials;
  int32_t count;       // parts
  int32_t unfinished;  // tasks
};

// Gives `visit` every tile of the step, the longest of a request first: a task with all its keys.
template <typename Visit>
void for_each_tile(const AttentionCall& call, const Kernel& kernel, Visit visit) {
  const int32_t group = group_size(call);
  for (int32_t request = 0; request < call.num_requests; ++request) {
    const int32_t num_queries = call.query_start[request + 1] - call.query_start[request];
    const int32_t num_rows = num_queries * group;
    const int32_t first_position = call.context_lens[request] - num_queries;
    const int32_t num_tiles = (num_rows + kernel.tile_rows - 1) / kernel.tile_rows;
    for (int32_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head)
      for (int32_t tile = num_tiles - 1; tile >= 0; --tile) {
        Task task = {request, kv_head, tile * kernel.tile_rows, 0, 0, 0, -1, nullptr};
        const int32_t left = num_rows - task.first_row;
        task.num_rows = left < kernel.tile_rows ? left : kernel.tile_rows;
        const int32_t oldest = first_position + task.first_row / group - call.window + 1;
        task.first_key = oldest > 0 ? oldest : 0;
        task.end_key = first_position + (task.first_row + task.num_rows - 1) / group + 1;
        visit(task);
      }
  }
}

// How many pieces of `keys` keys, which begin at multiples of that, the task's keys lie in.
int32_t count_pieces(const Task& task, int32_t keys) {
  return (task.end_key - 1) / keys - task.first_key / keys + 1;
}

int64_t work_of(const Task& task) {
  return static_cast<int64_t>(task.end_key - task.first_key) * task.num_rows;
}

struct Work {
  size_t num_tiles = 0;
  int64_t total = 0;  // products of a query and a key
};

Work measure(const AttentionCall& call, const Kernel& kernel) {
  Work work;
  for_each_tile(call, kernel, [&](const Task& task) {
    work.num_tiles += 1;
    work.total += work_of(task);
  });
  return work;
}

// Cuts tiles that are long for the step into tasks of whole parts.
class Cutter {
 public:
  Cutter(const AttentionCall& call, const Work& work, int32_t num_threads)
      : head_dim_(call.head_dim),
        most_(num_threads > 1 ? work.total / (kTasksPerThread * num_threads) : INT64_MAX) {}

  // The keys of a task of the tile; all of them if it stays whole. Tiles must come in order.
  int32_t keys(const Task& tile) {
    if (work_of(tile) <= most_) return INT32_MAX;
    const size_t floats = static_cast<size_t>(count_pieces(tile, kPartKeys)) *
                          partial_floats(tile.num_rows, head_dim_);
    if (floats > left_) return INT32_MAX;
    left_ -= floats;
    const int64_t parts = most_ / (int64_t{tile.num_rows} * kPartKeys) + 1;
    return static_cast<int32_t>(parts) * kPartKeys;
  }

 private:
  const int64_t head_dim_, most_;
  size_t left_ = kMaxPartialFloats;
};

struct Plan {
  size_t num_tasks = 0, num_splits = 0, partial_floats = 0;
};

Plan count_tasks(const AttentionCall& call, const Kernel& kernel, Cutter cutter) {
  Plan plan;
  for_each_tile(call, kernel, [&](const Task& tile) {
    const int32_t pieces = count_pieces(tile, cutter.keys(tile));
    plan.num_tasks += static_cast<size_t>(pieces);
    if (pieces == 1) return;
    plan.num_splits += 1;
    plan.partial_floats += static_cast<size_t>(count_pieces(tile, kPartKeys)) *
                           partial_floats(tile.num_rows, call.head_dim);
  });
  return plan;
}

void fill(const AttentionCall& call, const Kernel& kernel, Cutter cutter, Task* tasks,
          Split* splits, float* partials) {
  int32_t num_splits = 0;
  for_each_tile(call, kernel, [&](const Task& tile) {
    const int32_t keys = cutter.keys(tile), pieces = count_pieces(tile, keys);
    if (pieces == 1) {
      *tasks++ = tile;
      return;
    }
    const int32_t parts = count_pieces(tile, kPartKeys);
    const size_t stride = partial_floats(tile.num_rows, call.head_dim);
    const int32_t first_piece = tile.first_key / keys, first_part = tile.first_key / kPartKeys;
    splits[num_splits] = {partials, parts, pieces};
    for (int32_t i = 0; i < pieces; ++i) {
      Task task = tile;
      task.split = num_splits;
      if (i > 0) task.first_key = (first_piece + i) * keys;
      if (i < pieces - 1) task.end_key = (first_piece + i + 1) * keys;
      task.partial = partials + static_cast<size_t>(task.first_key / kPartKeys - first_part) * stride;
      *tasks++ = task;
    }
    partials += static_cast<size_t>(parts) * stride;
    ++num_splits;
  });
}

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int64_t kTokensAtOnce = 32;

// Where the numbers of a new token lie in the cache, from the beginning of the keys or the values.
int64_t cache_offset(const WriteCall& call, int64_t token) {
  const int64_t slot = call.slots[token];
  return slot / call.block_size * call.block_stride + slot % call.block_size * call.token_stride;
}

// Stores one head of a token in the keys or the values.
void store_head(const WriteCall& call, const Pointwise& pointwise, const float* head, void* cache,
                int64_t offset) {
  if (call.stored == Stored::kFloat16)
    pointwise.to_halves(head, call.head_dim, static_cast<uint16_t*>(cache) + offset);
  else
    std::memcpy(static_cast<float*>(cache) + offset, head,
                sizeof(float) * static_cast<size_t>(call.head_dim));
}

// Rotates pairs of neighbours; `to` may be `from`.
void rotate_neighbours(const float* from, const float* cos, const float* sin, int32_t half,
                       float* to) {
  for (int32_t i = 0; i < half; ++i) {
    const float first = from[2 * i], second = from[2 * i + 1];
    to[2 * i] = first * cos[i] - second * sin[i];
    to[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

// Normalises and rotates one head as far as wanted; `to` may be `from`.
void prepare_head(const QKVCall& qkv, const Pointwise& pointwise, const float* norm_weight,
                  int64_t token, int32_t head_dim, const float* from, float* to) {
  if (norm_weight) {
    pointwise.normalize(from, nullptr, norm_weight, qkv.eps, head_dim, nullptr, to);
    from = to;
  }
  int32_t rotated = 0;
  if (qkv.cos) {
    rotated = qkv.rotary_dim;
    const int32_t half = rotated / 2;
    const int64_t angle = qkv.positions[token] * half;
    if (qkv.interleaved)
      rotate_neighbours(from, qkv.cos + angle, qkv.sin + angle, half, to);
    else
      pointwise.rotate(from, qkv.cos + angle, qkv.sin + angle, half, to);
  }
  if (from != to)
    std::memcpy(to + rotated, from + rotated,
                sizeof(float) * static_cast<size_t>(head_dim - rotated));
}

// `key` has room for one head.
void prepare_token(const QKVCall& qkv, const WriteCall& call, const Pointwise& pointwise,
                   int64_t token, float* key) {
  const int32_t head_dim = call.head_dim;
  float* q = qkv.q + token * qkv.q_stride;
  for (int32_t head = 0; head < qkv.num_heads; ++head, q += head_dim)
    prepare_head(qkv, pointwise, qkv.q_norm, token, head_dim, q, q);
  const int64_t offset = cache_offset(call, token);
  const float* k = call.k + token * call.k_stride;
  const float* v = call.v + token * call.v_stride;
  for (int64_t head = 0; head < call.num_kv_heads; ++head, k += head_dim, v += head_dim) {
    const int64_t to = offset + head * call.head_stride;
    prepare_head(qkv, pointwise, qkv.k_norm, token, head_dim, k, key);
    store_head(call, pointwise, key, call.keys, to);
    store_head(call, pointwise, v, call.values, to);
  }
}

// What comes before attention.
struct NewTokens {
  const QKVCall& qkv;
  const WriteCall& write;
  const Pointwise& pointwise;
};

struct AttentionJob {
  const AttentionCall& call;
  const Kernel& kernel;
  const NewTokens& tokens;
  const Task* tasks;
  Split* splits;
  float* scratch;
  size_t scratch_stride;
  size_t next_member;
  Phase preparing, attending;
};

void attend_task(const AttentionJob& job, const Task& task, float* scratch) {
  job.kernel.attend(job.call, task, scratch);
  if (task.split < 0) return;
  // The thread that finishes the last task folds all parts, in the order of the keys.
  Split& split = job.splits[task.split];
  if (__atomic_sub_fetch(&split.unfinished, 1, __ATOMIC_ACQ_REL) == 0)
    job.kernel.merge(job.call, task, split.partials, split.count);
}

void work(void* data) {
  AttentionJob& job = *static_cast<AttentionJob*>(data);
  const size_t member = __atomic_fetch_add(&job.next_member, 1, __ATOMIC_RELAXED);
  float* scratch = job.scratch + member * job.scratch_stride;
  const NewTokens& tokens = job.tokens;
  job.preparing.run([&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token)
      prepare_token(tokens.qkv, tokens.write, tokens.pointwise, token, scratch);
  });
  job.preparing.wait();
  job.attending.run([&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) attend_task(job, job.tasks[i], scratch);
  });
}

// Returns 0, or -1 if there is no memory.
int attend(const AttentionCall& call, const NewTokens& tokens) {
  const Kernel& kernel = chosen_kernel();
  const Work step = measure(call, kernel);
  if (step.num_tiles == 0) return 0;
  int32_t num_threads = step.total * call.head_dim < kSerialWork ? 1 : call.num_threads;
  if (num_threads < 1) num_threads = 1;
  const Cutter cutter(call, step, num_threads);
  const Plan plan = count_tasks(call, kernel, cutter);
  const size_t scratch = padded(sizeof(float) * kernel.scratch_floats(call.head_dim));
  const size_t partials = padded(sizeof(float) * plan.partial_floats);
  const size_t tasks = padded(sizeof(Task) * plan.num_tasks);
  const size_t splits = padded(sizeof(Split) * plan.num_splits);
  const size_t bytes = scratch * static_cast<size_t>(num_threads) + partials + tasks + splits;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) return -1;
  char* at = static_cast<char*>(memory);
  float* scratch_at = reinterpret_cast<float*>(at);
  at += scratch * static_cast<size_t>(num_threads);
  float* partials_at = reinterpret_cast<float*>(at);
  Task* tasks_at = reinterpret_cast<Task*>(at + partials);
  Split* splits_at = reinterpret_cast<Split*>(at + partials + tasks);
  fill(call, kernel, cutter, tasks_at, splits_at, partials_at);
  AttentionJob job = {call,
                      kernel,
                      tokens,
                      tasks_at,
                      splits_at,
                      scratch_at,
                      scratch / sizeof(float),
                      0,
                      Phase(tokens.write.num_tokens, kTokensAtOnce),
                      Phase(static_cast<int64_t>(plan.num_tasks), 1)};
  run_parallel(work, &job, num_threads);
  std::free(memory);
  return 0;
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Prepares queries and keys, stores keys and values, then attends. Returns 0, or -1 if there is no memory.
int quire_attend_qkv(const quire::QKVCall* qkv, const quire::WriteCall* write,
                       const quire::AttentionCall* call) {
  return quire::attend(*call, {*qkv, *write, quire::chosen_pointwise()});
}

}  // extern "C"
#pragma GCC visibility pop
