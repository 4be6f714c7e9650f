// One landing step of many small square matrices, all of it while a matrix is in the cache.
//
// The same steps, in the same order, as ortholand/optim (momentum, landing, safe step): that code
// is the reference, and a test holds this one equal to it. Written once, for two layouts:
//
// - Lanes<T, P, W>: W matrices of size P <= 8 side by side, entry by entry, so that every operation
//   is one on vectors of W numbers. No matrix is too small for the vector units that way.
// - Single<T>: one larger matrix, its rows padded to whole vectors, products in register blocks.
//
// "tile" is what a layout works on. Scalars per matrix (norms, steps) are doubles: squares of
// large float entries would overflow.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "steps.h"

#ifndef SCALAR  // type of the entries
#define SCALAR float
#endif
#ifndef SIZE  // rows of the matrices where they are few, else 0
#define SIZE 0
#endif

namespace {

enum Attraction { COUPLED = 0, DECOUPLED = 1, AFTER = 2 };
enum Moments { NONE = 0, MOMENTUM = 1, ADAM = 2 };

}  // namespace

extern "C" {

// A parameter: `count` matrices, one after the other.
struct Parameter {
    void* X;
    const void* G;
    void* matrix_state;  // momentum buffer or first moment, as X; or null
    void* square_state;  // second moment, a number per matrix; or null
    void* step_state;    // steps taken, a number per matrix; or null
    int64_t count;
    int64_t skipped;     // written: how many of the matrices did not take their step
    int64_t limited;     // written: how many took one that was shorter than lr
};
}

namespace {

// Layouts -----------------------------------------------------------------------------------------

template <class T, int P_, int W_>
struct Lanes {
    using Scalar = T;
    static constexpr int W = W_, P = P_, PP = P_ * P_;
    typedef T Vector __attribute__((vector_size(W_ * sizeof(T)), may_alias));
    struct alignas(64) Buffer {
        T v[PP * W];
    };
    static constexpr int p() { return P; }

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

    // C = A B
    static inline void product(Buffer& C, const Buffer& A, const Buffer& B) {
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

    static inline void read(Buffer& A, const T* from, int filled) {
        if (filled == W) {
            for (int e = 0; e < PP; ++e)
                for (int l = 0; l < W; ++l) A.v[e * W + l] = from[l * PP + e];
            return;
        }
        A = Buffer{};
        for (int l = 0; l < filled; ++l)
            for (int e = 0; e < PP; ++e) A.v[e * W + l] = from[l * PP + e];
    }

    static inline void write(const Buffer& A, T* to, int filled, const bool* taken) {
        for (int l = 0; l < filled; ++l)
            if (taken[l])
                for (int e = 0; e < PP; ++e) to[l * PP + e] = A.v[e * W + l];
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

    static inline void product(Buffer& C, const Buffer& A, const Buffer& B) {
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

    static inline void read(Buffer& A, const T* from, int) {
        for (int i = 0; i < size; ++i)
            std::memcpy(A.v + i * stride, from + i * size, size * sizeof(T));
        clear_padding(A);
    }

    static inline void write(const Buffer& A, T* to, int, const bool* taken) {
        if (!taken[0]) return;
        for (int i = 0; i < size; ++i)
            std::memcpy(to + i * size, A.v + i * stride, size * sizeof(T));
    }
};

// The algorithm, for any layout -------------------------------------------------------------------

template <class L>
struct Step {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = L::W;

    const Options& o;
    Buffer X, Xt, G, A, D, R, B;  // B: the state, then scratch
    Buffer U, V;                  // scratch, for bounds that are seldom asked for
    double d[W], bound[W], eta[W];
    T eta_t[W];
    bool taken[W];

    explicit Step(const Options& options) : o(options) {}

    // Step of the matrices [first, first + filled) of a parameter.
    void run(Parameter& parameter, int64_t first, int filled) {
        const int64_t offset = first * L::p() * L::p();
        L::read(X, static_cast<const T*>(parameter.X) + offset, filled);
        L::read(G, static_cast<const T*>(parameter.G) + offset, filled);
        transpose(Xt, X);
        relative_gradient();
        double square[W] = {}, steps[W] = {};
        if (o.moments == MOMENTUM) accumulate(parameter, offset, filled);
        if (o.moments == ADAM) adapt(parameter, first, offset, filled, square, steps);
        residual(X, Xt);
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        if (o.lr > 0 || o.attraction == COUPLED)  // a step with lr = 0 changes nothing
            L::write(R, static_cast<T*>(parameter.X) + offset, filled, taken);
        if (o.moments != NONE)
            L::write(B, static_cast<T*>(parameter.matrix_state) + offset, filled, taken);
        if (o.moments == ADAM) write_numbers(parameter, first, filled, square, steps);
        for (int l = 0; l < filled; ++l)
            if (!taken[l]) __atomic_fetch_add(&parameter.skipped, 1, __ATOMIC_RELAXED);
        if (o.rule != UNSAFE)
            for (int l = 0; l < filled; ++l)
                if (eta[l] < o.lr) __atomic_fetch_add(&parameter.limited, 1, __ATOMIC_RELAXED);
    }

    static inline void transpose(Buffer& to, const Buffer& from) {
        L::each_pair([&](int e, int t, int) { to.v[e] = from.v[t]; });
        L::clear_padding(to);
    }

    // A = Skew(G X^T), skew to the last bit.
    inline void relative_gradient() {
        L::product(R, G, Xt);
        const T half = half_of_descent<T>(o);
        L::each_pair([&](int e, int t, int) { A.v[e] = half * (R.v[e] - R.v[t]); });
        L::clear_padding(A);
    }

    // D = Y Y^T - I
    inline void residual(const Buffer& Y, const Buffer& Yt) {
        L::product(D, Y, Yt);
        L::subtract_identity(D);
    }

    // Momentum as torch.optim.SGD has it: A becomes the direction, B the new buffer.
    inline void accumulate(const Parameter& parameter, int64_t offset, int filled) {
        L::read(B, static_cast<const T*>(parameter.matrix_state) + offset, filled);
        T weight[W];
        double started[W];
        if (o.dampening != 0) L::sum_of_squares(B, started);
        for (int l = 0; l < W; ++l)
            weight[l] = o.dampening != 0 && started[l] > 0 ? T(1 - o.dampening) : T(1);
        const T momentum = T(o.momentum);
        L::each([&](int e, int l) { B.v[e] = weight[l] * A.v[e] + momentum * B.v[e]; });
        if (o.nesterov)
            L::each([&](int e, int) { A.v[e] += momentum * B.v[e]; });
        else
            A = B;
    }

    // Adam with one second moment per matrix: A becomes the direction, B the new first moment.
    inline void adapt(const Parameter& parameter, int64_t first, int64_t offset, int filled,
                      double* square, double* steps) {
        L::read(B, static_cast<const T*>(parameter.matrix_state) + offset, filled);
        double sums[W];
        L::sum_of_squares(A, sums);
        T scale[W];
        double corrected_for = 0, correction1 = 1, correction2 = 1;
        for (int l = 0; l < W; ++l) {
            const bool there = l < filled;
            const T* squares = static_cast<const T*>(parameter.square_state) + first;
            const T* counts = static_cast<const T*>(parameter.step_state) + first;
            steps[l] = (there ? double(counts[l]) : 0) + 1;
            if (steps[l] != corrected_for) {  // nearly always the same for all: they cost a lot
                corrected_for = steps[l];
                correction1 = one_minus_power(o.beta1, corrected_for);
                correction2 = one_minus_power(o.beta2, corrected_for);
            }
            const double size = at_most(std::sqrt(sums[l] / L::p()), 1e18);
            square[l] = o.beta2 * (there ? double(squares[l]) : 0) + (1 - o.beta2) * size * size;
            const double root = std::sqrt(square[l] / correction2) + o.adam_eps;
            scale[l] = T(1 / (correction1 * root));
        }
        const T old = T(o.beta1), fresh = T(1 - o.beta1);
        L::each([&](int e, int l) {
            B.v[e] = old * B.v[e] + fresh * A.v[e];
            A.v[e] = scale[l] * B.v[e];
        });
    }

    // 1 - beta^step, to full precision also where the power is almost 1.
    static inline double one_minus_power(double beta, double step) {
        return beta > 0 ? -std::expm1(step * std::log(beta)) : 1.0;
    }

    inline void write_numbers(const Parameter& parameter, int64_t first, int filled,
                              const double* square, const double* steps) {
        for (int l = 0; l < filled; ++l) {
            if (!taken[l]) continue;
            static_cast<T*>(parameter.square_state)[first + l] = T(square[l]);
            static_cast<T*>(parameter.step_state)[first + l] = T(steps[l]);
        }
    }

    // R = X - eta (A + lam D) X
    inline void coupled() {
        norms(d, D);
        const T lam = T(o.lam);
        L::each([&](int e, int) { A.v[e] += lam * D.v[e]; });
        L::product(R, A, X);
        double q[W];
        L::sum_of_squares(R, q);
        if (lr_is_safe(q)) {
            for (int l = 0; l < W; ++l) eta[l] = o.lr, taken[l] = true;
        } else {
            double norm[W];
            for (int l = 0; l < W; ++l) norm[l] = bound[l] = std::sqrt(q[l]);
            better_bounds();
            for (int l = 0; l < W; ++l) {
                eta[l] = coupled_step<T>(o, bound[l], d[l], 0);
                taken[l] = is_a_step(o, eta[l], d[l], o.lam) && eta[l] * norm[l] < INFINITY;
            }
        }
        move();
    }

    // Whether d - 2 lr b + lr^2 q <= eps for all: then the safe step is no shorter than lr, and its
    // roots and quotients, which take as long as all else, need not be known. False for NaN.
    inline bool lr_is_safe(const double* q) const {
        if (o.rule == UNSAFE || 2 * o.lam * o.lr > 1) return false;
        int unsafe = 0;
#pragma omp simd reduction(+ : unsafe)
        for (int l = 0; l < W; ++l)
            unsafe += !(d[l] - 2 * o.lr * o.lam * d[l] * (1 - d[l]) + o.lr * o.lr * q[l] <= o.aim);
        return unsafe == 0;
    }

    // Better bounds of the field R and of the distance, where the rule has any: as
    // ortholand.safe_step, Tight, Spectral and spectral_distance.
    void better_bounds() {
        if (o.rule != TIGHT && o.rule != SPECTRAL) return;
        scale_to_one(U, R, bound);
        transpose(V, U);
        L::product(G, V, U);
        double size[W];
        norms(size, G);
        if (o.rule == SPECTRAL) {
            L::product(U, G, G);
            norms(size, U);
            for (int l = 0; l < W; ++l) size[l] = std::sqrt(size[l]);
        }
        for (int l = 0; l < W; ++l)
            if (!(bound[l] < TINY)) bound[l] *= std::sqrt(size[l]);
        if (o.rule == SPECTRAL) spectral_distance();
    }

    // Each matrix divided by its norm; one that is too small for that becomes zero.
    static inline void scale_to_one(Buffer& to, const Buffer& from, const double* norm) {
        T inverse[W];
        for (int l = 0; l < W; ++l) inverse[l] = norm[l] < TINY ? T(0) : T(1 / norm[l]);
        L::each([&](int e, int l) { to.v[e] = inverse[l] * from.v[e]; });
        L::clear_padding(to);
    }

    void spectral_distance() {
        scale_to_one(U, D, d);
        L::product(V, U, U);
        L::product(G, V, V);
        double second[W], fourth[W];
        norms(second, V);
        norms(fourth, G);
        for (int l = 0; l < W; ++l) {
            const double rounding = 1 + EDGE * std::numeric_limits<T>::epsilon();
            const double below =
                rounding * d[l] * std::sqrt(fourth[l] / at_least(second[l], SMALLEST));
            const double above = at_most(d[l] * std::sqrt(std::sqrt(fourth[l])), d[l]);
            d[l] = at_least(at_most(above, o.eps), below);
        }
    }

    // Whether the free bounds allow lr for all: then nothing better is asked for.
    inline bool is_lr(const double* free) const {
        int shorter = 0;
        for (int l = 0; l < W; ++l) shorter += !(free[l] >= o.lr && d[l] <= o.aim);
        return shorter == 0;
    }

    // R = X - eta A X - omega D X
    inline void decoupled() {
        norms(d, D);
        L::product(R, A, X);
        norms(bound, R);
        L::product(A, D, X);
        double normal[W], norm[W], pull[W];
        norms(normal, A);
        for (int l = 0; l < W; ++l) norm[l] = bound[l];
        for (int l = 0; l < W; ++l) eta[l] = decoupled_step(l, normal[l], pull[l]);
        if (o.rule > FROBENIUS && !is_lr(eta)) {
            better_bounds();
            for (int l = 0; l < W; ++l) {
                const double size = at_most(d[l] * std::sqrt(1 + d[l]), normal[l]);
                eta[l] = decoupled_step(l, o.rule == SPECTRAL ? size : normal[l], pull[l]);
            }
        }
        T omega[W];
        for (int l = 0; l < W; ++l) {
            eta[l] = at_most(eta[l], o.lr);
            omega[l] = T(pull[l]);
            taken[l] = is_a_step(o, std::max(eta[l], pull[l]), d[l], o.omega) &&
                       eta[l] * norm[l] + pull[l] * d[l] < INFINITY;
        }
        move();
        L::each([&](int e, int l) { R.v[e] -= omega[l] * A.v[e]; });
    }

    // The safe step of the matrix l, whose X D has the norm `normal`, and how much of X D is taken.
    inline double decoupled_step(int l, double normal, double& omega) const {
        omega = o.omega;
        if (o.rule == UNSAFE) return o.lr;
        const double distance = d[l], norm = at_least(bound[l], SMALLEST);
        const double gentle = distance * (1 - distance) /
            at_least(normal * normal, std::numeric_limits<T>::min());
        omega = at_most(omega, at_least(gentle, 0));
        const double pull = omega * normal;
        const double room = o.aim - distance + 2 * omega * distance * (1 - distance) - pull * pull;
        const double reach = std::sqrt(at_least(pull * pull + room, 0));
        const double away = pull > 0 ? at_least(room, 0) / (reach + pull) : reach;
        return at_most(away / norm, LARGEST);
    }

    // Y = c (X - eta A X), R = Y - (Y Y^T - I) Y / 2
    inline void after() {
        norms(d, D);
        L::product(R, A, X);
        norms(bound, R);
        double norm[W];
        for (int l = 0; l < W; ++l) norm[l] = bound[l];
        steps_before_landing();
        if (o.rule > FROBENIUS && !is_lr(eta)) {
            better_bounds();
            steps_before_landing();
        }
        T c[W];
        const double p = L::p();
#pragma omp simd
        for (int l = 0; l < W; ++l) {
            eta[l] = at_most(eta[l], o.lr);
            const double length = eta[l] * norm[l];
            c[l] = T(1 / std::sqrt(length * length / p + 1));
        }
        // From distance 1 on Newton-Schulz steps may lead anywhere.
        for (int l = 0; l < W; ++l)
            taken[l] = eta[l] * norm[l] < INFINITY && (o.rule == UNSAFE || d[l] < 1);
        move();
        L::each([&](int e, int l) { X.v[e] = c[l] * R.v[e]; });
        transpose(Xt, X);
        residual(X, Xt);
        // The sums of squares are almost 1, where floats are coarse: most of what rounding would
        // leave of ||X^T X - I|| comes from them.
        if constexpr (sizeof(T) == 4) L::sharpen_diagonal(D, X);
        L::product(R, D, X);
        L::each([&](int e, int) { R.v[e] = X.v[e] - T(0.5) * R.v[e]; });
    }

    inline void steps_before_landing() {
#pragma omp simd
        for (int l = 0; l < W; ++l) {
            const double safe =
                std::sqrt(at_least(o.farthest - d[l], 0)) / at_least(bound[l], SMALLEST);
            eta[l] = o.rule == UNSAFE ? o.lr : safe;
        }
    }

    // R = X - eta R
    inline void move() {
        for (int l = 0; l < W; ++l) eta_t[l] = T(eta[l]);
        L::each([&](int e, int l) { R.v[e] = X.v[e] - eta_t[l] * R.v[e]; });
    }

    static inline void norms(double* values, const Buffer& M) {
        L::sum_of_squares(M, values);
#pragma omp simd
        for (int l = 0; l < W; ++l) values[l] = std::sqrt(values[l]);
    }
};

// Work and threads --------------------------------------------------------------------------------

struct Block {
    int parameter;
    int64_t first;
    int64_t last;
};

template <class L>
void run_blocks(const Options& o, Parameter* parameters, const Block* begin,
                const Block* end, int p) {
    // Not on the stack, which may be small in other threads, and not made anew in each step.
    alignas(Step<L>) static thread_local unsigned char memory[sizeof(Step<L>)];
    Step<L>& step = *new (memory) Step<L>(o);
    if constexpr (L::W == 1) L::resize(p);
    for (const Block* b = begin; b != end; ++b)
        for (int64_t first = b->first; first < b->last; first += L::W)
            step.run(parameters[b->parameter], first,
                     int(std::min<int64_t>(L::W, b->last - first)));
}

template <class L>
void run_all(const Options& o, Parameter* parameters, int n, int p) {
    // A thread is worth starting for a tenth of a millisecond of work at least.
    const int64_t chunk = std::max<int64_t>(L::W, (int64_t(1) << 22) / (6 * p * p * p + 60 * p * p));
    const int64_t matrices_in_chunk = (chunk + L::W - 1) / L::W * L::W;
    std::vector<Block> blocks;
    for (int i = 0; i < n; ++i)
        for (int64_t first = 0; first < parameters[i].count; first += matrices_in_chunk)
            blocks.push_back({i, first, std::min(first + matrices_in_chunk, parameters[i].count)});
    int64_t total = 0;
    for (const Block& b : blocks) total += b.last - b.first;
    const int64_t useful = std::max<int64_t>(1, total / matrices_in_chunk);
    const int threads =
        int(std::min<int64_t>({int64_t(o.threads), useful, int64_t(blocks.size())}));
    const Block* all = blocks.data();
    const int64_t size = int64_t(blocks.size());
    std::vector<std::thread> helpers;
    helpers.reserve(std::max(threads - 1, 0));
    int64_t mine = size;  // blocks from here on are the helpers'
    for (int t = threads - 1; t > 0; --t) {
        const int64_t first = size * t / threads;
        try {
            helpers.emplace_back(run_blocks<L>, std::cref(o), parameters, all + first, all + mine, p);
        } catch (const std::system_error&) {
            break;  // no thread to be had: this one does the rest
        }
        mine = first;
    }
    run_blocks<L>(o, parameters, all, all + mine, p);
    for (std::thread& helper : helpers) helper.join();
}

#if SIZE > 0
using Layout = Lanes<SCALAR, SIZE, 64 / sizeof(SCALAR)>;
#else
using Layout = Single<SCALAR>;
#endif

}  // namespace

// Step n parameters of p x p matrices.
extern "C" void ortholand_landing(const Options* o, Parameter* parameters, int n, int p) {
    if (p > 0) run_all<Layout>(*o, parameters, n, p);
}
