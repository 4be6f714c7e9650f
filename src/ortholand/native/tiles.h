// Layouts of matrices in memory, for which an algorithm is written once:
//
// - Lanes<T, P, W>: W matrices of P <= 8 columns side by side, entry by entry, so that every
//   operation is one on vectors of W numbers. No matrix is too small for the vector units that way.
// - Single<T>: one larger matrix, its rows padded to whole vectors, products in register blocks.
//
// A "tile" is what a layout works on, p x p. Scalars per matrix (norms, steps) are doubles: squares
// of large float entries would overflow.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "steps.h"

#ifndef SCALAR  // type of the entries
#define SCALAR float
#endif
#ifndef SIZE  // columns of the matrices where they are side by side, else 0
#define SIZE 0
#endif

namespace {

// One matrix, and where its numbers are.
template <class T>
struct Matrix {
    T *X, *G, *state, *square, *steps;
    Parameter* parameter;
};

// Some rows of matrices. Lane l has those from `first + l spread` on, of the matrix l.
template <class T>
struct Piece {
    const Matrix<T>* matrices;
    int filled, rows;  // how many lanes are there, and rows in each
    int64_t first = 0, spread = 0;

    T* start(T* Matrix<T>::*which, int l) const {
        return matrices[l].*which + (first + l * spread) * matrices[l].parameter->row_stride;
    }
};

// Squares of V x V numbers, transposed -------------------------------------------------------------

constexpr int V = 32 / sizeof(SCALAR);  // numbers in a vector
typedef SCALAR Short __attribute__((vector_size(32), may_alias));
typedef SCALAR Loose __attribute__((vector_size(32), aligned(4), may_alias));  // anywhere
typedef std::conditional_t<sizeof(SCALAR) == 4, int32_t, int64_t> Integer;
typedef Integer Places __attribute__((vector_size(32)));

// Numbers of a and of b, one after the other, at these places.
inline Short chosen(const Short& a, const Short& b, const Places& places) {
#ifdef __clang__
    Short numbers;
    for (int j = 0; j < V; ++j) numbers[j] = places[j] < V ? a[places[j]] : b[places[j] - V];
    return numbers;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// Exchanges the upper part of one vector with the lower of another: halves, quarters, neighbours.
template <int PART>
inline void transpose_square(Short* lines) {
    Places low, high;
    for (int j = 0; j < V; ++j) {
        low[j] = j & PART ? V + j - PART : j;
        high[j] = j & PART ? V + j : j + PART;
    }
    for (int i = 0; i < V; ++i) {
        if (i & PART) continue;
        const Short a = lines[i], b = lines[i + PART];
        lines[i] = chosen(a, b, low), lines[i + PART] = chosen(a, b, high);
    }
    if constexpr (PART > 1) transpose_square<PART / 2>(lines);
}

// Between a tile, in rows so far apart, and memory that has columns of it at line(column).
template <bool READ, class Line>
inline void move_square(SCALAR* tile, int64_t apart, Line line) {
    Short lines[V];
    for (int k = 0; k < V; ++k)
        lines[k] = READ ? *reinterpret_cast<const Loose*>(line(k))
                        : *reinterpret_cast<const Loose*>(tile + k * apart);
    transpose_square<V / 2>(lines);
    for (int k = 0; k < V; ++k)
        *reinterpret_cast<Loose*>(READ ? tile + k * apart : line(k)) = lines[k];
}

template <bool READ, class T>
inline void move_number(T& tile, T& memory) {
    READ ? tile = memory : memory = tile;
}

// Matrices side by side ----------------------------------------------------------------------------

template <class T, int P_, int W_>
struct Lanes {
    using Scalar = T;
    static constexpr int W = W_, S = W_, P = P_, PP = P_ * P_;  // S: numbers in a vector
    typedef T Vector __attribute__((vector_size(W_ * sizeof(T)), may_alias));
    typedef double Doubles __attribute__((vector_size(W_ * sizeof(double))));
    struct alignas(64) Buffer {
        T v[PP * W];
    };
    static constexpr int p() { return P; }
    static constexpr int at(int i, int j) { return (i * P + j) * W; }
    // An entry of each matrix.
    static Vector number(const Buffer& A, int i, int j) { return vectors(A.v)[i * P + j]; }
    static const Vector* vectors(const T* A) { return reinterpret_cast<const Vector*>(A); }
    // A number for each matrix.
    static Vector numbers(const T* values) {
        Vector all;
        std::memcpy(&all, values, sizeof(all));
        return all;
    }

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
        const Vector *a = vectors(A.v), *b = vectors(B.v);
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

    // Reads rows, or writes those of matrices that are `taken`. Lanes that are not there are zero.
    template <bool READ>
    static void move(T* tile, const Piece<T>& piece, T* Matrix<T>::*which, const bool* taken) {
        const Parameter& first = *piece.matrices[0].parameter;
        const int64_t down = first.row_stride, across = first.column_stride;
        bool alike = piece.filled == W;
        for (int l = 0; l < piece.filled; ++l) {
            const Parameter& other = *piece.matrices[l].parameter;
            alike &= other.row_stride == down && other.column_stride == across && (READ || taken[l]);
        }
        T* starts[W];
        for (int l = 0; l < piece.filled; ++l) starts[l] = piece.start(which, l);
        if (alike && across == 1 && down == P) {
            move_runs<READ>(tile, W, starts, piece.rows * P);
        } else if (alike && down == 1) {
            for (int j = 0; j < P; ++j) {
                move_runs<READ>(tile + j * W, P * W, starts, piece.rows);
                for (int l = 0; l < W; ++l) starts[l] += across;
            }
        } else {
            if (READ && piece.filled < W) std::fill_n(tile, piece.rows * P * W, T(0));
            for (int l = 0; l < piece.filled; ++l) {
                if (!READ && !taken[l]) continue;
                const Parameter& own = *piece.matrices[l].parameter;
                for (int r = 0; r < piece.rows; ++r)
                    for (int j = 0; j < P; ++j)
                        move_number<READ>(tile[at(r, j) + l],
                                          starts[l][r * own.row_stride + j * own.column_stride]);
            }
        }
    }

    // Numbers that are next to each other in memory, and so far apart in the tile.
    template <bool READ>
    static void move_runs(T* tile, int64_t apart, T* const* starts, int length) {
        int e = 0;
        for (; e + V <= length; e += V)
            for (int l = 0; l < W; l += V)
                move_square<READ>(tile + e * apart + l, apart,
                                  [=](int k) { return starts[l + k] + e; });
        for (; e < length; ++e)
            for (int l = 0; l < W; ++l) move_number<READ>(tile[e * apart + l], starts[l][e]);
    }
};

// One matrix ---------------------------------------------------------------------------------------

template <class T>
struct Single {
    using Scalar = T;
    static constexpr int W = 1, S = V;
    typedef T Vector __attribute__((vector_size(32), aligned(32), may_alias));
    typedef double Doubles __attribute__((vector_size(256 / sizeof(T))));
    static constexpr int LARGEST_P = 128;
    struct alignas(32) Buffer {
        T v[LARGEST_P * LARGEST_P];
    };
    static inline thread_local int size = 0, stride = 0;
    static int p() { return size; }
    static int at(int i, int j) { return i * stride + j; }
    static T number(const Buffer& A, int i, int j) { return A.v[at(i, j)]; }
    static T numbers(const T* values) { return *values; }
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

    // R rows by N vectors of C, held in registers while k runs.
    template <int R, int N>
    static inline void block(T* C, const T* A, const T* B) {
        const int size = Single::size, stride = Single::stride;
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

    // As that of Lanes; what fills up the rows of a tile is zero.
    template <bool READ>
    static void move(T* tile, const Piece<T>& piece, T* Matrix<T>::*which, const bool* taken) {
        if (!READ && !taken[0]) return;
        const int size = Single::size, stride = Single::stride;
        const Parameter& own = *piece.matrices[0].parameter;
        T* memory = piece.start(which, 0);
        const int64_t down = own.row_stride;
        if (own.column_stride == 1 && down == size && size == stride)
            std::memcpy(READ ? tile : memory, READ ? memory : tile, sizeof(T) * stride * piece.rows);
        else if (own.column_stride == 1)
            for (int r = 0; r < piece.rows; ++r)
                move_row<READ>(tile + r * stride, memory + r * down,
                               READ && (piece.rows - r - 1) * down + size >= stride, size, stride);
        else
            move_columns<READ>(tile, memory, piece.rows, down, own.column_stride);
    }

    // A row that lies in memory as it does here. Vectors may be read beyond its end if there are
    // further rows.
    template <bool READ>
    static void move_row(T* tile, T* memory, bool beyond, int size, int stride) {
        int j = 0;
        for (; j + V <= (beyond ? stride : size); j += V)
            *reinterpret_cast<Loose*>(READ ? tile + j : memory + j) =
                *reinterpret_cast<const Loose*>(READ ? memory + j : tile + j);
        for (; j < size; ++j) move_number<READ>(tile[j], memory[j]);
        if (READ)
            for (j = size; j < stride; ++j) tile[j] = T(0);
    }

    template <bool READ>
    static void move_columns(T* tile, T* memory, int rows, int64_t down, int64_t across) {
        const int size = Single::size, stride = Single::stride;
        for (int r = 0; r < rows; r += V)
            for (int j = 0; j < size; j += V) {
                T *from = memory + r * down + j * across, *to = tile + r * stride + j;
                if (down == 1 && r + V <= rows && j + V <= size) {
                    move_square<READ>(to, stride, [=](int k) { return from + k * across; });
                    continue;
                }
                for (int i = 0; i < std::min(V, rows - r); ++i)
                    for (int k = 0; k < V; ++k) {
                        if (j + k < size)
                            move_number<READ>(to[i * stride + k], from[i * down + k * across]);
                        else if (READ)
                            to[i * stride + k] = T(0);
                    }
            }
    }
};

#if SIZE > 0
using Layout = Lanes<SCALAR, SIZE, 64 / sizeof(SCALAR)>;
#else
using Layout = Single<SCALAR>;
#endif

// What is asked of tiles of any layout -------------------------------------------------------------

// Raises W values to the largest moduli of entries whose matrices take turns; NaN stays.
template <int W, class T>
void raise_to_largest(double* values, const T* A, int64_t entries) {
    for (int64_t e = 0; e < entries; e += W)
        for (int l = 0; l < W; ++l) {
            const double size = std::abs(double(A[e + l]));
            values[l] = size <= values[l] ? values[l] : size;
        }
}

template <class L>
struct Tiles {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = L::W, S = L::S;

    static void read(Buffer& A, const Piece<T>& piece, T* Matrix<T>::*which) {
        L::template move<true>(A.v, piece, which, nullptr);
    }
    static void write(Buffer& A, const Piece<T>& piece, T* Matrix<T>::*which, const bool* taken) {
        L::template move<false>(A.v, piece, which, taken);
    }

    static inline void copy(Buffer& to, const Buffer& from) {
        std::copy_n(from.v, L::at(L::p(), 0), to.v);
    }

    static inline void transpose(Buffer& to, const Buffer& from) {
        L::each_pair([&](int e, int t, int) { to.v[e] = from.v[t]; });
        L::clear_padding(to);
    }

    static void symmetric_part(Buffer& to, const Buffer& from) {
        L::each_pair([&](int e, int t, int) { to.v[e] = T(0.5) * (from.v[e] + from.v[t]); });
        L::clear_padding(to);
    }

    static inline void add_to_diagonal(Buffer& A, const T* values) {
        for (int i = 0; i < L::p(); ++i) {
#pragma omp simd
            for (int l = 0; l < W; ++l) A.v[L::at(i, i) + l] += values[l];
        }
    }

    static inline void add_identity(Buffer& A, T times) {
        T values[W];
        std::fill(values, values + W, times);
        add_to_diagonal(A, values);
    }

    static inline void trace(const Buffer& A, double* sums) {
        for (int l = 0; l < W; ++l) sums[l] = 0;
        for (int i = 0; i < L::p(); ++i)
            for (int l = 0; l < W; ++l) sums[l] += A.v[L::at(i, i) + l];
    }

    // sum(a b) over some entries of each matrix, whole vectors.
    static inline void inner(const T* a, const T* b, int entries, double* sums) {
        double part[S] = {};
        for (int e = 0; e < entries; e += S) {
#pragma omp simd
            for (int s = 0; s < S; ++s) part[s] += double(a[e + s]) * double(b[e + s]);
        }
        for (int l = 0; l < W; ++l) sums[l] = part[l];
        for (int s = W; s < S; ++s) sums[s % W] += part[s];
    }

    // tr(A^T B)
    static inline void inner(const Buffer& A, const Buffer& B, double* sums) {
        inner(A.v, B.v, L::at(L::p(), 0), sums);
    }
    static inline void sum_of_squares(const Buffer& A, double* sums) { inner(A, A, sums); }

    static inline void norms(double* values, const Buffer& M) {
        sum_of_squares(M, values);
#pragma omp simd
        for (int l = 0; l < W; ++l) values[l] = std::sqrt(values[l]);
    }

    // The diagonal of D = Y Y^T - I, summed in double precision.
    static inline void sharpen_diagonal(Buffer& D, const Buffer& Y) {
        for (int i = 0; i < L::p(); ++i) {
            double sums[W];
            inner(Y.v + L::at(i, 0), Y.v + L::at(i, 0), L::at(1, 0), sums);
            for (int l = 0; l < W; ++l) D.v[L::at(i, i) + l] = T(sums[l] - 1);
        }
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

    // The largest entry of each matrix, in modulus.
    static void largest(double* values, const Buffer& M) {
        std::fill(values, values + W, 0.0);
        raise_to_largest<W>(values, M.v, L::at(L::p(), 0));
    }

    // E becomes E - m I, m its mean eigenvalue, or zero if that is negative; `norm` is its norm.
    static inline void centre(Buffer& E, double* m, double* norm) {
        T minus[W];
        trace(E, m);
        for (int l = 0; l < W; ++l) {
            minus[l] = T(-at_least(m[l] / L::p(), 0));
            m[l] = -double(minus[l]);
        }
        add_to_diagonal(E, minus);
        norms(norm, E);
    }

    // Bounds of the norms ||A||_2 of symmetric matrices: ||A^2||_F^(1/2), or sharper ||A^4||_F^(1/4).
    // `square` becomes A^2.
    static void bounds(double* values, const Buffer& A, Buffer& square, Buffer& scratch, bool sharp) {
        L::product(square, A, A);
        if (sharp) L::product(scratch, square, square);
        norms(values, sharp ? scratch : square);
        for (int l = 0; l < W; ++l) values[l] = std::sqrt(values[l]);
        if (sharp)
            for (int l = 0; l < W; ++l) values[l] = std::sqrt(values[l]);
    }
};

}  // namespace
