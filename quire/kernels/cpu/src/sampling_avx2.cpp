#include "sampling_kernel.h"

const quire::SamplingKernel quire::sampling_avx2 = quire::kSampling;
