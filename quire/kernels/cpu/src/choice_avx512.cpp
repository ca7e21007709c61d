#include "choice_kernel.h"

const quire::ChoiceKernel quire::choice_avx512 = quire::kChoice;
