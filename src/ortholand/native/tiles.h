// Layouts of matrices in memory; a library is compiled for one of them, called L:
//
// - SIZE columns, at most 8: W matrices side by side in lanes, entry by entry, so that every
//   operation is one on vectors of W numbers. No matrix is too small for the vector units that way.
// - SIZE = 0: one larger matrix, its rows padded to whole vectors, products in register blocks;
// - SIZE = 16: the same with vectors of twice the length, where the processor has them.
//
// A "tile" is p x p; a panel has more rows. Scalars per matrix (norms, steps) are doubles, because
// squares of large float entries would overflow.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "steps.h"

#ifndef SCALAR  // type of the entries
#define SCALAR float
#endif
#ifndef SIZE  // columns of the matrices where they are side by side, else 0 or 16
#define SIZE 0
#endif

namespace {

using T = SCALAR;

// One matrix of a parameter: from which number on it lies there, and which it is.
struct Matrix {
    Parameter* parameter;
    int64_t offset, index;
};
using Numbered = void* Parameter::*;  // X, G, state, ...

// Some rows of matrices. Lane l has those from `first + l spread` on, of the matrix l.
struct Piece {
    const Matrix* matrices;
    int filled, rows;  // how many lanes are there, and rows in each
    int64_t first = 0, spread = 0;

    std::pair<int64_t, int64_t> strides(int l) const {
        return {matrices[l].parameter->row_stride, matrices[l].parameter->column_stride};
    }
    T* start(Numbered which, int l) const {
        const auto& [parameter, offset, index] = matrices[l];
        return static_cast<T*>(parameter->*which) + offset + (first + l * spread) * strides(l).first;
    }
};

// Squares of V x V numbers, transposed -------------------------------------------------------------

// Numbers in a vector, no more than in a 2 x 2.
constexpr int V = SIZE == 2 ? 4 : (SIZE == 16 ? 64 : 32) / sizeof(T);
typedef T Short __attribute__((vector_size(V * sizeof(T)), may_alias));
typedef T Loose __attribute__((vector_size(V * sizeof(T)), aligned(4), may_alias));  // anywhere
typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Integer;
typedef Integer Places __attribute__((vector_size(V * sizeof(T))));

inline Loose& loose(T* place) { return *reinterpret_cast<Loose*>(place); }

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
__attribute__((always_inline)) inline void transpose_square(Short* lines) {
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

// Between a tile with rows at row(k), and memory that has columns of it at line(column).
template <bool READ, class Row, class Line>
__attribute__((always_inline)) inline void move_square(Row row, Line line) {
    Short lines[V];
    for (int k = 0; k < V; ++k) lines[k] = loose(READ ? line(k) : row(k));
    transpose_square<V / 2>(lines);
    for (int k = 0; k < V; ++k) loose(READ ? row(k) : line(k)) = lines[k];
}

template <bool READ>
inline void move_number(T& tile, T& memory) {
    READ ? tile = memory : memory = tile;
}

#if SIZE > 0 && SIZE <= 8

// Matrices side by side ----------------------------------------------------------------------------

struct L {
    static constexpr int W = 64 / sizeof(T), S = W, P = SIZE, PP = P * P;  // S: numbers in a vector
    static constexpr int COLUMNS = P;
    static constexpr int CAPACITY = 512 * W;  // entries of a panel
    static constexpr int SLICE = 128;         // entries of a lane, if one matrix has all of them
    typedef T Vector __attribute__((vector_size(W * sizeof(T)), may_alias));
    struct alignas(64) Buffer {
        T v[PP * W];
    };
    typedef Vector Element;  // an entry of A in A B
    static constexpr int ROWS = P % 4 == 0 ? 4 : P % 3 == 0 ? 3 : P % 2 == 0 ? 2 : 1;  // of a block
    static constexpr int p() { return P; }
    static constexpr int vectors() { return P; }   // in a row,
    static constexpr int elements() { return P; }  // which has so many elements
    static constexpr int at(int i, int j) { return (i * P + j) * W; }
    static constexpr int height() { return 512 / P; }
    static void resize(int) {}

    // f(entry, lane) for every entry of the tile.
    template <class F>
    static inline void each(F f) {
        for (int e = 0; e < PP; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) f(e * W + l, l);
        }
    }

    // To = from^T, or its lower triangle only.
    static void transpose(Buffer& to, const Buffer& from, bool lower) {
        Vector* place = reinterpret_cast<Vector*>(to.v);
        const Vector* entries = reinterpret_cast<const Vector*>(from.v);
        for (int i = 0; i < P; ++i)
            for (int j = 0; j < (lower ? i : P); ++j) place[i * P + j] = entries[j * P + i];
    }

    // Reads rows, or writes those of matrices that are `taken`. Lanes that are not there are zero.
    template <bool READ>
    static void move(T* tile, const Piece& piece, Numbered which, const int64_t* taken) {
        const int64_t down = piece.strides(0).first, across = piece.strides(0).second;
        bool alike = piece.filled == W;
        T* starts[W];
        for (int l = 0; l < piece.filled; ++l) {
            alike &= READ || taken[l];
            starts[l] = piece.start(which, l);
        }
        // They are in the order of their parameters.
        const bool same = piece.matrices[0].parameter == piece.matrices[piece.filled - 1].parameter;
        for (int l = 0; l < piece.filled && !same; ++l) {
            alike &= piece.strides(l) == piece.strides(0);
        }
        bool beside = alike;  // as columns are, that are vectors each
        for (int l = 1; l < W && beside; ++l) beside = starts[l] == starts[0] + l;
        if (beside) {
            for (int r = 0; r < piece.rows; ++r)
                for (int j = 0; j < P; ++j)
                    for (int l = 0; l < W; l += V) {
                        T *here = tile + at(r, j) + l, *there = starts[0] + r * down + j * across + l;
                        loose(READ ? here : there) = loose(READ ? there : here);
                    }
        } else if (alike && across == 1 && down == P) {
            move_run<READ>([=](int e) { return tile + e * W; }, starts, piece.rows * P);
        } else if (alike && down == 1 && across == P && piece.rows == P) {
            // Squares lie in memory as one run, transposed.
            move_run<READ>([=](int e) { return tile + at(e % P, e / P); }, starts, PP);
        } else if (alike && down == 1) {
            for (int j = 0; j < P; ++j) {
                move_run<READ>([=](int e) { return tile + at(e, j); }, starts, piece.rows);
                for (int l = 0; l < W; ++l) starts[l] += across;
            }
        } else {
            if (READ && piece.filled < W) std::fill_n(tile, piece.rows * P * W, T(0));
            for (int l = 0; l < piece.filled; ++l) {
                if (!READ && !taken[l]) continue;
                const int64_t down = piece.strides(l).first, across = piece.strides(l).second;
                for (int r = 0; r < piece.rows; ++r)
                    for (int j = 0; j < P; ++j)
                        move_number<READ>(tile[at(r, j) + l], starts[l][r * down + j * across]);
            }
        }
    }

    // Numbers that are next to each other in memory; the e-th ones of all lanes are at place(e).
    template <bool READ, class Place>
    static inline void move_run(Place place, T* const* starts, int length) {
        int e = 0;
#pragma GCC unroll 8
        for (; e + V <= length; e += V)
            for (int l = 0; l < W; l += V) {
                // The next matrices nearly always follow; a step of few columns waits for memory.
                for (int k = 0; READ && P < 4 && k < V; ++k)
                    __builtin_prefetch(starts[l + k] + e + W * length);
                move_square<READ>([=](int k) { return place(e + k) + l; },
                                  [=](int k) { return starts[l + k] + e; });
            }
        for (; e < length; ++e)
            for (int l = 0; l < W; ++l) move_number<READ>(place(e)[l], starts[l][e]);
    }
};

#else

// One matrix ---------------------------------------------------------------------------------------

struct L {
    static constexpr int W = 1, S = V, COLUMNS = 128;
    static constexpr int TALLEST = 240, ENTRIES = 32768 / sizeof(T), SLICE = 0;
    static constexpr int CAPACITY = ENTRIES + 12 * COLUMNS;  // with rows that fill blocks
    typedef Short Vector;
    typedef T Element;
    static constexpr int ROWS = 4;
    struct alignas(64) Buffer {
        T v[(COLUMNS + 4) * COLUMNS];
    };
    static inline thread_local int size = 0, stride = 0;
    static int p() { return size; }
    static int vectors() { return stride / V; }
    static int elements() { return stride; }
    static int at(int i, int j) { return i * stride + j; }
    static int height() { return std::min(TALLEST, ENTRIES / stride / 12 * 12); }
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

    // As that of lanes. What fills the rows up to whole vectors must be zero.
    static void transpose(Buffer& to, const Buffer& from, bool lower) {
        T* entries = const_cast<T*>(from.v);
        const int step = stride;
        for (int i = 0; i < step; i += V)
            for (int j = 0; j < (lower ? i : step); j += V)
                move_square<true>([&](int k) { return to.v + (i + k) * step + j; },
                                  [=](int k) { return entries + (j + k) * step + i; });
        for (int i = 0; i < size; ++i)
            std::fill(to.v + i * step + size, to.v + (i + 1) * step, T(0));
    }

    // As that of lanes; what fills up the rows of a tile is zero.
    template <bool READ>
    static void move(T* tile, const Piece& piece, Numbered which, const int64_t* taken) {
        if (!READ && !taken[0]) return;
        const int size = L::size, stride = L::stride, rows = piece.rows;
        const int64_t down = piece.strides(0).first, across = piece.strides(0).second;
        T* memory = piece.start(which, 0);
        for (int r = 0; READ && size < stride && r < rows; ++r)
            loose(tile + (r + 1) * stride - V) = Loose{};
        // The last vector of a row or column ends where that ends; some numbers are moved twice.
        if (across == 1 && size >= V)
            for (int r = 0; r < rows; ++r)
                for (int j = 0; j < size; j += V) {
                    const int column = std::min(j, size - V);
                    T *here = tile + r * stride + column, *there = memory + r * down + column;
                    loose(READ ? here : there) = loose(READ ? there : here);
                }
        else if (down == 1 && size >= V && rows >= V)
            for (int r = 0; r < rows; r += V)
                for (int j = 0; j < size; j += V) {
                    const int row = std::min(r, rows - V), column = std::min(j, size - V);
                    move_square<READ>([=](int k) { return tile + (row + k) * stride + column; },
                                      [=](int k) { return memory + row + (column + k) * across; });
                }
        else
            for (int r = 0; r < rows; ++r)
                for (int j = 0; j < size; ++j)
                    move_number<READ>(tile[r * stride + j], memory[r * down + j * across]);
    }
};

#endif

// What is done with tiles of any layout ------------------------------------------------------------

using Buffer = L::Buffer;
using Vector = L::Vector;
constexpr int W = L::W, S = L::S;
typedef double Doubles __attribute__((vector_size(S * sizeof(double))));

// A number for each matrix; or whether something holds, 1 or 0, which is as wide, for vectors.
template <class Number>
struct Each {
    Number v[W];
    Each() = default;
    Each(Number x) { std::fill(v, v + W, x); }
    Number& operator[](int l) { return v[l]; }
    const Number& operator[](int l) const { return v[l]; }
};
using Numbers = Each<double>;
using Flags = Each<int64_t>;

// f(lane) of all lanes.
template <class Result, class F>
inline Result each_lane(F f) {
    Result all;
#pragma omp simd
    for (int l = 0; l < W; ++l) all.v[l] = f(l);
    return all;
}

#define EACH(Result, Given, op)                                        \
    inline Result operator op(const Given& x, const Given& y) {        \
        return each_lane<Result>([&](int l) { return x[l] op y[l]; }); \
    }
EACH(Numbers, Numbers, +)
EACH(Numbers, Numbers, -)
EACH(Numbers, Numbers, *)
EACH(Numbers, Numbers, /)
EACH(Flags, Numbers, <)
EACH(Flags, Numbers, <=)
EACH(Flags, Numbers, >)
EACH(Flags, Numbers, >=)
EACH(Flags, Flags, &)
EACH(Flags, Flags, |)
EACH(Flags, Flags, <)
#undef EACH

inline Numbers choice(const Flags& first, const Numbers& x, const Numbers& y) {
    return each_lane<Numbers>([&](int l) { return first[l] ? x[l] : y[l]; });
}
// Bounds that let NaN pass, as torch's clamp does.
inline Numbers at_least(const Numbers& x, const Numbers& low) { return choice(x < low, low, x); }
inline Numbers at_most(const Numbers& x, const Numbers& high) { return choice(x > high, high, x); }
inline Numbers root(const Numbers& x) {
    return each_lane<Numbers>([&](int l) { return std::sqrt(x[l]); });
}
inline Each<T> rounded(const Numbers& x) {
    return each_lane<Each<T>>([&](int l) { return T(x[l]); });
}
inline bool all(const Flags& flags) {
    int64_t so = 1;
#pragma omp simd reduction(& : so)
    for (int l = 0; l < W; ++l) so &= flags[l];
    return so;
}

inline Vector* vectors(T* A) { return reinterpret_cast<Vector*>(A); }
inline const Vector* vectors(const T* A) { return reinterpret_cast<const Vector*>(A); }
inline const L::Element* elements(const T* A) { return reinterpret_cast<const L::Element*>(A); }

// To multiply vectors with.
inline L::Element element(const T* values) {
    L::Element all;
    std::memcpy(&all, values, sizeof(all));
    return all;
}

// f(first vector of a row, how many) for blocks of up to three vectors, none alone but one.
template <class F>
inline void each_block(int first, F f) {
    for (int j = first, left = L::vectors() - first; left > 0;) {
        const int now = left == 4 ? 2 : std::min(left, 3);
        switch (now) {
            case 3: f(j, std::integral_constant<int, 3>()); break;
            case 2: f(j, std::integral_constant<int, 2>()); break;
            default: f(j, std::integral_constant<int, 1>());
        }
        j += now, left -= now;
    }
}

// Some rows by N vectors of C += A^T B, held in registers while the rows of a panel run by: even and
// odd ones apart if there are few, because additions wait for each other.
template <int N, class Count>
inline void gram_block(Vector* C, const L::Element* A, const Vector* B, Count rows, int width,
                       int step, bool adds) {
    constexpr int R = L::ROWS, APART = R * N <= 4 ? 2 : 1;
    Vector sum[APART][R][N] = {};
    const auto add = [&](Vector(&to)[R][N], int k) {
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) to[r][n] += A[k * step + r] * B[k * width + n];
    };
    int k = 0;
    for (; k + APART <= rows; k += APART)
        for (int u = 0; u < APART; ++u) add(sum[u], k + u);
    for (; k < rows; ++k) add(sum[0], k);
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) {
            for (int u = 1; u < APART; ++u) sum[0][r][n] += sum[u][r][n];
            C[r * width + n] = adds ? C[r * width + n] + sum[0][r][n] : sum[0][r][n];
        }
}

// C = A^T B, or C += A^T B; of a symmetric one the blocks above the diagonal only.
__attribute__((noinline)) void gram(T* C, const T* A, const T* B, int rows, bool symmetric,
                                    bool adds) {
    const int p = L::p(), width = L::vectors(), step = L::elements();
    const auto blocks = [=](auto rows) {
        for (int i = 0; i < p; i += L::ROWS)
            each_block(symmetric ? i * width / step : 0, [=](int j, auto number) {
                gram_block<number()>(vectors(C) + i * width + j, elements(A) + i, vectors(B) + j,
                                     rows, width, step, adds);
            });
    };
    if (L::W > 1 && rows == p)
        blocks(std::integral_constant<int, SIZE>());
    else
        blocks(rows);
}

// R rows by N vectors of Y = start + X a + B b. A step is short beside where it starts, so it is
// summed first: added to the start term by term, it would be rounded p times.
template <int R, int N, bool BOTH>
inline void combine_block(Vector* Y, const Vector* start, const L::Element* X, const Vector* a,
                          const L::Element* B, const Vector* b, int p, int width, int step) {
    Vector sum[R][N] = {};
    const auto add = [&](const L::Element* left, const Vector* right, int k) {
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sum[r][n] += left[r * step + k] * right[k * width + n];
    };
    for (int k = 0; k < p; ++k) {
        add(X, a, k);
        if constexpr (BOTH) add(B, b, k);
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) {
            const int at = r * width + n;
            Y[at] = start ? start[at] + sum[r][n] : sum[r][n];
        }
}

// Y = start + X a + B b, or without the last; nothing to start with is zero. Of a single matrix
// twelve vectors are in registers, or six; rows that fill a block up are no one's.
template <bool BOTH>
__attribute__((noinline)) void combine(T* Y, const T* start, const T* X, const T* a, const T* B,
                                       const T* b, int rows) {
    const int p = L::p(), width = L::vectors(), step = L::elements();
    each_block(0, [=](int j, auto number) {
        constexpr int N = number(), R = W > 1 ? 1 : 12 / N;
        const auto block = [=](int r, auto some) {
            const Vector* first = start ? vectors(start) + r * width + j : nullptr;
            combine_block<some(), N, BOTH>(vectors(Y) + r * width + j, first,
                                           elements(X) + r * step, vectors(a) + j,
                                           elements(B) + r * step, vectors(b) + j, p, width, step);
        };
        for (int r = 0; r < rows; r += R)
            if (R == 1 || rows - r > R / 2)
                block(r, std::integral_constant<int, R>());
            else
                block(r, std::integral_constant<int, (R + 1) / 2>());
    });
}

// C = A B
inline void product(Buffer& C, const Buffer& A, const Buffer& B) {
    combine<false>(C.v, nullptr, A.v, B.v, A.v, B.v, L::p());
}

// Raises values to the largest moduli of entries whose matrices take turns; NaN stays.
inline void raise_to_largest(Numbers& values, const T* A, int64_t entries) {
    for (int64_t e = 0; e < entries; e += W)
        values = each_lane<Numbers>([&](int l) {
            const double size = std::abs(double(A[e + l]));
            return size <= values[l] ? values[l] : size;
        });
}

// The symmetric part of A, times a number.
inline void symmetric_part(Buffer& to, const Buffer& A, T times = 1) {
    const T half = times / 2;
    L::transpose(to, A, false);
    L::each([&](int e, int) { to.v[e] = half * (A.v[e] + to.v[e]); });
}

inline Numbers diagonal(const Buffer& A, int i) {
    return each_lane<Numbers>([&](int l) { return A.v[L::at(i, i) + l]; });
}

inline void add_to_diagonal(Buffer& A, const Each<T>& values) {
    for (int i = 0; i < L::p(); ++i)
        for (int l = 0; l < W; ++l) A.v[L::at(i, i) + l] += values[l];
}

inline Numbers trace(const Buffer& A) {
    Numbers sums = 0;
    for (int i = 0; i < L::p(); ++i) sums = sums + diagonal(A, i);
    return sums;
}

// tr(A^T B)
inline Numbers inner(const Buffer& A, const Buffer& B) {
    double part[S] = {};
    for (int e = 0, entries = L::at(L::p(), 0); e < entries; e += S) {
#pragma omp simd
        for (int s = 0; s < S; ++s) part[s] += double(A.v[e + s]) * double(B.v[e + s]);
    }
    for (int s = W; s < S; ++s) part[s % W] += part[s];
    return each_lane<Numbers>([&](int l) { return part[l]; });
}

inline Numbers norms(const Buffer& A) { return root(inner(A, A)); }

// A becomes S^-1 A, by elimination: S is positive definite, so no pivot is exchanged. S is
// overwritten; an entry of its diagonal is not positive if S was not.
__attribute__((noinline)) void solve(Buffer& S, Buffer& A) {
    const int p = L::p(), vectors = L::at(1, 0) * sizeof(T) / sizeof(Vector);
    const auto row = [](Buffer& M, int i) { return reinterpret_cast<Vector*>(M.v + L::at(i, 0)); };
    for (int k = 0; k < p; ++k)
        for (int i = 0; i < p; ++i) {
            if (i == k) continue;
            const auto factor = element(S.v + L::at(i, k)) / element(S.v + L::at(k, k));
            for (int j = k * vectors / L::elements(); j < vectors; ++j)
                row(S, i)[j] -= factor * row(S, k)[j];
            for (int j = 0; j < vectors; ++j) row(A, i)[j] -= factor * row(A, k)[j];
        }
    for (int i = 0; i < p; ++i) {
        const auto pivot = element(S.v + L::at(i, i));
        for (int j = 0; j < vectors; ++j) row(A, i)[j] /= pivot;
    }
}

// E becomes E - m I, m its mean eigenvalue, or zero if that is negative. The norm of E.
inline Numbers centre(Buffer& E, Numbers& m) {
    const Each<T> minus = rounded(-1 * at_least(trace(E) / L::p(), 0));
    m = each_lane<Numbers>([&](int l) { return -double(minus[l]); });
    add_to_diagonal(E, minus);
    return norms(E);
}

// Bounds of the norms ||A||_2 of symmetric matrices: ||A^2||_F^(1/2), or sharper ||A^4||_F^(1/4).
// `square` becomes A^2.
inline Numbers bounds(const Buffer& A, Buffer& square, Buffer& scratch, bool sharp) {
    product(square, A, A);
    if (!sharp) return root(norms(square));
    product(scratch, square, square);
    return root(root(norms(scratch)));
}

}  // namespace
