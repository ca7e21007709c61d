#include "pointwise_kernel.h"

const quire::Pointwise quire::pointwise_avx2 = quire::kPointwise;
