// Passes over the rows of matrices, for which the step of landing.cpp is written once: Gram matrices
// of X and of B = g G + m state, a mix of the gradient and the state that is never kept; of a field
// X a + B b; and X <- X + X a + B b. Rows are read piece by piece into panels, of the layouts of
// tiles.h. Lanes may also be filled by one matrix, whose rows are dealt out to them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <system_error>
#include <thread>
#include <vector>

#include "steps.h"
#include "tiles.h"

namespace {

// run(first, last) for parts of [0, count), by up to so many threads, this one among them.
template <class Run>
void share(int64_t count, int64_t threads, Run run) {
    threads = std::max<int64_t>(1, std::min(threads, count));
    std::vector<std::thread> helpers;
    helpers.reserve(threads - 1);
    int64_t mine = count;  // what is from here on is the helpers'
    for (int64_t t = threads - 1; t > 0; --t) {
        const int64_t first = count * t / threads;
        try {
            helpers.emplace_back(run, first, mine);
        } catch (const std::system_error&) {
            break;  // no thread to be had: this one does the rest
        }
        mine = first;
    }
    run(int64_t(0), mine);
    for (std::thread& helper : helpers) helper.join();
}

// B = g G + m state, for each of W matrices.
struct Mix {
    Each<T> g, m;
};

// What a pass over the rows sums up besides X^T X and X^T B.
struct Wanted {
    bool state;   // whether there is one
    bool K;       // X^T K and ||K||^2, K a second mix
    bool square;  // B^T B
    bool sizes;   // squares of columns of X, and of B and K, in double precision
    bool exact;   // that throughout: they may underflow
};

class Rows {
    static constexpr int64_t IN_CHUNK = int64_t(1) << 23;  // operations of a product
    struct Panel {
        alignas(64) T X[L::CAPACITY];
        alignas(64) T B[L::CAPACITY];
        alignas(64) T K[L::CAPACITY];
        alignas(64) T Y[L::CAPACITY];
    };
    // What some of the rows sum up to.
    struct Sums {
        Buffer* matrices[4] = {};
        double diagonal[L::COLUMNS * W] = {};
        Numbers squares[2] = {0, 0};  // of B, and of K
        bool begun = false;           // whether there is something to add to

        void add_gram(int k, const T* A, const T* B, int rows, bool symmetric) {
            if (matrices[k]) ::gram(matrices[k]->v, A, B, rows, symmetric, begun);
        }
    };

    const Matrix* matrices = nullptr;
    bool sliced = false;  // whether all lanes are of one matrix
    bool kept = false;    // whether a panel has all rows, mixed
    int filled = 0, row = 0;
    int64_t n = 0, threads = 1, rows_in_chunk = 1, chunks = 1;
    T scale = T(1);

  public:
    // Of the rows that are read by `gram`, or after `reread`.
    Mix mix_B, mix_K;
    Wanted wanted{};

    void reread() { kept = false; }

    // Whether lanes are better filled by slices of one matrix than by few, or large, ones.
    static bool in_slices(int64_t rows, int64_t count) {
        return W > 1 && (rows > L::height() || count < 4);
    }

    void open(const Matrix* these, int count, bool in_slices, int64_t rows, int64_t helpers,
              T weight_scale) {
        matrices = these, filled = count, sliced = in_slices, n = rows, threads = helpers;
        scale = weight_scale, row = L::at(1, 0);
        // The number of threads changes neither the chunks nor any sum.
        const int64_t least = IN_CHUNK / (int64_t(L::p()) * row / W) + L::height() * W;
        chunks = n < 2 * least || (W > 1 && !sliced) ? 1 : std::min<int64_t>(16, n / least);
        rows_in_chunk = (n + chunks - 1) / chunks;
    }

    // The largest numbers of B, and of K or G; with C, of the state B + X C, or K + X C.
    Numbers largest(const Buffer* C, bool keeps_K) {
        Numbers values = 0;
        each_panel(0, n, [&](Panel& own, const Piece& piece) {
            if (C) combine_state(own, *C, keeps_K, piece.rows);
            raise_to_largest(values, C ? own.Y : own.B, piece.rows * row);
            if (!C && wanted.state) raise_to_largest(values, own.K, piece.rows * row);
        });
        return sliced ? Numbers(*std::max_element(values.v, values.v + W)) : values;
    }

    // X^T X - I, X^T B, X^T K, B^T B, and the squared norms of B and of K.
    void gram(Buffer& D, Buffer& M, Buffer& N, Buffer& Q, Numbers& squares_of_B,
              Numbers& squares_of_K) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            to.add_gram(0, own.X, own.X, rows, true);
            for (int c = 0; wanted.sizes && c < row; c += S)
                add_squares(to.diagonal + c, own.X + c, row, rows, wanted.exact);
            to.add_gram(1, own.X, own.B, rows, false);
            to.add_gram(2, own.X, own.K, rows, false);
            to.add_gram(3, own.B, own.B, rows, true);
            if (wanted.sizes) add_all_squares(to.squares[0], own.B, rows);
            if (wanted.K) add_all_squares(to.squares[1], own.K, rows);
        };
        reread();
        Sums all = sum_up({&D, &M, wanted.K ? &N : nullptr, wanted.square ? &Q : nullptr}, add);
        L::transpose(D, D, true);
        if (!wanted.sizes) add_to_diagonal(D, T(-1));
        for (int j = 0; wanted.sizes && j < L::p(); ++j)
            for (int l = 0; l < W; ++l) D.v[L::at(j, j) + l] = T(all.diagonal[j * W + l] - 1);
        if (wanted.square) L::transpose(Q, Q, true);
        squares_of_B = all.squares[0], squares_of_K = all.squares[1];
    }

    // Of the field X a + B b: its squared norm, and its Gram matrix. There may be no b.
    Numbers measure(const Buffer& a, const Buffer* b, Buffer* Q) {
        const auto add = [&](Sums& to, Panel& own, int rows) {
            combine(own, nullptr, a, b, rows);
            add_all_squares(to.squares[0], own.Y, rows);
            to.add_gram(0, own.Y, own.Y, rows, true);
        };
        const Sums all = sum_up({Q}, add);
        if (Q) L::transpose(*Q, *Q, true);
        return all.squares[0];
    }

    // X <- X + X a + B b, and state <- unit (B + X C), or that of K; if there is a, b and C.
    void apply(const Buffer* a, const Buffer* b, const Buffer* C, bool keeps_K, const Flags& taken,
               const Each<T>& unit) {
        const auto factor = element(unit.v);
        each_chunk([&](int64_t, int64_t start, int64_t end) {
            each_panel(start, end, [&](Panel& own, const Piece& piece) {
                if (C) {
                    combine_state(own, *C, keeps_K, piece.rows);
                    for (int e = 0; wanted.exact && e < piece.rows * row; e += S)
                        *vectors(own.Y + e) *= factor;
                    L::move<false>(own.Y, piece, &Parameter::state, taken.v);
                }
                if (!a) return;
                // Weights are seldom scaled.
                if (scale != T(1)) L::move<true>(own.K, piece, &Parameter::X, nullptr);
                combine(own, scale == T(1) ? own.X : own.K, *a, b, piece.rows);
                L::move<false>(own.Y, piece, &Parameter::X, taken.v);
            });
        });
    }

  private:
    // Y = start + X a + B b
    static void combine(Panel& own, const T* start, const Buffer& a, const Buffer* b, int rows) {
        if (b)
            ::combine<true>(own.Y, start, own.X, a.v, own.B, b->v, rows);
        else
            ::combine<false>(own.Y, start, own.X, a.v, own.X, a.v, rows);
    }

    static void combine_state(Panel& own, const Buffer& C, bool keeps_K, int rows) {
        combine(own, keeps_K ? own.K : own.B, C, nullptr, rows);
    }

    __attribute__((noinline)) static Panel& panel() {
        static thread_local Panel own;
        return own;
    }

    template <class Run>
    void each_chunk(Run run) {
        if (chunks == 1) return run(int64_t(0), int64_t(0), n);
        share(chunks, threads, [&, p = L::p()](int64_t begin, int64_t end) {
            L::resize(p);  // each thread has sizes of its own
            for (int64_t c = begin; c < end; ++c)
                run(c, c * rows_in_chunk, std::min(n, (c + 1) * rows_in_chunk));
        });
    }

    // run(panel, piece) for all rows from `first` on. Few rows stay in the panel from pass to pass.
    template <class Run>
    void each_panel(int64_t first, int64_t end, Run run) {
        Panel& own = panel();
        while (first < end) {
            const Piece piece = next(first, end);
            const int64_t rows = sliced ? piece.rows * piece.filled : piece.rows;
            if (!kept) load(own, piece);
            if (rows == n) kept = true;
            run(own, piece);
            first += rows;
        }
    }

    Piece next(int64_t first, int64_t end) const {
        const int64_t left = end - first;
        if (!sliced) return {matrices, filled, int(std::min<int64_t>(L::height(), left)), first, 0};
        const int rows = int(std::min<int64_t>(L::SLICE / L::p(), left / W));
        return {matrices, rows ? W : int(left), std::max(rows, 1), first, std::max(rows, 1)};
    }

    // X, B and where it is wanted K of some rows.
    __attribute__((noinline)) void load(Panel& own, const Piece& piece) const {
        const int entries = piece.rows * row;
        L::move<true>(own.X, piece, &Parameter::X, nullptr);
        if (scale != T(1))
            for (int e = 0; e < entries; e += S) *vectors(own.X + e) /= scale;
        L::move<true>(wanted.state ? own.K : own.B, piece, &Parameter::G, nullptr);
        if (wanted.state) L::move<true>(own.Y, piece, &Parameter::state, nullptr);
        const auto g = element(mix_B.g.v), m = element(mix_B.m.v);
        const auto h = element(mix_K.g.v), k = element(mix_K.m.v);
        // Nearly always K is the gradient, or of no use; unless matrices have units of their own.
        const bool mixes_K = wanted.K && (wanted.exact || mix_K.g[0] != T(1) || mix_K.m[0] != T(0));
        for (int e = 0; e < entries; e += S) {
            if (!wanted.state) {
                *vectors(own.B + e) *= g;
                continue;
            }
            const Vector G = *vectors(own.K + e), state = *vectors(own.Y + e);
            *vectors(own.B + e) = g * G + m * state;
            if (mixes_K) *vectors(own.K + e) = h * G + k * state;
        }
    }

    // The sums of all rows, to which add(sums, panel, rows) adds those of a panel. The first chunk
    // adds to these matrices; others to matrices of their own, which are added up afterwards.
    template <class Add>
    Sums sum_up(std::initializer_list<Buffer*> wanted_matrices, Add add) {
        const int64_t count = wanted_matrices.size();
        const int entries = L::at(L::p(), 0);
        Sums all;
        std::copy(wanted_matrices.begin(), wanted_matrices.end(), all.matrices);
        std::vector<Sums> others(chunks - 1);  // empty, and so free, for all small matrices
        std::vector<Buffer> further(count * (chunks - 1));
        for (int64_t c = 0; c < chunks - 1; ++c)
            for (int64_t k = 0; k < count; ++k)
                others[c].matrices[k] = all.matrices[k] ? &further[c * count + k] : nullptr;
        each_chunk([&](int64_t c, int64_t first, int64_t last) {
            Sums& part = c ? others[c - 1] : all;
            each_panel(first, last, [&](Panel& own, const Piece& piece) {
                add(part, own, piece.rows);
                part.begun = true;
            });
        });
        for (const Sums& other : others) {
            for (int64_t k = 0; k < count; ++k)
                for (int e = 0; all.matrices[k] && e < entries; ++e)
                    all.matrices[k]->v[e] += other.matrices[k]->v[e];
            for (int j = 0; j < L::COLUMNS * W; ++j) all.diagonal[j] += other.diagonal[j];
            for (int k : {0, 1}) all.squares[k] = all.squares[k] + other.squares[k];
        }
        if (sliced) {
            for (int64_t k = 0; k < count; ++k)
                if (all.matrices[k]) add_lanes(all.matrices[k]->v, entries);
            add_lanes(all.diagonal, L::COLUMNS * W);
            for (Numbers& squares : all.squares) add_lanes(squares.v, W);
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

    // Squares of `count` vectors that are so far apart, four at a time in their own precision: so
    // few add no error up.
    __attribute__((always_inline)) static void add_squares(double* sums, const T* A, int apart,
                                                           int count, bool exact) {
        const auto at = [=](int i) { return *vectors(A + i * apart); };
        Doubles sum = {};
        int k = 0;
        for (; !exact && k + 4 <= count; k += 4) {
            Vector four = at(k) * at(k);
            for (int i = k + 1; i < k + 4; ++i) four += at(i) * at(i);
            sum += __builtin_convertvector(four, Doubles);
        }
        for (; k < count; ++k) {
            const Doubles x = __builtin_convertvector(at(k), Doubles);
            sum += x * x;
        }
        for (int s = 0; s < S; ++s) sums[s] += sum[s];
    }

    void add_all_squares(Numbers& sums, const T* A, int rows) const {
        double parts[S] = {};
        add_squares(parts, A, S, rows * row / S, wanted.exact);
        for (int s = 0; s < S; ++s) sums[s % W] += parts[s];
    }
};

}  // namespace
