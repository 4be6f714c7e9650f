// What a landing step of a large matrix needs besides its products: some passes over memory.
//
// The products are torch's; between them torch's own operations would read and write the matrices
// ten times and more, and hold four to six of them.

#include <algorithm>
#include <cstdint>

#include "steps.h"

#ifndef SCALAR
#define SCALAR float
#endif

using T = SCALAR;

namespace {

constexpr int64_t TILE = 32;  // rows and columns of a tile: four of them fit the nearest cache

double sum_of_squares(const T* x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        const double value = x[i];
        sum += value * value;
    }
    return sum;
}

// A tile of the new first moment, from Skew(P) there; the sum of squares of Skew(P) in it.
double accumulate(const T (*skew)[TILE + 1], int64_t height, int64_t width, int64_t first_row,
                  int64_t first_column, T* P, const T* buffer, T decay, T share, int64_t n) {
    double sum = 0;
    for (int64_t r = 0; r < height; ++r) {
        const int64_t start = (first_row + r) * n + first_column;
        const T* row = skew[r];
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < width; ++c) sum += double(row[c]) * double(row[c]);
        if (!buffer) {
            std::copy_n(row, width, P + start);
            continue;
        }
#pragma omp simd
        for (int64_t c = 0; c < width; ++c)
            P[start + c] = share * row[c] + decay * buffer[start + c];
    }
    return sum;
}

}  // namespace

extern "C" {

// P = G X^T, square, becomes the generator A: Skew(P), or share * Skew(P) + decay * buffer.
// Gives ||Skew(P)||.
double ortholand_generator(T* P, const T* buffer, int64_t n, double decay, double share,
                           const Options* o) {
    const T half = half_of_descent<T>(*o);
    double sum = 0;
    for (int64_t ib = 0; ib < n; ib += TILE)
        for (int64_t jb = ib; jb < n; jb += TILE) {
            const int64_t height = std::min(TILE, n - ib), width = std::min(TILE, n - jb);
            // Copied row by row, and only then read by columns: rows of a large matrix that are
            // a power of two apart push each other out of the cache.
            T above[TILE][TILE + 1], below[TILE][TILE + 1];
            for (int64_t j = 0; j < width; ++j)
                std::copy_n(P + (jb + j) * n + ib, height, below[j]);
            for (int64_t i = 0; i < height; ++i)
                for (int64_t j = 0; j < width; ++j)
                    above[i][j] = half * (P[(ib + i) * n + jb + j] - below[j][i]);
            sum += accumulate(above, height, width, ib, jb, P, buffer, T(decay), T(share), n);
            if (ib == jb) continue;
            for (int64_t i = 0; i < height; ++i)
                for (int64_t j = 0; j < width; ++j) below[j][i] = -above[i][j];
            sum += accumulate(below, width, height, jb, ib, P, buffer, T(decay), T(share), n);
        }
    return std::sqrt(sum);
}

// S = X X^T becomes scale * A + pull (S - I). Gives ||S - I||.
double ortholand_field(T* S, const T* A, int64_t n, double scale, double pull) {
    const T share = T(pull), factor = T(scale);
    double sum = 0;
    for (int64_t row = 0; row < n; ++row) {
        T* s = S + row * n;
        const T* a = A + row * n;
        s[row] -= T(1);
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < n; ++c) {
            const T D = s[c];
            s[c] = factor * a[c] + share * D;
            sum += double(D) * double(D);
        }
    }
    return std::sqrt(sum);
}

// R becomes c (X - step R).
void ortholand_shift(T* R, const T* X, int64_t n, double step, double c) {
    const T factor = T(c), length = T(c * step);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) R[i] = factor * X[i] - length * R[i];
}

// E = Y^T Y, n x n, becomes E - I, its diagonal summed in double precision: sums that are almost 1
// are coarse in float. Gives ||Y^T Y / c^2 - I||. `columns` is memory for n numbers.
double ortholand_overshoot(T* E, const T* Y, double* columns, int64_t n, double c) {
    std::fill(columns, columns + n, 0.0);
    for (int64_t row = 0; row < n; ++row) {
        const T* y = Y + row * n;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) columns[j] += double(y[j]) * double(y[j]);
    }
    const double scale = 1 / (c * c);
    double sum = 0;
    for (int64_t row = 0; row < n; ++row) {
        T* e = E + row * n;
        e[row] = T(0);
        sum += scale * scale * sum_of_squares(e, n);
        e[row] = T(columns[row] - 1);
        const double diagonal = columns[row] * scale - 1;
        sum += diagonal * diagonal;
    }
    return std::sqrt(sum);
}

// ||x||
double ortholand_norm(const T* x, int64_t n) { return std::sqrt(sum_of_squares(x, n)); }

// The safe step for a field of this norm, and lr if that is less.
double ortholand_step(double norm, double distance, double tangency_error, const Options* o) {
    return coupled_step<T>(*o, norm, distance, tangency_error);
}

// W <- W - scale eta L for a field of this norm at W / scale, which has this share of X D. 1 if
// taken.
int ortholand_move(T* W, const T* L, int64_t n, double eta, double norm, double distance,
                   double pull, const Options* o) {
    if (!is_a_step(*o, eta, distance, pull) || !is_finite_step<T>(*o, eta * norm))
        return 0;
    const Factors<T> factors(o->scale * eta);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) W[i] -= factors.step * (factors.rest * L[i]);
    return 1;
}
}
