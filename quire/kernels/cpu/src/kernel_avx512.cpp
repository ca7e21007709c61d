#include "kernel.h"

const quire::Kernel quire::kernel_avx512 = quire::kKernel;
