// What the steps of square and of tall matrices have in common: the numbers of each matrix, how far
// a move that is too long may go, Adam's second moments, and the threads that share the work.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "steps.h"
#include "tiles.h"

namespace {

// A step of W matrices at a time.
template <class L>
struct Base : Tiles<L> {
    using T = typename L::Scalar;
    using Buffer = typename L::Buffer;
    static constexpr int W = L::W;

    const Options& o;
    double d[W], norm[W], eta[W];  // distance, norm of the field, step
    double error[W] = {};          // of tangency, for a step of length 1
    double square[W], steps[W];    // Adam's
    bool finite[W], taken[W];

    explicit Base(const Options& options) : o(options) { std::fill(finite, finite + W, true); }

    // Shares of trial moves by eta, where they have reached more than they may, `from` a distance.

    void shorten_coupled(const double* from, const double* reached) {
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

    void shorten_decoupled(const double* from, const double* reached, const double* normal) {
        for (int l = 0; l < W; ++l) {
            const double astray = 2 * eta[l] * error[l], length = eta[l] * norm[l];
            // The move itself, X + X a + B b, is rounded in another way than what was measured.
            const bool safe = decoupled_is_safe(o, eta[l], norm[l], d[l], normal[l], astray) ||
                              reached[l] + astray <= o.aim;
            d[l] = from[l];
            const double delta = at_most(d[l], o.eps);
            const double drift = 2 * o.omega * delta * std::sqrt(1 + delta) * length + astray;
            const double P = added(reached[l], delta + drift, length);
            if (!safe) eta[l] *= share_of_tangent_move(P, drift, o.aim - delta);
        }
    }

    // The share theta of a move before landing, which has reached a distance, and may be so far
    // `astray` of it; `below` is less than the distance of X.
    double shorten_before_landing(int l, double reached, double astray, double drift, double below) {
        const bool safe = reached + astray <= o.farthest;
        const double delta = at_least(at_most(d[l], o.eps), below);
        const double P = added(reached, delta + drift, eta[l] * norm[l]);
        const double theta = safe ? 1 : share_of_tangent_move(P, drift, o.farthest - delta);
        // From distance 1 on Newton-Schulz steps may lead anywhere.
        taken[l] = taken[l] && reached < INFINITY && (safe || below < FARTHEST);
        eta[l] *= theta;
        return theta;
    }

    // Bounds of the distance of X, from D = X^T X - I.
    void bound_distances(double* from, const Buffer& D, Buffer& square, Buffer& scratch) {
        this->bounds(from, D, square, scratch, is_sharp(o));
        for (int l = 0; l < W; ++l) from[l] = distance_inside(o, from[l], d[l]);
    }

    // Adam's second moments, one for each matrix, from norms of gradients; what directions are
    // multiplied with.
    void update_squares(const Matrix<T>* matrices, int filled, const double* norms, double* scale) {
        AdamNumbers numbers;
        for (int l = 0; l < W; ++l) {
            const bool there = l < filled;
            numbers.update(o, norms[l], L::p(), there ? double(*matrices[l].square) : 0,
                           there ? double(*matrices[l].steps) : 0);
            square[l] = numbers.square, steps[l] = numbers.steps, scale[l] = numbers.scale;
        }
    }

    // Writes Adam's numbers, and counts what was not taken, and what was shorter than lr.
    void finish_numbers(const Matrix<T>* matrices, int filled) const {
        for (int l = 0; l < filled; ++l) {
            Parameter& parameter = *matrices[l].parameter;
            if (!taken[l]) __atomic_fetch_add(&parameter.skipped, 1, __ATOMIC_RELAXED);
            if (o.rule != UNSAFE && finite[l] && eta[l] < o.lr)
                __atomic_fetch_add(&parameter.limited, 1, __ATOMIC_RELAXED);
            if (o.moments == ADAM && taken[l])
                *matrices[l].square = T(square[l]), *matrices[l].steps = T(steps[l]);
        }
    }
};

// run(first, last) for parts of [0, count), by up to so many threads, this one among them.
template <class Run>
void share(int64_t count, int64_t threads, Run run) {
    threads = std::max<int64_t>(1, std::min(threads, count));
    std::vector<std::thread> helpers;
    helpers.reserve(threads - 1);
    int64_t mine = count;  // what is from here on is the helpers'
    for (int64_t t = threads - 1; t > 0; --t) {
        const int64_t first = count * t / threads;
        try {
            helpers.emplace_back(run, first, mine);
        } catch (const std::system_error&) {
            break;  // no thread to be had: this one does the rest
        }
        mine = first;
    }
    run(int64_t(0), mine);
    for (std::thread& helper : helpers) helper.join();
}

// All matrices of some parameters, in one row.
template <class T>
std::vector<Matrix<T>> matrices_of(Parameter* parameters, int count) {
    std::vector<Matrix<T>> all;
    const auto shifted = [](const void* start, int64_t offset) {
        return start ? static_cast<T*>(const_cast<void*>(start)) + offset : nullptr;
    };
    int64_t total = 0;
    for (int i = 0; i < count; ++i) total += parameters[i].count;
    all.reserve(total);
    for (Parameter* q = parameters; q != parameters + count; ++q)
        for (int64_t k = 0; k < q->count; ++k) {
            const int64_t at = q->offset(k);
            all.push_back({shifted(q->X, at), shifted(q->G, at), shifted(q->matrix_state, at),
                           shifted(q->square_state, k), shifted(q->step_state, k), q});
        }
    return all;
}

// Steps all n x p matrices of some parameters, so many at a time.
template <class Step>
void run_all(const Options& o, Parameter* parameters, int count, int64_t n, int p) {
    using L = typename Step::L;
    const auto matrices = matrices_of<typename L::Scalar>(parameters, count);
    const int64_t total = matrices.size(), together = Step::together(n, total);
    // A thread is worth starting for a tenth of a millisecond of work at least.
    const int64_t useful = int64_t(double(total) * Step::work(double(n), p) / (1 << 22));
    const int64_t threads = std::min<int64_t>(std::max(1, o.threads), std::max<int64_t>(1, useful));
    const bool few = n > p && together == 1 && total < threads;  // then they share their rows
    const int64_t blocks = (total + together - 1) / together;
    share(blocks, few ? 1 : threads, [&](int64_t first, int64_t last) {
        // Not on the stack, which may be small in other threads, and not made anew in each step.
        alignas(Step) static thread_local unsigned char memory[sizeof(Step)];
        Step& step = *new (memory) Step(o, n);
        if constexpr (L::W == 1) L::resize(p);
        for (; first < last; ++first) {
            const int64_t start = first * together;
            step.run(&matrices[start], int(std::min(together, total - start)), few ? threads : 1);
        }
        step.~Step();
    });
}

}  // namespace
