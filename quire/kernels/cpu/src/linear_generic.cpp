#include "linear.h"

const quire::LinearKernel quire::linear_generic = quire::kLinear;
