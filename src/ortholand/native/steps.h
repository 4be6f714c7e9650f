// What the sources here share: the options of a step, and how far it may go.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

// Mirrored by ortholand/native/__init__.py, field by field.
extern "C" struct Options {
    double lr, lam, eps, aim, farthest, omega;
    double momentum, dampening;
    double beta1, beta2, adam_eps;
    int32_t attraction, rule, maximize, moments, nesterov, threads;
};

// Rules of the safe step (ortholand.safe_step); 0: no safe step.
enum Rule { UNSAFE = 0, FROBENIUS = 1, TIGHT = 2, SPECTRAL = 3 };

// Norms by which numbers can be divided, and the quotients squared, without overflow.
constexpr double SMALLEST = 1e-100;
constexpr double TINY = 1e-30;  // norms below which nothing is gained from a better bound
constexpr double EDGE = 16;  // units of rounding within which a matrix counts as on the edge
constexpr double LARGEST = std::numeric_limits<double>::max();

// Bounds that let NaN pass, as torch's clamp does.
inline double at_least(double x, double low) { return x < low ? low : x; }
inline double at_most(double x, double high) { return x > high ? high : x; }

// 1/2 with the sign that makes a gradient one of a descent.
template <class T>
inline T half_of_descent(const Options& o) {
    return o.maximize ? T(-0.5) : T(0.5);
}

// Whether something moves, or will: not from distance 1 on. Where no step is safe for now, a matrix
// that is pulled back stays and goes on with its moments; with no pull it would stay for ever. With
// lr = 0 nothing shall move.
inline bool is_a_step(const Options& o, double eta, double distance, double pull) {
    return (eta > 0 || o.lr == 0 || pull > 0) && (o.rule == UNSAFE || distance < 1);
}

// ortholand.safe_step.largest_step for a field of this norm, and lr if that is less.
template <class T>
inline double coupled_step(const Options& o, double norm, double distance, double tangency_error) {
    if (o.rule == UNSAFE) return o.lr;
    norm = at_least(norm, SMALLEST);
    const double slope = (o.lam * distance * (1 - distance) - tangency_error) / norm;
    double room = o.aim - distance;
    // Nothing leads away from the edge: the root of what rounding leaves is no step.
    if (o.lam == 0 && room <= EDGE * std::numeric_limits<T>::epsilon()) room = at_most(room, 0);
    const double reach = std::sqrt(at_least(slope * slope + room, 0));
    // Nothing cancels for negative slopes either.
    const double ahead = slope >= 0 ? reach + slope : at_least(room, 0) / (reach - slope);
    const double step = at_most(at_least(ahead / norm, 0), LARGEST);
    return at_most(o.lam > 0 ? at_most(step, 1 / (2 * o.lam)) : step, o.lr);
}
