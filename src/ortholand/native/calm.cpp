// Whether all numbers of some arrays are moderate: a look at them that launches nothing.

#include <cmath>
#include <cstdint>

#ifndef SCALAR
#define SCALAR float
#endif

// 1 if |x| < limit for every x in the arrays, 0 if not (NaN is not).
extern "C" int ortholand_calm(const int64_t* addresses, const int64_t* sizes, int n, double limit) {
    for (int i = 0; i < n; ++i) {
        const SCALAR* x = reinterpret_cast<const SCALAR*>(addresses[i]);
        const SCALAR bound = SCALAR(limit);
        int wild = 0;
#pragma omp simd reduction(+ : wild)
        for (int64_t j = 0; j < sizes[i]; ++j) wild += !(std::fabs(x[j]) < bound);
        if (wild) return 0;
    }
    return 1;
}
