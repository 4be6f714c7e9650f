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
// Written once, for the layouts of rows.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>

#include "rows.h"
#include "steps.h"
#include "threads.h"
#include "tiles.h"

#ifndef SIZE  // columns of the matrices where they are side by side, else 0
#define SIZE 0
#endif

namespace {

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

    // Bounds of the norms of symmetric matrices, and their squares; a and b are free.
    void bounds(double* values, const Buffer& S, Buffer& square) {
        if (o.attraction != AFTER && is_sharp(o))
            Tiles<L>::sharp_bounds(values, S, square, a);
        else
            Tiles<L>::spectral_bounds(values, S, square);
    }

    // U = D^2, and bounds of the distances.
    void bound_distances(double* from) {
        bounds(from, D, U);
        for (int l = 0; l < W; ++l) from[l] = distance_inside(o, from[l], d[l]);
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
        bounds(reached, Z, b);
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l];
            const bool safe = coupled_is_safe(o, eta[l], norm[l], d[l], astray) ||
                              reached[l] + astray <= o.aim;
            d[l] = from[l];
            const double delta = at_most(d[l], o.eps);
            const double P = added(reached[l], delta, eta[l] * norm[l]);
            // Small singular values are pulled by (1 - delta) slope only, delta being at most eps.
            const double slope = o.lam * eta[l] * delta - astray / 2 / (1 - o.eps);
            if (!safe) eta[l] *= share_of_pulled_move(P, at_least(slope, -1e6), o.aim - delta);
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
        bounds(reached, Z, b);
        bound_distances(from);
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l];
            // The move itself, X + X a + B b, is rounded in another way than what was measured.
            const bool safe = decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l], astray) ||
                              reached[l] + astray <= o.aim;
            d[l] = from[l];
            const double delta = at_most(d[l], o.eps), length = eta[l] * norm[l];
            const double drift = 2 * o.omega * delta * std::sqrt(1 + delta) * length + astray;
            const double P = added(reached[l], delta + drift, length);
            if (!safe) eta[l] *= share_of_tangent_move(P, drift, o.aim - delta);
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
        bounds(reached, Z, b);
        Tiles<L>::largest(below, D);
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l];  // as above
            reached[l] += mean[l];
            const bool safe = reached[l] + astray <= o.farthest;
            const double delta = at_least(at_most(d[l], o.eps), below[l]);
            const double tilt = (1 + 2 / o.farthest) * astray;
            const double drifts = eta[l] * drift[l] + tilt;
            const double P = added(reached[l], delta + drifts, eta[l] * norm[l]);
            const double theta =
                safe ? 1 : share_of_tangent_move(P, drifts, o.farthest - delta);
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
