// What a landing step of a large matrix needs besides its products: two passes over memory.
//
// The products are torch's; between them torch's own operations would read and write the matrices
// ten times, and hold four more of them.

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

// S <- A + lam (S - I) in a tile where Skew(P) is given; the sum of squares of S - I in it.
double apply(const T (*skew)[TILE + 1], int64_t height, int64_t width, int64_t first_row,
             int64_t first_column, T* P, T* S, const T* buffer, int64_t n, const Options& o) {
    const T lam = T(o.lam), momentum = T(o.momentum);
    double sum = 0;
    for (int64_t r = 0; r < height; ++r) {
        const int64_t start = (first_row + r) * n + first_column;
        T A[TILE];
        std::copy_n(skew[r], width, A);
        if (buffer) {
#pragma omp simd
            for (int64_t c = 0; c < width; ++c) A[c] += momentum * buffer[start + c];
            std::copy_n(A, width, P + start);
        }
        const int64_t diagonal = first_row + r - first_column;
        if (0 <= diagonal && diagonal < width) S[start + diagonal] -= T(1);
#pragma omp simd reduction(+ : sum)
        for (int64_t c = 0; c < width; ++c) {
            const T D = S[start + c];
            S[start + c] = A[c] + lam * D;
            sum += double(D) * double(D);
        }
    }
    return sum;
}

}  // namespace

extern "C" {

// From P = G X^T and S = X X^T, square: S becomes M = A + lam (S - I), where A = Skew(P), or
// A = Skew(P) + momentum * buffer, which then takes P's place. Gives ||S - I||.
double ortholand_residual(T* P, T* S, const T* buffer, int64_t n, const Options* o) {
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
            sum += apply(above, height, width, ib, jb, P, S, buffer, n, *o);
            if (ib == jb) continue;
            for (int64_t i = 0; i < height; ++i)
                for (int64_t j = 0; j < width; ++j) below[j][i] = -above[i][j];
            sum += apply(below, width, height, jb, ib, P, S, buffer, n, *o);
        }
    return std::sqrt(sum);
}

// ||x||
double ortholand_norm(const T* x, int64_t n) { return std::sqrt(sum_of_squares(x, n)); }

// The safe step for a field of this norm, and lr if that is less.
double ortholand_step(double norm, double distance, double tangency_error, const Options* o) {
    return coupled_step<T>(*o, norm, distance, tangency_error);
}

// X <- X - eta L for a field of this norm; the new buffer is A, where there is one. 1 if taken.
int ortholand_move(T* X, const T* L, T* buffer, const T* A, int64_t n, double eta, double norm,
                   double distance, const Options* o) {
    if (!is_a_step(*o, eta, distance, o->lam) || !(eta * norm < INFINITY)) return 0;
    const T step = T(eta);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) X[i] -= step * L[i];
    if (buffer) std::copy(A, A + n, buffer);
    return 1;
}
}
