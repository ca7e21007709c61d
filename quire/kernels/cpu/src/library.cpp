// The entry points of the library: cuts a step into tasks and shares them among threads.
//
// There is no dependence on an OpenMP library. The caller hands over the address of the
// `GOMP_parallel` that torch itself uses, so that both draw on one team of threads.

#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "dispatch.h"

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

using Parallel = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
Parallel parallel_region = nullptr;
int isa_in_use = -1;  // the widest one

const Kernel* kernel_of(int isa) {
  switch (isa) {
    case 0: return &kernel_generic;
#if defined(__x86_64__)
    case 1:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernel_avx2
                                                                             : nullptr;
    case 2: return __builtin_cpu_supports("avx512f") ? &kernel_avx512 : nullptr;
#endif
    default: return nullptr;
  }
}

int best_isa() {
  int isa = 2;
  while (!kernel_of(isa)) --isa;
  return isa;
}

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

struct Team {
  const AttentionCall& call;
  const Kernel& kernel;
  const Task* tasks;
  Split* splits;
  float* scratch;
  size_t scratch_stride;
  size_t num_tasks;
  size_t next_task;
  size_t next_member;
};

void work(void* data) {
  Team& team = *static_cast<Team*>(data);
  const size_t member = __atomic_fetch_add(&team.next_member, 1, __ATOMIC_RELAXED);
  float* scratch = team.scratch + member * team.scratch_stride;
  for (;;) {
    const size_t index = __atomic_fetch_add(&team.next_task, 1, __ATOMIC_RELAXED);
    if (index >= team.num_tasks) return;
    const Task& task = team.tasks[index];
    team.kernel.attend(team.call, task, scratch);
    if (task.split < 0) continue;
    // Whoever finishes the last part joins them, always in the order of the keys.
    Split& split = team.splits[task.split];
    if (__atomic_sub_fetch(&split.unfinished, 1, __ATOMIC_ACQ_REL) == 0)
      team.kernel.merge(team.call, task, split.partials, split.count);
  }
}

struct Multipliers {
  const FloatLinearCall& call;
  const Kernel& kernel;
  float* columns;
  int32_t next_tile;
  int32_t next_group;
};

void lay_all_columns(void* data) {
  Multipliers& team = *static_cast<Multipliers*>(data);
  const TokenTiles tiles(team.call.num_tokens, team.kernel.tile_tokens);
  for (;;) {
    const int32_t tile = __atomic_fetch_add(&team.next_tile, 1, __ATOMIC_RELAXED);
    if (tile >= tiles.count) return;
    team.kernel.lay_columns(team.call, tile, team.columns);
  }
}

void multiply(void* data) {
  Multipliers& team = *static_cast<Multipliers*>(data);
  const int32_t num_groups = count_groups(team.call);
  const float* columns = team.columns ? team.columns : team.call.x;
  for (;;) {
    const int32_t first = __atomic_fetch_add(&team.next_group, kTaskGroups, __ATOMIC_RELAXED);
    if (first >= num_groups) return;
    const int32_t end = first + kTaskGroups;
    team.kernel.multiply(team.call, columns, first, end < num_groups ? end : num_groups);
  }
}

size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }

struct Writers {
  const WriteCall& call;
  int64_t next_token;
};

constexpr int64_t kTokensAtOnce = 32;

void write_token(const WriteCall& call, int64_t token) {
  const int64_t slot = call.slots[token];
  const int64_t offset = slot / call.block_size * call.block_stride +
                         slot % call.block_size * call.token_stride;
  const size_t bytes = sizeof(float) * static_cast<size_t>(call.head_dim);
  for (int64_t head = 0; head < call.num_kv_heads; ++head) {
    const int64_t to = offset + head * call.head_stride, from = head * call.head_dim;
    std::memcpy(call.keys + to, call.k + token * call.k_stride + from, bytes);
    std::memcpy(call.values + to, call.v + token * call.v_stride + from, bytes);
  }
}

void write(void* data) {
  Writers& writers = *static_cast<Writers*>(data);
  for (;;) {
    const int64_t first = __atomic_fetch_add(&writers.next_token, kTokensAtOnce, __ATOMIC_RELAXED);
    if (first >= writers.call.num_tokens) return;
    const int64_t end = first + kTokensAtOnce;
    for (int64_t i = first; i < end && i < writers.call.num_tokens; ++i)
      write_token(writers.call, i);
  }
}

}  // namespace

int chosen_isa() { return isa_in_use < 0 ? best_isa() : isa_in_use; }

void run_parallel(void (*body)(void*), void* data, int32_t num_threads) {
  if (num_threads > 1 && parallel_region)
    parallel_region(body, data, static_cast<unsigned>(num_threads), 0);
  else
    body(data);
}

}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Changes whenever a struct or the meaning of an entry point does.
int quire_abi() { return 3; }

void quire_set_parallel(void* gomp_parallel) {
  quire::parallel_region = reinterpret_cast<quire::Parallel>(gomp_parallel);
}

// The widest instruction set of this processor: 0 generic, 1 AVX2, 2 AVX-512.
int quire_best_isa() { return quire::best_isa(); }

// Returns 0, or -1 if this processor or build lacks the instruction set.
int quire_set_isa(int isa) {
  if (!quire::kernel_of(isa)) return -1;
  quire::isa_in_use = isa;
  return 0;
}

// Returns 0, or -1 if there is no memory.
int quire_paged_attention(const quire::AttentionCall* call) {
  using namespace quire;
  const Kernel& kernel = *kernel_of(chosen_isa());
  const Plan plan = measure(*call, kernel);
  if (plan.num_tasks == 0) return 0;
  int32_t num_threads = plan.work < kSerialWork ? 1 : call->num_threads;
  if (num_threads < 1) num_threads = 1;
  const size_t scratch = padded(sizeof(float) * kernel.scratch_floats(call->head_dim));
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
  fill(*call, kernel, tasks_at, splits_at, partials_at);
  Team team = {*call,      kernel, tasks_at, splits_at, scratch_at, scratch / sizeof(float),
               plan.num_tasks, 0,  0};
  run_parallel(work, &team, num_threads);
  std::free(memory);
  return 0;
}

void quire_write_kv(const quire::WriteCall* call) {
  quire::Writers writers = {*call, 0};
  const int64_t floats = call->num_tokens * call->num_kv_heads * call->head_dim;
  quire::run_parallel(quire::write, &writers, floats < quire::kSerialWork ? 1 : call->num_threads);
}

// Returns 0, or -1 if there is no memory.
int quire_float_linear(const quire::FloatLinearCall* call) {
  using namespace quire;
  const Kernel& kernel = *kernel_of(chosen_isa());
  const int64_t floats = int64_t{call->num_tokens} * call->num_inputs;
  const int32_t num_threads = floats * call->num_outputs < kSerialWork ? 1 : call->num_threads;
  void* columns = nullptr;  // a single token is its own column
  if (call->num_tokens > 1 && posix_memalign(&columns, 64, sizeof(float) * floats) != 0) return -1;
  Multipliers team = {*call, kernel, static_cast<float*>(columns), 0, 0};
  if (columns) run_parallel(lay_all_columns, &team, floats < kSerialWork ? 1 : num_threads);
  run_parallel(multiply, &team, num_threads);
  std::free(columns);
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
