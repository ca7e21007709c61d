#include "pointwise_kernel.h"

const quire::Pointwise quire::pointwise_generic = quire::kPointwise;
