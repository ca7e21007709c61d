// The entry points of routers. A token's choice and weights depend on its own logits alone, to the bit:
// functions of numbers are those of vectors, also where only some numbers are left.

#include "routing.h"

#include <cstdlib>
#include <cstring>

#include "dispatch.h"
#include "phase.h"
#include "pointwise.h"

namespace quire {
namespace {

// Logits that one thread goes through without asking others to help.
constexpr int64_t kLogitsAtOnce = 8192;

// Ranks numbers: the larger one first, of equals the one that comes first. NaN is above all.
int64_t key_of(float number, int32_t place) {
  number += 0.0f;  // there is one zero
  int32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  if (number != number) bits = 0x7fffffff;
  const int64_t key = bits ^ ((bits >> 31) & 0x7fffffff);
  return key * (int64_t{1} << 32) - place;
}

constexpr int64_t kLeast = INT64_MIN;

// The place of the largest key, which is then taken away.
int32_t take_largest(int64_t* keys, int32_t count) {
  int32_t best = 0;
  for (int32_t i = 1; i < count; ++i)
    if (keys[i] > keys[best]) best = i;
  keys[best] = kLeast;
  return best;
}

// Chooses for one token at a time.
class Router {
 public:
  Router(const RoutingCall& call, const Pointwise& pointwise, int64_t* keys, float* scores)
      : call_(call),
        pointwise_(pointwise),
        keys_(keys),
        group_keys_(keys + call.num_experts),
        scores_(scores) {}

  void route(int64_t token) {
    score(call_.logits + token * call_.stride);
    for (int32_t i = 0; i < call_.num_experts; ++i)
      keys_[i] = key_of(scores_[i] + (call_.bias ? call_.bias[i] : 0.0f), i);
    if (call_.top_groups < call_.num_groups) close_groups();
    int32_t* chosen = call_.chosen + token * call_.top_k;
    float* weights = call_.weights + token * call_.top_k;
    for (int32_t k = 0; k < call_.top_k; ++k) {
      chosen[k] = take_largest(keys_, call_.num_experts);
      weights[k] = scores_[chosen[k]];
    }
    weigh(weights);
  }

 private:
  void score(const float* logits) {
    const int32_t count = call_.num_experts;
    if (call_.scoring == Scoring::kSigmoid) return pointwise_.sigmoid(logits, count, scores_);
    if (call_.scoring == Scoring::kSoftmaxOfChosen)
      std::memcpy(scores_, logits, sizeof(float) * static_cast<size_t>(count));
    else
      softmax(logits, count, scores_);
  }

  void softmax(const float* logits, int32_t count, float* out) const {
    pointwise_.exponentials(logits, logits[pointwise_.largest(logits, count)], count, out);
    divide_by_sum(out, count, 0.0f);
  }

  static void divide_by_sum(float* x, int32_t count, float sum) {
    for (int32_t i = 0; i < count; ++i) sum += x[i];
    for (int32_t i = 0; i < count; ++i) x[i] /= sum;
  }

  void weigh(float* weights) const {
    if (call_.scoring == Scoring::kSoftmaxOfChosen)
      softmax(weights, call_.top_k, weights);
    else if (call_.normalizes)
      divide_by_sum(weights, call_.top_k, call_.scoring == Scoring::kSigmoid ? 1e-20f : 0.0f);
    for (int32_t k = 0; k < call_.top_k; ++k) weights[k] *= call_.factor;
  }

  // Takes away the keys of all groups but the best: those with the best expert, or by sigmoid with the
  // largest sum of their two best.
  void close_groups() {
    const int32_t size = call_.num_experts / call_.num_groups;
    for (int32_t group = 0; group < call_.num_groups; ++group) {
      float first = -__builtin_inff(), second = first;
      for (int32_t i = group * size; i < (group + 1) * size; ++i) {
        const float ranked = scores_[i] + (call_.bias ? call_.bias[i] : 0.0f);
        if (!(ranked <= first)) {
          second = first;
          first = ranked;
        } else if (ranked > second) {
          second = ranked;
        }
      }
      const bool adds = call_.scoring == Scoring::kSigmoid && size > 1;
      group_keys_[group] = key_of(adds ? first + second : first, group);
    }
    for (int32_t i = 0; i < call_.top_groups; ++i) take_largest(group_keys_, call_.num_groups);
    for (int32_t group = 0; group < call_.num_groups; ++group)
      if (group_keys_[group] != kLeast)  // it was not taken
        for (int32_t i = group * size; i < (group + 1) * size; ++i) keys_[i] = kLeast;
  }

  const RoutingCall& call_;
  const Pointwise& pointwise_;
  int64_t *keys_, *group_keys_;
  float* scores_;
};

struct Job {
  const RoutingCall& call;
  const Pointwise& pointwise;
  char* memory;  // for each thread
  size_t thread_bytes;
  size_t next_member;
  Phase phase;
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  const size_t member = __atomic_fetch_add(&job.next_member, 1, __ATOMIC_RELAXED);
  int64_t* keys = reinterpret_cast<int64_t*>(job.memory + member * job.thread_bytes);
  Router router(job.call, job.pointwise, keys,
                reinterpret_cast<float*>(keys + job.call.num_experts + job.call.num_groups));
  job.phase.run([&](int64_t first, int64_t end) {
    for (int64_t token = first; token < end; ++token) router.route(token);
  });
}

}  // namespace
}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Returns 0, or -1 if there is no memory.
int quire_route(const quire::RoutingCall* call) {
  using namespace quire;
  const size_t experts = static_cast<size_t>(call->num_experts);
  const size_t bytes = sizeof(int64_t) * (experts + static_cast<size_t>(call->num_groups)) +
                       sizeof(float) * experts;
  const size_t thread_bytes = (bytes + 63) / 64 * 64;
  const int64_t pieces = divide_up(call->num_tokens * call->num_experts, kLogitsAtOnce);
  const int32_t threads = pieces < call->num_threads ? static_cast<int32_t>(pieces) : call->num_threads;
  const size_t members = static_cast<size_t>(threads < 1 ? 1 : threads);
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, members * thread_bytes) != 0) return -1;
  Job job = {*call,        chosen_pointwise(),
             static_cast<char*>(memory), thread_bytes,
             0,            Phase(call->num_tokens, kLogitsAtOnce / call->num_experts)};
  run_parallel(work, &job, static_cast<int32_t>(members));
  std::free(memory);
  return 0;
}

// out = 1 / (1 + exp(-x)) for n numbers.
void quire_sigmoid(const float* x, int64_t n, float* out) {
  constexpr int64_t kAtOnce = int64_t{1} << 30;
  for (; n > 0; n -= kAtOnce, x += kAtOnce, out += kAtOnce)
    quire::chosen_pointwise().sigmoid(x, static_cast<int32_t>(n < kAtOnce ? n : kAtOnce), out);
}

}  // extern "C"
#pragma GCC visibility pop
