// The instruction set that all entry points use.

#include "attention.h"
#include "sampling.h"
#include "dispatch.h"
#include "pointwise.h"
#include "quantized.h"

namespace quire {
namespace {

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

}  // namespace

int chosen_isa() { return isa_in_use < 0 ? best_isa() : isa_in_use; }

const Kernel& chosen_kernel() { return *kernel_of(chosen_isa()); }

const LinearKernel& chosen_blocks() {
#if defined(__x86_64__)
  static const bool has_vnni =
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
  if (chosen_isa() == 2 && has_vnni) return linear_vnni;
  if (chosen_isa() >= 1) return linear_avx2;
#endif
  return linear_generic;
}

const Pointwise& chosen_pointwise() {
#if defined(__x86_64__)
  if (chosen_isa() == 2) return pointwise_avx512;
  if (chosen_isa() == 1) return pointwise_avx2;
#endif
  return pointwise_generic;
}

const SamplingKernel& chosen_sampling() {
#if defined(__x86_64__)
  if (chosen_isa() == 2) return sampling_avx512;
  if (chosen_isa() == 1) return sampling_avx2;
#endif
  return sampling_generic;
}

}  // namespace quire

#pragma GCC visibility push(default)
extern "C" {

// Changes whenever a struct or the meaning of an entry point does.
int quire_abi() { return 24; }

// The widest instruction set of this processor: 0 generic, 1 AVX2, 2 AVX-512.
int quire_best_isa() { return quire::best_isa(); }

// Returns 0, or -1 if this processor or build lacks the instruction set.
int quire_set_isa(int isa) {
  if (!quire::kernel_of(isa)) return -1;
  quire::isa_in_use = isa;
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
