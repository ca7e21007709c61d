// What the tests of the library share: random data, comparisons, and a pool of threads.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

extern "C" {
void quire_set_parallel(void (*parallel)(void (*body)(void*), void* data, int32_t));
int quire_best_isa();
int quire_set_isa(int isa);
}

namespace check {

using Parallel = void (*)(void (*body)(void*), void* data, int32_t num_threads);

// Exactly as many elements as are asked for, so that a read or write beside them is an error that the
// address sanitizer sees.
using Floats = std::vector<float>;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  // Between two numbers, both included.
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  float normal() { return std::normal_distribution<float>()(engine_); }
  Floats normals(size_t count) {
    Floats values(count);
    for (float& value : values) value = normal();
    return values;
  }

 private:
  std::mt19937 engine_;
};

// Notes a failure if `found` is not within `tolerance` of `expected`; NaN never is.
void near(const char* what, double found, double expected, double tolerance);
void equal(const char* what, int64_t found, int64_t expected);

// The number of threads of the case that runs, and what is said of it when it fails.
extern int num_threads;

void test_attention();
void test_float_linear();
void test_packed_linear();
void test_packed_rows();
void test_pack_int8();
void test_pack_codes();
void test_norm_linear();
void test_adapters();
void test_attend_qkv();
void test_largest();
void test_sampling();
void test_logprobs();
void test_decode();
void test_bitmask();
void test_propose_ngrams();
void test_accept_tokens();
void test_experts();
void test_route();
void test_sigmoid();
void test_penalize();
void test_dequantize();
void test_thread_pool();
void test_contention();
void test_collectives();
void test_missing_rank();
void test_ring();
void test_published_number();

}  // namespace check
