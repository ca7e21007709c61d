// Runs every entry point of the library with every instruction set that the processor has and 1 to 8
// threads. It is compiled with sanitizers, or for another processor, together with the library.
//
// The threads are mostly the test's own, since those of the library may come too late to take part.

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "check.h"

namespace check {

int num_threads = 1;

namespace {

constexpr int kMaxFailuresShown = 20;
int isa = 0;
const char* running = "";
int passed = 0, failed = 0;
bool has_failed = false;

void fail(const char* what, double found, double expected) {
  if (!has_failed && failed < kMaxFailuresShown)
    std::printf("FAILED %s, instruction set %d, %d threads: %s is %.9g instead of %.9g\n", running,
                isa, num_threads, what, found, expected);
  has_failed = true;
}

// A pool of which all take part.
void run_thread_pool(void (*body)(void*), void* data, int32_t count) {
  std::vector<std::thread> others;
  for (int32_t i = 1; i < count; ++i) others.emplace_back(body, data);
  body(data);
  for (std::thread& other : others) other.join();
}

struct Test {
  const char* name;
  void (*run)();
};

constexpr Test kTests[] = {
    {"attention", test_attention},         {"attend QKV", test_attend_qkv},
    {"float linear", test_float_linear},   {"packed linear", test_packed_linear},
    {"packed rows", test_packed_rows},     {"pack int8", test_pack_int8},
    {"pack codes", test_pack_codes},
    {"norm linear", test_norm_linear},     {"largest", test_largest},
    {"adapters", test_adapters},
    {"sampling", test_sampling},               {"logprobs", test_logprobs},
    {"decode", test_decode},               {"bitmask", test_bitmask},
    {"propose n-grams", test_propose_ngrams}, {"accept tokens", test_accept_tokens},
    {"experts", test_experts},             {"route", test_route},
    {"sigmoid", test_sigmoid},
    {"penalize", test_penalize},           {"dequantize", test_dequantize},
    {"thread pool", test_thread_pool},                   {"contention", test_contention},
    {"collectives", test_collectives},     {"missing rank", test_missing_rank},
    {"ring", test_ring},                   {"published number", test_published_number},
};

void run(const Test& test) {
  running = test.name;
  has_failed = false;
  test.run();
  ++(has_failed ? failed : passed);
}

}  // namespace

void near(const char* what, double found, double expected, double tolerance) {
  const double difference = found > expected ? found - expected : expected - found;
  if (!(difference <= tolerance)) fail(what, found, expected);
}

void equal(const char* what, int64_t found, int64_t expected) {
  if (found != expected) fail(what, static_cast<double>(found), static_cast<double>(expected));
}

}  // namespace check

int main() {
  using namespace check;
  for (isa = 0; isa <= quire_best_isa(); ++isa) {
    if (quire_set_isa(isa) != 0) {
      std::printf("FAILED: instruction set %d cannot be set\n", isa);
      return EXIT_FAILURE;
    }
    for (num_threads = 1; num_threads <= 8; ++num_threads)
      for (const auto pool : {run_thread_pool, Parallel{nullptr}}) {
        quire_set_parallel(pool);
        for (const Test& test : kTests) run(test);
      }
  }
  std::printf("instruction sets 0 to %d, 1 to 8 threads\n%d passed, %d failed\n", quire_best_isa(),
              passed, failed);
  return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
