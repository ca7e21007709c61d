// The entry points for attention: cuts a step into tasks and shares them among threads.

#include "attention.h"

#include <cstdlib>
#include <cstring>

#include "dispatch.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Keys per part when a request's keys are split. Splitting depends on nothing but the request and
// the model's shape, so a request's result does not depend on what else is in the batch.
constexpr int32_t kFewRowsPart = 128;
constexpr int32_t kTilePart = 1024;
// Tiles are split only if the request has fewer of them than this, to bound the memory for parts.
constexpr int32_t kEnoughTiles = 64;
// Below this many multiply-adds waking other threads costs more than it gains.
constexpr int64_t kSerialWork = 100000;

// A tile whose keys are shared out to several tasks.
struct Split {
  const float* partials;
  int32_t count;
  int32_t unfinished;
};

// Gives `visit` every tile of the step, the longest of a request first: a task with all its keys, and
// the number of keys at which it is to be cut.
template <typename Visit>
void for_each_tile(const AttentionCall& call, const Kernel& kernel, Visit visit) {
  const int32_t group = group_size(call);
  for (int32_t request = 0; request < call.num_requests; ++request) {
    const int32_t num_queries = call.query_start[request + 1] - call.query_start[request];
    const int32_t num_rows = num_queries * group;
    const int32_t first_position = call.context_lens[request] - num_queries;
    const int32_t num_tiles = (num_rows + kernel.tile_rows - 1) / kernel.tile_rows;
    int32_t part = num_tiles * call.num_kv_heads < kEnoughTiles ? kTilePart : INT32_MAX;
    if (num_rows <= kernel.few_rows) part = kFewRowsPart;
    for (int32_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head)
      for (int32_t tile = num_tiles - 1; tile >= 0; --tile) {
        Task task = {request, kv_head, tile * kernel.tile_rows, 0, 0, 0, -1, nullptr};
        const int32_t left = num_rows - task.first_row;
        task.num_rows = left < kernel.tile_rows ? left : kernel.tile_rows;
        const int32_t oldest = first_position + task.first_row / group - call.window + 1;
        task.first_key = oldest > 0 ? oldest : 0;
        task.end_key = first_position + (task.first_row + task.num_rows - 1) / group + 1;
        visit(task, part);
      }
  }
}

int32_t count_parts(const Task& task, int32_t part) {
  return (task.end_key - 1) / part - task.first_key / part + 1;
}

struct Plan {
  size_t num_tasks = 0, num_splits = 0, partial_floats = 0;
  int64_t work = 0;
};

Plan measure(const AttentionCall& call, const Kernel& kernel) {
  Plan plan;
  for_each_tile(call, kernel, [&](const Task& task, int32_t part) {
    const int32_t parts = count_parts(task, part);
    plan.num_tasks += static_cast<size_t>(parts);
    if (parts > 1) {
      plan.num_splits += 1;
      plan.partial_floats += parts * partial_floats(task.num_rows, call.head_dim);
    }
    plan.work += static_cast<int64_t>(task.end_key - task.first_key) * task.num_rows * call.head_dim;
  });
  return plan;
}

void fill(const AttentionCall& call, const Kernel& kernel, Task* tasks, Split* splits,
          float* partials) {
  int32_t num_splits = 0;
  for_each_tile(call, kernel, [&](const Task& tile, int32_t part) {
    const int32_t parts = count_parts(tile, part);
    if (parts == 1) {
      *tasks++ = tile;
      return;
    }
    splits[num_splits] = {partials, parts, parts};
    const int32_t first_part = tile.first_key / part;
    for (int32_t i = 0; i < parts; ++i) {
      Task task = tile;
      task.split = num_splits;
      task.partial = partials;
      if (i > 0) task.first_key = (first_part + i) * part;
      if (i < parts - 1) task.end_key = (first_part + i + 1) * part;
      *tasks++ = task;
      partials += partial_floats(tile.num_rows, call.head_dim);
    }
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

void write_token(const WriteCall& call, const Pointwise& pointwise, int64_t token) {
  const int64_t offset = cache_offset(call, token);
  const float* k = call.k + token * call.k_stride;
  const float* v = call.v + token * call.v_stride;
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    const int64_t to = offset + head * call.head_stride, from = head * call.head_dim;
    store_head(call, pointwise, k + from, call.keys, to);
    store_head(call, pointwise, v + from, call.values, to);
  }
}

struct Writers {
  const WriteCall& call;
  const Pointwise& pointwise;
  Phase writing;
};

void write(void* data) {
  Writers& writers = *static_cast<Writers*>(data);
  writers.writing.run([&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token)
      write_token(writers.call, writers.pointwise, token);
  });
}

// Normalises and rotates one head as far as wanted; `to` may be `from`.
void prepare_head(const HeadsCall& heads, const Pointwise& pointwise, const float* norm_weight,
                  int64_t token, int32_t head_dim, const float* from, float* to) {
  if (norm_weight) {
    pointwise.normalize(from, nullptr, norm_weight, heads.eps, head_dim, nullptr, to);
    from = to;
  }
  if (heads.cos) {
    const int32_t half = head_dim / 2;
    const int64_t angle = heads.positions[token] * half;
    pointwise.rotate(from, heads.cos + angle, heads.sin + angle, half, to);
  } else if (from != to) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(head_dim));
  }
}

// `key` has room for one head.
void prepare_token(const HeadsCall& heads, const WriteCall& call, const Pointwise& pointwise,
                   int64_t token, float* key) {
  const int32_t head_dim = call.head_dim;
  float* q = heads.q + token * heads.q_stride;
  for (int32_t head = 0; head < heads.num_heads; ++head, q += head_dim)
    prepare_head(heads, pointwise, heads.q_norm, token, head_dim, q, q);
  const int64_t offset = cache_offset(call, token);
  const float* k = call.k + token * call.k_stride;
  const float* v = call.v + token * call.v_stride;
  for (int64_t head = 0; head < call.num_kv_heads; ++head, k += head_dim, v += head_dim) {
    const int64_t to = offset + head * call.head_stride;
    prepare_head(heads, pointwise, heads.k_norm, token, head_dim, k, key);
    store_head(call, pointwise, key, call.keys, to);
    store_head(call, pointwise, v, call.values, to);
  }
}

// What comes before attention, if the caller has not done it.
struct NewTokens {
  const HeadsCall* heads;
  const WriteCall* write;
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
  // Whoever finishes the last part joins them, always in the order of the keys.
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
      prepare_token(*tokens.heads, *tokens.write, tokens.pointwise, token, scratch);
  });
  job.preparing.wait();
  job.attending.run([&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) attend_task(job, job.tasks[i], scratch);
  });
}

// Returns 0, or -1 if there is no memory.
int attend(const AttentionCall& call, const NewTokens& tokens) {
  const Kernel& kernel = chosen_kernel();
  const Plan plan = measure(call, kernel);
  if (plan.num_tasks == 0) return 0;
  int32_t num_threads = plan.work < kSerialWork ? 1 : call.num_threads;
  if (num_threads < 1) num_threads = 1;
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
  fill(call, kernel, tasks_at, splits_at, partials_at);
  AttentionJob job = {call,
                      kernel,
                      tokens,
                      tasks_at,
                      splits_at,
                      scratch_at,
                      scratch / sizeof(float),
                      0,
                      Phase(tokens.write ? tokens.write->num_tokens : 0, kTokensAtOnce),
                      Phase(static_cast<int64_t>(plan.num_tasks), 1)};
  run_parallel(work, &job, num_threads);
  std::free(memory);
  return 0;
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Returns 0, or -1 if there is no memory.
int quire_paged_attention(const quire::AttentionCall* call) {
  return quire::attend(*call, {nullptr, nullptr, quire::chosen_pointwise()});
}

void quire_write_kv(const quire::WriteCall* call) {
  quire::Writers writers = {*call, quire::chosen_pointwise(),
                            quire::Phase(call->num_tokens, quire::kTokensAtOnce)};
  const int64_t floats = call->num_tokens * call->num_kv_heads * call->head_dim;
  quire::run_parallel(quire::write, &writers, floats < quire::kSerialWork ? 1 : call->num_threads);
}

// Prepares the heads, stores keys and values, then attends. Returns 0, or -1 if there is no memory.
int quire_attend_heads(const quire::HeadsCall* heads, const quire::WriteCall* write,
                       const quire::AttentionCall* call) {
  return quire::attend(*call, {heads, write, quire::chosen_pointwise()});
}

}  // extern "C"
#pragma GCC visibility pop
