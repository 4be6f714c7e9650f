// One landing step of n x p matrices, n >= p, in the Gram form: wide ones are tall ones whose rows
// lie next to each other in memory, and any other strides will do.
//
// The same steps as ortholand/landing (moments.py, gram.py and the attractions): that code is the
// reference, and tests hold this one equal to it. A pass over the rows gives the Gram matrices
//
//     D = X^T X - I,    M = X^T B,    Q = B^T B (for "move, then land" only),
//
// algebra of p x p tiles the coefficients, and a pass X <- X + X a + B b; of a weight W = scale X it
// is W <- W + scale (X a + B b). B = g G + m state, a mix of the gradient and the momentum buffer or
// first moment, is never kept. Where the free bound of a field does not allow lr, the field is
// formed and measured, in a pass of its own, as `move` of the reference does; and so is Y^T Y where
// rounding in B^T B would be seen in it.
//
// Square matrices come transposed. Their direction is X M with a skew M, which is also what their
// state is made of, so there is no b. It is tangent but for rounding relative to itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>

#include "rows.h"
#include "steps.h"
#include "tiles.h"

namespace {

// What is less than this share of what rounding does anyway is left out, with its products.
constexpr double LITTLE = 0.125;
// What rounding may change by more than this share is measured.
constexpr double MUCH = 1e-4, SHAKY = 1e-3;
// How much longer than its field a generator may be, in squares, for the field's Gram matrix to be
// derived without loss.
constexpr double GENERIC = 16;
// How long columns of a generator may be for what rounding does to them not to be seen.
constexpr double COARSE = 2;

// How far a step may go, as ortholand/safe_step.py says ---------------------------------------------

// Norms by which numbers can be divided, and the quotients squared, without overflow.
constexpr double SMALLEST = 1e-100;
constexpr double TINY = 1e-30;  // the same for floats
constexpr double EDGE = 16;     // units of rounding within which a matrix counts as on the edge
constexpr double FARTHEST = 1 - 0x1p-20;  // distance from which X may be singular, up to rounding

// ortholand.geometry.matrices.largest_norm: below it a few products do not overflow.
constexpr double LARGEST_NORM = std::numeric_limits<T>::max() / 4.0;

// Whether something moves, or will: not from FARTHEST on. Where no step is safe for now, a matrix
// that is pulled back stays and goes on with its moments; with no pull it would stay for ever. With
// lr = 0 nothing shall move.
inline Flags is_a_step(const Options& o, const Numbers& eta, const Numbers& distance, double pull) {
    const Flags moves = (eta > 0) | (o.lr == 0 || pull > 0);
    return moves & ((distance < FARTHEST) | (o.rule == UNSAFE));
}

// lr, or less where the pull of a coupled step would overshoot.
inline double longest_step(const Options& o) {
    return o.lam > 0 ? std::min(o.lr, 1 / (2 * o.lam)) : o.lr;
}

// The largest theta <= 1 for which theta^2 P - 2 theta slope <= room: the share of a trial move that
// is safe (share_of_pulled_move, share_of_tangent_move and largest_root of ortholand.safe_step).
// Nothing cancels for negative slopes either.
inline Numbers safe_share(const Numbers& move, const Numbers& slope, const Numbers& room) {
    const Numbers P = at_least(move, SMALLEST);
    const Numbers reach = root(at_least(slope * slope + P * room, 0));
    const Numbers away = at_least(room, 0) / at_least(reach - slope, SMALLEST);
    return at_most(choice(slope >= 0, (reach + slope) / P, away), 1);
}

// ortholand.safe_step.trial_step: no longer move is safe, and none of it overflows.
inline Numbers trial_step(double longest, const Numbers& norm, int p) {
    return at_most(std::sqrt(2.0 * p) / norm, longest);
}

// "spectral": a trial move by t is measured, and shortened where it leads too far. Comparisons are
// written such that NaN is never safe.

// Whether the norm of the field L = R + lam X D alone shows that a move by t is safe. "frobenius"
// holds in that norm, in which the pull is weaker.
inline Flags coupled_is_safe(const Options& o, const Numbers& t, const Numbers& norm,
                             const Numbers& d, const Numbers& astray) {
    const Numbers length = t * norm, pulled = o.rule == FROBENIUS ? 1 - d : Numbers(1);
    return (d <= o.aim) & (d * (1 - 2 * o.lam * t * pulled) + length * length + astray <= o.aim);
}

// The same for a move by t R + omega X D.
inline Flags decoupled_is_safe(const Options& o, const Numbers& t, const Numbers& norm,
                               const Numbers& d, const Numbers& normal, const Numbers& astray) {
    const Numbers length = t * norm + o.omega * normal, inside = d * (1 - d);
    return (d <= o.aim) & (o.omega * normal * normal <= inside) &
           (d - 2 * o.omega * inside + length * length + astray <= o.aim);
}

// Whether nothing attracts, so that bounds of distances must be sharp: a matrix inside the ball must
// not look as if it were at the edge.
inline bool is_sharp(const Options& o) {
    return (o.attraction == DECOUPLED ? o.omega : o.lam) == 0;
}

// A step of W matrices.
struct Step {
    const Options o;  // a copy, which nothing that is written can change
    const int64_t n;
    const bool square;
    const double roundoff;  // relative, of sums of n products: ortholand.fields.product_roundoff
    Rows rows;
    Wanted& wanted = rows.wanted;
    Mix &mix_B = rows.mix_B, &mix_K = rows.mix_K;
    Buffer D, M, N, Q, U, Z, a, b;  // N: of the second mix, then C, by which the state gains X C
    Buffer E;              // Y^T Y - I is D + eta unit E + eta^2 R^T R after a move
    bool curved = false;   // whether D makes a difference to R, so that E is not zero
    Numbers d, norm, eta;  // distance, norm of the field or a bound of it, step
    Numbers error;         // of tangency, for a step of length 1
    Numbers moment, steps;  // Adam's
    Flags finite, taken;
    // In units of `power`, of two, by which gradients and state are multiplied, and which is nearly
    // always 1: squares of B, squares of K, how large what was added up to B is.
    Numbers squares_of_B, squares_of_K, size, power;
    Numbers unit;  // the direction is that of `unit` times B
    Numbers mean;
    Numbers shrunk;  // the mean to take off before landing, if only a share of a move is taken
    bool lands_later = false;
    Matrix matrices[W];  // if all lanes are of one matrix, it is there W times
    int filled = 0;

    Step(const Options& options, int64_t rows)
        : o(options), n(rows), square(rows == L::p()),
          roundoff((8 + std::sqrt(double(rows))) * std::numeric_limits<T>::epsilon() / 2) {}

    // Step of the first so many of `matrices`.
    void run(int count, int64_t threads) {
        const bool sliced = W > 1 && count == 1 && !square, lands = o.attraction == AFTER;
        filled = sliced ? W : count;
        if (sliced) std::fill(matrices + 1, matrices + W, matrices[0]);
        power = unit = 1, eta = 0;
        finite = each_lane<Flags>([&](int l) { return l < filled; });
        rows.open(matrices, filled, sliced, n, threads, T(o.scale));
        wanted = {!square && o.moments != NONE, !square && (o.moments == ADAM || keeps_K()),
                  !square && lands, !square || lands, false};
        sum_up();
        if (!square && !is_moderate()) {
            rescale();
            wanted.exact = true;
            sum_up();
        }
        d = norms(D);
        if (square)
            turn();
        else
            size = root(squares_of_B);
        finite = finite & (unit * size < INFINITY);
        if (o.moments == ADAM && !square) adapt();
        if (o.moments == MOMENTUM && !square) {
            find_multiplier(keeps_K() ? N : M);
            L::each([&](int e, int) { N.v[e] = -U.v[e]; });
        }
        error = (1 + d) * unit * size * (square ? 0 : roundoff);
        lands_later = false;
        switch (o.attraction) {
            case COUPLED: coupled(); break;
            case DECOUPLED: decoupled(); break;
            default: after();
        }
        finish();
        finish_numbers(count);
    }

    // Whether something holds for all matrices that are there.
    bool for_all(const Flags& holds) const { return all(holds | (finite < 1)); }

    // Moments --------------------------------------------------------------------------------------

    bool keeps_K() const { return o.moments == MOMENTUM && o.nesterov; }

    void sum_up() {
        const double sign = o.maximize ? -1 : 1;
        Numbers g = sign, m = 0, h = sign, k = 0;
        if (o.moments == MOMENTUM && !square) {
            for (int l = 0; l < filled && o.dampening != 0; ++l)
                if (has_started(matrices[l])) h[l] = sign * (1 - o.dampening);
            g = h, m = k = o.momentum;
            if (o.nesterov) g = sign + o.momentum * h, m = o.momentum * k;
        } else if (o.moments == ADAM && !square) {
            g = sign * (1 - o.beta1), m = o.beta1;
        }
        mix_B = {rounded(power * g), rounded(power * m)};
        mix_K = {rounded(power * h), rounded(power * k)};
        rows.gram(D, M, N, Q, squares_of_B, squares_of_K);
    }

    // The first gradient enters whole, as in torch; a buffer of zeros is one not yet started.
    bool has_started(const Matrix& matrix) const {
        const Parameter& q = *matrix.parameter;
        const T* state = static_cast<T*>(q.state) + matrix.offset;
        for (int64_t r = 0; r < n; ++r)
            for (int j = 0; j < L::p(); ++j)
                if (state[r * q.row_stride + j * q.column_stride] != T(0)) return true;
        return false;
    }

    // Whether the squares of all matrices are numbers whose squares are numbers, too.
    bool is_moderate() const {
        const double most = sizeof(T) == 4 ? 1e24 : 1e200;
        const auto within = [=](const Numbers& x) { return (x > 1 / most) & (x < most); };
        return for_all(within(squares_of_B)) && (!wanted.K || for_all(within(squares_of_K)));
    }

    // Powers of two that bring gradients and state near to 1.
    void rescale() {
        const Numbers largest = rows.largest(nullptr, false);
        finite = finite & (largest < INFINITY);
        unit = powers_near(largest), power = 1 / unit;
    }

    static Numbers powers_near(const Numbers& x) {
        constexpr int MOST = std::numeric_limits<T>::max_exponent - 2;
        Numbers powers = 1;
        for (int l = 0; l < W; ++l)
            if (x[l] > 0 && x[l] < INFINITY)
                powers[l] = std::ldexp(1.0, std::clamp(std::ilogb(x[l]), -MOST, MOST));
        return powers;
    }

    // Square matrices: M becomes the direction, in units of `unit`, and N the new state.
    void turn() {
        const T half = T(0.5);
        L::transpose(U, M, false);
        L::each([&](int e, int) { M.v[e] = half * M.v[e] - half * U.v[e]; });
        if (o.moments != NONE) L::move<true>(N.v, tile(), &Parameter::state, nullptr);
        if (o.moments == MOMENTUM) {
            const T momentum = T(o.momentum), ahead = T(o.nesterov);
            const T kept = o.nesterov ? momentum : T(1);
            Each<T> fresh = T(1);
            if (o.dampening != 0) fresh = rounded(choice(norms(N) > 0, 1 - o.dampening, 1));
            L::each([&](int e, int l) {
                N.v[e] = fresh[l] * M.v[e] + momentum * N.v[e];
                M.v[e] = ahead * M.v[e] + kept * N.v[e];
            });
        } else if (o.moments == ADAM) {
            const T old = T(o.beta1), fresh = T(1 - o.beta1);
            unit = update_squares(norms(M));
            L::each([&](int e, int) { M.v[e] = N.v[e] = old * N.v[e] + fresh * M.v[e]; });
        }
        size = norms(M);
        // Of what is very long or short, squares would not be numbers.
        if (for_all((size > 1e-9) & (size < 1e9))) return;
        const Numbers near = powers_near(size);
        const Each<T> factor = rounded(1 / near);
        unit = unit * near, size = size / near;
        L::each([&](int e, int l) { M.v[e] *= factor[l]; });
    }

    // The state of square matrices is a tile.
    Piece tile() const { return {matrices, filled, L::p()}; }

    // U = Sym(S^-1 A), S = I + D: as ortholand.geometry.derivatives.multiplier. Where D is at the
    // level of rounding, Sym(A).
    void find_multiplier(const Buffer& A) {
        if (for_all(d <= roundoff)) return symmetric_part(U, A);
        if (for_all(d * d <= roundoff)) {
            product(Z, D, A);
            L::each([&](int e, int) { a.v[e] = A.v[e] - Z.v[e]; });
        } else {
            Flags regular = 1;
            L::each([&](int e, int) { a.v[e] = A.v[e], Z.v[e] = D.v[e]; });
            add_to_diagonal(Z, T(1));
            solve(Z, a);
            for (int i = 0; i < L::p(); ++i) regular = regular & (diagonal(Z, i) > 0);
            L::each([&](int e, int l) { a.v[e] = regular[l] ? a.v[e] : A.v[e]; });
        }
        symmetric_part(U, a);
    }

    // Adam: B + X C is the new mean, -C the part of the gradient's normal part that is in it. Both
    // stand for the same direction: X C X^T is symmetric. B will do where its products are known.
    void adapt() {
        find_multiplier(N);
        const Numbers gradient = inner(U, U);
        const Numbers little = LITTLE * roundoff * squares_of_K;
        Numbers pulled = 0;
        // Whether D makes a difference.
        if (!wanted.square || !for_all(d * gradient <= little)) {
            product(Z, D, U);
            pulled = inner(U, Z);
        }
        Numbers tangent = squares_of_K - 2 * inner(U, N) + gradient + pulled;
        // Whether little is left of the gradient, so that rounding is seen.
        if (!for_all(tangent >= MUCH * squares_of_K)) tangent = measured_tangent();
        const double fresh = 1 - o.beta1;
        unit = unit * update_squares(root(tangent) * unit);
        if (!wanted.square) {
            size = size + 2 * fresh * root(squares_of_K);
            const Numbers mean = squares_of_B - 2 * fresh * inner(U, M) +
                                 fresh * fresh * (gradient + pulled);
            squares_of_B = at_least(mean, 0) + roundoff * size * size;
        }
        const T share = T(fresh);
        L::each([&](int e, int) { N.v[e] = -share * U.v[e]; });
        if (!wanted.square) L::each([&](int e, int) { M.v[e] += N.v[e] - share * Z.v[e]; });
    }

    // The squared norm of K - X U, in a pass of its own.
    Numbers measured_tangent() {
        L::each([&](int e, int) { a.v[e] = -U.v[e], b.v[e] = T(0); });
        add_to_diagonal(b, T(1));
        std::swap(mix_B, mix_K), rows.reread();
        const Numbers squares = rows.measure(a, &b, nullptr);
        std::swap(mix_B, mix_K), rows.reread();
        return squares;
    }

    // What is kept of the l-th matrix as a single number.
    T& number(Numbered which, int l) const {
        return static_cast<T*>(matrices[l].parameter->*which)[matrices[l].index];
    }

    // Adam's second moments, one for each matrix, from norms of gradients, which their p columns
    // share. What directions are multiplied with.
    Numbers update_squares(const Numbers& norms) {
        // 1 - beta^step, to full precision also where the power is almost 1.
        const auto one_minus_power = [](double beta, double step) {
            return beta > 0 ? -std::expm1(step * std::log(beta)) : 1.0;
        };
        Numbers old = 0, correction1 = 1, correction2 = 1;
        steps = 0;
        for (int l = 0; l < filled; ++l) {
            old[l] = number(&Parameter::squares, l), steps[l] = number(&Parameter::steps, l) + 1.0;
            const bool again = l > 0 && steps[l] == steps[l - 1];  // nearly always: they cost a lot
            correction1[l] = again ? correction1[l - 1] : one_minus_power(o.beta1, steps[l]);
            correction2[l] = again ? correction2[l - 1] : one_minus_power(o.beta2, steps[l]);
        }
        const Numbers length = at_most(norms / std::sqrt(double(L::p())), 1e18);
        moment = o.beta2 * old + (1 - o.beta2) * length * length;
        return 1 / (correction1 * (root(moment / correction2) + o.adam_eps));
    }

    // Fields ---------------------------------------------------------------------------------------

    const Buffer* second() const { return square ? nullptr : &b; }

    // A bound of ||R|| that is free; R = (B (I + D) - X M^T) / 2 or X M, times `unit`. ||X||_2 is at
    // most (1 + d)^(1/2), and so 1 + d / 2.
    Numbers bound_of_tangent_part() const {
        if (square) return unit * (1 + d / 2) * size;
        return unit / 2 * ((1 + d) * root(squares_of_B) + (1 + d / 2) * norms(M));
    }

    // a and b of the field X a + B b = pull X D + tangent R.
    void set_field(const Numbers& pull, const Numbers& tangent) {
        const Each<T> p = rounded(pull), t = rounded(tangent * unit * (square ? 1 : 0.5));
        if (square) return L::each([&](int e, int l) { a.v[e] = p[l] * D.v[e] + t[l] * M.v[e]; });
        L::transpose(a, M, false);
        L::each([&](int e, int l) { a.v[e] = p[l] * D.v[e] - t[l] * a.v[e]; });
        const T with_D = T(o.attraction == AFTER ? 0 : 1);
        L::each([&](int e, int l) { b.v[e] = with_D * t[l] * D.v[e]; });
        add_to_diagonal(b, t);
        // Along fields Adam's generator is B + X C: X a + (B + X C) b = X (a + C b) + B b.
        if (o.moments != ADAM || o.attraction == AFTER) return;
        product(U, N, b);
        L::each([&](int e, int) { a.v[e] += U.v[e]; });
    }

    // a and b of a move by -eta R - pull X D.
    void set_move(const Numbers& pull) { set_field(-1 * pull, -1 * eta); }

    // Forms the field pull X D + R, whose norm is at most `norm`, and measures its norm. Then Q is
    // its Gram matrix, in units of norm^2, if that is wanted.
    void measure(double pull, bool with_square) {
        const Numbers whole = at_least(norm, TINY * at_least(unit, 1));  // Adam's unit may be large
        set_field(pull / whole, 1 / whole);
        const Numbers squares = rows.measure(a, second(), with_square ? &Q : nullptr);
        const Each<T> inverse = rounded(choice(squares > 0, 1 / squares, 0));
        norm = whole * root(squares);
        if (with_square) L::each([&](int e, int l) { Q.v[e] *= inverse[l]; });
    }

    // Z = Y^T Y - I, Y = X + X a + B b.
    void measure_reached() {
        add_to_diagonal(a, T(1));
        rows.measure(a, second(), &Z);
        add_to_diagonal(Z, T(-1));
    }

    // Makes eta the step to try along a field of norm `norm`. With "frobenius" it is what bounds
    // allow before the move, which adds eta^2 norm^2 - 2 eta slope to the distance.
    void choose(double longest, const Numbers& slope, const Numbers& room) {
        eta = trial_step(longest, norm, L::p());
        const Numbers length = eta * norm;
        if (o.rule == FROBENIUS) eta = eta * safe_share(length * length, eta * slope, room);
    }

    // Takes a share of a trial move, which has added `most` to the distance, or less: the share.
    Numbers shorten(const Flags& safe, const Numbers& most, const Numbers& slope,
                    const Numbers& room) {
        const Numbers length = eta * norm, P = at_most(length * length, most);
        const Numbers theta = choice(safe, 1, safe_share(P, slope, at_least(room, 0)));
        eta = eta * theta;
        return theta;
    }

    // The distance d becomes a bound of it in the spectral norm, from D; U becomes D^2. At most eps
    // is returned: iterates are within that. d is more for a matrix that is known to be outside.
    Numbers bound_distances() {
        const Numbers bound = bounds(D, U, a, is_sharp(o));
        d = at_least(at_most(bound, o.eps), bound * bound / at_least(d, SMALLEST));
        return at_most(d, o.eps);
    }

    // The attractions ------------------------------------------------------------------------------

    // X - eta (R + lam X D)
    void coupled() {
        const double longest = longest_step(o);
        eta = o.rule == UNSAFE ? o.lr : longest;
        norm = bound_of_tangent_part() + o.lam * d * (1 + d / 2);
        const bool free = for_all(coupled_is_safe(o, longest, norm, d, 2 * longest * error));
        if (!free && o.rule != UNSAFE) {
            measure(o.lam, o.rule == SPECTRAL && !square);
            // Nothing leads away from the edge: the root of what rounding leaves is no step.
            const double least = o.lam == 0 ? EDGE * std::numeric_limits<T>::epsilon() : -INFINITY;
            const Numbers room = o.aim - d;
            choose(longest, o.lam * d * (1 - d) - error,
                   choice(room <= least, at_most(room, 0), room));
            if (o.rule == SPECTRAL) shorten_coupled();
        }
        taken = is_a_step(o, eta, d, o.lam) & (eta * norm < INFINITY);
        set_move(eta * o.lam);
    }

    // A trial move reaches D - 2 t lam (D + D^2) + t^2 F^T F along F, but for tangency lost to
    // rounding. Of square X, D is seen from the other side, where R turns it.
    void shorten_coupled() {
        const Numbers length = eta * norm, astray = 2 * eta * error;
        const Each<T> less = rounded(2 * eta * o.lam), factor = rounded(length * length);
        const Flags safe = coupled_is_safe(o, eta, norm, d, astray);
        const Numbers delta = bound_distances();
        L::each([&](int e, int l) {
            Z.v[e] = D.v[e] - less[l] * (D.v[e] + U.v[e]) + factor[l] * Q.v[e];
        });
        if (square) set_move(eta * o.lam), measure_reached();
        const Numbers reached = bounds(Z, b, a, is_sharp(o));
        // Small singular values are pulled by (1 - delta) slope only, delta being at most eps.
        shorten(safe | (reached + astray <= o.aim), reached + delta,
                o.lam * eta * delta - astray / 2 / (1 - o.eps), o.aim - delta);
    }

    // X - eta R - omega X D
    void decoupled() {
        Numbers normal = d * (1 + d / 2), omega = o.omega;
        norm = bound_of_tangent_part(), eta = o.lr;
        const bool free = for_all(decoupled_is_safe(o, o.lr, norm, d, normal, 2 * o.lr * error));
        if (!free && o.rule != UNSAFE) {
            product(U, D, D);
            normal = root(at_least(inner(D, D) + inner(D, U), 0));
            measure(0, false);
            const Numbers inside = d * (1 - d);
            const Numbers squares = at_least(normal * normal, std::numeric_limits<T>::min());
            if (o.rule == FROBENIUS) omega = at_most(o.omega, at_least(inside / squares, 0));
            const Numbers pull = omega * normal;
            choose(o.lr, -1 * pull * norm - error, o.aim - d + 2 * omega * inside - pull * pull);
            if (o.rule == SPECTRAL) shorten_decoupled(normal);
        }
        taken = is_a_step(o, at_least(eta, omega), d, o.omega) &
                (eta * norm + omega * d < INFINITY);
        set_move(omega);
    }

    void shorten_decoupled(const Numbers& normal) {
        set_move(o.omega);
        measure_reached();
        const Numbers reached = bounds(Z, b, a, is_sharp(o));
        const Numbers astray = 2 * eta * error;
        // The move itself, X + X a + B b, is rounded in another way than what was measured.
        const Flags safe = decoupled_is_safe(o, eta, norm, d, normal, astray) |
                           (reached + astray <= o.aim);
        const Numbers delta = bound_distances();
        const Numbers drift = 2 * o.omega * delta * root(1 + delta) * eta * norm + astray;
        shorten(safe, reached + delta + drift, drift / -2, o.aim - delta);
    }

    // Y = X - eta R, R = (B - X M^T) / 2, then a Newton-Schulz step from Y / (1 + m)^(1/2), where
    // Y^T Y - I, which is derived, is Z + m I.
    void after() {
        const Numbers longest = o.lr * unit * size;
        curved = !for_all(d * longest * at_least(4 * longest, 1) <= LITTLE * roundoff);
        Numbers column = square ? Numbers(0) : longest_column(Q);
        square ? turned_square() : tangent_square();
        if (square) column = longest_column(Q);
        const Numbers drift = curved && !square ? unit * norms(E) : Numbers(0);
        const Numbers unknown = (1 + d) * (1 + d) * roundoff + (curved ? 0 * d : 4 * d);
        norm = unit * root(at_least(trace(Q), 0) + unknown * size * size), eta = o.lr;
        // Longer moves land at the same point, but Y + Y U would lose all of its digits.
        if (o.rule == UNSAFE) eta = at_most(eta, 1 / (std::sqrt(roundoff) * norm));
        derive(unit);
        Numbers end = centre(Z, mean) + mean + unknown * longest * longest;
        if (o.rule == FROBENIUS) end = d + o.lr * norm * (o.lr * norm);
        const bool free = for_all(end + 2 * o.lr * error <= o.farthest);
        taken = finite & ((d < FARTHEST) | (o.rule != FROBENIUS));
        shrunk = -1;
        if (!free && o.rule != UNSAFE) {
            // Nearly always Q is as good as if it were measured.
            const bool known = for_all(size * size <= GENERIC * trace(Q));
            known ? void(norm = unit * root(trace(Q))) : measure(0, true);
            choose(o.lr, -1 * error, o.farthest - d);
            derive(known ? unit : norm);
            centre(Z, mean);
            if (o.rule == SPECTRAL) shorten_landing(drift);
        }
        taken = taken & (eta * norm < INFINITY);
        // A generator may be so long that what rounding does to it would be seen in Y^T Y, where
        // the gradient is nearly normal to the manifold. Then Y is formed, and measured.
        lands_later = !for_all((eta * unit * column <= COARSE) | (taken < 1));
        set_move(0);
        if (!lands_later) land();
    }

    // The norm of the longest column of what has this Gram matrix.
    static Numbers longest_column(const Buffer& gram) {
        Numbers longest = 0;
        for (int i = 0; i < L::p(); ++i) longest = at_least(diagonal(gram, i), longest);
        return root(longest);
    }

    // Q becomes R^T R, and E what D adds to Y^T Y: of square X, Q = -M (M + D M), E = M^T D + D M.
    void turned_square() {
        if (curved) {
            product(b, D, M);
            symmetric_part(E, b, T(-2));
            L::each([&](int e, int) { a.v[e] = -M.v[e] - b.v[e]; });
            product(Z, M, a);
            symmetric_part(Q, Z);
        } else {
            L::each([&](int e, int) { a.v[e] = -M.v[e]; });
            product(Q, M, a);  // symmetric to the last bit
        }
    }

    // Q becomes R^T R in place of B^T B; M the transpose of H = M^T - K D in R = (B - X H) / 2; and
    // E = Sym(W D), W = M - K - D K, K the multiplier of B. Where D makes no difference H is M^T.
    void tangent_square() {
        if (curved) {
            if (o.moments == MOMENTUM && !keeps_K())
                L::each([&](int e, int) { U.v[e] = -N.v[e]; });
            else
                find_multiplier(M);
            product(Z, D, U);
            L::each([&](int e, int) { a.v[e] = M.v[e] - U.v[e] - Z.v[e]; });
            product(b, a, D);
            symmetric_part(E, b);
            L::each([&](int e, int) { M.v[e] -= Z.v[e]; });
            L::transpose(a, M, false);
            product(b, D, a);
            L::each([&](int e, int) { b.v[e] = 2 * (M.v[e] + Z.v[e]) - a.v[e] - b.v[e]; });
        } else {
            L::transpose(b, M, false);
            L::each([&](int e, int) { b.v[e] = 2 * M.v[e] - b.v[e]; });
        }
        product(a, M, b);
        L::each([&](int e, int) { a.v[e] = Q.v[e] - a.v[e]; });
        symmetric_part(Q, a, T(0.25));
    }

    // Z = D + E eta + R^T R eta^2, R^T R being Q times the square of `share`.
    void derive(const Numbers& share) {
        const Numbers length = eta * share;
        const Each<T> linear = rounded(eta * unit), factor = rounded(length * length);
        L::each([&](int e, int l) { Z.v[e] = D.v[e] + factor[l] * Q.v[e]; });
        if (curved) L::each([&](int e, int l) { Z.v[e] += linear[l] * E.v[e]; });
    }

    // Takes a share of the moves that are too long: eta, and the residual Z + m I.
    void shorten_landing(const Numbers& drift) {
        const Numbers wrong = 2 * eta * error, start = eta * unit;
        if (!for_all(wrong <= SHAKY * o.farthest)) {
            set_move(0);
            measure_reached();
            centre(Z, mean);
        }
        const Numbers end = bounds(Z, b, a, false) + mean;
        Numbers below = 0;  // the largest entry of D is less than the distance of X
        raise_to_largest(below, D.v, L::at(L::p(), 0));
        const Flags safe = end + wrong <= o.farthest;
        const Numbers drifts = eta * drift + (1 + 2 / o.farthest) * wrong;
        const Numbers delta = at_least(at_most(d, o.eps), below);
        const Numbers theta = shorten(safe, end + delta + drifts, drifts / -2, o.farthest - delta);
        // From distance 1 on Newton-Schulz steps may lead anywhere.
        taken = taken & (end < INFINITY) & (safe | (below < FARTHEST));
        const Each<T> linear = rounded(theta * (1 - theta) * start);
        const Each<T> part = rounded(theta * theta), rest = rounded(1 - theta * theta);
        mean = mean * theta * theta;
        shrunk = choice(theta < 1, mean, shrunk);
        L::each([&](int e, int l) { Z.v[e] = part[l] * Z.v[e] + rest[l] * D.v[e]; });
        if (curved) L::each([&](int e, int l) { Z.v[e] += linear[l] * E.v[e]; });
    }

    // U: the landed point is Y + Y U, where Y has the residual Z + m I.
    void land_from() {
        const Numbers c = 1 / root(1 + mean);
        const Each<T> factor = rounded(c / (-2 * (1 + mean)));
        L::each([&](int e, int l) { U.v[e] = factor[l] * Z.v[e]; });
        add_to_diagonal(U, rounded(c - 1));
    }

    // Adds the landing to the move X + X a + B b, b a multiple of the identity.
    void land() {
        land_from();
        const Each<T> minus = rounded(eta * unit / -2);
        product(Z, a, U);
        L::each([&](int e, int) { a.v[e] += U.v[e] + Z.v[e]; });
        if (!square) L::each([&](int e, int l) { b.v[e] += minus[l] * U.v[e]; });
    }

    // Lands from Y that is in the place of X.
    void land_measured() {
        wanted = {false, false, false, true, false};
        rows.gram(Z, M, N, Q, squares_of_B, squares_of_K);
        centre(Z, mean);
        const Numbers other = choice(shrunk < 0, mean, shrunk);
        add_to_diagonal(Z, rounded(mean - other));
        mean = other;
        land_from();
        if (o.scale != 1) L::each([&](int e, int) { U.v[e] *= T(o.scale); });
        rows.apply(&U, nullptr, nullptr, false, taken, T(1));
    }

    // What is written ------------------------------------------------------------------------------

    void finish() {
        const bool gains = o.moments != NONE && !square;  // whether the state does, X C
        if (o.rule == UNSAFE) take_finite_steps();
        // The state of gradients that were scaled down may be finite in their unit only.
        if (gains && wanted.exact)
            taken = taken & (rows.largest(&N, keeps_K()) / power <= std::numeric_limits<T>::max());
        taken = taken & finite;
        if (all(taken < 1)) return;
        // Weights are W = scale X. What is kept is W + scale (X' - X), not scale X': rounded there
        // and back in each step, weights would creep.
        if (o.scale != 1) L::each([&](int e, int) { a.v[e] *= T(o.scale), b.v[e] *= T(o.scale); });
        // A step with lr = 0 changes nothing.
        const bool moves = o.lr > 0;
        rows.apply(moves ? &a : nullptr, second(), gains ? &N : nullptr, keeps_K(), taken,
                   rounded(1 / power));
        if (o.moments != NONE && square) L::move<false>(N.v, tile(), &Parameter::state, taken.v);
        if (lands_later && moves) land_measured();
    }

    // Without a safe step X may be anything. A step is taken if bounds show that X + X a + B b, what
    // a landing from there makes of it, and the state are finite.
    __attribute__((noinline)) void take_finite_steps() {
        const Numbers of_X = root(1 + d), of_b = square ? Numbers(0) : norms(b);
        const Numbers reached = of_X * (1 + norms(a)) + size * of_b;
        const Numbers landed = lands_later ? reached * reached * reached : reached;
        const Numbers kept = o.moments == NONE ? Numbers(0) : of_X * norms(N) / power;
        taken = taken & (std::max(o.scale, 1.0) * landed + kept < LARGEST_NORM);
    }

    // Writes Adam's numbers, and counts what was not taken, and what was shorter than lr.
    void finish_numbers(int count) const {
        if (o.moments != ADAM && all(taken & (eta >= o.lr))) return;
        for (int l = 0; l < count; ++l) {
            Parameter& parameter = *matrices[l].parameter;
            if (!taken[l]) __atomic_fetch_add(&parameter.skipped, 1, __ATOMIC_RELAXED);
            if (o.rule != UNSAFE && finite[l] && eta[l] < o.lr)
                __atomic_fetch_add(&parameter.limited, 1, __ATOMIC_RELAXED);
            if (o.moments == ADAM && taken[l])
                number(&Parameter::squares, l) = T(moment[l]),
                number(&Parameter::steps, l) = T(steps[l]);
        }
    }
};

// Not on the stack, which may be small in other threads. Looked up once: that takes its time.
__attribute__((noinline)) void* place_of_step() {
    alignas(Step) static thread_local unsigned char memory[sizeof(Step)];
    return memory;
}

// Goes through the matrices of some parameters.
struct Cursor {
    Parameter* q;
    int64_t k;

    Cursor(Parameter* parameters, int64_t from) : q(parameters), k(from) {
        while (k >= q->count) k -= q++->count;
    }
    Matrix next() {
        while (k == q->count) ++q, k = 0;
        return {q, q->offset(k), k++};
    }
};

}  // namespace

// Step some parameters, whose matrices are of one size.
extern "C" void ortholand_landing(const Options* o, Parameter* parameters, int count) {
    const int64_t n = count ? parameters->n : 0, p = count ? parameters->p : 0;
    int64_t total = 0;
    for (int i = 0; i < count; ++i) total += parameters[i].count;
    if (p < 1 || n < p || total < 1) return;
    // Matrices that lie side by side in memory are read side by side, however long they are.
    const bool beside = parameters->inner_stride == 1 && parameters->inner >= W;
    const int64_t together = n > p && !beside && Rows::in_slices(n, total) ? 1 : W;
    // A thread is worth starting for a tenth of a millisecond of work at least.
    const double work = (6.0 * n * p + (n > p ? 10.0 * p * p : 0)) * p + 60.0 * n * p;
    const int64_t useful = int64_t(double(total) * work / (1 << 22));
    const int64_t threads = std::min<int64_t>(std::max(1, o->threads), std::max<int64_t>(1, useful));
    const bool few = n > p && together == 1 && total < threads;  // then they share their rows
    const int64_t blocks = (total + together - 1) / together;
    share(blocks, few ? 1 : threads, [&](int64_t first, int64_t last) {
        L::resize(int(p));
        Step& step = *new (place_of_step()) Step(*o, n);
        Cursor cursor(parameters, first * together);
        for (; first < last; ++first) {
            const int some = int(std::min(together, total - first * together));
            for (int l = 0; l < some; ++l) step.matrices[l] = cursor.next();
            step.run(some, few ? threads : 1);
        }
        step.~Step();
    });
}
