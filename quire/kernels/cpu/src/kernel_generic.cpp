#include "kernel.h"

const quire::Kernel quire::kernel_generic = quire::kKernel;
