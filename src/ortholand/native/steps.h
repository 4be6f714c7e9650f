// What the border and the kernels share: what is stepped, and the options of a step.

#pragma once

#include <cstdint>

// Given by optim/engines/compiled.py, field by field.
extern "C" struct Options {
    double lr, scale, lam, eps, aim, farthest, omega;
    double momentum, dampening;
    double beta1, beta2, adam_eps;
    int32_t attraction, rule, maximize, moments, nesterov, threads;
};

// A parameter: `count` n x p matrices, n >= p, in memory that is the same for weight, gradient and
// state.
extern "C" struct Parameter {
    void *X, *G;
    void* state;    // momentum buffer or first moment, as X; or null
    void* squares;  // second moments, a number per matrix; or null
    void* steps;    // steps taken, a number per matrix; or null
    int64_t count;
    int64_t row_stride, column_stride;  // of a matrix with at least as many rows as columns
    // Matrices are in groups of `inner`, so far from each other in a group and from group to group.
    int64_t inner, inner_stride, outer_stride;
    int64_t skipped;  // written: how many of the matrices did not take their step
    int64_t limited;  // written: how many took one that was shorter than lr
    int64_t n, p;     // size of a matrix; square ones come as if their strides were exchanged
    int64_t index, is_double;

    int64_t offset(int64_t matrix) const {
        if (outer_stride == inner * inner_stride) return matrix * inner_stride;  // no division
        return matrix / inner * outer_stride + matrix % inner * inner_stride;
    }
};

enum Attraction { COUPLED = 0, DECOUPLED = 1, AFTER = 2 };
enum Moments { NONE = 0, MOMENTUM = 1, ADAM = 2 };

// Rules of the safe step (ortholand.safe_step); 0: no safe step.
enum Rule { UNSAFE = 0, FROBENIUS = 1, SPECTRAL = 3 };
