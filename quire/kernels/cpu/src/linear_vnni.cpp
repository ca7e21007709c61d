#include "linear.h"

const quire::LinearKernel quire::linear_vnni = quire::kLinear;
