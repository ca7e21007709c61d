// What the entry points share: the instruction set and the threads.
#pragma once

#include <cstdint>

namespace quire {

// The one in use: 0 generic, 1 AVX2, 2 AVX-512.
int chosen_isa();

// Runs `body(data)` on this thread, and on up to `num_threads - 1` others if they come in time.
void run_parallel(void (*body)(void*), void* data, int32_t num_threads);

}  // namespace quire
