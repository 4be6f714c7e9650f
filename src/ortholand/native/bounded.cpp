// Whether all numbers of some arrays are below a bound: a look at them that launches nothing.

#include <cmath>
#include <cstdint>

#ifndef SCALAR
#define SCALAR float
#endif

extern "C" {

// An array of numbers.
struct Span {
    const SCALAR* start;
    int64_t size;
};

// 1 if |x| < limit for every x in n arrays, 0 if not (NaN is not).
int ortholand_all_below(const Span* spans, int64_t n, double limit) {
    const SCALAR bound = SCALAR(limit);
    for (int64_t i = 0; i < n; ++i) {
        const SCALAR* x = spans[i].start;
        int beyond = 0;  // or-ed: a sum of very many would overflow
#pragma omp simd reduction(| : beyond)
        for (int64_t j = 0; j < spans[i].size; ++j) beyond |= !(std::fabs(x[j]) < bound);
        if (beyond) return 0;
    }
    return 1;
}
}
