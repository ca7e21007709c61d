#include "linear.h"

const quire::LinearKernel quire::linear_avx2 = quire::kLinear;
