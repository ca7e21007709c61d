#pragma once

// Included before every file of the library (setup.py), and never of its tests.
//
// glibc gave these functions new versions whose behaviour the library does not need: the linker would take
// those of the machine that builds a wheel, and the wheel would ask for as new a glibc everywhere. Here the
// first version is asked for, which every glibc has.

#ifdef __linux__
#include <features.h>
#endif

#if defined(__GLIBC__) && defined(__x86_64__)
#define QUIRE_GLIBC_BASE "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define QUIRE_GLIBC_BASE "GLIBC_2.17"
#endif

#ifdef QUIRE_GLIBC_BASE
#define QUIRE_BASE_VERSION(name) __asm__(".symver " #name "," #name "@" QUIRE_GLIBC_BASE)
QUIRE_BASE_VERSION(log);             // 2.29, without errors in errno
QUIRE_BASE_VERSION(logf);            // 2.27, the same
QUIRE_BASE_VERSION(pthread_create);  // 2.34, since it moved to libc.so
QUIRE_BASE_VERSION(pthread_detach);  // 2.34
#undef QUIRE_BASE_VERSION
#endif
