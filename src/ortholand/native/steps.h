// What the sources here share: what is stepped, the options of a step, and how far it may go.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

// Given by optim/engines/compiled.py, field by field.
extern "C" struct Options {
    double lr, scale, lam, eps, aim, farthest, omega;
    double momentum, dampening;
    double beta1, beta2, adam_eps;
    int32_t attraction, rule, maximize, moments, nesterov, threads;
};

// A parameter: `count` matrices, in memory that is the same for weight, gradient and state.
extern "C" struct Parameter {
    void* X;
    const void* G;
    void* matrix_state;  // momentum buffer or first moment, as X; or null
    void* square_state;  // second moment, a number per matrix; or null
    void* step_state;    // steps taken, a number per matrix; or null
    int64_t count;
    int64_t row_stride, column_stride;  // of a matrix with at least as many rows as columns
    // Matrices are in groups of `inner`, so far from each other in a group and from group to group.
    int64_t inner, inner_stride, outer_stride;
    int64_t skipped;  // written: how many of the matrices did not take their step
    int64_t limited;  // written: how many took one that was shorter than lr

    int64_t offset(int64_t matrix) const {
        if (outer_stride == inner * inner_stride) return matrix * inner_stride;  // no division
        return matrix / inner * outer_stride + matrix % inner * inner_stride;
    }
};

enum Attraction { COUPLED = 0, DECOUPLED = 1, AFTER = 2 };
enum Moments { NONE = 0, MOMENTUM = 1, ADAM = 2 };

// Rules of the safe step (ortholand.safe_step); 0: no safe step.
enum Rule { UNSAFE = 0, FROBENIUS = 1, SPECTRAL = 3 };

// Norms by which numbers can be divided, and the quotients squared, without overflow.
constexpr double SMALLEST = 1e-100;
constexpr double TINY = 1e-30;  // the same for floats
constexpr double EDGE = 16;  // units of rounding within which a matrix counts as on the edge
constexpr double FARTHEST = 1 - 0x1p-20;  // distance from which X may be singular, up to rounding
constexpr double LARGEST = std::numeric_limits<double>::max();

// ortholand.geometry.matrices.largest_norm: below it a few products do not overflow.
template <class T>
constexpr double LARGEST_NORM = std::numeric_limits<T>::max() / 4.0;

// Bounds that let NaN pass, as torch's clamp does.
inline double at_least(double x, double low) { return x < low ? low : x; }
inline double at_most(double x, double high) { return x > high ? high : x; }

// 1/2 with the sign that makes a gradient one of a descent.
template <class T>
inline T half_of_descent(const Options& o) {
    return o.maximize ? T(-0.5) : T(0.5);
}

// Weights are W = scale Z, and Z steps. What is kept is W + scale (Z' - Z), not scale Z': rounded
// there and back in each step, weights would creep.
inline bool is_scaled(const Options& o) { return o.scale != 1; }

// Whether something moves, or will: not from FARTHEST on. Where no step is safe for now, a matrix
// that is pulled back stays and goes on with its moments; with no pull it would stay for ever. With
// lr = 0 nothing shall move.
inline bool is_a_step(const Options& o, double eta, double distance, double pull) {
    return (eta > 0 || o.lr == 0 || pull > 0) && (o.rule == UNSAFE || distance < FARTHEST);
}

// Whether a step of this length is finite, in the weight W too.
template <class T>
inline bool is_finite_step(const Options& o, double length) {
    return at_least(o.scale, 1) * length < LARGEST_NORM<T>;
}

// A step in two factors: along a very large field it may be less than the smallest normal number.
template <class T>
struct Factors {
    T step, rest;
    explicit Factors(double eta) {
        const bool tiny = eta < 0x1p-100;
        step = T(tiny ? eta * 0x1p16 : eta), rest = T(tiny ? 0x1p-16 : 1);
    }
};

// lr, or less where the pull of a coupled step would overshoot.
inline double longest_step(const Options& o) {
    return o.lam > 0 ? at_most(o.lr, 1 / (2 * o.lam)) : o.lr;
}

// ortholand.safe_step.largest_root: the largest eta with eta^2 norm^2 - 2 eta b <= room, where
// slope = b / norm. Nothing cancels for negative slopes either.
inline double largest_root(double norm, double slope, double room) {
    const double reach = std::sqrt(at_least(slope * slope + room, 0));
    const double ahead = slope >= 0 ? reach + slope : at_least(room, 0) / (reach - slope);
    return at_most(at_least(ahead / norm, 0), LARGEST);
}

// "frobenius": safe steps for a field of norm at most `norm`, which tangency lost to rounding may
// lead astray. All are known before the move.

// ortholand.safe_step.largest_step, and lr if that is less.
template <class T>
inline double coupled_step(const Options& o, double norm, double distance, double tangency_error) {
    if (o.rule == UNSAFE) return o.lr;
    norm = at_least(norm, SMALLEST);
    const double slope = (o.lam * distance * (1 - distance) - tangency_error) / norm;
    double room = o.aim - distance;
    // Nothing leads away from the edge: the root of what rounding leaves is no step.
    if (o.lam == 0 && room <= EDGE * std::numeric_limits<T>::epsilon()) room = at_most(room, 0);
    return at_most(largest_root(norm, slope, room), longest_step(o));
}

// ortholand.safe_step.largest_step_decoupled, X D having the norm `normal`; how much of X D is taken.
template <class T>
inline double decoupled_step(const Options& o, double norm, double distance, double normal,
                             double tangency_error, double& omega) {
    omega = o.omega;
    if (o.rule == UNSAFE) return o.lr;
    norm = at_least(norm, SMALLEST);
    const double gentle = distance * (1 - distance) /
        at_least(normal * normal, std::numeric_limits<T>::min());
    omega = at_most(omega, at_least(gentle, 0));
    const double pull = omega * normal;
    const double room = o.aim - distance + 2 * omega * distance * (1 - distance) - pull * pull;
    return at_most(largest_root(norm, -pull - tangency_error / norm, room), o.lr);
}

// ortholand.safe_step.largest_step_before_landing, and lr if that is less.
inline double step_before_landing(const Options& o, double norm, double distance,
                                  double tangency_error) {
    if (o.rule == UNSAFE) return o.lr;
    norm = at_least(norm, SMALLEST);
    return at_most(largest_root(norm, -tangency_error / norm, o.farthest - distance), o.lr);
}

// "spectral": a trial move by t is measured, and shortened where it leads too far. Comparisons are
// written such that NaN is never safe.

// ortholand.safe_step.trial_step: no longer move is safe, and none of it overflows.
inline double trial_step(double longest, double norm, int p) {
    return at_most(std::sqrt(2.0 * p) / norm, longest);
}

// Whether the norm of the field L = R + lam X D alone shows that a move by t is safe.
inline bool coupled_is_safe(const Options& o, double t, double norm, double d, double astray) {
    const double length = t * norm;
    return d <= o.aim && d * (1 - 2 * o.lam * t) + length * length + astray <= o.aim;
}

// The same for a move by t R + omega X D.
inline bool decoupled_is_safe(const Options& o, double t, double norm, double d, double normal,
                              double astray) {
    const double length = t * norm + o.omega * normal, inside = d * (1 - d);
    return d <= o.aim && o.omega * normal * normal <= inside &&
           d - 2 * o.omega * inside + length * length + astray <= o.aim;
}

// A bound of the distance of iterates, which are within eps; more than that for a matrix that is
// known to be outside, from `bound` >= ||D||_2 and d = ||D||_F.
inline double distance_inside(const Options& o, double bound, double d) {
    return at_least(at_most(bound, o.eps), bound * bound / at_least(d, SMALLEST));
}

// Whether nothing attracts, so that bounds of distances must be sharp: a matrix inside the ball must
// not look as if it were at the edge.
inline bool is_sharp(const Options& o) {
    return (o.attraction == DECOUPLED ? o.omega : o.lam) == 0;
}

// What a trial move of some length adds to the distance at most, from the distance it has reached.
inline double added(double reached, double delta, double length) {
    return at_least(at_most(length * length, reached + delta), SMALLEST);
}

// ortholand.safe_step.share_of_pulled_move: the largest theta with
// delta - 2 theta slope + theta^2 P <= delta + room.
inline double share_of_pulled_move(double P, double slope, double room) {
    return at_most((slope + std::sqrt(slope * slope + P * at_least(room, 0))) / P, 1);
}

// ortholand.safe_step.share_of_tangent_move: the largest theta with
// delta + theta drift + theta^2 P <= delta + room.
inline double share_of_tangent_move(double P, double drift, double room) {
    room = at_least(room, 0);
    const double reach = drift / 2 + std::sqrt(drift * drift / 4 + P * room);
    return at_most(room / at_least(reach, SMALLEST), 1);
}

// Adam with one second moment per matrix: the numbers of one matrix.
struct AdamNumbers {
    double square = 0, steps = 0;  // the new ones
    double scale = 0;              // what the mean is multiplied with
    double corrected_for = 0, correction1 = 1, correction2 = 1;

    // `norm` is that of the gradient, whose p columns share it.
    void update(const Options& o, double norm, int p, double old_square, double old_steps) {
        steps = old_steps + 1;
        if (steps != corrected_for) {  // nearly always the same for all: they cost a lot
            corrected_for = steps;
            correction1 = one_minus_power(o.beta1, steps);
            correction2 = one_minus_power(o.beta2, steps);
        }
        const double size = at_most(norm / std::sqrt(double(p)), 1e18);
        square = o.beta2 * old_square + (1 - o.beta2) * size * size;
        scale = 1 / (correction1 * (std::sqrt(square / correction2) + o.adam_eps));
    }

    // 1 - beta^step, to full precision also where the power is almost 1.
    static double one_minus_power(double beta, double step) {
        return beta > 0 ? -std::expm1(step * std::log(beta)) : 1.0;
    }
};
