// Layouts of the rows of tall matrices, for which the step of tall.cpp is written once:
//
// - LaneRows: many matrices of up to 8 columns side by side.
// - Panels: one matrix, some rows at a time.
//
// Each has passes over its rows: Gram matrices of X and of B = g G + m state, a mix of the gradient
// and the state that is never kept; of a field X a + B b; and X <- X + X a + B b.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "steps.h"
#include "threads.h"
#include "tiles.h"

#ifndef SCALAR  // type of the entries
#define SCALAR float
#endif

namespace {

// One matrix, and where its numbers are.
template <class T>
struct Matrix {
    T* X;
    const T* G;
    T* state;
    T* square;
    T* steps;
    Parameter* parameter;
};

// All matrices of some parameters, in one row.
template <class T>
class Matrices {
  public:
    Matrices(Parameter* parameters, int n) : parameters(parameters), starts(n + 1, 0) {
        for (int i = 0; i < n; ++i) starts[i + 1] = starts[i] + parameters[i].count;
    }

    int64_t count() const { return starts.back(); }

    Matrix<T> operator[](int64_t k) const {
        const int64_t i = std::upper_bound(starts.begin(), starts.end(), k) - starts.begin() - 1;
        Parameter& parameter = parameters[i];
        const int64_t at = parameter.offset(k - starts[i]);
        return {shifted(parameter.X, at),
                static_cast<const T*>(parameter.G) + at,
                shifted(parameter.matrix_state, at),
                shifted(parameter.square_state, k - starts[i]),
                shifted(parameter.step_state, k - starts[i]),
                &parameter};
    }

  private:
    Parameter* parameters;
    std::vector<int64_t> starts;  // of each parameter, and the end

    static T* shifted(void* start, int64_t offset) {
        return start ? static_cast<T*>(start) + offset : nullptr;
    }
};

// B = g G + m state, for each of W matrices.
template <class T, int W>
struct Mix {
    T g[W], m[W];
};

// What a pass over the rows sums up besides X^T X and X^T B.
struct Wanted {
    bool state;  // whether there is one
    bool K;      // X^T K and ||K||^2, K a second mix
    bool square; // B^T B
    bool exact;  // squares in double precision throughout: they may underflow
};

// Vectors -----------------------------------------------------------------------------------------

typedef double Doubles __attribute__((vector_size(256 / sizeof(SCALAR))));  // of a vector

typedef std::conditional_t<sizeof(SCALAR) == 4, int32_t, int64_t> Integer;
typedef Integer Places __attribute__((vector_size(32)));

// Numbers of a and of b, one after the other, at these places.
template <class Vector>
inline Vector chosen(const Vector& a, const Vector& b, const Places& places) {
#ifdef __clang__
    Vector numbers;
    constexpr int V = 32 / sizeof(SCALAR);
    for (int j = 0; j < V; ++j) numbers[j] = places[j] < V ? a[places[j]] : b[places[j] - V];
    return numbers;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

// Exchanges the upper part of one vector with the lower of another: halves, quarters, neighbours.
template <int PART, class Vector>
inline void exchange(Vector& a, Vector& b) {
    constexpr int V = 32 / sizeof(SCALAR);
    Places low, high;
    for (int j = 0; j < V; ++j) {
        low[j] = j & PART ? V + j - PART : j;
        high[j] = j & PART ? V + j : j + PART;
    }
    const Vector lower = chosen(a, b, low), upper = chosen(a, b, high);
    a = lower, b = upper;
}

// Transposes V x V numbers, from parts of PART on.
template <int PART, class Vector>
inline void transpose_square(Vector* lines) {
    constexpr int V = 32 / sizeof(SCALAR);
    for (int i = 0; i < V; ++i)
        if (!(i & PART)) exchange<PART>(lines[i], lines[i + PART]);
    if constexpr (PART > 1) transpose_square<PART / 2>(lines);
}

// Rows side by side --------------------------------------------------------------------------------

constexpr int LARGEST_IN_LANES = 512;  // entries of a matrix

template <class T, int P, int W_>
struct LaneRows {
    using Tile = Lanes<T, P, W_>;
    using Scalar = T;
    using Buffer = typename Tile::Buffer;
    using Vector = typename Tile::Vector;
    static constexpr int W = W_;

    int n = 0, filled = 0;
    T scale = T(1);
    const Matrix<T>* matrices = nullptr;
    alignas(64) T X[LARGEST_IN_LANES * W];
    alignas(64) T B[LARGEST_IN_LANES * W];
    alignas(64) T K[LARGEST_IN_LANES * W];
    alignas(64) T Y[LARGEST_IN_LANES * W];

    void open(const Matrix<T>* these, int count, int rows, int64_t, T weight_scale) {
        matrices = these, filled = count, n = rows, scale = weight_scale;
        read(X, [](const Matrix<T>& matrix) { return matrix.X; });
        if (scale != T(1)) divide(X, scale);
    }

    // B and K, by their mixes.
    void mix(const Mix<T, W>& of_B, const Mix<T, W>& of_K, const Wanted& wanted) {
        read(K, [](const Matrix<T>& matrix) { return matrix.G; });
        if (wanted.state) read(Y, [](const Matrix<T>& matrix) { return matrix.state; });
        for (int e = 0; e < n * P; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const T g = K[e * W + l], m = wanted.state ? Y[e * W + l] : T(0);
                B[e * W + l] = of_B.g[l] * g + of_B.m[l] * m;
                K[e * W + l] = of_K.g[l] * g + of_K.m[l] * m;
            }
        }
    }

    void largest(double* values) const {
        std::fill(values, values + W, 0.0);
        for (const T* A : {B, K}) raise_to_largest<W>(values, A, n * P * W);
    }

    // Of the state B + X C, or K + X C.
    void largest_kept(const Buffer& C, bool keeps_K, const Wanted&, double* values) {
        std::fill(values, values + W, 0.0);
        combine<false>(keeps_K ? K : B, C, B, C);
        raise_to_largest<W>(values, Y, n * P * W);
    }

    void gram(Buffer& D, Buffer& M, Buffer& N, Buffer& Q, double* squares_of_B,
              double* squares_of_K, const Wanted& wanted) const {
        product(D, X, X, true);
        sharpen(D);
        product(M, X, B, false);
        sum_of_squares(B, squares_of_B);
        if (wanted.K) {
            product(N, X, K, false);
            sum_of_squares(K, squares_of_K);
        }
        if (wanted.square) product(Q, B, B, true);
    }

    // Of the field X a + B b: its squared norm, and its Gram matrix.
    void measure(const Buffer& a, const Buffer& b, double* squares, Buffer* Q, const Wanted&) {
        combine<true>(nullptr, a, B, b);
        sum_of_squares(Y, squares);
        if (Q) product(*Q, Y, Y, true);
    }

    void apply(const Buffer* a, const Buffer& b, const Buffer* C, bool keeps_K, const bool* taken,
               const T* unit, const Wanted&) {
        if (C) {
            combine<false>(keeps_K ? K : B, *C, B, b);
            for (int e = 0; e < n * P; ++e) {
#pragma omp simd
                for (int l = 0; l < W; ++l) Y[e * W + l] *= unit[l];
            }
            write(taken, [](const Matrix<T>& matrix) { return matrix.state; });
        }
        if (a) {
            if (scale == T(1))
                combine<true>(X, *a, B, b);
            else
                combine_from_weight(*a, b);
            write(taken, [](const Matrix<T>& matrix) { return matrix.X; });
        }
    }

  private:
    static constexpr int V = 32 / sizeof(T), PARTS = W / V;
    typedef T Short __attribute__((vector_size(32), may_alias));
    typedef T Loose __attribute__((vector_size(32), aligned(4), may_alias));  // anywhere

    bool is_contiguous(int l) const {
        const Parameter& parameter = *matrices[l].parameter;
        return parameter.column_stride == 1 && parameter.row_stride == P;
    }

    bool are_contiguous() const {
        bool all = filled == W;
        for (int l = 0; l < filled; ++l) all &= is_contiguous(l);
        return all;
    }

    // run(first entry, first lane) for squares of V entries by V lanes, as long as there are such.
    template <class Run>
    int each_square(Run run) const {
        int e = 0;
        for (; e + V <= n * P; e += V)
            for (int part = 0; part < PARTS; ++part) run(e, part * V);
        return e;
    }

    template <class Start>
    void read(T* to, Start start) const {
        int first = 0;
        if (are_contiguous()) {
            first = each_square([&](int e, int lane) {
                Short lines[V];
                for (int k = 0; k < V; ++k)
                    lines[k] = *reinterpret_cast<const Loose*>(start(matrices[lane + k]) + e);
                transpose_square<V / 2>(lines);
                for (int k = 0; k < V; ++k)
                    *reinterpret_cast<Short*>(to + (e + k) * W + lane) = lines[k];
            });
        }
        if (filled < W) std::fill(to, to + n * P * W, T(0));
        for (int l = 0; l < filled; ++l) {
            const T* from = start(matrices[l]);
            if (is_contiguous(l)) {
                for (int e = first; e < n * P; ++e) to[e * W + l] = from[e];
                continue;
            }
            const int64_t down = matrices[l].parameter->row_stride;
            const int64_t across = matrices[l].parameter->column_stride;
            for (int j = 0; j < P; ++j)
                for (int r = 0; r < n; ++r) to[(r * P + j) * W + l] = from[r * down + j * across];
        }
    }

    template <class Start>
    void write(const bool* taken, Start start) const {
        bool all = are_contiguous();
        for (int l = 0; l < W; ++l) all &= taken[l];
        int first = 0;
        if (all) {
            first = each_square([&](int e, int lane) {
                Short lines[V];
                for (int k = 0; k < V; ++k)
                    lines[k] = *reinterpret_cast<const Short*>(Y + (e + k) * W + lane);
                transpose_square<V / 2>(lines);
                for (int k = 0; k < V; ++k)
                    *reinterpret_cast<Loose*>(start(matrices[lane + k]) + e) = lines[k];
            });
        }
        for (int l = 0; l < filled; ++l) {
            if (!taken[l]) continue;
            T* to = start(matrices[l]);
            if (is_contiguous(l)) {
                for (int e = first; e < n * P; ++e) to[e] = Y[e * W + l];
                continue;
            }
            const int64_t down = matrices[l].parameter->row_stride;
            const int64_t across = matrices[l].parameter->column_stride;
            for (int j = 0; j < P; ++j)
                for (int r = 0; r < n; ++r) to[r * down + j * across] = Y[(r * P + j) * W + l];
        }
    }

    // Weights are seldom scaled: what that takes is kept out of the way of all others.
    __attribute__((noinline)) void divide(T* A, T by) const {
        for (int e = 0; e < n * P * W; ++e) A[e] /= by;
    }

    __attribute__((noinline)) void combine_from_weight(const Buffer& a, const Buffer& b) {
        read(K, [](const Matrix<T>& matrix) { return matrix.X; });
        combine<true>(K, a, B, b);
    }

    static const Vector* vectors(const T* A) { return reinterpret_cast<const Vector*>(A); }

    // Row i of A^T B, from column j on, N columns.
    template <int N>
    void row(Buffer& C, const T* A, const T* B, int i, int j) const {
        const Vector *a = vectors(A) + i, *b = vectors(B) + j;
        Vector sum[N] = {};
        for (int r = 0; r < n; ++r)
#pragma GCC unroll 4
            for (int k = 0; k < N; ++k) sum[k] += a[r * P] * b[r * P + k];
        Vector* c = reinterpret_cast<Vector*>(C.v) + i * P + j;
        for (int k = 0; k < N; ++k) c[k] = sum[k];
    }

    // C = A^T B; of a symmetric one the blocks above the diagonal only, and these mirrored.
    __attribute__((noinline)) void product(Buffer& C, const T* A, const T* B,
                                           bool symmetric) const {
        constexpr int N = P < 4 ? P : 4, REST = P % N;
        for (int i = 0; i < P; ++i) {
            for (int j = symmetric ? i / N * N : 0; j + N <= P; j += N) row<N>(C, A, B, i, j);
            if constexpr (REST > 0) row<REST>(C, A, B, i, P - REST);
        }
        if (!symmetric) return;
        for (int i = 0; i < P; ++i)
            for (int j = 0; j < i; ++j)
                for (int l = 0; l < W; ++l) C.v[(i * P + j) * W + l] = C.v[(j * P + i) * W + l];
    }

    // The diagonal of D = X^T X - I, summed in double precision; the identity is taken off.
    void sharpen(Buffer& D) const {
        for (int j = 0; j < P; ++j) {
            double sum[W];
            for (int l = 0; l < W; ++l) sum[l] = -1;
            for (int r = 0; r < n; ++r) {
#pragma omp simd
                for (int l = 0; l < W; ++l) {
                    const double x = X[(r * P + j) * W + l];
                    sum[l] += x * x;
                }
            }
            for (int l = 0; l < W; ++l) D.v[(j * P + j) * W + l] = T(sum[l]);
        }
    }

    void sum_of_squares(const T* A, double* sums) const {
        for (int l = 0; l < W; ++l) sums[l] = 0;
        for (int e = 0; e < n * P; ++e) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const double x = A[e * W + l];
                sums[l] += x * x;
            }
        }
    }

    // Y = start + X a + B b, or without the last; nothing to start with is zero.
    template <bool BOTH>
    __attribute__((noinline)) void combine(const T* start, const Buffer& a, const T* B, const Buffer& b) {
        const Vector *va = vectors(a.v), *vb = vectors(b.v);
        for (int r = 0; r < n; ++r) {
            const Vector *x = vectors(X) + r * P, *g = vectors(B) + r * P;
            Vector* y = reinterpret_cast<Vector*>(Y) + r * P;
#pragma GCC unroll 8
            for (int j = 0; j < P; ++j) {
                Vector sum = {};
                if (start) sum = vectors(start)[r * P + j];
#pragma GCC unroll 8
                for (int k = 0; k < P; ++k) {
                    sum += x[k] * va[k * P + j];
                    if constexpr (BOTH) sum += g[k] * vb[k * P + j];
                }
                y[j] = sum;
            }
        }
    }
};

// Rows in panels -----------------------------------------------------------------------------------

template <class T>
struct Panels {
    using Tile = Single<T>;
    using Scalar = T;
    using Buffer = typename Tile::Buffer;
    using Vector = typename Tile::Vector;
    static constexpr int W = 1, V = Tile::V;
    typedef T Loose __attribute__((vector_size(32), aligned(4), may_alias));  // anywhere
    static constexpr int TALLEST = 240;                    // rows of a panel
    static constexpr int CAPACITY = 32768 / sizeof(T);     // entries of a panel
    static constexpr int REST = 12 * Tile::LARGEST_P;      // entries of rows that fill blocks
    static constexpr int64_t IN_CHUNK = int64_t(1) << 23;  // operations of a product
    struct Panel {
        alignas(64) T X[CAPACITY + REST];
        alignas(64) T B[CAPACITY + REST];
        alignas(64) T K[CAPACITY + REST];
        alignas(64) T Y[CAPACITY + REST];
    };
    // What some of the rows sum up to.
    struct Sums {
        T* matrices[4];
        double diagonal[Tile::LARGEST_P];
        double squares[2];
    };

    int64_t n = 0, threads = 1, rows_in_chunk = 1, chunks = 1;
    int p = 0, stride = 0, height = 0;
    T scale = T(1);
    Matrix<T> matrix{};
    std::vector<T> memory;  // sums of chunks

    static Panel& panel() {
        static thread_local Panel own;
        return own;
    }

    void open(const Matrix<T>* it, int, int64_t rows, int64_t helpers, T weight_scale) {
        matrix = *it, n = rows, p = Tile::size, stride = Tile::stride, threads = helpers;
        scale = weight_scale;
        height = std::min(TALLEST, CAPACITY / stride / 12 * 12);
        // The number of threads changes neither the chunks nor any sum.
        const int64_t least = IN_CHUNK / (int64_t(p) * stride) + height;
        chunks = std::max<int64_t>(1, std::min<int64_t>(16, n / least));
        rows_in_chunk = (n + chunks - 1) / chunks;
    }

    void mix(const Mix<T, 1>& of_B, const Mix<T, 1>& of_K, const Wanted&) {
        mix_B = of_B, mix_K = of_K;
    }

    void largest(double* values) {
        const Wanted all{matrix.state != nullptr, true, false, true};
        values[0] = 0;
        each_panel(0, n, all, [&](Panel& own, int64_t, int rows) {
            for (const T* A : {own.B, own.K}) raise_to_largest<1>(values, A, rows * stride);
        });
    }

    // Of the state B + X C, or K + X C.
    void largest_kept(const Buffer& C, bool keeps_K, const Wanted& wanted, double* values) {
        Wanted needed = wanted;
        needed.K = keeps_K;
        values[0] = 0;
        each_panel(0, n, needed, [&](Panel& own, int64_t, int rows) {
            combine<false>(own.Y, keeps_K ? own.K : own.B, own.X, C.v, nullptr, nullptr, rows);
            raise_to_largest<1>(values, own.Y, rows * stride);
        });
    }

    void gram(Buffer& D, Buffer& M, Buffer& N, Buffer& Q, double* squares_of_B,
              double* squares_of_K, const Wanted& wanted) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            product(to.matrices[0], own.X, own.X, rows, true);
            add_squares(to.diagonal, own.X, rows);
            product(to.matrices[1], own.X, own.B, rows, false);
            to.squares[0] += sum_of_squares(own.B, rows * stride, wanted.exact);
            if (wanted.K) {
                product(to.matrices[2], own.X, own.K, rows, false);
                to.squares[1] += sum_of_squares(own.K, rows * stride, wanted.exact);
            }
            if (wanted.square) product(to.matrices[3], own.B, own.B, rows, true);
        };
        const Sums all = sum_up({D.v, M.v, N.v, Q.v}, wanted, add);
        mirror(D.v);
        for (int j = 0; j < p; ++j) D.v[j * stride + j] = T(all.diagonal[j] - 1);
        if (wanted.square) mirror(Q.v);
        *squares_of_B = all.squares[0];
        *squares_of_K = all.squares[1];
    }

    void measure(const Buffer& a, const Buffer& b, double* squares, Buffer* Q,
                 const Wanted& wanted) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            combine<true>(own.Y, nullptr, own.X, a.v, own.B, b.v, rows);
            to.squares[0] += sum_of_squares(own.Y, rows * stride, false);
            if (Q) product(to.matrices[0], own.Y, own.Y, rows, true);
        };
        *squares = sum_up({Q ? Q->v : nullptr}, wanted, add).squares[0];
        if (Q) mirror(Q->v);
    }

    void apply(const Buffer* a, const Buffer& b, const Buffer* C, bool keeps_K, const bool* taken,
               const T* unit, const Wanted& wanted) {
        if (!taken[0]) return;
        Wanted needed = wanted;
        needed.K = keeps_K && C;
        each_chunk([&](int64_t, int64_t start, int64_t end) {
            each_panel(start, end, needed, [&](Panel& own, int64_t first, int rows) {
                if (C) {
                    combine<false>(own.Y, keeps_K ? own.K : own.B, own.X, C->v, nullptr, nullptr,
                                   rows);
                    if (*unit != T(1))
                        for (int e = 0; e < rows * stride; ++e) own.Y[e] *= *unit;
                    write(matrix.state, own.Y, first, rows);
                }
                if (a) {
                    if (scale == T(1))
                        combine<true>(own.Y, own.X, own.X, a->v, own.B, b.v, rows);
                    else
                        combine_from_weight(own, first, rows, a->v, b.v);
                    write(matrix.X, own.Y, first, rows);
                }
            });
        });
    }

  private:
    Mix<T, 1> mix_B{}, mix_K{};

    // So much memory for sums, where vectors may begin.
    T* room(int64_t entries) {
        constexpr size_t ALIGNMENT = 64;
        memory.resize(entries + ALIGNMENT / sizeof(T));
        const auto start = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<T*>((start + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    }

    int padded_rows() const { return (p + 3) / 4 * 4; }

    template <class Run>
    void each_chunk(Run run) {
        share(chunks, threads, [&](int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c)
                run(c, c * rows_in_chunk, std::min(n, (c + 1) * rows_in_chunk));
        });
    }

    template <class Run>
    void each_panel(int64_t start, int64_t end, const Wanted& wanted, Run run) const {
        Panel& own = panel();
        for (int64_t first = start; first < end; first += height) {
            const int rows = int(std::min<int64_t>(height, end - first));
            load(own, first, rows, wanted);
            run(own, first, rows);
        }
    }

    // The sums of all rows, to which add(sums, panel, rows) adds those of a panel. The first chunk
    // adds to these matrices; others to matrices of their own, which are added up afterwards.
    template <class Add>
    Sums sum_up(std::initializer_list<T*> matrices, const Wanted& wanted, Add add) {
        const int64_t entries = int64_t(stride) * padded_rows(), count = matrices.size();
        std::vector<Sums> parts(chunks);
        T* next = chunks > 1 ? room(count * entries * (chunks - 1)) : nullptr;
        for (int64_t c = 0; c < chunks; ++c) {
            parts[c] = {};
            for (int64_t k = 0; k < count; ++k, next += c > 0 ? entries : 0) {
                T* first = matrices.begin()[k];
                parts[c].matrices[k] = first && c ? next : first;
                if (first) std::fill_n(parts[c].matrices[k], entries, T(0));
            }
        }
        each_chunk([&](int64_t c, int64_t first, int64_t last) {
            each_panel(first, last, wanted,
                       [&](Panel& own, int64_t, int rows) { add(parts[c], own, rows); });
        });
        Sums& all = parts[0];
        for (int64_t c = 1; c < chunks; ++c) {
            for (int64_t k = 0; k < count; ++k)
                for (int64_t e = 0; all.matrices[k] && e < entries; ++e)
                    all.matrices[k][e] += parts[c].matrices[k][e];
            for (int j = 0; j < p; ++j) all.diagonal[j] += parts[c].diagonal[j];
            for (int k = 0; k < 2; ++k) all.squares[k] += parts[c].squares[k];
        }
        return all;
    }

    // X, B and where it is wanted K of some rows, each row filled up with zeros to whole vectors.
    __attribute__((noinline)) void load(Panel& own, int64_t first, int rows,
                                        const Wanted& wanted) const {
        read(own.X, matrix.X, first, rows);
        if (scale != T(1)) divide(own.X, rows * stride, scale);
        const T g = mix_B.g[0], m = mix_B.m[0], h = mix_K.g[0], k = mix_K.m[0];
        read(own.K, matrix.G, first, rows);
        if (wanted.state) read(own.Y, matrix.state, first, rows);
        const int entries = rows * stride;
        if (!wanted.state) {
            for (int e = 0; e < entries; e += V) at(own.B + e) = g * at(own.K + e);
        } else if (!wanted.K || (h == T(1) && k == T(0))) {
            for (int e = 0; e < entries; e += V)
                at(own.B + e) = g * at(own.K + e) + m * at(own.Y + e);
        } else {
            for (int e = 0; e < entries; e += V) {
                const Vector G = at(own.K + e), state = at(own.Y + e);
                at(own.B + e) = g * G + m * state;
                at(own.K + e) = h * G + k * state;
            }
        }
    }

    __attribute__((noinline)) static void divide(T* A, int entries, T by) {
        for (int e = 0; e < entries; e += V) at(A + e) /= by;
    }

    __attribute__((noinline)) void combine_from_weight(Panel& own, int64_t first, int rows,
                                                       const T* a, const T* b) const {
        read(own.K, matrix.X, first, rows);
        combine<true>(own.Y, own.K, own.X, a, own.B, b, rows);
    }

    void read(T* to, const T* from, int64_t first, int rows) const {
        const int64_t down = matrix.parameter->row_stride, across = matrix.parameter->column_stride;
        from += first * down;
        if (across == 1) return read_rows(to, from, rows, down, (n - first - 1) * down + p);
        for (int start = 0; start < rows; start += V) {
            const int height = std::min(V, rows - start);
            for (int j = 0; j < stride; j += V)
                read_square(to + start * stride + j, from + start * down + j * across, height,
                            std::min(V, p - j), down, across);
        }
    }

    // Rows that lie in memory as they do here, but for what fills them up; there are `readable`
    // numbers, so that vectors may be read beyond the end of most rows.
    void read_rows(T* to, const T* from, int rows, int64_t down, int64_t readable) const {
        if (p == stride && down == p) {
            std::memcpy(to, from, sizeof(T) * p * rows);
            return;
        }
        const int whole = p / V * V;
        for (int r = 0; r < rows; ++r, from += down, to += stride, readable -= down) {
            for (int j = 0; j < whole; j += V) at(to + j) = loose(from + j);
            if (whole == p) continue;
            if (readable >= stride) {
                at(to + whole) = masked(loose(from + whole));
                continue;
            }
            for (int j = whole; j < p; ++j) to[j] = from[j];
            std::fill(to + p, to + stride, T(0));
        }
    }

    void write(T* to, const T* from, int64_t first, int rows) const {
        const int64_t down = matrix.parameter->row_stride, across = matrix.parameter->column_stride;
        to += first * down;
        if (across != 1) {
            for (int start = 0; start < rows; start += V) {
                const int height = std::min(V, rows - start);
                for (int j = 0; j < p; j += V)
                    write_square(to + start * down + j * across, from + start * stride + j, height,
                                 std::min(V, p - j), down, across);
            }
            return;
        }
        if (p == stride && down == p) {
            std::memcpy(to, from, sizeof(T) * p * rows);
            return;
        }
        const int whole = p / V * V;
        for (int r = 0; r < rows; ++r, from += stride, to += down) {
            for (int j = 0; j < whole; j += V) loose(to + j) = at(from + j);
            for (int j = whole; j < p; ++j) to[j] = from[j];
        }
    }

    // Up to V x V numbers, which may lie across; what is beyond them becomes zero.
    void read_square(T* to, const T* from, int height, int width, int64_t down,
                     int64_t across) const {
        if (down == 1 && height == V && width == V) {
            Vector lines[V];
            for (int j = 0; j < V; ++j) lines[j] = loose(from + j * across);
            transpose_square<V / 2>(lines);
            for (int r = 0; r < V; ++r) at(to + r * stride) = lines[r];
            return;
        }
        for (int r = 0; r < height; ++r) {
            for (int j = 0; j < width; ++j) to[r * stride + j] = from[r * down + j * across];
            for (int j = std::max(width, 0); j < V; ++j) to[r * stride + j] = T(0);
        }
    }

    void write_square(T* to, const T* from, int height, int width, int64_t down,
                      int64_t across) const {
        if (down == 1 && height == V && width == V) {
            Vector lines[V];
            for (int r = 0; r < V; ++r) lines[r] = at(from + r * stride);
            transpose_square<V / 2>(lines);
            for (int j = 0; j < V; ++j) loose(to + j * across) = lines[j];
            return;
        }
        for (int r = 0; r < height; ++r)
            for (int j = 0; j < width; ++j) to[r * down + j * across] = from[r * stride + j];
    }

    // The first p % V numbers; bits, because zero times NaN is not zero.
    Vector masked(Vector numbers) const {
        Places bits, kept;
        for (int j = 0; j < V; ++j) kept[j] = j < p % V ? -1 : 0;
        std::memcpy(&bits, &numbers, sizeof(bits));
        bits &= kept;
        std::memcpy(&numbers, &bits, sizeof(bits));
        return numbers;
    }

    static Vector& at(T* place) { return *reinterpret_cast<Vector*>(place); }
    static const Vector& at(const T* place) { return *reinterpret_cast<const Vector*>(place); }
    static Loose& loose(T* place) { return *reinterpret_cast<Loose*>(place); }
    static const Loose& loose(const T* place) { return *reinterpret_cast<const Loose*>(place); }

    // Four rows by N vectors of C += A^T B, held in registers while the rows of a panel run by:
    // even and odd ones apart if there are few, because additions wait for each other.
    template <int N>
    void gram_block(T* C, const T* A, const T* B, int rows) const {
        constexpr int APART = N == 1 ? 2 : 1;
        Vector sum[APART][4][N] = {};
        const int step = stride;
        const auto add = [&](Vector(&to)[4][N], int k) {
            Vector b[N];
            for (int n = 0; n < N; ++n) b[n] = at(B + k * step + n * V);
            for (int r = 0; r < 4; ++r) {
                const T a = A[k * step + r];
                for (int n = 0; n < N; ++n) to[r][n] += a * b[n];
            }
        };
        int k = 0;
        for (; k + APART <= rows; k += APART)
            for (int u = 0; u < APART; ++u) add(sum[u], k + u);
        for (; k < rows; ++k) add(sum[0], k);
        for (int r = 0; r < 4; ++r)
            for (int n = 0; n < N; ++n) {
                for (int u = 1; u < APART; ++u) sum[0][r][n] += sum[u][r][n];
                at(C + r * step + n * V) += sum[0][r][n];
            }
    }

    // run(first column, number of vectors) for blocks of up to three vectors, none alone but one.
    template <class Run>
    static void each_block(int first, int last, Run run) {
        for (int j = first, left = (last - first) / V; left > 0;) {
            const int now = left == 4 ? 2 : std::min(left, 3);
            run(j, now);
            j += now * V, left -= now;
        }
    }

    // C += A^T B; of a symmetric one the blocks on and above the diagonal.
    __attribute__((noinline)) void product(T* C, const T* A, const T* B, int rows, bool symmetric) const {
        for (int i = 0; i < p; i += 4)
            each_block(symmetric ? i / V * V : 0, stride, [&](int j, int width) {
                T* c = C + i * stride + j;
                switch (width) {
                    case 3: return gram_block<3>(c, A + i, B + j, rows);
                    case 2: return gram_block<2>(c, A + i, B + j, rows);
                    default: return gram_block<1>(c, A + i, B + j, rows);
                }
            });
    }

    // Some rows by N vectors of Y = start + X a + B b, twelve vectors in all.
    template <int N, bool BOTH>
    void combine_block(T* Y, const T* start, const T* X, const T* a, const T* B, const T* b) const {
        constexpr int R = 12 / N;
        Vector sum[R][N] = {};
        const int step = stride;
        if (start)
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] = at(start + r * step + n * V);
        for (int k = 0; k < p; ++k) {
            Vector factor[N];
            for (int n = 0; n < N; ++n) factor[n] = at(a + k * step + n * V);
            for (int r = 0; r < R; ++r) {
                const T x = X[r * step + k];
                for (int n = 0; n < N; ++n) sum[r][n] += x * factor[n];
            }
            if constexpr (BOTH) {
                for (int n = 0; n < N; ++n) factor[n] = at(b + k * step + n * V);
                for (int r = 0; r < R; ++r) {
                    const T x = B[r * step + k];
                    for (int n = 0; n < N; ++n) sum[r][n] += x * factor[n];
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) at(Y + r * step + n * V) = sum[r][n];
    }

    template <int N, bool BOTH>
    void combine_columns(T* Y, const T* start, const T* X, const T* a, const T* B, const T* b,
                         int rows, int j) const {
        for (int r = 0; r < rows; r += 12 / N) {
            const int64_t at = r * stride;
            combine_block<N, BOTH>(Y + at + j, start ? start + at + j : nullptr, X + at, a + j,
                                   BOTH ? B + at : nullptr, BOTH ? b + j : nullptr);
        }
    }

    template <bool BOTH>
    __attribute__((noinline)) void combine(T* Y, const T* start, const T* X, const T* a, const T* B,
                                           const T* b, int rows) const {
        each_block(0, stride, [&](int j, int width) {
            switch (width) {
                case 3: return combine_columns<3, BOTH>(Y, start, X, a, B, b, rows, j);
                case 2: return combine_columns<2, BOTH>(Y, start, X, a, B, b, rows, j);
                default: return combine_columns<1, BOTH>(Y, start, X, a, B, b, rows, j);
            }
        });
    }

    void mirror(T* A) const {
        constexpr int TILE = 16;
        for (int ib = 0; ib < p; ib += TILE)
            for (int jb = 0; jb <= ib; jb += TILE)
                for (int i = ib; i < std::min(ib + TILE, p); ++i)
                    for (int j = jb; j < std::min(jb + TILE, i); ++j)
                        A[i * stride + j] = A[j * stride + i];
    }

    // Sums of squares, of four at a time in their own precision: so few add no error up.
    static void add_four(Doubles& sum, const T* A, int step) {
        Vector four = at(A) * at(A);
        for (int k = 1; k < 4; ++k) four += at(A + k * step) * at(A + k * step);
        sum += __builtin_convertvector(four, Doubles);
    }

    // Of each column.
    void add_squares(double* sums, const T* A, int rows) const {
        for (int j = 0; j < stride; j += V) {
            Doubles sum = {};
            int r = 0;
            for (; r + 4 <= rows; r += 4) add_four(sum, A + r * stride + j, stride);
            for (; r < rows; ++r) {
                const Doubles x = __builtin_convertvector(at(A + r * stride + j), Doubles);
                sum += x * x;
            }
            double each[V];
            std::memcpy(each, &sum, sizeof(sum));
            for (int i = 0; i < V; ++i) sums[j + i] += each[i];
        }
    }

    static double sum_of_squares(const T* A, int entries, bool exact) {
        double total = 0, each[V] = {};
        int e = 0;
        if (!exact) {
            Doubles sum = {};
            for (; e + 4 * V <= entries; e += 4 * V) add_four(sum, A + e, V);
            std::memcpy(each, &sum, sizeof(sum));
        }
        for (; e < entries; ++e) total += double(A[e]) * double(A[e]);
        for (double part : each) total += part;
        return total;
    }
};

}  // namespace
