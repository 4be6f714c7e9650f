// L-BFGS for one small matrix with orthonormal columns: everything between two evaluations of f.
//
// LBFGS of lbfgs.py, with the line search, the targets and the landed line that it uses, in one call
// for each evaluation: at 20 x 3 the arithmetic takes a microsecond, and Python takes forty.
// Python evaluates f, decides what success is, and is the reference.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#ifndef SCALAR
#define SCALAR double
#endif

namespace {

using Real = SCALAR;

// The standard one asks for a function that libstdc++ has only had since GCC 11, and wheels are
// for older systems, too.
template <class T>
struct Allocator {
    using value_type = T;
    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T))); }
    void deallocate(T* p, std::size_t) noexcept { ::operator delete(p); }
    bool operator==(const Allocator&) const { return true; }
    bool operator!=(const Allocator&) const { return false; }
};

using Vector = std::vector<Real, Allocator<Real>>;
using Doubles = std::vector<double, Allocator<double>>;

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int RECENT = 3;           // curvatures remembered

// What Python and this code show each other besides matrices: Numbers of search.py, name by name.
struct Numbers {
    // Constants of the method, each from the Python file that explains it.
    double decrease, flattened, last, max_trials, many_trials, flatness, news, first_angle, near;
    double farthest, cubic, warm, share, looks[3];
    // The problem and the run's limits.
    double lam;  // NaN: by the multiplier
    double eps, gtol, atol, noise, first, length, magnitude, patience, iterations, deadline;
    // Where the run is; changed here.
    double value, lowest, flattest, in_vain, caution, seen, curvatures[RECENT];
    // What happened: rows to fetch, and about the lowest point, if one was lower than before.
    double saw_non_finite, rows, has_best, best_is_here, best_value;
};

enum Kind { TALL, SQUARE, SPAN };
enum Answer { EVALUATE, LOOK, STUCK };

template <class T>
double dot(const T* a, const T* b, int64_t size) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += double(a[i]) * double(b[i]);
    return sum;
}

double dot(const Vector& a, const Vector& b) { return dot(a.data(), b.data(), a.size()); }

double norm(const Vector& a) { return std::sqrt(dot(a, a)); }

// Products of a with ``count`` vectors, one behind the other in B: four at a time, because one sum
// would wait for each of its additions.
template <class Out>
void dots(const Real* a, const Real* B, int64_t count, int64_t size, Out* out) {
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const Real *b = B + k * size, *c = b + size, *d = c + size, *e = d + size;
        double first = 0, second = 0, third = 0, fourth = 0;
#pragma omp simd reduction(+ : first, second, third, fourth)
        for (int64_t i = 0; i < size; ++i) {
            const double x = double(a[i]);
            first += x * double(b[i]), second += x * double(c[i]);
            third += x * double(d[i]), fourth += x * double(e[i]);
        }
        out[k] = Out(first), out[k + 1] = Out(second);
        out[k + 2] = Out(third), out[k + 3] = Out(fourth);
    }
    for (; k < count; ++k) out[k] = Out(dot(a, B + k * size, size));
}

// out += factor (f_1 b_1 + f_2 b_2 + ...) with the vectors of B; four at a time, to store less.
template <class In>
void add_all(Real* out, double factor, const In* f, const Real* B, int64_t count, int64_t size) {
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const Real *b = B + k * size, *c = b + size, *d = c + size, *e = d + size;
        const Real first = Real(factor * f[k]), second = Real(factor * f[k + 1]);
        const Real third = Real(factor * f[k + 2]), fourth = Real(factor * f[k + 3]);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i)
            out[i] += (first * b[i] + second * c[i]) + (third * d[i] + fourth * e[i]);
    }
    for (; k < count; ++k) {
        const Real *b = B + k * size, only = Real(factor * f[k]);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[i] += only * b[i];
    }
}

// Matrices are stored by columns, which are longer than rows: loops run along them.

void read(const Real* rows, Vector& A, int64_t n, int64_t p) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t a = 0; a < p; ++a) A[a * n + i] = rows[i * p + a];
}

void write(const Vector& A, Real* rows, int64_t n, int64_t p) {
    for (int64_t i = 0; i < n; ++i)
        for (int64_t a = 0; a < p; ++a) rows[i * p + a] = A[a * n + i];
}

// out = A^T B for n x p matrices.
void gram(const Vector& A, const Vector& B, Vector& out, int64_t n, int64_t p) {
    for (int64_t b = 0; b < p; ++b) dots(&B[b * n], A.data(), p, n, &out[b * p]);
}

// out = C + alpha A B, A n x p and B p x p; C may be null. out must not be A or B.
void multiply(const Real* C, double alpha, const Vector& A, const Vector& B, Vector& out,
              int64_t n, int64_t p) {
    for (int64_t b = 0; b < p; ++b) {
        Real* column = &out[b * n];
        for (int64_t i = 0; i < n; ++i) column[i] = C ? C[b * n + i] : Real(0);
        add_all(column, alpha, &B[b * p], A.data(), p, n);
    }
}

void symmetrize(Vector& M, int64_t p) {
    for (int64_t a = 0; a < p; ++a)
        for (int64_t b = 0; b < a; ++b)
            M[a * p + b] = M[b * p + a] = (M[a * p + b] + M[b * p + a]) / 2;
}

// A point with all that is known there: Point of manifold_cost.py.
struct Spot {
    Vector X, D, G, gradient;
    double value = 0, gradient_norm = 0, multiplier_norm = 0, euclidean_norm = 0, distance = 0;
    double correction = 0;
    bool finite = false;

    Spot(int64_t n, int64_t p) : X(n * p), D(p * p), G(n * p), gradient(n * p) {}
    double merit(double lam) const { return value - correction + lam * distance * distance / 4; }
};

// The last steps s and changes y of the gradient, and the inverse Hessian they imply: Pairs of
// lbfgs.py, the compact form, in which a direction takes two passes over them.
class Pairs {
  public:
    Pairs(int64_t size, int64_t memory, double news)
        : news(news), size(size), memory(memory), held(memory + std::max<int64_t>(1, memory / 2)),
          S(held * size), Y(held * size), YY(held * held), inverse(held * held), Sg(held), Yg(held),
          Sg_before(held), Yg_before(held), curvatures(held), u(held), v(held) {}

    bool empty() const { return begin == end; }
    void forget() { begin = end = 0; }

    // Go to a point with this gradient: products with it, and by how much they have changed.
    void look(const Vector& g) {
        Sg.swap(Sg_before);
        Yg.swap(Yg_before);
        dots(g.data(), S.data() + begin * size, end - begin, size, Sg.data() + begin);
        dots(g.data(), Y.data() + begin * size, end - begin, size, Yg.data() + begin);
    }

    // After a look at the gradient g, which has changed by y in the step s.
    void add(const Vector& s, const Vector& y, const Vector& g, double sy, double yy) {
        if (end == held) move_to_front();
        const int64_t k = end++;
        begin = std::max(begin, end - memory);
        std::copy(s.begin(), s.end(), S.begin() + k * size);
        std::copy(y.begin(), y.end(), Y.begin() + k * size);
        for (int64_t i = begin; i < k; ++i) {
            u[i] = (Sg_before[i] - Sg[i]) / sy;
            YY[i * held + k] = YY[k * held + i] = Yg[i] - Yg_before[i];
        }
        for (int64_t i = begin; i < k; ++i)  // an upper triangular matrix gets one column more
            inverse[i * held + k] = dot(&inverse[i * held + i], &u[i], k - i);
        inverse[k * held + k] = 1 / sy, YY[k * held + k] = yy, curvatures[k] = sy;
        Sg[k] = dot(s, g), Yg[k] = dot(y, g);
        gamma = end - begin == 1 ? sy / yy : gamma * std::pow(sy / yy / gamma, news);
    }

    // -H g for the gradient g of the last look.
    void direction(const Vector& g, Vector& out) {
        for (int64_t i = begin; i < end; ++i) u[i] = dot(&inverse[i * held + i], &Sg[i], end - i);
        std::fill(v.begin(), v.end(), 0);
        for (int64_t i = begin; i < end; ++i) {
            const double Du = curvatures[i] * u[i];
            const double w = gamma * (Yg[i] - dot(&YY[i * held + begin], &u[begin], end - begin)) - Du;
            for (int64_t j = i; j < end; ++j) v[j] += w * inverse[i * held + j];
        }
        for (int64_t i = 0; i < size; ++i) out[i] = Real(-gamma) * g[i];
        add_all(out.data(), 1, v.data() + begin, S.data() + begin * size, end - begin, size);
        add_all(out.data(), gamma, u.data() + begin, Y.data() + begin * size, end - begin, size);
    }

  private:
    const double news;
    const int64_t size, memory, held;  // held: places for pairs
    int64_t begin = 0, end = 0;
    double gamma = 1;
    Vector S, Y;          // one behind the other
    Doubles YY, inverse;  // <y_i, y_j>; inverse of <s_i, y_j> for i <= j: rows of ``held``
    Doubles Sg, Yg, Sg_before, Yg_before;  // products with the gradient, and with the one before
    Doubles curvatures, u, v;              // <s_i, y_i>; room to work

    // The pairs that stay when one more comes.
    void move_to_front() {
        const int64_t count = memory - 1, from = end - count;
        for (Vector* vectors : {&S, &Y})
            std::copy_n(vectors->begin() + from * size, count * size, vectors->begin());
        for (Doubles* numbers : {&Sg, &Yg, &Sg_before, &Yg_before, &curvatures})
            std::copy_n(numbers->begin() + from, count, numbers->begin());
        for (Doubles* matrix : {&YY, &inverse})
            for (int64_t i = 0; i < count; ++i)
                std::copy_n(matrix->begin() + (from + i) * held + from, count,
                            matrix->begin() + i * held);
        begin = 0, end = count;
    }
};

// What Python and this code show each other: matrices by rows, and numbers.
struct Desk {
    Real *X, *G, *D;  // n x p, n x p, p x p
    Numbers* numbers;
};

class Search {
  public:
    Search(Kind kind, int64_t n, int64_t p, int64_t memory, const Desk& desk)
        : kind(kind), n(n), p(p), desk(desk), run(*desk.numbers), pairs(n * p, memory, run.news),
          here(n, p), trial(n, p), lowest(n, p), best(n, p), V(n * p), moved(n * p), d(n * p),
          s(n * p), y(n * p), E(p * p), C(p * p), T(p * p), U(p * p) {}

    // From the point on the desk, which Python has evaluated.
    Answer start() {
        read(desk.X, here.X, n, p);
        read(desk.D, here.D, p, p);
        read(desk.G, here.G, n, p);
        here.value = run.value;
        derive(here);
        pairs.look(here.gradient);
        run.has_best = run.best_is_here = run.saw_non_finite = run.rows = 0;
        evaluations = 0;
        rows.clear();
        return begin();
    }

    // Choose a direction, and the first point to evaluate.
    Answer begin() {
        choose_direction();
        slope = dot(here.gradient, d);
        length = norm(d);
        if (!(slope < -1e-10 * here.gradient_norm * length)) {
            if (pairs.empty()) return STUCK;
            pairs.forget();
            choose_direction();
            slope = -here.gradient_norm * here.gradient_norm;
            length = here.gradient_norm;
        }
        if (kind == SQUARE)
            multiply(nullptr, 1, d, here.X, V, n, p);
        else
            V = d;
        lam = run.caution * (std::isnan(run.lam) ? 2 * here.multiplier_norm : run.lam);
        merit = here.merit(lam);
        may_end = here.gradient_norm <= run.last * goal();
        trials = 0;
        low_t = 0, low_slope = slope;
        has_high = has_lowest = false;
        return attempt(pairs.empty() ? run.first_angle * std::sqrt(double(p)) / length : 1.0);
    }

    // Take f, and its gradient from the desk; write the next point there, or tell what happened.
    Answer next(double value, double seconds) {
        ++evaluations;
        time = seconds;
        read(desk.G, trial.G, n, p);
        trial.value = value;
        derive(trial);
        if (!trial.finite) run.saw_non_finite = 1;
        trial_slope = dot(trial.gradient, d);
        const bool lower = is_lower();
        const bool flat = std::fabs(trial_slope) <= -run.flatness * slope;
        const bool farthest = trial_slope <= 0 && t < asked_t;  // as far as one can go
        if (lower && (flat || farthest)) return accept(t, trial_slope);
        if (!lower || trial_slope > 0) {
            high_t = t, high_slope = trial_slope, high_finite = trial.finite;
            has_high = true;
        } else {
            low_t = t, low_slope = trial_slope;
        }
        if (lower && (!has_lowest || trial.merit(lam) < lowest.merit(lam))) {
            std::swap(lowest, trial);
            lowest_t = t, lowest_slope = trial_slope;
            has_lowest = true;
        }
        const bool narrow = has_high && high_t - low_t <= 1e-12 * high_t;
        if (!narrow && trials < run.max_trials) return attempt(next_t());
        if (!has_lowest) {
            judge();
            return STUCK;
        }
        std::swap(lowest, trial);
        return accept(lowest_t, lowest_slope);
    }

    bool forget() {
        const bool forgot = !pairs.empty();
        pairs.forget();
        return forgot;
    }

    void copy_rows(double* out) const { std::copy(rows.begin(), rows.end(), out); }

    void show(int of_best) const {
        const Spot& spot = of_best ? best : here;
        write(spot.X, desk.X, n, p);
        write(spot.D, desk.D, p, p);
        write(spot.G, desk.G, n, p);
    }

  private:
    const Kind kind;
    const int64_t n, p;
    const Desk desk;
    Numbers& run;
    Pairs pairs;
    Spot here, trial, lowest, best;
    Vector V, moved, d, s, y, E, C, T, U;
    double slope = 0, length = 0, lam = 0, merit = 0;
    double t = 0, asked_t = 0, trial_slope = 0;
    double low_t = 0, low_slope = 0, high_t = 0, high_slope = 0;
    double lowest_t = 0, lowest_slope = 0;
    bool may_end = false, has_high = false, has_lowest = false, high_finite = false;
    int trials = 0;
    double time = 0;
    int64_t evaluations = 0;
    Doubles rows;

    // Riemannian gradient and all norms, from X, D, G and the value.
    void derive(Spot& spot) {
        if (kind == SQUARE)
            derive_square(spot);
        else
            derive_tall(spot);
        spot.gradient_norm = norm(spot.gradient);
        spot.distance = norm(spot.D);
        const double tangent = spot.gradient_norm, normal = spot.multiplier_norm;
        spot.euclidean_norm = std::sqrt(tangent * tangent + normal * normal);
        spot.finite = std::isfinite(spot.value + spot.gradient_norm + spot.distance +
                                    spot.correction);
    }

    void derive_tall(Spot& spot) {
        gram(spot.X, spot.G, T, n, p);
        multiply(T.data(), -1, spot.D, T, U, p, p);  // X^T G, to first order in D
        T = U;
        symmetrize(T, p);
        multiply(spot.G.data(), -1, spot.X, kind == SPAN ? U : T, spot.gradient, n, p);
        spot.multiplier_norm = norm(T);
        spot.correction = dot(T, spot.D) / 2;
    }

    void derive_square(Spot& spot) {
        Vector& P = y;  // G X^T
        std::fill(P.begin(), P.end(), Real(0));
        for (int64_t j = 0; j < n; ++j)
            for (int64_t a = 0; a < n; ++a)
                add_all(&P[j * n], 1, &spot.X[a * n + j], &spot.G[a * n], 1, n);
        double sum = 0;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < n; ++j) {
                const double a = P[j * n + i], b = P[i * n + j];
                spot.gradient[j * n + i] = Real((a - b) / 2);
                sum += (a + b) * (a + b);
            }
        spot.multiplier_norm = std::sqrt(sum) / 2;
        multiply(nullptr, 1, spot.X, spot.D, moved, n, p);
        spot.correction = dot(spot.G, moved) / 2;
    }

    void choose_direction() {
        if (pairs.empty()) {
            for (int64_t i = 0; i < n * p; ++i) d[i] = -here.gradient[i];
            return;
        }
        pairs.direction(here.gradient, moved);
        if (kind == SQUARE) {
            d = moved;
            return;
        }
        gram(here.X, moved, T, n, p);
        if (kind == TALL) symmetrize(T, p);
        multiply(moved.data(), -1, here.X, T, d, n, p);
    }

    // The point at the step, landed as closely as the merit function needs: LandedLine.
    Answer attempt(double step) {
        ++trials;
        asked_t = t = step;
        const double blur = lam ? std::sqrt(0.01 * t * std::fabs(slope) / lam) : INFINITE;
        const double near = std::min(std::max(may_end ? 0.0 : blur, run.eps), run.near);
        double error = look(t), spectral = 0;
        while (error > 0.5 && (spectral = squared_size()) > run.farthest) {
            t *= 0.9 * std::sqrt(run.farthest / spectral);
            error = look(t);
        }
        land(error, spectral, near);
        multiply(nullptr, 1, moved, C, trial.X, n, p);
        std::copy(E.begin(), E.begin() + p * p, trial.D.begin());
        write(trial.X, desk.X, n, p);
        return EVALUATE;
    }

    // moved = X + t V, E = moved^T moved - I; its norm.
    double look(double step) {
        const Real f = Real(step);
        for (int64_t i = 0; i < n * p; ++i) moved[i] = here.X[i] + f * V[i];
        gram(moved, moved, E, n, p);
        for (int64_t a = 0; a < p; ++a) E[a * p + a] -= 1;
        return std::sqrt(dot(E.data(), E.data(), p * p));
    }

    double squared_size() {  // sqrt(||E^2||), at least the spectral norm
        multiply(nullptr, 1, E, E, T, p, p);
        return std::sqrt(std::sqrt(dot(T.data(), T.data(), p * p)));
    }

    // Newton-Schulz steps in p x p matrices: C lands, E is what is left.
    void land(double error, double spectral, double near) {
        const int64_t pp = p * p;
        std::fill(C.begin(), C.begin() + pp, Real(0));
        double shrink = 1;
        if (error > 0.5) {
            shrink = 1 / (1 + spectral / 2);
            for (int64_t i = 0; i < pp; ++i) E[i] *= Real(shrink);
            for (int64_t a = 0; a < p; ++a) E[a * p + a] += Real(shrink - 1);
            error = std::sqrt(dot(E.data(), E.data(), pp));
        }
        for (int64_t a = 0; a < p; ++a) C[a * p + a] = Real(std::sqrt(shrink));
        for (int step = 0; step < 20; ++step) {
            multiply(C.data(), -0.5, C, E, U, p, p);  // C (I - E / 2)
            std::copy(U.begin(), U.begin() + pp, C.begin());
            multiply(nullptr, 1, E, E, T, p, p);  // E becomes (E^3 - 3 E^2) / 4
            if (error < run.cubic) {
                for (int64_t i = 0; i < pp; ++i) E[i] = Real(-0.75) * T[i];
            } else {
                multiply(nullptr, 1, T, E, U, p, p);
                for (int64_t i = 0; i < pp; ++i) E[i] = (U[i] - 3 * T[i]) / 4;
            }
            if (!(error * error * (3 + error) / 4 > near)) break;
            error = std::sqrt(dot(E.data(), E.data(), pp));
        }
    }

    double rounding(double roundings) const {
        const double size = std::max(std::fabs(here.value), run.magnitude);
        return std::max(roundings * size, run.noise);
    }

    bool is_lower() const {
        if (!trial.finite) return false;
        const double change = trial.merit(lam) - merit;
        if (change <= run.decrease * t * slope) return true;
        const bool flattened =
            run.flattened * slope <= trial_slope && trial_slope <= (2 * run.decrease - 1) * slope;
        return flattened && change <= rounding(std::pow(run.eps, 2.0 / 3));
    }

    double next_t() const {
        if (!has_high) return 4 * low_t;
        const double width = high_t - low_t;
        if (!std::isfinite(high_slope) || !high_finite) return low_t + width / 10;
        if (high_slope <= 0) return low_t + width / 3;
        const double share = low_slope / (low_slope - high_slope);
        return low_t + width * std::min(std::max(share, 0.05), 0.95);
    }

    void judge() {
        if (trials > run.many_trials && run.caution < 1e12) run.caution *= 10;
    }

    // The trial becomes the point; go on from there unless Python is to look.
    Answer accept(double step, double slope_there) {
        judge();
        remember(step, slope_there);
        if (run.best_is_here) std::swap(best, here);  // what is lower than here is kept already
        std::swap(here, trial);
        run.value = here.value;
        run.saw_non_finite = 0;
        const double value = here.value - here.correction;
        run.best_is_here = value < run.lowest;
        if (run.best_is_here) run.lowest = value, run.has_best = 1;
        run.best_value = best.value;
        run.in_vain = run.best_is_here || here.gradient_norm < run.flattest ? 0 : run.in_vain + 1;
        run.flattest = std::min(run.flattest, here.gradient_norm);
        const double count = double(evaluations);
        const double row[] = {here.value, here.gradient_norm, here.distance, count, count, 0, time};
        rows.insert(rows.end(), std::begin(row), std::end(row));
        ++run.rows;
        const bool over = run.rows >= run.iterations || !(time < run.deadline);
        return over || worth_a_look() ? LOOK : begin();
    }

    void remember(double step, double slope_there) {
        pairs.look(trial.gradient);
        for (int64_t i = 0; i < n * p; ++i) y[i] = trial.gradient[i] - here.gradient[i];
        const double sy = step * (slope_there - slope), yy = dot(y, y);
        if (!(yy > 0 && sy > 1e-10 * step * length * std::sqrt(yy))) return;
        saw(yy / sy);
        for (int64_t i = 0; i < n * p; ++i) s[i] = Real(step) * d[i];
        pairs.add(s, y, trial.gradient, sy, yy);
    }

    void saw(double curvature) {
        const bool clear = here.gradient_norm > 1e3 * run.eps * here.euclidean_norm;
        if (!clear || !(0 < curvature && curvature < INFINITE)) return;
        std::rotate(run.curvatures, run.curvatures + 1, run.curvatures + RECENT);
        run.curvatures[RECENT - 1] = curvature;
        ++run.seen;
    }

    // The gradient norm to reach: Targets.goal.
    double goal() const {
        const double euclidean = here.euclidean_norm;
        const double most = *std::max_element(run.curvatures, run.curvatures + RECENT);
        const double curved = most * run.length;
        const double usual = run.seen > RECENT ? std::max(euclidean, curved) : euclidean;
        const double less = std::min(euclidean, curved);
        const double scale =
            run.first > run.warm * less ? std::min(run.first, usual) : run.share * less;
        return std::max(run.gtol * scale, run.atol);
    }

    // Whether the loop in Python would do anything here but go on.
    bool worth_a_look() const {
        const double size = here.gradient_norm, euclidean = here.euclidean_norm;
        if (size <= goal()) return true;
        if (size <= 8 * run.eps * euclidean || !here.finite) return true;
        if (run.in_vain && run.in_vain > run.patience) return true;
        return std::find(std::begin(run.looks), std::end(run.looks), run.in_vain) !=
               std::end(run.looks);
    }
};

}  // namespace

extern "C" {

// desk: X and G, n x p, and D, p x p, one behind the other; numbers with the constants in place.
// Both must outlive the search. Null: no memory is left.
Search* ortholand_search_new(int kind, int64_t n, int64_t p, int64_t memory, SCALAR* desk,
                             Numbers* numbers) {
    try {
        const Desk places{desk, desk + n * p, desk + 2 * n * p, numbers};
        return new Search(Kind(kind), n, p, memory, places);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void ortholand_search_delete(Search* search) { delete search; }

// If the answer is 0, f and its gradient at the X that is now on the desk come next.
int ortholand_search_start(Search* search) {
    try {
        return search->start();
    } catch (const std::bad_alloc&) {
        return STUCK;
    }
}

int ortholand_search_next(Search* search, double value, double seconds) {
    try {
        return search->next(value, seconds);
    } catch (const std::bad_alloc&) {
        return STUCK;
    }
}

// Whether there was something to forget.
int ortholand_search_forget(Search* search) { return search->forget(); }

// As many rows of seven, RECORDED of run.py, as the numbers say.
void ortholand_search_rows(const Search* search, double* rows) { search->copy_rows(rows); }

// The last point, or the best one, on the desk.
void ortholand_search_point(const Search* search, int of_best) { search->show(of_best); }
}
