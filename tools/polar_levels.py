"""Computes the tables LEVELS and SKEW_LEVELS of ``ortholand/geometry/polar.py``, in 40 digits.

Level k is the odd polynomial, of degree 5 or 7, that takes singular values from [l_k, 1] into
[l_(k-1), 1 - margin] with the largest share l_(k-1): the best approximation of 1 on [l_k, 1]
(points of equal error, by Remez exchange), divided by its largest value. l_0 is 1 - TOLERANCE.
Composing best approximations is the best of all compositions (Amsel, Persson, Musco and Gower,
2025, "The Polar Express"). The library repeats the fourth level in place of going on to a fifth:
see there.

    python tools/polar_levels.py
"""

from mpmath import lu_solve, matrix, mp, mpf, polyroots, re, sqrt

mp.dps = 40
TOLERANCE = mpf(10) ** -6
MARGIN = mpf(1) / 256  # for rounding: where a polynomial is largest, the next is steep
LEVELS = 4


def best_polynomial(low, terms):
    """Coefficients of x, x^3, ..., and the largest error on [low, 1]."""
    angles = (mp.pi * k / terms for k in range(terms + 1))
    points = [low + (1 - low) * (1 - mp.cos(angle)) / 2 for angle in angles]
    while True:
        rows = [[x ** (2 * i + 1) for i in range(terms)] for x in points]
        rows = [[*row, mpf(-1) ** k] for k, row in enumerate(rows)]
        *coefficients, error = lu_solve(matrix(rows), matrix([1] * (terms + 1)))
        slope = [(2 * i + 1) * c for i, c in enumerate(coefficients)]
        new = [low, *sorted(sqrt(re(y)) for y in roots(slope)), mpf(1)]
        if max(abs(x - y) for x, y in zip(points, new, strict=True)) < mpf(10) ** -30:
            return coefficients, error
        points = new


def roots(coefficients):
    """The roots of a polynomial, from its lowest coefficient on."""
    return polyroots(coefficients[::-1], maxsteps=500, extraprec=200)


def level(target, margin, terms):
    """The polynomial and the lowest l that it takes to ``target`` or more."""
    low, high = mpf(10) ** -4, 1 - mpf(10) ** -4
    while high / low - 1 > mpf(10) ** -25:
        middle = sqrt(low * high)
        _, error = best_polynomial(middle, terms)
        reached = (1 - abs(error)) / (1 + abs(error)) / (1 + margin)
        low, high = (low, middle) if reached > target else (middle, high)
    coefficients, error = best_polynomial(high, terms)
    return [x / (1 + abs(error)) / (1 + margin) for x in coefficients], high


def factored(coefficients):
    """m, e, i and d of ``x (x^2 + m) (i + d x^2 (x^2 + e))``."""
    a, _, c, d = coefficients
    root = min(roots(coefficients), key=lambda y: abs(mp.im(y)))
    m = -re(root)
    return m, c / d - m, a / m, d


def main():
    """Print the tables."""
    for terms, form in ((3, list), (4, factored)):
        target = 1 - TOLERANCE
        for k in range(LEVELS):
            coefficients, target = level(target, MARGIN if k else 0, terms)
            numbers = ", ".join(mp.nstr(x, 17) for x in form(coefficients))
            print(f"    {'Skew' * (terms == 4)}Level({mp.nstr(target, 4)}, {numbers}),")


if __name__ == "__main__":
    main()
