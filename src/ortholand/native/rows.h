// Passes over the rows of tall matrices, for which the step of tall.cpp is written once: Gram
// matrices of X and of B = g G + m state, a mix of the gradient and the state that is never kept; of
// a field X a + B b; and X <- X + X a + B b. Rows are read piece by piece into panels, of the layouts
// of tiles.h:
//
// - Lanes: many matrices side by side; or a single one, whose rows are dealt out to the lanes.
// - Single: one matrix of more columns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "base.h"
#include "steps.h"
#include "tiles.h"

namespace {

// B = g G + m state, for each of W matrices.
template <class T, int W>
struct Mix {
    T g[W], m[W];
};

// What a pass over the rows sums up besides X^T X and X^T B.
struct Wanted {
    bool state;   // whether there is one
    bool K;       // X^T K and ||K||^2, K a second mix
    bool square;  // B^T B
    bool exact;   // squares in double precision throughout: they may underflow
};

// Products with panels -----------------------------------------------------------------------------

template <class L>
struct Products;

template <class T, int P, int W>
struct Products<Lanes<T, P, W>> {
    using L = Lanes<T, P, W>;
    using Vector = typename L::Vector;
    static constexpr int CAPACITY = 512 * W;  // entries of a panel
    static constexpr int SLICE = 128;         // entries of a lane, if one matrix has all of them
    static constexpr int COLUMNS = P;
    static int height() { return 512 / P; }

    // R rows from i on by N columns from j on of C += A^T B.
    template <int R, int N>
    static void block(T* C, const T* A, const T* B, int rows, int i, int j) {
        const Vector *a = L::vectors(A) + i, *b = L::vectors(B) + j;
        Vector sum[R][N] = {};
        for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
            for (int k = 0; k < R; ++k)
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[k][n] += a[r * P + k] * b[r * P + n];
        for (int k = 0; k < R; ++k)
            for (int n = 0; n < N; ++n)
                reinterpret_cast<Vector*>(C)[(i + k) * P + j + n] += sum[k][n];
    }

    // C += A^T B; of a symmetric one the blocks above the diagonal only.
    __attribute__((noinline)) static void gram(T* C, const T* A, const T* B, int rows,
                                               bool symmetric) {
        constexpr int R = P % 2 ? 1 : 2, N = P < 4 ? P : 4, REST = P % N;
        for (int i = 0; i < P; i += R) {
            for (int j = symmetric ? i / N * N : 0; j + N <= P; j += N)
                block<R, N>(C, A, B, rows, i, j);
            if constexpr (REST > 0) block<R, REST>(C, A, B, rows, i, P - REST);
        }
    }

    // Y = start + X a + B b, or without the last; nothing to start with is zero.
    template <bool BOTH>
    __attribute__((noinline)) static void combine(T* Y, const T* start, const T* X, const T* a,
                                                  const T* B, const T* b, int rows) {
        const Vector *va = L::vectors(a), *vb = L::vectors(b);
        for (int r = 0; r < rows; ++r) {
            const Vector *x = L::vectors(X) + r * P, *g = L::vectors(B) + r * P;
            Vector* y = reinterpret_cast<Vector*>(Y) + r * P;
#pragma GCC unroll 8
            for (int j = 0; j < P; ++j) {
                Vector sum = {};
                if (start) sum = L::vectors(start)[r * P + j];
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

template <class T>
struct Products<Single<T>> {
    using L = Single<T>;
    using Vector = typename L::Vector;
    static constexpr int TALLEST = 240, ENTRIES = 32768 / sizeof(T);
    static constexpr int COLUMNS = L::LARGEST_P, SLICE = 0;
    static constexpr int CAPACITY = ENTRIES + 12 * COLUMNS;  // with rows that fill blocks
    static int height() { return std::min(TALLEST, ENTRIES / L::stride / 12 * 12); }

    static Vector& at(T* place) { return *reinterpret_cast<Vector*>(place); }
    static const Vector& at(const T* place) { return *reinterpret_cast<const Vector*>(place); }

    // f(first column, number of vectors) for blocks of up to three vectors, none alone but one.
    template <class F>
    static void each_block(int first, int stride, F f) {
        for (int j = first, left = (stride - first) / V; left > 0;) {
            const int now = left == 4 ? 2 : std::min(left, 3);
            switch (now) {
                case 3: f(j, std::integral_constant<int, 3>()); break;
                case 2: f(j, std::integral_constant<int, 2>()); break;
                default: f(j, std::integral_constant<int, 1>());
            }
            j += now * V, left -= now;
        }
    }

    // Four rows by N vectors of C += A^T B, held in registers while the rows of a panel run by:
    // even and odd ones apart if there are few, because additions wait for each other.
    template <int N>
    static void gram_block(T* C, const T* A, const T* B, int rows, int step) {
        constexpr int APART = N == 1 ? 2 : 1;
        Vector sum[APART][4][N] = {};
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

    __attribute__((noinline)) static void gram(T* C, const T* A, const T* B, int rows,
                                               bool symmetric) {
        const int p = L::size, stride = L::stride;
        for (int i = 0; i < p; i += 4)
            each_block(symmetric ? i / V * V : 0, stride, [=](int j, auto width) {
                gram_block<width()>(C + i * stride + j, A + i, B + j, rows, stride);
            });
    }

    // Some rows by N vectors of Y = start + X a + B b, twelve vectors in all.
    template <int N, bool BOTH>
    static void combine_block(T* Y, const T* start, const T* X, const T* a, const T* B, const T* b,
                              int p, int step) {
        constexpr int R = 12 / N;
        Vector sum[R][N] = {};
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

    template <bool BOTH>
    __attribute__((noinline)) static void combine(T* Y, const T* start, const T* X, const T* a,
                                                  const T* B, const T* b, int rows) {
        const int p = L::size, stride = L::stride;
        each_block(0, stride, [=](int j, auto width) {
            for (int r = 0; r < rows; r += 12 / width()) {
                const int64_t at = r * stride;
                combine_block<width(), BOTH>(Y + at + j, start ? start + at + j : nullptr, X + at,
                                             a + j, B + at, b + j, p, stride);
            }
        });
    }
};

// Passes -------------------------------------------------------------------------------------------

template <class L>
class Rows {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    using Vector = typename L::Vector;
    using By = Products<L>;
    static constexpr int W = L::W, S = L::S;
    using Doubles = typename L::Doubles;
    static constexpr int64_t IN_CHUNK = int64_t(1) << 23;  // operations of a product
    struct Panel {
        alignas(64) T X[By::CAPACITY];
        alignas(64) T B[By::CAPACITY];
        alignas(64) T K[By::CAPACITY];
        alignas(64) T Y[By::CAPACITY];
    };
    // What some of the rows sum up to.
    struct Sums {
        Buffer* matrices[4];
        double diagonal[By::COLUMNS * W];
        double squares[2 * W];  // of B, and of K
    };

    const Matrix<T>* matrices = nullptr;
    bool sliced = false;  // whether all lanes are of one matrix
    bool kept = false;    // whether a panel has all rows, mixed
    bool K_is_gradient = false;
    int filled = 0, row = 0;
    int64_t n = 0, threads = 1, rows_in_chunk = 1, chunks = 1;
    T scale = T(1);
    Mix<T, W> mix_B, mix_K;
    Wanted wanted{};

  public:
    // Whether lanes are better filled by slices of one matrix than by few, or large, ones.
    static bool in_slices(int64_t rows, int64_t count) {
        return W > 1 && (rows > By::height() || count < 4);
    }

    void open(const Matrix<T>* these, int count, bool in_slices, int64_t rows, int64_t helpers,
              T weight_scale) {
        matrices = these, filled = count, sliced = in_slices, n = rows, threads = helpers;
        scale = weight_scale, row = L::at(1, 0), kept = false;
        // The number of threads changes neither the chunks nor any sum.
        const int64_t least = IN_CHUNK / (int64_t(L::p()) * row / W) + By::height() * W;
        chunks = W > 1 && !sliced ? 1 : std::max<int64_t>(1, std::min<int64_t>(16, n / least));
        rows_in_chunk = (n + chunks - 1) / chunks;
    }

    void mix(const Mix<T, W>& of_B, const Mix<T, W>& of_K, const Wanted& what) {
        mix_B = of_B, mix_K = of_K, wanted = what, kept = false, K_is_gradient = true;
        for (int l = 0; l < W; ++l) K_is_gradient &= mix_K.g[l] == T(1) && mix_K.m[l] == T(0);
    }

    // The largest numbers of B, and of K or G.
    void largest(double* values) {
        std::fill(values, values + W, 0.0);
        each_panel(0, n, [&](Panel& own, const Piece<T>& piece) {
            for (const T* A : {own.B, own.K}) raise_to_largest<W>(values, A, piece.rows * row);
        });
        if (sliced) std::fill(values, values + W, *std::max_element(values, values + W));
    }

    // Of the state B + X C, or K + X C.
    void largest_kept(const Buffer& C, bool keeps_K, double* values) {
        std::fill(values, values + W, 0.0);
        each_panel(0, n, [&](Panel& own, const Piece<T>& piece) {
            const T* start = keeps_K ? own.K : own.B;
            By::template combine<false>(own.Y, start, own.X, C.v, own.X, C.v, piece.rows);
            raise_to_largest<W>(values, own.Y, piece.rows * row);
        });
        if (sliced) std::fill(values, values + W, *std::max_element(values, values + W));
    }

    void gram(Buffer& D, Buffer& M, Buffer& N, Buffer& Q, double* squares_of_B,
              double* squares_of_K) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            By::gram(to.matrices[0]->v, own.X, own.X, rows, true);
            for (int c = 0; c < row; c += S)
                add_squares(to.diagonal + c, own.X + c, row, rows, wanted.exact);
            By::gram(to.matrices[1]->v, own.X, own.B, rows, false);
            add_all_squares(to.squares, own.B, rows);
            if (wanted.K) {
                By::gram(to.matrices[2]->v, own.X, own.K, rows, false);
                add_all_squares(to.squares + W, own.K, rows);
            }
            if (wanted.square) By::gram(to.matrices[3]->v, own.B, own.B, rows, true);
        };
        Buffer *of_K = wanted.K ? &N : nullptr, *of_B = wanted.square ? &Q : nullptr;
        const Sums all = sum_up({&D, &M, of_K, of_B}, add);
        mirror(D);
        for (int j = 0; j < L::p(); ++j)
            for (int l = 0; l < W; ++l) D.v[L::at(j, j) + l] = T(all.diagonal[j * W + l] - 1);
        if (wanted.square) mirror(Q);
        std::copy_n(all.squares, W, squares_of_B);
        std::copy_n(all.squares + W, W, squares_of_K);
    }

    // Of the field X a + B b: its squared norm, and its Gram matrix.
    void measure(const Buffer& a, const Buffer& b, double* squares, Buffer* Q) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            By::template combine<true>(own.Y, nullptr, own.X, a.v, own.B, b.v, rows);
            add_all_squares(to.squares, own.Y, rows);
            if (Q) By::gram(to.matrices[0]->v, own.Y, own.Y, rows, true);
        };
        std::copy_n(sum_up({Q}, add).squares, W, squares);
        if (Q) mirror(*Q);
    }

    // X <- X + X a + B b, and state <- unit (B + X C), or that of K; if there is a, and C.
    void apply(const Buffer* a, const Buffer& b, const Buffer* C, bool keeps_K, const bool* taken,
               const T* unit) {
        const auto factor = L::numbers(unit);
        const bool rescaled = std::any_of(unit, unit + W, [](T x) { return x != T(1); });
        each_chunk([&](int64_t, int64_t start, int64_t end) {
            each_panel(start, end, [&](Panel& own, const Piece<T>& piece) {
                const int rows = piece.rows;
                if (C) {
                    const T* old = keeps_K ? own.K : own.B;
                    By::template combine<false>(own.Y, old, own.X, C->v, own.X, C->v, rows);
                    for (int e = 0; rescaled && e < rows * row; e += S) at(own.Y + e) *= factor;
                    L::template move<false>(own.Y, piece, &Matrix<T>::state, taken);
                }
                if (!a) return;
                // Weights are seldom scaled.
                if (scale != T(1)) L::template move<true>(own.K, piece, &Matrix<T>::X, nullptr);
                const T* old = scale == T(1) ? own.X : own.K;
                By::template combine<true>(own.Y, old, own.X, a->v, own.B, b.v, rows);
                L::template move<false>(own.Y, piece, &Matrix<T>::X, taken);
            });
        });
    }

  private:
    static Vector& at(T* place) { return *reinterpret_cast<Vector*>(place); }
    static const Vector& at(const T* place) { return *reinterpret_cast<const Vector*>(place); }

    static Panel& panel() {
        static thread_local Panel own;
        return own;
    }

    template <class Run>
    void each_chunk(Run run) {
        share(chunks, threads, [&, p = L::p()](int64_t begin, int64_t end) {
            if constexpr (W == 1) L::resize(p);  // each thread has sizes of its own
            for (int64_t c = begin; c < end; ++c)
                run(c, c * rows_in_chunk, std::min(n, (c + 1) * rows_in_chunk));
        });
    }

    // run(panel, piece) for all rows from `first` on. Few rows stay in the panel from pass to pass.
    template <class Run>
    void each_panel(int64_t first, int64_t end, Run run) {
        Panel& own = panel();
        while (first < end) {
            const Piece<T> piece = next(first, end);
            const int64_t rows = sliced ? piece.rows * piece.filled : piece.rows;
            if (!kept) load(own, piece);
            if (rows == n) kept = true;
            run(own, piece);
            first += rows;
        }
    }

    Piece<T> next(int64_t first, int64_t end) const {
        const int64_t left = end - first;
        if (!sliced)
            return {matrices, filled, int(std::min<int64_t>(By::height(), left)), first, 0};
        const int rows = int(std::min<int64_t>(By::SLICE / L::p(), left / W));
        return {matrices, rows ? W : int(left), std::max(rows, 1), first, std::max(rows, 1)};
    }

    // X, B and where it is wanted K of some rows.
    __attribute__((noinline)) void load(Panel& own, const Piece<T>& piece) const {
        const int entries = piece.rows * row;
        L::template move<true>(own.X, piece, &Matrix<T>::X, nullptr);
        if (scale != T(1))
            for (int e = 0; e < entries; e += S) at(own.X + e) /= scale;
        L::template move<true>(own.K, piece, &Matrix<T>::G, nullptr);
        if (wanted.state) L::template move<true>(own.Y, piece, &Matrix<T>::state, nullptr);
        const auto g = L::numbers(mix_B.g), m = L::numbers(mix_B.m);
        if (!wanted.state) {
            for (int e = 0; e < entries; e += S) at(own.B + e) = g * at(own.K + e);
        } else if (!wanted.K || K_is_gradient) {
            for (int e = 0; e < entries; e += S)
                at(own.B + e) = g * at(own.K + e) + m * at(own.Y + e);
        } else {
            const auto h = L::numbers(mix_K.g), k = L::numbers(mix_K.m);
            for (int e = 0; e < entries; e += S) {
                const Vector G = at(own.K + e), state = at(own.Y + e);
                at(own.B + e) = g * G + m * state;
                at(own.K + e) = h * G + k * state;
            }
        }
    }

    // The sums of all rows, to which add(sums, panel, rows) adds those of a panel. The first chunk
    // adds to these matrices; others to matrices of their own, which are added up afterwards.
    template <class Add>
    Sums sum_up(std::initializer_list<Buffer*> wanted_matrices, Add add) {
        const int64_t count = wanted_matrices.size();
        // Blocks have four rows.
        const int most = sizeof(Buffer) / sizeof(T);
        const int entries = std::min<int>(L::at((L::p() + 3) / 4 * 4, 0), most);
        std::vector<Sums> parts(chunks);
        std::vector<Buffer> further(count * (chunks - 1));
        for (int64_t c = 0; c < chunks; ++c)
            for (int64_t k = 0; k < count; ++k) {
                Buffer* first = wanted_matrices.begin()[k];
                parts[c].matrices[k] = first && c ? &further[(c - 1) * count + k] : first;
                if (first) std::fill_n(parts[c].matrices[k]->v, entries, T(0));
            }
        each_chunk([&](int64_t c, int64_t first, int64_t last) {
            each_panel(first, last, [&](Panel& own, const Piece<T>& piece) {
                add(parts[c], own, piece.rows);
            });
        });
        Sums& all = parts[0];
        for (int64_t c = 1; c < chunks; ++c) {
            for (int64_t k = 0; k < count; ++k)
                for (int e = 0; all.matrices[k] && e < entries; ++e)
                    all.matrices[k]->v[e] += parts[c].matrices[k]->v[e];
            for (int j = 0; j < By::COLUMNS * W; ++j) all.diagonal[j] += parts[c].diagonal[j];
            for (int k = 0; k < 2 * W; ++k) all.squares[k] += parts[c].squares[k];
        }
        if (sliced) {
            for (int64_t k = 0; k < count; ++k)
                if (all.matrices[k]) add_lanes(all.matrices[k]->v, L::at(L::p(), 0));
            add_lanes(all.diagonal, By::COLUMNS * W);
            add_lanes(all.squares, 2 * W);
        }
        return all;
    }

    // The sum of all lanes becomes that of each.
    template <class Number>
    static void add_lanes(Number* A, int entries) {
        for (int e = 0; e < entries; e += W) {
            double sum = 0;
            for (int l = 0; l < W; ++l) sum += A[e + l];
            std::fill_n(A + e, W, Number(sum));
        }
    }

    static void mirror(Buffer& A) {
        L::each_pair([&](int e, int t, int) {
            if (t < e) A.v[e] = A.v[t];
        });
    }

    // Squares of `count` vectors that are so far apart, four at a time in their own precision: so
    // few add no error up.
    __attribute__((always_inline)) static void add_squares(double* sums, const T* A, int apart,
                                                           int count, bool exact) {
        Doubles sum = {};
        int k = 0;
        for (; !exact && k + 4 <= count; k += 4) {
            Vector four = at(A + k * apart) * at(A + k * apart);
            for (int i = k + 1; i < k + 4; ++i) four += at(A + i * apart) * at(A + i * apart);
            sum += __builtin_convertvector(four, Doubles);
        }
        for (; k < count; ++k) {
            const Doubles x = __builtin_convertvector(at(A + k * apart), Doubles);
            sum += x * x;
        }
        for (int s = 0; s < S; ++s) sums[s] += sum[s];
    }

    void add_all_squares(double* sums, const T* A, int rows) const {
        double parts[S] = {};
        add_squares(parts, A, S, rows * row / S, wanted.exact);
        for (int s = 0; s < S; ++s) sums[s % W] += parts[s];
    }
};

}  // namespace
