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
    using Tiles<L>::scale_to_one;
    using Tiles<L>::transpose;

    const Options& o;
    Buffer X, Xt, G, A, D, R, B;  // B: the state, then scratch
    Buffer U, V;                  // scratch, for bounds that are seldom asked for
    double d[W], bound[W], eta[W];
    bool taken[W];

    explicit Step(const Options& options) : o(options) {}

    // Step of the matrices [first, first + filled) of a parameter.
    void run(Parameter& parameter, int64_t first, int filled) {
        L::read(X, static_cast<const T*>(parameter.X), parameter, first, filled);
        L::read(G, static_cast<const T*>(parameter.G), parameter, first, filled);
        if (is_scaled(o)) unscale();
        transpose(Xt, X);
        relative_gradient();
        double square[W] = {}, steps[W] = {};
        if (o.moments == MOMENTUM) accumulate(parameter, first, filled);
        if (o.moments == ADAM) adapt(parameter, first, filled, square, steps);
        residual(X, Xt);
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

    // D = Y Y^T - I
    inline void residual(const Buffer& Y, const Buffer& Yt) {
        L::product(D, Y, Yt);
        L::subtract_identity(D);
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
                taken[l] = is_a_step(o, eta[l], d[l], o.lam) &&
                           is_finite_step<T>(o, eta[l] * norm[l]);
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

    // Better bounds of the field R and of the distance, where the rule has any.
    void better_bounds() {
        if (o.rule != TIGHT && o.rule != SPECTRAL) return;
        for (int l = 0; l < W; ++l) bound[l] = at_most(bound[l], LARGEST_NORM<T>);
        scale_to_one(U, R, bound);
        transpose(V, U);
        L::product(G, V, U);
        Tiles<L>::better_bounds(bound, G, U, o.rule);
        if (o.rule == SPECTRAL) Tiles<L>::spectral_distance(d, D, o.eps, U, V, G);
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
        for (int l = 0; l < W; ++l) eta[l] = decoupled_step<T>(o, bound[l], d[l], normal[l], 0, pull[l]);
        if (o.rule > FROBENIUS && !is_lr(eta)) {
            better_bounds();
            for (int l = 0; l < W; ++l) {
                const double size = at_most(d[l] * std::sqrt(1 + d[l]), normal[l]);
                eta[l] = decoupled_step<T>(o, bound[l], d[l], o.rule == SPECTRAL ? size : normal[l],
                                           0, pull[l]);
            }
        }
        T omega[W];
        for (int l = 0; l < W; ++l) {
            eta[l] = at_most(eta[l], o.lr);
            omega[l] = T(pull[l]);
            taken[l] = is_a_step(o, std::max(eta[l], pull[l]), d[l], o.omega) &&
                       is_finite_step<T>(o, eta[l] * norm[l] + pull[l] * normal[l]);
        }
        move();
        L::each([&](int e, int l) { R.v[e] -= omega[l] * A.v[e]; });
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
            taken[l] = is_finite_step<T>(o, eta[l] * norm[l]) &&
                       (o.rule == UNSAFE ? d[l] * std::sqrt(d[l]) < LARGEST_NORM<T> : d[l] < 1);
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
        for (int l = 0; l < W; ++l) eta[l] = step_before_landing(o, bound[l], d[l], 0);
    }

    // R = X - eta R
    inline void move() {
        T step[W], rest[W];
        for (int l = 0; l < W; ++l) {
            const Factors<T> factors(eta[l]);
            step[l] = factors.step, rest[l] = factors.rest;
        }
        L::each([&](int e, int l) { R.v[e] = X.v[e] - step[l] * (rest[l] * R.v[e]); });
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
