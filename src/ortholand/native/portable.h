// Included first in code that is compiled on one Linux and runs on others (recipe.py).
//
// glibc 2.29 has new versions of these functions, which differ in errno only. The first versions are
// in every glibc, those that torch needs included.

#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#endif

#ifdef FIRST
__asm__(".symver exp,exp@" FIRST);
__asm__(".symver log,log@" FIRST);
__asm__(".symver pow,pow@" FIRST);
#undef FIRST
#endif
