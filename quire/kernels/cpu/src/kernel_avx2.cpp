#include "kernel.h"

const quire::Kernel quire::kernel_avx2 = quire::kKernel;
