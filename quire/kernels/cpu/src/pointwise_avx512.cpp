#include "pointwise_kernel.h"

const quire::Pointwise quire::pointwise_avx512 = quire::kPointwise;
