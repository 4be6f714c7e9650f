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

#include "base.h"
#include "rows.h"
#include "steps.h"
#include "tiles.h"

namespace {

template <class L_>
struct TallStep : Base<L_> {
    using L = L_;
    using typename Base<L>::T;
    using typename Base<L>::Buffer;
    using Tile = Tiles<L>;
    using Base<L>::W, Base<L>::o, Base<L>::d, Base<L>::norm, Base<L>::eta, Base<L>::error;
    using Base<L>::finite, Base<L>::taken, Base<L>::norms;

    // What is less than this share of what rounding does anyway is left out, with its products.
    static constexpr double LITTLE = 0.125;
    // What rounding may change by more than this share is measured.
    static constexpr double MUCH = 1e-4, SHAKY = 1e-3;
    // How long a generator may be for what rounding does to it not to be seen.
    static constexpr double COARSE = 0.5;

    const int64_t n;
    const double roundoff;  // relative, of sums of n products: ortholand.fields.product_roundoff
    Rows<L> rows;
    Wanted wanted{};
    Mix<T, W> mix_B, mix_K;
    Buffer D, M, N, Q, U, V, Z, a, b;  // N: of the second mix, then C, by which the state loses X C
    // In units of `power`, of two, by which gradients and state are multiplied, and which is nearly
    // always 1: squares of B, squares of K, how large what was added up to B is.
    double squares_of_B[W], squares_of_K[W], size[W], power[W];
    double unit[W];  // the direction is that of `unit` times B
    double bound[W], mean[W];
    double shrunk[W];  // the mean to take off before landing, if only a share of a move is taken
    bool lands_later = false;
    Matrix<T> matrices[W];  // if all lanes are of one matrix, it is there W times
    int filled = 0;

    TallStep(const Options& options, int64_t rows)
        : Base<L>(options), n(rows),
          roundoff((8 + std::sqrt(double(rows))) * std::numeric_limits<T>::epsilon() / 2) {}

    static int64_t together(int64_t n, int64_t count) { return Rows<L>::in_slices(n, count) ? 1 : W; }
    static double work(double n, int p) { return (6 * n * p + 10.0 * p * p) * p + 60 * n * p; }

    // Step of up to W matrices.
    void run(const Matrix<T>* these, int count, int64_t threads) {
        const bool sliced = W > 1 && count == 1;
        filled = sliced ? W : count;
        for (int l = 0; l < filled; ++l) matrices[l] = these[sliced ? 0 : l];
        for (int l = 0; l < W; ++l) power[l] = 1, finite[l] = l < filled;
        rows.open(matrices, filled, sliced, n, threads, T(o.scale));
        wanted = {o.moments != NONE, o.moments == ADAM || keeps_K(), o.attraction == AFTER, false};
        sum_up();
        if (!is_moderate()) {
            rescale();
            wanted.exact = true;
            sum_up();
        }
        norms(d, D);
        for (int l = 0; l < W; ++l) {
            size[l] = std::sqrt(squares_of_B[l]), unit[l] = 1 / power[l];
            finite[l] = finite[l] && unit[l] * size[l] < INFINITY;
        }
        if (o.moments == ADAM) adapt();
        if (o.moments == MOMENTUM) find_multiplier(keeps_K() ? N : M), Tile::copy(N, U);
        for (int l = 0; l < W; ++l) error[l] = (1 + d[l]) * unit[l] * size[l] * roundoff;
        lands_later = false;
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        finish();
        this->finish_numbers(matrices, count);
    }

    bool keeps_K() const { return o.moments == MOMENTUM && o.nesterov; }

    void sum_up() {
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
        rows.gram(D, M, N, Q, squares_of_B, squares_of_K);
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
    bool is_moderate() const {
        const double most = sizeof(T) == 4 ? 1e24 : 1e200;
        bool all = true;
        for (int l = 0; l < filled; ++l) {
            all &= squares_of_B[l] > 1 / most && squares_of_B[l] < most;
            if (wanted.K) all &= squares_of_K[l] > 1 / most && squares_of_K[l] < most;
        }
        return all;
    }

    // Powers of two that bring gradients and state near to 1.
    void rescale() {
        double largest[W];
        rows.largest(largest);
        constexpr int MOST = std::numeric_limits<T>::max_exponent - 2;
        for (int l = 0; l < filled; ++l) {
            finite[l] = largest[l] < INFINITY;
            if (finite[l] && largest[l] > 0)
                power[l] = std::ldexp(1.0, -std::clamp(std::ilogb(largest[l]), -MOST, MOST));
        }
    }

    // U = Sym(S^-1 A), S = I + D: as ortholand.geometry.derivatives.multiplier. Where D is at the
    // level of rounding, Sym(A).
    void find_multiplier(const Buffer& A) {
        double most = 0;
        for (int l = 0; l < W; ++l)
            if (finite[l]) most = std::max(most, d[l]);
        if (most <= roundoff) return Tile::symmetric_part(U, A);
        if (most * most <= roundoff) {
            L::product(Z, D, A);
            L::each([&](int e, int) { a.v[e] = A.v[e] - Z.v[e]; });
        } else {
            bool singular[W] = {};
            L::each([&](int e, int) { a.v[e] = A.v[e], Z.v[e] = D.v[e]; });
            Tile::add_identity(Z, T(1));
            Tile::solve(Z, a);
            for (int i = 0; i < L::p(); ++i)
                for (int l = 0; l < W; ++l) singular[l] |= !(Z.v[L::at(i, i) + l] > 0);
            L::each([&](int e, int l) { a.v[e] = singular[l] ? A.v[e] : a.v[e]; });
        }
        Tile::symmetric_part(U, a);
    }

    // Adam: B - X C is the new mean, C the part of the gradient's normal part that is in it. Both
    // stand for the same direction: X C X^T is symmetric. B will do where its products are known.
    void adapt() {
        find_multiplier(N);
        double gradient[W], pulled[W] = {}, mixed[W] = {}, tangent[W], scale[W];
        Tile::sum_of_squares(U, gradient);
        Tile::inner(U, N, tangent);
        bool seen = !wanted.square;  // whether D makes a difference
        for (int l = 0; l < W; ++l)
            seen |= finite[l] && !(d[l] * gradient[l] <= LITTLE * roundoff * squares_of_K[l]);
        if (seen) {
            L::product(Z, D, U);
            Tile::inner(U, Z, pulled);
        }
        if (!wanted.square) Tile::inner(U, M, mixed);
        bool cancels = false;  // whether little is left of the gradient, so that rounding is seen
        for (int l = 0; l < W; ++l) {
            tangent[l] = squares_of_K[l] - 2 * tangent[l] + gradient[l] + pulled[l];
            cancels |= finite[l] && tangent[l] < MUCH * squares_of_K[l];
        }
        if (cancels) measure_tangent(tangent);
        const double fresh = 1 - o.beta1;
        for (int l = 0; l < W; ++l) tangent[l] = std::sqrt(tangent[l]) * unit[l];
        this->update_squares(matrices, filled, tangent, scale);
        for (int l = 0; l < W; ++l) {
            unit[l] *= scale[l];
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
        L::each([&](int e, int) { a.v[e] = -U.v[e], b.v[e] = T(0); });
        Tile::add_identity(b, T(1));
        rows.mix(mix_K, mix_K, wanted);
        rows.measure(a, b, squares, nullptr);
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
        Tile::add_to_diagonal(b, t);
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
        rows.measure(a, b, squares, with_square ? &Q : nullptr);
        for (int l = 0; l < W; ++l) {
            inverse[l] = T(squares[l] > 0 ? 1 / squares[l] : 0);
            norm[l] = bound[l] = whole[l] * std::sqrt(squares[l]);
        }
        if (with_square) L::each([&](int e, int l) { Q.v[e] *= inverse[l]; });
    }

    // Z = Y^T Y - I, Y = X + X a + B b.
    void measure_reached() {
        double squares[W];
        Tile::add_identity(a, T(1));
        rows.measure(a, b, squares, &Z);
        Tile::add_identity(Z, T(-1));
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
                try_coupled(longest);
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
    void try_coupled(double longest) {
        double from[W], reached[W];
        T less[W], square[W];
        measure(o.lam, true);
        this->bound_distances(from, D, U, a);
        for (int l = 0; l < W; ++l) {
            eta[l] = trial_step(longest, norm[l], L::p());
            const double length = eta[l] * norm[l];
            less[l] = T(2 * eta[l] * o.lam), square[l] = T(length * length);
        }
        L::each([&](int e, int l) {
            Z.v[e] = D.v[e] - less[l] * (D.v[e] + U.v[e]) + square[l] * Q.v[e];
        });
        this->bounds(reached, Z, b, a, is_sharp(o));
        this->shorten_coupled(from, reached);
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
            Tile::sum_of_squares(D, squares);
            Tile::inner(D, U, cube);
            for (int l = 0; l < W; ++l) normal[l] = std::sqrt(at_least(squares[l] + cube[l], 0));
            measure(0, false);
            lengths();
            if (o.rule == SPECTRAL) try_decoupled(normal);
        }
        for (int l = 0; l < W; ++l) {
            taken[l] = is_a_step(o, std::max(eta[l], omega[l]), d[l], o.omega) &&
                       eta[l] * norm[l] + omega[l] * d[l] < INFINITY;
            omega[l] = -omega[l], tangent[l] = -eta[l];
        }
        set_field(omega, tangent);
    }

    void try_decoupled(const double* normal) {
        double from[W], reached[W], pull[W], tangent[W];
        for (int l = 0; l < W; ++l) pull[l] = -o.omega, tangent[l] = -eta[l];
        set_field(pull, tangent);
        measure_reached();
        this->bounds(reached, Z, b, a, is_sharp(o));
        this->bound_distances(from, D, U, a);
        this->shorten_decoupled(from, reached, normal);
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
        Tile::centre(Z, mean, size_of_Z);
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
            Tile::centre(Z, mean, size_of_Z);
            if (o.rule == SPECTRAL) shorten_landing(drift);
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
                Tile::copy(U, N);
            else
                find_multiplier(M);
            L::product(Z, D, U);
            L::each([&](int e, int) { a.v[e] = M.v[e] - U.v[e] - Z.v[e]; });
            L::product(b, a, D);
            Tile::symmetric_part(V, b);
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
        Tile::trace(Q, squares);
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
    void shorten_landing(const double* drift) {
        double reached[W], below[W], size_of_Z[W];
        T part[W] = {}, rest[W] = {}, linear[W] = {};
        const bool derived = all([&](int l) {
            return 2 * eta[l] * error[l] <= SHAKY * o.farthest;
        });
        if (!derived) {
            set_move(0);
            measure_reached();
            Tile::centre(Z, mean, size_of_Z);
        }
        this->bounds(reached, Z, b, a, false);
        Tile::largest(below, D);
        for (int l = 0; l < W; ++l) {
            const double wrong = 2 * eta[l] * error[l], start = eta[l] * unit[l];
            const double drifts = eta[l] * drift[l] + (1 + 2 / o.farthest) * wrong;
            const double theta = this->shorten_before_landing(
                l, reached[l] + mean[l], wrong, drifts, below[l]);
            linear[l] = T(theta * (1 - theta) * start);
            part[l] = T(theta * theta), rest[l] = T(1 - theta * theta);
            mean[l] *= theta * theta;
            if (theta < 1) shrunk[l] = mean[l];
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
        Tile::add_to_diagonal(U, diagonal);
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

    void finish() {
        T inverse[W];
        bool any = false;
        if (o.moments != NONE) L::each([&](int e, int) { N.v[e] = -N.v[e]; });
        if (o.rule == UNSAFE) take_finite_steps();
        if (o.moments != NONE && *std::min_element(power, power + W) < 1) keep_finite_state();
        for (int l = 0; l < W; ++l) {
            taken[l] = taken[l] && finite[l];
            any |= taken[l];
            inverse[l] = T(1 / power[l]);
        }
        if (!any) return;
        if (is_scaled(o)) scale_coefficients();
        // A step with lr = 0 changes nothing.
        const bool moves = o.lr > 0;
        rows.apply(moves ? &a : nullptr, b, o.moments != NONE ? &N : nullptr, keeps_K(), taken, inverse);
        if (lands_later && moves) land_measured();
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
        rows.largest_kept(N, keeps_K(), largest);
        for (int l = 0; l < W; ++l)
            taken[l] = taken[l] && largest[l] / power[l] <= std::numeric_limits<T>::max();
    }

    // W = scale X goes to W + X (scale a) + B (scale b).
    __attribute__((noinline)) void scale_coefficients() {
        const T weight_scale = T(o.scale);
        L::each([&](int e, int) { a.v[e] *= weight_scale, b.v[e] *= weight_scale; });
    }

    // Lands from Y that is in the place of X.
    void land_measured() {
        T one[W];
        double size_of_Z[W];
        wanted = {false, false, false, false};
        rows.mix(mix_B, mix_K, wanted);
        rows.gram(Z, M, N, Q, squares_of_B, squares_of_K);
        Tile::centre(Z, mean, size_of_Z);
        for (int l = 0; l < W; ++l) {
            const double other = shrunk[l] < 0 ? mean[l] : shrunk[l];
            one[l] = T(mean[l] - other), mean[l] = other;
        }
        Tile::add_to_diagonal(Z, one);
        land_from();
        L::each([&](int e, int) { a.v[e] = U.v[e], b.v[e] = T(0); });
        if (is_scaled(o)) scale_coefficients();
        rows.apply(&a, b, nullptr, false, taken, one);
    }
};

}  // namespace

// Step some parameters of n x p matrices.
extern "C" void ortholand_tall(const Options* o, Parameter* parameters, int count, int64_t n,
                               int p) {
    if (p > 0 && n > p) run_all<TallStep<Layout>>(*o, parameters, count, n, p);
}
