// Layouts of square matrices in memory, for which an algorithm is written once:
//
// - Lanes<T, P, W>: W matrices of size P <= 8 side by side, entry by entry, so that every operation
//   is one on vectors of W numbers. No matrix is too small for the vector units that way.
// - Single<T>: one larger matrix, its rows padded to whole vectors, products in register blocks.
//
// "tile" is what a layout works on. Scalars per matrix (norms, steps) are doubles: squares of
// large float entries would overflow.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "steps.h"

namespace {

template <class T, int P_, int W_>
struct Lanes {
    using Scalar = T;
    static constexpr int W = W_, P = P_, PP = P_ * P_;
    typedef T Vector __attribute__((vector_size(W_ * sizeof(T)), may_alias));
    struct alignas(64) Buffer {
        T v[PP * W];
    };
    static constexpr int p() { return P; }
    static constexpr int at(int i, int j) { return (i * P + j) * W; }
    // An entry of each matrix.
    static Vector number(const Buffer& A, int i, int j) { return vectors(A)[i * P + j]; }

    // f(entry, lane) for every entry of the tile.
    template <class F>
    static inline void each(F f) {
        for (int e = 0; e < PP; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) f(e * W + l, l);
        }
    }

    // f(entry, transposed entry, lane).
    template <class F>
    static inline void each_pair(F f) {
        for (int i = 0; i < P; ++i)
            for (int j = 0; j < P; ++j) {
#pragma omp simd
                for (int l = 0; l < W; ++l) f((i * P + j) * W + l, (j * P + i) * W + l, l);
            }
    }

    static inline void clear_padding(Buffer&) {}  // there is none

    static inline void subtract_identity(Buffer& S) {
        for (int i = 0; i < P; ++i) {
#pragma omp simd
            for (int l = 0; l < W; ++l) S.v[(i * P + i) * W + l] -= T(1);
        }
    }

    // C = A B. Compiled once where it is long: it is asked for in many places.
    static void product(Buffer& C, const Buffer& A, const Buffer& B) {
        if constexpr (P <= 3)
            inlined_product(C, A, B);
        else
            long_product(C, A, B);
    }

    __attribute__((noinline)) static void long_product(Buffer& C, const Buffer& A,
                                                       const Buffer& B) {
        inlined_product(C, A, B);
    }

    static inline void inlined_product(Buffer& C, const Buffer& A, const Buffer& B) {
        const Vector *a = vectors(A), *b = vectors(B);
        Vector* c = reinterpret_cast<Vector*>(C.v);
#pragma GCC unroll 8
        for (int i = 0; i < P; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < P; ++j) {
                Vector sum = a[i * P] * b[j];
#pragma GCC unroll 8
                for (int k = 1; k < P; ++k) sum += a[i * P + k] * b[k * P + j];
                c[i * P + j] = sum;
            }
    }

    static inline const Vector* vectors(const Buffer& A) {
        return reinterpret_cast<const Vector*>(A.v);
    }

    // The diagonal of D = Y Y^T - I, summed in double precision.
    static inline void sharpen_diagonal(Buffer& D, const Buffer& Y) {
        for (int i = 0; i < P; ++i) {
            double sum[W];
            for (int l = 0; l < W; ++l) sum[l] = -1;
            for (int k = 0; k < P; ++k) {
#pragma omp simd
                for (int l = 0; l < W; ++l) {
                    double y = Y.v[(i * P + k) * W + l];
                    sum[l] += y * y;
                }
            }
#pragma omp simd
            for (int l = 0; l < W; ++l) D.v[(i * P + i) * W + l] = T(sum[l]);
        }
    }

    static inline void add_to_diagonal(Buffer& A, const T* values) {
        for (int i = 0; i < P; ++i) {
#pragma omp simd
            for (int l = 0; l < W; ++l) A.v[(i * P + i) * W + l] += values[l];
        }
    }

    static inline void trace(const Buffer& A, double* sums) {
        for (int l = 0; l < W; ++l) sums[l] = 0;
        for (int i = 0; i < P; ++i)
            for (int l = 0; l < W; ++l) sums[l] += A.v[(i * P + i) * W + l];
    }

    // tr(A^T B)
    static inline void inner(const Buffer& A, const Buffer& B, double* sums) {
        for (int l = 0; l < W; ++l) sums[l] = 0;
        for (int e = 0; e < PP; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) sums[l] += double(A.v[e * W + l]) * double(B.v[e * W + l]);
        }
    }

    static inline void sum_of_squares(const Buffer& A, double* sums) {
        for (int l = 0; l < W; ++l) sums[l] = 0;
        for (int e = 0; e < PP; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                double x = A.v[e * W + l];
                sums[l] += x * x;
            }
        }
    }

    // Matrices [first, first + filled) of a parameter, whose numbers begin at `from`.
    static inline void read(Buffer& A, const T* from, const Parameter& parameter, int64_t first,
                            int filled) {
        const bool plain = parameter.is_contiguous(P, P);
        if (plain && filled == W) {
            const T* start = from + first * PP;
            for (int e = 0; e < PP; ++e)
                for (int l = 0; l < W; ++l) A.v[e * W + l] = start[l * PP + e];
            return;
        }
        if (filled < W) A = Buffer{};
        const int64_t down = parameter.row_stride, across = parameter.column_stride;
        for (int l = 0; l < filled; ++l) {
            const T* start = from + parameter.offset(first + l);
            for (int i = 0; i < P; ++i)
                for (int j = 0; j < P; ++j)
                    A.v[(i * P + j) * W + l] = start[i * down + j * across];
        }
    }

    static inline void write(const Buffer& A, T* to, const Parameter& parameter, int64_t first,
                             int filled, const bool* taken) {
        const bool plain = parameter.is_contiguous(P, P);
        const int64_t down = parameter.row_stride, across = parameter.column_stride;
        for (int l = 0; l < filled; ++l) {
            if (!taken[l]) continue;
            if (plain) {
                for (int e = 0; e < PP; ++e) to[(first + l) * PP + e] = A.v[e * W + l];
                continue;
            }
            T* start = to + parameter.offset(first + l);
            for (int i = 0; i < P; ++i)
                for (int j = 0; j < P; ++j)
                    start[i * down + j * across] = A.v[(i * P + j) * W + l];
        }
    }
};

template <class T>
struct Single {
    using Scalar = T;
    static constexpr int W = 1;
    static constexpr int V = 32 / sizeof(T);  // numbers in a vector
    typedef T Vector __attribute__((vector_size(32), aligned(32), may_alias));
    static constexpr int LARGEST_P = 128;
    struct alignas(32) Buffer {
        T v[LARGEST_P * LARGEST_P];
    };
    static inline thread_local int size = 0, stride = 0;
    static int p() { return size; }
    static int at(int i, int j) { return i * stride + j; }
    static T number(const Buffer& A, int i, int j) { return A.v[at(i, j)]; }
    static void resize(int p) {
        size = p;
        stride = (p + V - 1) / V * V;
    }

    template <class F>
    static inline void each(F f) {
        const int n = size * stride;
#pragma omp simd
        for (int e = 0; e < n; ++e) f(e, 0);
    }

    template <class F>
    static inline void each_pair(F f) {
        // In blocks: a column of a whole matrix would be a cache line for every entry.
        constexpr int B = 16;
        for (int ib = 0; ib < size; ib += B)
            for (int jb = 0; jb < size; jb += B)
                for (int i = ib; i < std::min(ib + B, size); ++i)
                    for (int j = jb; j < std::min(jb + B, size); ++j)
                        f(i * stride + j, j * stride + i, 0);
    }

    // What fills the rows up to whole vectors must be zero; each_pair leaves it as it was, which
    // may be NaN from the matrix before.
    static inline void clear_padding(Buffer& A) {
        for (int i = 0; i < size; ++i)
            std::fill(A.v + i * stride + size, A.v + (i + 1) * stride, T(0));
    }

    static inline void subtract_identity(Buffer& S) {
        for (int i = 0; i < size; ++i) S.v[i * stride + i] -= T(1);
    }

    // R rows by N vectors of C, held in registers while k runs.
    template <int R, int N>
    static inline void block(T* C, const T* A, const T* B) {
        Vector sum[R][N] = {};
        for (int k = 0; k < size; ++k) {
            Vector b[N];
            for (int n = 0; n < N; ++n)
                b[n] = *reinterpret_cast<const Vector*>(B + k * stride + n * V);
            for (int r = 0; r < R; ++r) {
                const T a = A[r * stride + k];
                for (int n = 0; n < N; ++n) sum[r][n] += a * b[n];
            }
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n)
                *reinterpret_cast<Vector*>(C + r * stride + n * V) = sum[r][n];
    }

    template <int R>
    static inline void rows(T* C, const T* A, const T* B) {
        int j = 0;
        for (; j + 2 * V <= stride; j += 2 * V) block<R, 2>(C + j, A, B + j);
        if (j < stride) block<R, 1>(C + j, A, B + j);
    }

    __attribute__((noinline)) static void product(Buffer& C, const Buffer& A, const Buffer& B) {
        int i = 0;
        for (; i + 6 <= size; i += 6) rows<6>(C.v + i * stride, A.v + i * stride, B.v);
        T *c = C.v + i * stride;
        const T *a = A.v + i * stride;
        switch (size - i) {
            case 5: return rows<5>(c, a, B.v);
            case 4: return rows<4>(c, a, B.v);
            case 3: return rows<3>(c, a, B.v);
            case 2: return rows<2>(c, a, B.v);
            case 1: return rows<1>(c, a, B.v);
        }
    }

    static inline void sharpen_diagonal(Buffer& D, const Buffer& Y) {
        for (int i = 0; i < size; ++i) {
            double sum = -1;
#pragma omp simd reduction(+ : sum)
            for (int k = 0; k < size; ++k) {
                double y = Y.v[i * stride + k];
                sum += y * y;
            }
            D.v[i * stride + i] = T(sum);
        }
    }

    static inline void add_to_diagonal(Buffer& A, const T* values) {
        for (int i = 0; i < size; ++i) A.v[i * stride + i] += *values;
    }

    static inline void trace(const Buffer& A, double* sums) {
        *sums = 0;
        for (int i = 0; i < size; ++i) *sums += A.v[i * stride + i];
    }

    static inline void inner(const Buffer& A, const Buffer& B, double* sums) {
        double sum = 0;
        const int n = size * stride;
#pragma omp simd reduction(+ : sum)
        for (int e = 0; e < n; ++e) sum += double(A.v[e]) * double(B.v[e]);
        *sums = sum;
    }

    static inline void sum_of_squares(const Buffer& A, double* sums) {
        double sum = 0;
        const int n = size * stride;
#pragma omp simd reduction(+ : sum)
        for (int e = 0; e < n; ++e) {
            double x = A.v[e];
            sum += x * x;
        }
        sums[0] = sum;
    }

    static inline void read(Buffer& A, const T* from, const Parameter& parameter, int64_t first,
                            int) {
        const int64_t down = parameter.row_stride, across = parameter.column_stride;
        from += parameter.offset(first);
        for (int i = 0; i < size; ++i) {
            if (across == 1) {
                std::memcpy(A.v + i * stride, from + i * down, size * sizeof(T));
                continue;
            }
            for (int j = 0; j < size; ++j) A.v[i * stride + j] = from[i * down + j * across];
        }
        clear_padding(A);
    }

    static inline void write(const Buffer& A, T* to, const Parameter& parameter, int64_t first,
                             int, const bool* taken) {
        if (!taken[0]) return;
        const int64_t down = parameter.row_stride, across = parameter.column_stride;
        to += parameter.offset(first);
        for (int i = 0; i < size; ++i) {
            if (across == 1) {
                std::memcpy(to + i * down, A.v + i * stride, size * sizeof(T));
                continue;
            }
            for (int j = 0; j < size; ++j) to[i * down + j * across] = A.v[i * stride + j];
        }
    }
};

// Raises W values to the largest moduli of entries whose matrices take turns; NaN stays.
template <int W, class T>
void raise_to_largest(double* values, const T* A, int64_t entries) {
    for (int64_t e = 0; e < entries; e += W)
        for (int l = 0; l < W; ++l) {
            const double size = std::abs(double(A[e + l]));
            values[l] = size <= values[l] ? values[l] : size;
        }
}

// What is asked of tiles of any layout.
template <class L>
struct Tiles {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = L::W;

    static inline void transpose(Buffer& to, const Buffer& from) {
        L::each_pair([&](int e, int t, int) { to.v[e] = from.v[t]; });
        L::clear_padding(to);
    }

    // A becomes S^-1 A, by elimination: S is positive definite, so no pivot is exchanged. S is
    // overwritten; an entry of its diagonal is not positive if S was not.
    __attribute__((noinline)) static void solve(Buffer& S, Buffer& A) {
        using Vector = typename L::Vector;
        const int p = L::p(), vectors = L::at(1, 0) * sizeof(T) / sizeof(Vector);
        const auto row = [](Buffer& M, int i) { return reinterpret_cast<Vector*>(M.v + L::at(i, 0)); };
        for (int k = 0; k < p; ++k)
            for (int i = 0; i < p; ++i) {
                if (i == k) continue;
                const auto factor = L::number(S, i, k) / L::number(S, k, k);
                for (int j = 0; j < vectors; ++j) {
                    row(S, i)[j] -= factor * row(S, k)[j];
                    row(A, i)[j] -= factor * row(A, k)[j];
                }
            }
        for (int i = 0; i < p; ++i) {
            const auto pivot = L::number(S, i, i);
            for (int j = 0; j < vectors; ++j) row(A, i)[j] /= pivot;
        }
    }

    static inline void norms(double* values, const Buffer& M) {
        L::sum_of_squares(M, values);
#pragma omp simd
        for (int l = 0; l < W; ++l) values[l] = std::sqrt(values[l]);
    }

    // The largest entry of each matrix, in modulus.
    static void largest(double* values, const Buffer& M) {
        std::fill(values, values + W, 0.0);
        raise_to_largest<W>(values, M.v, L::at(L::p(), 0));
    }

    // E becomes E - m I, m its mean eigenvalue, or zero if that is negative; `norm` is its norm.
    static inline void centre(Buffer& E, double* m, double* norm) {
        T minus[W];
        L::trace(E, m);
        for (int l = 0; l < W; ++l) {
            minus[l] = T(-at_least(m[l] / L::p(), 0));
            m[l] = -double(minus[l]);
        }
        L::add_to_diagonal(E, minus);
        norms(norm, E);
    }

    // ||A^2||_F^(1/2) of symmetric A, a bound of ||A||_2; `square` becomes A^2.
    static void spectral_bounds(double* values, const Buffer& A, Buffer& square) {
        L::product(square, A, A);
        norms(values, square);
        for (int l = 0; l < L::W; ++l) values[l] = std::sqrt(values[l]);
    }

    // ||A^4||_F^(1/4), a better one; `square` becomes A^2.
    static void sharp_bounds(double* values, const Buffer& A, Buffer& square, Buffer& scratch) {
        L::product(square, A, A);
        spectral_bounds(values, square, scratch);
        for (int l = 0; l < L::W; ++l) values[l] = std::sqrt(values[l]);
    }
};

}  // namespace
