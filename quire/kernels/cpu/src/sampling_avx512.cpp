#include "sampling_kernel.h"

const quire::SamplingKernel quire::sampling_avx512 = quire::kSampling;
