#include "choice_kernel.h"

const quire::ChoiceKernel quire::choice_generic = quire::kChoice;
