#include "sampling_kernel.h"

const quire::SamplingKernel quire::sampling_generic = quire::kSampling;
