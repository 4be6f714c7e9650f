// How far a step may go, as ortholand/safe_step.py says.

#pragma once

#include <limits>

#include "steps.h"
#include "tiles.h"

namespace {

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

}  // namespace
