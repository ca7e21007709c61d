#include "choice_kernel.h"

const quire::ChoiceKernel quire::choice_avx2 = quire::kChoice;
