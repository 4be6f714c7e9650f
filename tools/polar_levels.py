"""Computes the table LEVELS of ``ortholand/geometry/polar.py``, in 40 digits.

Level k is the odd quintic that takes singular values from [l_k, 1] into [l_(k-1), 1 - margin] with
the largest share l_(k-1): the best approximation of 1 on [l_k, 1] (four points of equal error, by
Remez exchange), divided by its largest value. l_0 is 1 - TOLERANCE. Composing best approximations
is the best of all compositions (Amsel, Persson, Musco and Gower, 2025, "The Polar Express"). The
library repeats the fourth level in place of going on to a fifth: see there.

    python tools/polar_levels.py
"""

from mpmath import lu_solve, matrix, mp, mpf, sqrt

mp.dps = 40
TOLERANCE = mpf(10) ** -6
MARGIN = mpf(1) / 256  # for rounding: where a quintic has its largest value, the next is steep
LEVELS = 4


def best_quintic(low):
    """Coefficients of x, x^3, x^5, and the largest error on [low, 1]."""
    inner = (3 * low + 1) / 4, (low + 3) / 4
    while True:
        points = (low, *inner, mpf(1))
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1, -1, 1, -1), strict=True)]
        a, b, c, error = lu_solve(matrix(rows), matrix([1] * 4))
        root = sqrt(9 * b * b - 20 * a * c)
        new = sqrt((-3 * b - root) / (10 * c)), sqrt((-3 * b + root) / (10 * c))
        if max(abs(x - y) for x, y in zip(inner, new, strict=True)) < mpf(10) ** -30:
            return (a, b, c), error
        inner = new


def level(target, margin):
    """The quintic and the lowest l that it takes to ``target`` or more."""
    low, high = mpf(10) ** -9, 1 - mpf(10) ** -6
    while high / low - 1 > mpf(10) ** -25:
        middle = sqrt(low * high)
        _, error = best_quintic(middle)
        reached = (1 - error) / (1 + error) / (1 + margin)
        low, high = (low, middle) if reached > target else (middle, high)
    coefficients, error = best_quintic(high)
    return [x / (1 + error) / (1 + margin) for x in coefficients], high


def main():
    """Print the table."""
    target = 1 - TOLERANCE
    for k in range(LEVELS):
        coefficients, target = level(target, MARGIN if k else 0)
        numbers = ", ".join(mp.nstr(x, 17) for x in coefficients)
        print(f"    Level({mp.nstr(target, 4)}, {numbers}),")


if __name__ == "__main__":
    main()
