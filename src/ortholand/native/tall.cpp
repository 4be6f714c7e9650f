// One landing step of tall matrices n x p, n > p, in the Gram form: wide ones are tall ones whose
// rows lie next to each other in memory, and any other strides will do.
//
// The same steps as ortholand/landing (moments.py, gram.py and the attractions): that code is the
// reference, and a test holds this one equal to it. A pass over the rows gives the Gram matrices
//
//     D = X^T X - I,    M = X^T B,    Q = B^T B (for "move, then land" only),
//
// algebra of p x p tiles the coefficients, and a pass X <- X + X a + B b; of a weight W = scale X it
// is W <- W + scale (X a + B b). B = g G + m state, a mix of the gradient and the momentum buffer or
// first moment, is never kept. Where the free bound of a field does not allow lr, the field is
// formed and measured, in a pass of its own, as `move` of the reference does; and so is Y^T Y where
// rounding in B^T B would be seen in it.
//
// Written once, for two layouts of rows: LaneRows, many matrices of up to 8 columns side by side;
// and Panels, one matrix, some rows at a time.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <type_traits>
#include <vector>

#include "steps.h"
#include "threads.h"
#include "tiles.h"

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

// The algorithm, for any layout -------------------------------------------------------------------

template <class R>
struct Step : Tiles<typename R::Tile> {
    using L = typename R::Tile;
    using T = typename R::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = R::W;
    using Tiles<L>::norms;

    // What is less than this share of what rounding does anyway is left out, with its products.
    static constexpr double LITTLE = 0.125;
    // What rounding may change by more than this share is measured.
    static constexpr double MUCH = 1e-4, SHAKY = 1e-3;
    // How long a generator may be for what rounding does to it not to be seen.
    static constexpr double COARSE = 0.5;

    const Options& o;
    const int64_t n;
    const double roundoff;  // relative, of sums of n products: ortholand.fields.product_roundoff
    R rows;
    Wanted wanted{};
    Mix<T, W> mix_B, mix_K;
    Buffer D, M, N, Q, U, V, Z, a, b;  // N: of the second mix, then C, by which the state loses X C
    // In units of `power`, of two, by which gradients and state are multiplied, and which is nearly
    // always 1: squares of B, squares of K, how large what was added up to B is.
    double squares_of_B[W], squares_of_K[W], size[W], power[W];
    double unit[W];  // the direction is that of `unit` times B
    double d[W], bound[W], norm[W], eta[W], error[W], mean[W];
    double square[W], steps[W];
    double shrunk[W];  // the mean to take off before landing, if only a share of a move is taken
    bool finite[W], taken[W];
    bool lands_later = false;
    int64_t team = 1;  // threads

    Step(const Options& options, int64_t rows)
        : o(options), n(rows),
          roundoff((8 + std::sqrt(double(rows))) * std::numeric_limits<T>::epsilon() / 2) {}

    // Step of up to W matrices.
    void run(const Matrix<T>* matrices, int filled, int64_t threads) {
        rows.open(matrices, filled, n, threads, T(o.scale));
        team = threads, lands_later = false;
        wanted = {o.moments != NONE, o.moments == ADAM || keeps_K(), o.attraction == AFTER, false};
        for (int l = 0; l < W; ++l) power[l] = 1, finite[l] = l < filled;
        sum_up(matrices, filled);
        if (!is_moderate(filled)) {
            rescale(filled);
            wanted.exact = true;
            sum_up(matrices, filled);
        }
        norms(d, D);
        for (int l = 0; l < W; ++l) {
            size[l] = std::sqrt(squares_of_B[l]), unit[l] = 1 / power[l];
            finite[l] = finite[l] && unit[l] * size[l] < INFINITY;
        }
        if (o.moments == ADAM) adapt(matrices, filled);
        if (o.moments == MOMENTUM) find_multiplier(keeps_K() ? N : M), N = U;
        for (int l = 0; l < W; ++l) error[l] = (1 + d[l]) * unit[l] * size[l] * roundoff;
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        finish(matrices, filled);
    }

    bool keeps_K() const { return o.moments == MOMENTUM && o.nesterov; }

    void sum_up(const Matrix<T>* matrices, int filled) {
        const double sign = o.maximize ? -1 : 1;
        for (int l = 0; l < W; ++l) {
            double g = sign, m = 0, h = 0, k = 0;
            if (o.moments == MOMENTUM) {
                const bool damped = o.dampening != 0 && l < filled && has_started(matrices[l]);
                g = h = damped ? sign * (1 - o.dampening) : sign;
                m = k = o.momentum;
                if (o.nesterov) g = sign + o.momentum * h, m = o.momentum * k;
            } else if (o.moments == ADAM) {
                g = sign * (1 - o.beta1), m = o.beta1, h = sign;
            }
            mix_B.g[l] = T(power[l] * g), mix_B.m[l] = T(power[l] * m);
            mix_K.g[l] = T(power[l] * h), mix_K.m[l] = T(power[l] * k);
        }
        rows.mix(mix_B, mix_K, wanted);
        rows.gram(D, M, N, Q, squares_of_B, squares_of_K, wanted);
    }

    // The first gradient enters whole, as in torch; a buffer of zeros is one not yet started.
    bool has_started(const Matrix<T>& matrix) const {
        const int64_t down = matrix.parameter->row_stride, across = matrix.parameter->column_stride;
        for (int64_t r = 0; r < n; ++r)
            for (int j = 0; j < L::p(); ++j)
                if (matrix.state[r * down + j * across] != T(0)) return true;
        return false;
    }

    // Whether the squares of all matrices are numbers whose squares are numbers, too.
    bool is_moderate(int filled) const {
        const double most = sizeof(T) == 4 ? 1e24 : 1e200;
        bool all = true;
        for (int l = 0; l < filled; ++l) {
            all &= squares_of_B[l] > 1 / most && squares_of_B[l] < most;
            if (wanted.K) all &= squares_of_K[l] > 1 / most && squares_of_K[l] < most;
        }
        return all;
    }

    // Powers of two that bring gradients and state near to 1.
    void rescale(int filled) {
        double largest[W];
        rows.largest(largest);
        constexpr int MOST = std::numeric_limits<T>::max_exponent - 2;
        for (int l = 0; l < filled; ++l) {
            finite[l] = largest[l] < INFINITY;
            if (finite[l] && largest[l] > 0)
                power[l] = std::ldexp(1.0, -std::clamp(std::ilogb(largest[l]), -MOST, MOST));
        }
    }

    static void symmetric_part(Buffer& to, const Buffer& from) {
        L::each_pair([&](int e, int t, int) { to.v[e] = T(0.5) * (from.v[e] + from.v[t]); });
        L::clear_padding(to);
    }

    // U = Sym(S^-1 A), S = I + D: as ortholand.geometry.derivatives.multiplier. Where D is at the
    // level of rounding, Sym(A).
    void find_multiplier(const Buffer& A) {
        double most = 0;
        for (int l = 0; l < W; ++l)
            if (finite[l]) most = std::max(most, d[l]);
        if (most <= roundoff) return symmetric_part(U, A);
        if (most * most <= roundoff) {
            L::product(Z, D, A);
            L::each([&](int e, int) { a.v[e] = A.v[e] - Z.v[e]; });
        } else {
            T one[W];
            bool singular[W] = {};
            std::fill(one, one + W, T(1));
            L::each([&](int e, int) { a.v[e] = A.v[e], Z.v[e] = D.v[e]; });
            L::add_to_diagonal(Z, one);
            Tiles<L>::solve(Z, a);
            for (int i = 0; i < L::p(); ++i)
                for (int l = 0; l < W; ++l) singular[l] |= !(Z.v[L::at(i, i) + l] > 0);
            L::each([&](int e, int l) { a.v[e] = singular[l] ? A.v[e] : a.v[e]; });
        }
        symmetric_part(U, a);
    }

    // Adam: B - X C is the new mean, C the part of the gradient's normal part that is in it. Both
    // stand for the same direction: X C X^T is symmetric. B will do where its products are known.
    void adapt(const Matrix<T>* matrices, int filled) {
        find_multiplier(N);
        double gradient[W], pulled[W] = {}, mixed[W] = {}, tangent[W];
        L::sum_of_squares(U, gradient);
        L::inner(U, N, tangent);
        bool seen = !wanted.square;  // whether D makes a difference
        for (int l = 0; l < W; ++l)
            seen |= finite[l] && !(d[l] * gradient[l] <= LITTLE * roundoff * squares_of_K[l]);
        if (seen) {
            L::product(Z, D, U);
            L::inner(U, Z, pulled);
        }
        if (!wanted.square) L::inner(U, M, mixed);
        bool cancels = false;  // whether little is left of the gradient, so that rounding is seen
        for (int l = 0; l < W; ++l) {
            tangent[l] = squares_of_K[l] - 2 * tangent[l] + gradient[l] + pulled[l];
            cancels |= finite[l] && tangent[l] < MUCH * squares_of_K[l];
        }
        if (cancels) measure_tangent(tangent);
        const double fresh = 1 - o.beta1;
        AdamNumbers numbers;
        for (int l = 0; l < W; ++l) {
            const bool there = l < filled;
            numbers.update(o, std::sqrt(tangent[l]) * unit[l], L::p(),
                           there ? double(*matrices[l].square) : 0,
                           there ? double(*matrices[l].steps) : 0);
            square[l] = numbers.square, steps[l] = numbers.steps;
            unit[l] *= numbers.scale;
            if (wanted.square) continue;
            size[l] += 2 * fresh * std::sqrt(squares_of_K[l]);
            const double mean = squares_of_B[l] - fresh * (2 * mixed[l]) +
                                fresh * fresh * (gradient[l] + pulled[l]);
            squares_of_B[l] = at_least(mean, 0) + roundoff * size[l] * size[l];
        }
        const T share = T(fresh);
        L::each([&](int e, int) { N.v[e] = share * U.v[e]; });
        if (!wanted.square) L::each([&](int e, int) { M.v[e] -= N.v[e] + share * Z.v[e]; });
    }

    // The squared norm of K - X U, in a pass of its own.
    void measure_tangent(double* squares) {
        T one[W];
        std::fill(one, one + W, T(1));
        L::each([&](int e, int) { a.v[e] = -U.v[e], b.v[e] = T(0); });
        L::add_to_diagonal(b, one);
        rows.mix(mix_K, mix_K, wanted);
        rows.measure(a, b, squares, nullptr, wanted);
        rows.mix(mix_B, mix_K, wanted);
    }

    // A bound of ||R||, R = (B (I + D) - X M^T) / 2 times `unit`, that is free.
    void bound_tangent_part() {
        double sizes[W];
        norms(sizes, M);
        for (int l = 0; l < W; ++l) {
            const double stretch = 1 + d[l];
            bound[l] = unit[l] / 2 *
                (stretch * std::sqrt(squares_of_B[l]) + std::sqrt(stretch) * sizes[l]);
        }
    }

    // a and b of the field X a + B b = pull X D + tangent R.
    void set_field(const double* pull, const double* tangent) {
        T p[W], t[W];
        for (int l = 0; l < W; ++l) p[l] = T(pull[l]), t[l] = T(tangent[l] * unit[l] / 2);
        L::each_pair([&](int e, int s, int l) { a.v[e] = p[l] * D.v[e] - t[l] * M.v[s]; });
        L::clear_padding(a);
        const T with_D = T(o.attraction == AFTER ? 0 : 1);
        L::each([&](int e, int l) { b.v[e] = with_D * t[l] * D.v[e]; });
        L::add_to_diagonal(b, t);
        // Along fields Adam's generator is B - X C: X a + (B - X C) b = X (a - C b) + B b.
        if (o.moments != ADAM || o.attraction == AFTER) return;
        L::product(U, N, b);
        L::each([&](int e, int) { a.v[e] -= U.v[e]; });
    }

    // a and b of a move by -eta (R + pull X D).
    void set_move(double pull) {
        double pulls[W], tangents[W];
        for (int l = 0; l < W; ++l) pulls[l] = -eta[l] * pull, tangents[l] = -eta[l];
        set_field(pulls, tangents);
    }

    // Forms the field pull X D + R, whose norm is at most `bound`, and measures its norm. Then Q is
    // its Gram matrix, in units of norm^2, if that is wanted.
    void measure(double pull, bool with_square) {
        double whole[W], pulls[W], tangents[W], squares[W];
        T inverse[W];
        for (int l = 0; l < W; ++l) {
            whole[l] = at_least(bound[l], TINY);
            pulls[l] = pull / whole[l], tangents[l] = 1 / whole[l];
        }
        set_field(pulls, tangents);
        rows.measure(a, b, squares, with_square ? &Q : nullptr, wanted);
        for (int l = 0; l < W; ++l) {
            inverse[l] = T(squares[l] > 0 ? 1 / squares[l] : 0);
            norm[l] = bound[l] = whole[l] * std::sqrt(squares[l]);
        }
        if (with_square) L::each([&](int e, int l) { Q.v[e] *= inverse[l]; });
    }

    // Z = Y^T Y - I, Y = X + X a + B b.
    void measure_reached() {
        T one[W];
        double squares[W];
        std::fill(one, one + W, T(1));
        L::add_to_diagonal(a, one);
        rows.measure(a, b, squares, &Z, wanted);
        L::subtract_identity(Z);
    }

    // A bound of ||Z||_2.
    void bound_reached(double* reached) {
        Tiles<L>::norms_of_square(reached, Z, b);
        for (int l = 0; l < W; ++l) reached[l] = std::sqrt(reached[l]);
    }

    // U = D^2, and bounds of the distances.
    void bound_distances(double* from) {
        double square[W];
        Tiles<L>::norms_of_square(square, D, U);
        for (int l = 0; l < W; ++l) from[l] = distance_inside(o, square[l], d[l]);
    }

    // Whether something holds for all matrices that are there.
    template <class Holds>
    bool all(Holds holds) const {
        bool so = true;
        for (int l = 0; l < W; ++l) so &= !finite[l] || holds(l);
        return so;
    }

    // X - eta (R + lam X D)
    void coupled() {
        const double longest = longest_step(o);
        bound_tangent_part();
        for (int l = 0; l < W; ++l) norm[l] = bound[l] += o.lam * d[l] * std::sqrt(1 + d[l]);
        if (o.rule == SPECTRAL) {
            std::fill(eta, eta + W, longest);
            if (!all([&](int l) {
                    return coupled_is_safe(o, longest, bound[l], d[l], 2 * longest * error[l]);
                }))
                shorten_coupled(longest);
        } else {
            const auto lengths = [&] {
                for (int l = 0; l < W; ++l) eta[l] = coupled_step<T>(o, bound[l], d[l], error[l]);
            };
            lengths();
            if (o.rule != UNSAFE && !all([&](int l) { return eta[l] >= longest; })) {
                measure(o.lam, false);
                lengths();
            }
        }
        for (int l = 0; l < W; ++l)
            taken[l] = is_a_step(o, eta[l], d[l], o.lam) && eta[l] * norm[l] < INFINITY;
        set_move(o.lam);
    }

    // A trial move reaches D - 2 t lam (D + D^2) + t^2 L^T L, but for tangency lost to rounding.
    void shorten_coupled(double longest) {
        double from[W], reached[W];
        T less[W], square[W];
        measure(o.lam, true);
        bound_distances(from);
        for (int l = 0; l < W; ++l) {
            eta[l] = trial_step(longest, norm[l], L::p());
            const double length = eta[l] * norm[l];
            less[l] = T(2 * eta[l] * o.lam), square[l] = T(length * length);
        }
        L::each([&](int e, int l) {
            Z.v[e] = D.v[e] - less[l] * (D.v[e] + U.v[e]) + square[l] * Q.v[e];
        });
        bound_reached(reached);
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l];
            const bool safe = coupled_is_safe(o, eta[l], norm[l], d[l], astray) ||
                              reached[l] + astray <= o.aim;
            d[l] = from[l];
            if (!safe)
                eta[l] *= share_of_pulled_move(reached[l], d[l], o.lam * eta[l] * d[l],
                                               o.aim - d[l] - astray);
        }
    }

    // X - eta R - omega X D
    void decoupled() {
        double normal[W], omega[W], tangent[W];
        for (int l = 0; l < W; ++l) normal[l] = d[l] * std::sqrt(1 + d[l]), omega[l] = o.omega;
        bound_tangent_part();
        std::copy(bound, bound + W, norm);
        const auto lengths = [&] {
            for (int l = 0; l < W; ++l)
                eta[l] = o.rule == SPECTRAL ? trial_step(o.lr, norm[l], L::p())
                    : decoupled_step<T>(o, norm[l], d[l], normal[l], error[l], omega[l]);
        };
        // Whether bounds of ||R|| and ||X D|| have made neither eta nor omega less than they may be.
        const auto suffices = [&](int l) {
            if (o.rule != SPECTRAL) return eta[l] >= o.lr && omega[l] >= o.omega;
            return eta[l] >= o.lr && decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l],
                                                       2 * eta[l] * error[l]);
        };
        lengths();
        if (o.rule != UNSAFE && !all(suffices)) {
            L::product(U, D, D);
            double cube[W], squares[W];
            L::sum_of_squares(D, squares);
            L::inner(D, U, cube);
            for (int l = 0; l < W; ++l) normal[l] = std::sqrt(at_least(squares[l] + cube[l], 0));
            measure(0, false);
            lengths();
            if (o.rule == SPECTRAL) shorten_decoupled(normal);
        }
        for (int l = 0; l < W; ++l) {
            taken[l] = is_a_step(o, std::max(eta[l], omega[l]), d[l], o.omega) &&
                       eta[l] * norm[l] + omega[l] * d[l] < INFINITY;
            omega[l] = -omega[l], tangent[l] = -eta[l];
        }
        set_field(omega, tangent);
    }

    void shorten_decoupled(const double* normal) {
        double from[W], reached[W], pull[W], tangent[W];
        for (int l = 0; l < W; ++l) pull[l] = -o.omega, tangent[l] = -eta[l];
        set_field(pull, tangent);
        measure_reached();
        bound_reached(reached);
        bound_distances(from);
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l];
            const bool safe = decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l], astray) ||
                              reached[l] <= o.aim;
            d[l] = from[l];
            const double bend = 2 * eta[l] * o.omega * d[l] * std::sqrt(1 + d[l]) * norm[l];
            if (!safe) eta[l] *= share_of_tangent_move(reached[l], d[l], bend + astray, o.aim);
        }
    }

    // Y = X - eta R, R = (B - X M^T) / 2, then a Newton-Schulz step from Y / (1 + m)^(1/2), where
    // Y^T Y - I, which is derived, is Z + m I.
    void after() {
        double squares[W], drift[W] = {}, size_of_Z[W];
        const bool seen = !all([&](int l) {  // whether D makes a difference to R
            const double length = o.lr * unit[l] * size[l];
            return d[l] * length * at_least(4 * length, 1) <= LITTLE * roundoff;
        });
        tangent_square(squares, seen);
        if (seen) norms(drift, V);
        const auto lengths = [&] {
            for (int l = 0; l < W; ++l)
                eta[l] = o.rule == SPECTRAL ? trial_step(o.lr, bound[l], L::p())
                    : step_before_landing(o, bound[l], d[l], error[l]);
        };
        double unknown[W];
        for (int l = 0; l < W; ++l) {
            drift[l] *= unit[l];
            unknown[l] = (1 + d[l]) * (1 + d[l]) * roundoff + (seen ? 0 : 4 * d[l]);
            const double square = at_least(squares[l], 0);
            norm[l] = unit[l] * std::sqrt(square);
            bound[l] = unit[l] * std::sqrt(square + unknown[l] * size[l] * size[l]);
        }
        lengths();
        derive(unit);
        Tiles<L>::centre(Z, mean, size_of_Z);
        const bool free = all([&](int l) {
            const double length = eta[l] * unit[l] * size[l];
            const double rest = unknown[l] * length * length + 2 * eta[l] * error[l];
            return eta[l] >= o.lr && (o.rule == FROBENIUS ||
                                      size_of_Z[l] + mean[l] + rest <= o.farthest);
        });
        for (int l = 0; l < W; ++l)
            taken[l] = finite[l] && (o.rule != FROBENIUS || d[l] < FARTHEST), shrunk[l] = -1;
        if (o.rule != UNSAFE && !free) {
            measure(0, true);
            lengths();
            derive(norm);
            Tiles<L>::centre(Z, mean, size_of_Z);
            if (o.rule == SPECTRAL) shorten_before_landing(drift);
        }
        for (int l = 0; l < W; ++l) taken[l] = taken[l] && eta[l] * norm[l] < INFINITY;
        lands_later = is_coarse();
        set_move(0);
        if (!lands_later) land();
    }

    // Q becomes R^T R in place of B^T B, and `squares` its trace; M the transpose of H = M^T - K D
    // in R = (B - X H) / 2; and V = Sym(W D), W = M - K - D K, K the multiplier of B. Where D makes
    // no difference H is M^T, and V is zero.
    void tangent_square(double* squares, bool with_D) {
        if (with_D) {
            if (o.moments == MOMENTUM && !keeps_K())
                U = N;
            else
                find_multiplier(M);
            L::product(Z, D, U);
            L::each([&](int e, int) { a.v[e] = M.v[e] - U.v[e] - Z.v[e]; });
            L::product(b, a, D);
            symmetric_part(V, b);
            L::each_pair([&](int e, int t, int) { a.v[e] = M.v[t] - Z.v[t]; });
            L::clear_padding(a);
            L::product(b, D, a);
            L::each([&](int e, int) {
                b.v[e] = 2 * M.v[e] - a.v[e] - b.v[e];
                M.v[e] -= Z.v[e];
            });
        } else {
            L::each([&](int e, int) { V.v[e] = T(0); });
            L::each_pair([&](int e, int t, int) { b.v[e] = 2 * M.v[e] - M.v[t]; });
            L::clear_padding(b);
        }
        L::product(a, M, b);
        L::each([&](int e, int) { a.v[e] = Q.v[e] - a.v[e]; });
        L::each_pair([&](int e, int t, int) { Q.v[e] = T(0.125) * (a.v[e] + a.v[t]); });
        L::clear_padding(Q);
        L::trace(Q, squares);
    }

    // Z = D + V eta + R^T R eta^2, R^T R being Q times the square of `share`.
    void derive(const double* share) {
        T linear[W], factor[W];
        for (int l = 0; l < W; ++l) {
            linear[l] = T(eta[l] * unit[l]);
            factor[l] = T(eta[l] * share[l] * (eta[l] * share[l]));
        }
        L::each([&](int e, int l) {
            Z.v[e] = D.v[e] + linear[l] * V.v[e] + factor[l] * Q.v[e];
        });
    }

    // Takes a share of the moves that are too long: eta, and the residual Z + m I.
    void shorten_before_landing(const double* drift) {
        double reached[W], below[W], size_of_Z[W];
        T part[W], rest[W], linear[W];
        const bool derived = all([&](int l) {
            return 2 * eta[l] * error[l] <= SHAKY * o.farthest;
        });
        if (!derived) {
            set_move(0);
            measure_reached();
            Tiles<L>::centre(Z, mean, size_of_Z);
        }
        bound_reached(reached);
        Tiles<L>::largest(below, D);
        for (int l = 0; l < W; ++l) {
            const double astray = derived ? 2 * eta[l] * error[l] : 0;
            reached[l] += mean[l];
            const bool safe = reached[l] + astray <= o.farthest;
            const double delta = at_least(at_most(d[l], o.eps), below[l]);
            const double tilt = (1 + 2 / o.farthest) * (2 * eta[l] * error[l]);
            const double theta = safe ? 1
                : share_of_tangent_move(reached[l], delta, eta[l] * drift[l] + tilt, o.farthest);
            // From distance 1 on Newton-Schulz steps may lead anywhere.
            taken[l] = taken[l] && reached[l] < INFINITY && (safe || below[l] < FARTHEST);
            linear[l] = T(theta * (1 - theta) * eta[l] * unit[l]);
            part[l] = T(theta * theta), rest[l] = T(1 - theta * theta);
            eta[l] *= theta, mean[l] *= theta * theta;
            if (!safe) shrunk[l] = mean[l];
        }
        L::each([&](int e, int l) {
            Z.v[e] = part[l] * Z.v[e] + rest[l] * D.v[e] + linear[l] * V.v[e];
        });
    }

    // Whether a generator is so long that what rounding does to it would be seen in Y^T Y: where
    // the gradient is nearly normal to the manifold. Then Y is formed, and its Gram matrix measured.
    bool is_coarse() const {
        return !all([&](int l) { return !taken[l] || eta[l] * unit[l] * size[l] <= COARSE; });
    }

    // U: the landed point is Y + Y U, where Y has the residual Z + m I.
    void land_from() {
        T factor[W], diagonal[W];
        for (int l = 0; l < W; ++l) {
            const double c = 1 / std::sqrt(1 + mean[l]);
            factor[l] = T(-c / (2 * (1 + mean[l]))), diagonal[l] = T(c - 1);
        }
        L::each([&](int e, int l) { U.v[e] = factor[l] * Z.v[e]; });
        L::add_to_diagonal(U, diagonal);
    }

    // Adds the landing to the move X + X a + B b, b a multiple of the identity.
    void land() {
        land_from();
        T minus[W];
        for (int l = 0; l < W; ++l) minus[l] = T(-eta[l] * unit[l] / 2);
        L::product(Z, a, U);
        L::each([&](int e, int l) {
            a.v[e] += U.v[e] + Z.v[e];
            b.v[e] += minus[l] * U.v[e];
        });
    }

    void finish(const Matrix<T>* matrices, int filled) {
        T inverse[W];
        bool any = false;
        if (o.moments != NONE) L::each([&](int e, int) { N.v[e] = -N.v[e]; });
        if (o.rule == UNSAFE) take_finite_steps();
        if (o.moments != NONE && *std::min_element(power, power + W) < 1) keep_finite_state();
        for (int l = 0; l < W; ++l) {
            taken[l] = taken[l] && finite[l] && l < filled;
            any |= taken[l];
            inverse[l] = T(1 / power[l]);
        }
        count(matrices, filled);
        if (!any) return;
        if (is_scaled(o)) scale_coefficients();
        // A step with lr = 0 changes nothing.
        rows.apply(o.lr > 0 ? &a : nullptr, b, o.moments != NONE ? &N : nullptr, keeps_K(), taken,
                   inverse, wanted);
        if (lands_later && o.lr > 0) land_measured(matrices, filled);
        if (o.moments != ADAM) return;
        for (int l = 0; l < filled; ++l)
            if (taken[l]) *matrices[l].square = T(square[l]), *matrices[l].steps = T(steps[l]);
    }

    // Without a safe step X may be anything. A step is taken if bounds show that X + X a + B b, what
    // a landing from there makes of it, and the state are finite.
    __attribute__((noinline)) void take_finite_steps() {
        double of_a[W], of_b[W], of_C[W] = {};
        norms(of_a, a), norms(of_b, b);
        if (o.moments != NONE) norms(of_C, N);
        for (int l = 0; l < W; ++l) {
            const double of_X = std::sqrt(1 + d[l]);
            const double reached = of_X * (1 + of_a[l]) + size[l] * of_b[l];
            const double landed = lands_later ? reached * reached * reached : reached;
            const double kept = of_X * of_C[l] / power[l];
            taken[l] = taken[l] && at_least(o.scale, 1) * landed + kept < LARGEST_NORM<T>;
        }
    }

    // The state of gradients that were scaled down may be finite in their unit only.
    __attribute__((noinline)) void keep_finite_state() {
        double largest[W];
        rows.largest_kept(N, keeps_K(), wanted, largest);
        for (int l = 0; l < W; ++l)
            taken[l] = taken[l] && largest[l] / power[l] <= std::numeric_limits<T>::max();
    }

    // W = scale X goes to W + X (scale a) + B (scale b).
    __attribute__((noinline)) void scale_coefficients() {
        const T weight_scale = T(o.scale);
        L::each([&](int e, int) { a.v[e] *= weight_scale, b.v[e] *= weight_scale; });
    }

    // Lands from Y that is in the place of X.
    void land_measured(const Matrix<T>* matrices, int filled) {
        T one[W];
        double size_of_Z[W];
        rows.open(matrices, filled, n, team, T(o.scale));
        wanted.K = wanted.square = false;
        rows.mix(mix_B, mix_K, wanted);
        rows.gram(Z, M, N, Q, squares_of_B, squares_of_K, wanted);
        Tiles<L>::centre(Z, mean, size_of_Z);
        for (int l = 0; l < W; ++l) {
            const double other = shrunk[l] < 0 ? mean[l] : shrunk[l];
            one[l] = T(mean[l] - other), mean[l] = other;
        }
        L::add_to_diagonal(Z, one);
        std::fill(one, one + W, T(1));
        land_from();
        L::each([&](int e, int) { a.v[e] = U.v[e], b.v[e] = T(0); });
        if (is_scaled(o)) scale_coefficients();
        rows.apply(&a, b, nullptr, false, taken, one, wanted);
    }

    void count(const Matrix<T>* matrices, int filled) const {
        for (int l = 0; l < filled; ++l) {
            Parameter& parameter = *matrices[l].parameter;
            if (!taken[l]) __atomic_fetch_add(&parameter.skipped, 1, __ATOMIC_RELAXED);
            if (o.rule != UNSAFE && finite[l] && eta[l] < o.lr)
                __atomic_fetch_add(&parameter.limited, 1, __ATOMIC_RELAXED);
        }
    }
};

// Work and threads --------------------------------------------------------------------------------

template <class R>
void run_some(const Options& o, const Matrices<typename R::Scalar>& matrices, int64_t first,
              int64_t last, int64_t n, int p, int64_t threads) {
    // Not on the stack, which may be small in other threads, and not made anew in each step.
    alignas(Step<R>) static thread_local unsigned char memory[sizeof(Step<R>)];
    Step<R>& step = *new (memory) Step<R>(o, n);
    if constexpr (R::W == 1) R::Tile::resize(p);
    Matrix<typename R::Scalar> some[R::W];
    for (; first < last; first += R::W) {
        const int filled = int(std::min<int64_t>(R::W, last - first));
        for (int l = 0; l < filled; ++l) some[l] = matrices[first + l];
        step.run(some, filled, threads);
    }
    step.~Step<R>();
}

template <class R>
void run_all(const Options& o, Parameter* parameters, int count, int64_t n, int p) {
    const Matrices<typename R::Scalar> matrices(parameters, count);
    const int64_t total = matrices.count();
    // A thread is worth starting for a tenth of a millisecond of work at least.
    const int64_t work = (6 * n * p + 10 * int64_t(p) * p) * p + 60 * n * p;
    const int64_t useful = std::max<int64_t>(1, int64_t(double(total) * double(work) / (1 << 22)));
    const int64_t threads = std::min<int64_t>(std::max(1, o.threads), useful);
    if (R::W == 1 && total < threads) {  // few large ones: their rows are shared
        run_some<R>(o, matrices, 0, total, n, p, threads);
        return;
    }
    const int64_t blocks = (total + R::W - 1) / R::W;
    share(blocks, threads, [&](int64_t first, int64_t last) {
        run_some<R>(o, matrices, first * R::W, std::min(last * R::W, total), n, p, 1);
    });
}

#if SIZE > 0
using Layout = LaneRows<SCALAR, SIZE, 64 / sizeof(SCALAR)>;
#else
using Layout = Panels<SCALAR>;
#endif

}  // namespace

// Step some parameters of n x p matrices.
extern "C" void ortholand_tall(const Options* o, Parameter* parameters, int count, int64_t n,
                               int p) {
    if (p > 0 && n > p) run_all<Layout>(*o, parameters, count, n, p);
}
