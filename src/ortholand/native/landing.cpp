// One landing step of many small square matrices, all of it while a matrix is in the cache.
//
// The same steps, in the same order, as ortholand/landing (moments, attraction, safe step): that code
// is the reference, and a test holds this one equal to it. Written once, for the layouts of tiles.h.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base.h"
#include "steps.h"
#include "tiles.h"

namespace {

template <class L_>
struct SquareStep : Base<L_> {
    using L = L_;
    using typename Base<L>::T;
    using typename Base<L>::Buffer;
    using Tile = Tiles<L>;
    using Base<L>::W, Base<L>::o, Base<L>::d, Base<L>::norm, Base<L>::eta, Base<L>::taken;
    using Base<L>::norms, Base<L>::transpose;

    Buffer X, Xt, G, A, D, R, B;  // B: the state, then scratch
    Buffer U, V;                  // scratch, for moves that are too long

    SquareStep(const Options& options, int64_t) : Base<L>(options) {}

    static int64_t together(int64_t, int64_t) { return W; }
    static double work(double n, int p) { return n * p * (6 * p + 60); }

    void run(const Matrix<T>* matrices, int filled, int64_t) {
        const Piece<T> piece{matrices, filled, L::p()};
        Tile::read(X, piece, &Matrix<T>::X);
        Tile::read(G, piece, &Matrix<T>::G);
        if (is_scaled(o)) unscale();
        for (int l = filled; l < W; ++l)  // what is not there is on the manifold, and stays
            for (int i = 0; i < L::p(); ++i) X.v[L::at(i, i) + l] = T(1);
        transpose(Xt, X);
        relative_gradient();
        if (o.moments != NONE) Tile::read(B, piece, &Matrix<T>::state);
        if (o.moments == MOMENTUM) accumulate();
        if (o.moments == ADAM) adapt(matrices, filled);
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        if (is_scaled(o)) follow(piece);
        // A step with lr = 0 changes nothing.
        if (o.lr > 0) Tile::write(R, piece, &Matrix<T>::X, taken);
        if (o.moments != NONE) Tile::write(B, piece, &Matrix<T>::state, taken);
        this->finish_numbers(matrices, filled);
    }

    // Weights are seldom scaled: what that takes is kept out of the way of all others.

    // X = W / scale
    __attribute__((noinline)) void unscale() {
        const T scale = T(o.scale);
        L::each([&](int e, int) { X.v[e] /= scale; });
    }

    // R = W + scale (R - W / scale)
    __attribute__((noinline)) void follow(const Piece<T>& piece) {
        const T scale = T(o.scale);
        Tile::read(G, piece, &Matrix<T>::X);
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
        Tile::add_identity(E, T(-1));
    }

    // Momentum as torch.optim.SGD has it: A becomes the direction, B the new buffer.
    inline void accumulate() {
        T weight[W];
        double started[W];
        if (o.dampening != 0) Tile::sum_of_squares(B, started);
        for (int l = 0; l < W; ++l)
            weight[l] = o.dampening != 0 && started[l] > 0 ? T(1 - o.dampening) : T(1);
        const T momentum = T(o.momentum);
        L::each([&](int e, int l) { B.v[e] = weight[l] * A.v[e] + momentum * B.v[e]; });
        if (o.nesterov)
            L::each([&](int e, int) { A.v[e] += momentum * B.v[e]; });
        else
            Tile::copy(A, B);
    }

    // Adam with one second moment per matrix: A becomes the direction, B the new first moment.
    inline void adapt(const Matrix<T>* matrices, int filled) {
        double sizes[W], scales[W];
        norms(sizes, A);
        this->update_squares(matrices, filled, sizes, scales);
        T scale[W];
        std::copy(scales, scales + W, scale);
        const T old = T(o.beta1), fresh = T(1 - o.beta1);
        L::each([&](int e, int l) {
            B.v[e] = old * B.v[e] + fresh * A.v[e];
            A.v[e] = scale[l] * B.v[e];
        });
    }

    // R = X - eta (A + lam D) X
    inline void coupled() {
        residual(D, X, Xt);
        norms(d, D);
        const T lam = T(o.lam);
        L::each([&](int e, int) { A.v[e] += lam * D.v[e]; });
        L::product(R, A, X);
        double q[W];
        Tile::sum_of_squares(R, q);
        if (longest_is_safe(q)) {
            for (int l = 0; l < W; ++l) eta[l] = longest_step(o), taken[l] = true;
        } else {
            for (int l = 0; l < W; ++l) norm[l] = std::sqrt(q[l]);
            if (o.rule == SPECTRAL)
                try_coupled();
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

    // eta for a field R: what a trial move reaches is measured.
    __attribute__((noinline)) void try_coupled() {
        double reached[W], from[W];
        for (int l = 0; l < W; ++l) eta[l] = trial_step(longest_step(o), norm[l], L::p());
        move(U);
        measure(from, reached);
        this->shorten_coupled(from, reached);
    }

    // Bounds of the distances of X and of U.
    void measure(double* from, double* reached) {
        transpose(V, U);
        residual(G, U, V);
        this->bounds(reached, G, V, U, is_sharp(o));
        this->bound_distances(from, D, V, U);
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
            try_decoupled(normal);
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

    // As try_coupled, with D X in A.
    void try_decoupled(const double* normal) {
        bool all = true;
        for (int l = 0; l < W; ++l) {
            eta[l] = trial_step(o.lr, norm[l], L::p());
            all &= decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l], 0);
        }
        if (all) return;
        double reached[W], from[W];
        const T omega = T(o.omega);
        move(U);
        L::each([&](int e, int) { U.v[e] -= omega * A.v[e]; });
        measure(from, reached);
        this->shorten_decoupled(from, reached, normal);
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
        if constexpr (sizeof(T) == 4) Tile::sharpen_diagonal(C, G);
        Tile::centre(C, m, size);
        int far = 0;
        for (int l = 0; l < W; ++l) {
            const double reached = size[l] + m[l];  // its power bounds what landing makes of Y
            taken[l] = is_finite_step<T>(o, eta[l] * norm[l]) &&
                       is_finite_step<T>(o, reached * std::sqrt(reached)) &&
                       (o.rule != FROBENIUS || d[l] < FARTHEST);
            far += !(reached <= o.farthest);
        }
        if (o.rule == SPECTRAL && far > 0) shorten_landing(C, m, size);
        T c[W], half[W];
        for (int l = 0; l < W; ++l) {
            c[l] = T(1 / std::sqrt(1 + m[l]));
            half[l] = T(0.5 / (1 + m[l]));
        }
        L::product(U, R, C);
        L::each([&](int e, int l) { R.v[e] = c[l] * (R.v[e] - half[l] * U.v[e]); });
    }

    // Takes a share of the moves to R that are too long: R, its residual C + m I, and eta.
    __attribute__((noinline)) void shorten_landing(Buffer& C, double* m, const double* size) {
        double bound[W], below[W];
        this->bounds(bound, C, U, V, false);
        residual(D, Xt, X);
        norms(d, D);
        Tile::largest(below, D);
        T share[W], rest[W], part[W];
        for (int l = 0; l < W; ++l) {
            const double reached = m[l] + (size[l] + m[l] <= o.farthest ? size[l] : bound[l]);
            const double theta = this->shorten_before_landing(l, reached, 0, 0, below[l]);
            share[l] = T(theta), part[l] = T(theta * theta), rest[l] = T(1 - theta * theta);
            m[l] *= theta * theta;
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

}  // namespace

// Step some parameters of p x p matrices.
extern "C" void ortholand_landing(const Options* o, Parameter* parameters, int count, int p) {
    if (p > 0) run_all<SquareStep<Layout>>(*o, parameters, count, p, p);
}
