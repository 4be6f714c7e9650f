// One landing step of many small square matrices, all of it while a matrix is in the cache.
//
// The same steps, in the same order, as ortholand/optim (momentum, landing, safe step): that code
// is the reference, and a test holds this one equal to it. Written once, for the layouts of tiles.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <vector>

#include "steps.h"
#include "threads.h"
#include "tiles.h"

#ifndef SCALAR  // type of the entries
#define SCALAR float
#endif
#ifndef SIZE  // rows of the matrices where they are few, else 0
#define SIZE 0
#endif

namespace {

// The algorithm, for any layout -------------------------------------------------------------------

template <class L>
struct Step : Tiles<L> {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = L::W;
    using Tiles<L>::norms;
    using Tiles<L>::sharp_bounds;
    using Tiles<L>::spectral_bounds;
    using Tiles<L>::transpose;

    const Options& o;
    Buffer X, Xt, G, A, D, R, B;  // B: the state, then scratch
    Buffer U, V;                  // scratch, for moves that are too long
    double d[W], norm[W], eta[W];
    bool taken[W];

    explicit Step(const Options& options) : o(options) {}

    // Step of the matrices [first, first + filled) of a parameter.
    void run(Parameter& parameter, int64_t first, int filled) {
        L::read(X, static_cast<const T*>(parameter.X), parameter, first, filled);
        L::read(G, static_cast<const T*>(parameter.G), parameter, first, filled);
        if (is_scaled(o)) unscale();
        for (int l = filled; l < W; ++l)  // what is not there is on the manifold, and stays
            for (int i = 0; i < L::p(); ++i) X.v[L::at(i, i) + l] = T(1);
        transpose(Xt, X);
        relative_gradient();
        double square[W] = {}, steps[W] = {};
        if (o.moments == MOMENTUM) accumulate(parameter, first, filled);
        if (o.moments == ADAM) adapt(parameter, first, filled, square, steps);
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        if (is_scaled(o)) follow(parameter, first, filled);
        if (o.lr > 0)  // a step with lr = 0 changes nothing
            L::write(R, static_cast<T*>(parameter.X), parameter, first, filled, taken);
        if (o.moments != NONE)
            L::write(B, static_cast<T*>(parameter.matrix_state), parameter, first, filled, taken);
        if (o.moments == ADAM) write_numbers(parameter, first, filled, square, steps);
        for (int l = 0; l < filled; ++l)
            if (!taken[l]) __atomic_fetch_add(&parameter.skipped, 1, __ATOMIC_RELAXED);
        if (o.rule != UNSAFE)
            for (int l = 0; l < filled; ++l)
                if (eta[l] < o.lr) __atomic_fetch_add(&parameter.limited, 1, __ATOMIC_RELAXED);
    }

    // Weights are seldom scaled: what that takes is kept out of the way of all others.

    // X = W / scale
    __attribute__((noinline)) void unscale() {
        const T scale = T(o.scale);
        L::each([&](int e, int) { X.v[e] /= scale; });
    }

    // R = W + scale (R - W / scale)
    __attribute__((noinline)) void follow(const Parameter& parameter, int64_t first, int filled) {
        const T scale = T(o.scale);
        L::read(G, static_cast<const T*>(parameter.X), parameter, first, filled);
        L::each([&](int e, int) { R.v[e] = G.v[e] + scale * (R.v[e] - G.v[e] / scale); });
    }

    // A = Skew(G X^T), skew to the last bit.
    inline void relative_gradient() {
        L::product(R, G, Xt);
        const T half = half_of_descent<T>(o);
        L::each_pair([&](int e, int t, int) { A.v[e] = half * (R.v[e] - R.v[t]); });
        L::clear_padding(A);
    }

    // E = Y Y^T - I
    static inline void residual(Buffer& E, const Buffer& Y, const Buffer& Yt) {
        L::product(E, Y, Yt);
        L::subtract_identity(E);
    }

    // Momentum as torch.optim.SGD has it: A becomes the direction, B the new buffer.
    inline void accumulate(const Parameter& parameter, int64_t first, int filled) {
        L::read(B, static_cast<const T*>(parameter.matrix_state), parameter, first, filled);
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
    inline void adapt(const Parameter& parameter, int64_t first, int filled, double* square,
                      double* steps) {
        L::read(B, static_cast<const T*>(parameter.matrix_state), parameter, first, filled);
        double sums[W];
        L::sum_of_squares(A, sums);
        T scale[W];
        AdamNumbers numbers;
        const T* squares = static_cast<const T*>(parameter.square_state) + first;
        const T* counts = static_cast<const T*>(parameter.step_state) + first;
        for (int l = 0; l < W; ++l) {
            const bool there = l < filled;
            numbers.update(o, std::sqrt(sums[l]), L::p(), there ? double(squares[l]) : 0,
                           there ? double(counts[l]) : 0);
            square[l] = numbers.square;
            steps[l] = numbers.steps;
            scale[l] = T(numbers.scale);
        }
        const T old = T(o.beta1), fresh = T(1 - o.beta1);
        L::each([&](int e, int l) {
            B.v[e] = old * B.v[e] + fresh * A.v[e];
            A.v[e] = scale[l] * B.v[e];
        });
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
        residual(D, X, Xt);
        norms(d, D);
        const T lam = T(o.lam);
        L::each([&](int e, int) { A.v[e] += lam * D.v[e]; });
        L::product(R, A, X);
        double q[W];
        L::sum_of_squares(R, q);
        if (longest_is_safe(q)) {
            for (int l = 0; l < W; ++l) eta[l] = longest_step(o), taken[l] = true;
        } else {
            for (int l = 0; l < W; ++l) norm[l] = std::sqrt(q[l]);
            if (o.rule == SPECTRAL)
                shorten_coupled();
            else
                for (int l = 0; l < W; ++l) eta[l] = coupled_step<T>(o, norm[l], d[l], 0);
            for (int l = 0; l < W; ++l)
                taken[l] = is_a_step(o, eta[l], d[l], o.lam) &&
                           is_finite_step<T>(o, eta[l] * norm[l]);
        }
        move(R);
    }

    // Whether the squared norms of the fields show that the longest step is safe for all: then its
    // roots and quotients, which take as long as all else, need not be known. False for NaN.
    inline bool longest_is_safe(const double* q) const {
        if (o.rule == UNSAFE) return false;
        const double t = longest_step(o), pull = 2 * t * o.lam, less = o.rule == FROBENIUS ? 1 : 0;
        int unsafe = 0;
#pragma omp simd reduction(+ : unsafe)
        for (int l = 0; l < W; ++l) {
            const double reached = d[l] * (1 - pull * (1 - less * d[l])) + t * t * q[l];
            unsafe += !(reached <= o.aim) | !(d[l] <= o.aim);
        }
        return unsafe == 0;
    }

    // eta for a field R, and the distance d: what a trial move reaches is measured.
    __attribute__((noinline)) void shorten_coupled() {
        double reached[W], from[W];
        for (int l = 0; l < W; ++l) eta[l] = trial_step(longest_step(o), norm[l], L::p());
        move(U);
        measure(reached);
        distances(from);
        for (int l = 0; l < W; ++l) {
            const bool safe = coupled_is_safe(o, eta[l], norm[l], d[l], 0) || reached[l] <= o.aim;
            d[l] = from[l];
            const double delta = at_most(d[l], o.eps);
            const double P = added(reached[l], delta, eta[l] * norm[l]);
            if (!safe)
                eta[l] *= share_of_pulled_move(P, o.lam * eta[l] * delta, o.aim - delta);
        }
    }

    // A bound of the distance of U.
    void measure(double* reached) {
        transpose(V, U);
        residual(G, U, V);
        bounds(reached, G);
    }

    // Bounds of the norms of symmetric matrices; U and V are free.
    void bounds(double* values, const Buffer& S) {
        if (is_sharp(o))
            sharp_bounds(values, S, V, U);
        else
            spectral_bounds(values, S, V);
    }

    // Bounds of the distance of X.
    void distances(double* from) {
        bounds(from, D);
        for (int l = 0; l < W; ++l) from[l] = distance_inside(o, from[l], d[l]);
    }

    // R = X - eta A X - omega D X
    inline void decoupled() {
        residual(D, X, Xt);
        norms(d, D);
        L::product(R, A, X);
        norms(norm, R);
        L::product(A, D, X);
        double normal[W], pull[W];
        norms(normal, A);
        if (o.rule == SPECTRAL) {
            std::fill(pull, pull + W, o.omega);
            shorten_decoupled(normal);
        } else {
            for (int l = 0; l < W; ++l)
                eta[l] = decoupled_step<T>(o, norm[l], d[l], normal[l], 0, pull[l]);
        }
        T omega[W];
        for (int l = 0; l < W; ++l) {
            omega[l] = T(pull[l]);
            taken[l] = is_a_step(o, std::max(eta[l], pull[l]), d[l], o.omega) &&
                       is_finite_step<T>(o, eta[l] * norm[l] + pull[l] * normal[l]);
        }
        move(R);
        L::each([&](int e, int l) { R.v[e] -= omega[l] * A.v[e]; });
    }

    // As shorten_coupled, with D X in A.
    void shorten_decoupled(const double* normal) {
        bool safe[W], all = true;
        for (int l = 0; l < W; ++l) {
            eta[l] = trial_step(o.lr, norm[l], L::p());
            all &= safe[l] = decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l], 0);
        }
        if (all) return;
        double reached[W], from[W];
        const T omega = T(o.omega);
        move(U);
        L::each([&](int e, int) { U.v[e] -= omega * A.v[e]; });
        measure(reached);
        distances(from);
        for (int l = 0; l < W; ++l) {
            safe[l] = safe[l] || reached[l] <= o.aim;
            d[l] = from[l];
            const double delta = at_most(d[l], o.eps), length = eta[l] * norm[l];
            const double drift = 2 * o.omega * delta * std::sqrt(1 + delta) * length;
            const double P = added(reached[l], delta + drift, length);
            if (!safe[l]) eta[l] *= share_of_tangent_move(P, drift, o.aim - delta);
        }
    }

    // Y = X - eta A X, divided by (1 + m)^(1/2), and R = Y - Y F / 2, F the residual of that: the
    // measured E = Y^T Y - I is C + m I, and F = C / (1 + m).
    inline void after() {
        L::product(R, A, X);
        norms(norm, R);
        if (o.rule == FROBENIUS) {
            residual(D, Xt, X);
            norms(d, D);
        }
        for (int l = 0; l < W; ++l)
            eta[l] = o.rule == SPECTRAL ? trial_step(o.lr, norm[l], L::p())
                                        : step_before_landing(o, norm[l], d[l], 0);
        move(R);
        Buffer& C = A;
        double m[W], size[W];
        transpose(G, R);
        residual(C, G, R);
        // The sums of squares are almost 1, where floats are coarse: most of what rounding would
        // leave of ||X^T X - I|| comes from them.
        if constexpr (sizeof(T) == 4) L::sharpen_diagonal(C, G);
        Tiles<L>::centre(C, m, size);
        int far = 0;
        for (int l = 0; l < W; ++l) {
            const double reached = size[l] + m[l];  // its power bounds what landing makes of Y
            taken[l] = is_finite_step<T>(o, eta[l] * norm[l]) &&
                       is_finite_step<T>(o, reached * std::sqrt(reached)) &&
                       (o.rule != FROBENIUS || d[l] < FARTHEST);
            far += !(reached <= o.farthest);
        }
        if (o.rule == SPECTRAL && far > 0) shorten_before_landing(C, m, size);
        T c[W], half[W];
        for (int l = 0; l < W; ++l) {
            c[l] = T(1 / std::sqrt(1 + m[l]));
            half[l] = T(0.5 / (1 + m[l]));
        }
        L::product(U, R, C);
        L::each([&](int e, int l) { R.v[e] = c[l] * (R.v[e] - half[l] * U.v[e]); });
    }

    // Takes a share of the moves to R that are too long: R, its residual C + m I, and eta.
    __attribute__((noinline)) void shorten_before_landing(Buffer& C, double* m, const double* size) {
        double bound[W], below[W];
        spectral_bounds(bound, C, U);
        residual(D, Xt, X);
        norms(d, D);
        Tiles<L>::largest(below, D);
        T share[W], rest[W], part[W];
        for (int l = 0; l < W; ++l) {
            const double reached = m[l] + bound[l];
            const bool safe = size[l] + m[l] <= o.farthest || reached <= o.farthest;
            const double delta = at_least(at_most(d[l], o.eps), below[l]);
            const double P = added(reached, delta, eta[l] * norm[l]);
            const double theta = safe ? 1 : share_of_tangent_move(P, 0, o.farthest - delta);
            // From distance 1 on Newton-Schulz steps may lead anywhere.
            taken[l] = taken[l] && reached < INFINITY && (safe || below[l] < FARTHEST);
            share[l] = T(theta), part[l] = T(theta * theta), rest[l] = T(1 - theta * theta);
            eta[l] *= theta, m[l] *= theta * theta;
        }
        L::each([&](int e, int l) {
            R.v[e] = share[l] < T(1) ? X.v[e] + share[l] * (R.v[e] - X.v[e]) : R.v[e];
            C.v[e] = part[l] * C.v[e] + rest[l] * D.v[e];
        });
    }

    // Y = X - eta R
    inline void move(Buffer& Y) {
        T step[W], rest[W];
        for (int l = 0; l < W; ++l) {
            const Factors<T> factors(eta[l]);
            step[l] = factors.step, rest[l] = factors.rest;
        }
        L::each([&](int e, int l) { Y.v[e] = X.v[e] - step[l] * (rest[l] * R.v[e]); });
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
    share(int64_t(blocks.size()), threads, [&, all](int64_t first, int64_t last) {
        run_blocks<L>(o, parameters, all + first, all + last, p);
    });
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
