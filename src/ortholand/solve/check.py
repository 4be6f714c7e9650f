"""Checks, before minimising, that a gradient and a Hessian belong to the function.

Along a curve X(t) on the manifold with velocity xi at X, f differs from its Taylor polynomial by
``O(t^2)`` if the gradient is right, and by ``O(t^3)`` if the Hessian is right too. On logarithmic
axes these are lines of slope 2 and 3. The curve is the polar factor of ``X + t xi``: a retraction
of second order, so the Hessian's line is straight even where the gradient is not zero.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ortholand.geometry.derivatives import remove_normal, riemannian_hessian
from ortholand.geometry.manifold import polar_projection
from ortholand.geometry.matrices import is_square, sym
from ortholand.solve.arrays import Array, all_finite, inner, norm, precision
from ortholand.solve.manifolds import one_matrix
from ortholand.solve.objective import HessianProduct, Objective

Curve = Callable[[float], Tensor]
Verdict = Literal["right", "wrong", "undecided"]

PER_DECADE = 8  # steps t per decade
ABOVE_NOISE = 10.0  # an error counts if it is this many times the rounding of f
STRAIGHT = 0.03  # largest root mean square deviation, in decades, of what counts as a line
NORMAL_LENGTH = 0.2  # so that X + t N stays where d < 1/2: in the ball where solvers evaluate f
N_DIAGNOSTIC = 5  # directions that tell one mistake from another
SEED_OFFSET = 0x5EED


@dataclass(frozen=True, repr=False)
class CheckResult:
    """The outcome of a check: true if everything is right; prints as a report.

    Attributes:
        ok: the verdict; False also if nothing could be measured.
        slope: slope of the errors on logarithmic axes, over the decade where they are closest to a
            line; NaN if rounding hides them.
        steps: the steps t.
        errors: distance of f from its Taylor polynomial at each step along the manifold, root mean
            square over a few directions.
        message: the verdict in words: what was measured, and what to do.
        normal_slope, normal_errors: of a gradient, the same in a normal direction.
        gradient_norm: of a gradient, the Riemannian one's norm at x0.
        symmetry_error: of a Hessian, ``|<H a, b> - <a, H b>|`` for random tangent a and b, relative
            to their sizes and those of the derivatives.
        linearity_error: of a Hessian, ``||H(a + 2 b) - H a - 2 H b||``, likewise relative.
    """

    ok: bool
    slope: float
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    message: str
    normal_slope: float = math.nan
    normal_errors: tuple[float, ...] = ()
    gradient_norm: float = math.nan
    symmetry_error: float = math.nan
    linearity_error: float = math.nan

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        columns = {"t": self.steps, "error": self.errors}
        if self.normal_errors:
            columns = {"t": self.steps, "tangent": self.errors, "normal": self.normal_errors}
        header = "".join(f"{name:>10}" for name in columns)
        rows = list(zip(*columns.values(), strict=True))[::PER_DECADE]
        table = [header, *("".join(f"{x:10.1e}" for x in row) for row in rows)]
        return "\n".join([self.message, *table])

    __repr__ = __str__


def check_gradient(
    fun: Callable[..., Any],
    jac: Callable[..., Any] | bool | None,
    x0: Array,
    *,
    args: Sequence[Any] = (),
    seed: int | torch.Generator = 0,
) -> CheckResult:
    """Check that jac is the Euclidean gradient of fun, along the manifold and across it.

    Args:
        fun: ``fun(X, *args)``, a real number, in NumPy or torch like x0.
        jac: ``jac(X, *args)``, the Euclidean gradient, without any projection; True if fun returns
            the pair; None for autograd. For complex X, ``f(X + E) = f(X) + Re <G, E> + o(E)``.
        x0: a matrix; the check is made at the nearest one with orthonormal columns (rows if wide).
            A random one is best: at a critical point a wrong gradient may look right.
        args: further arguments of fun and jac.
        seed: seed of the directions.

    The tangent directions decide whether a minimiser is found. The normal one matters too: solvers
    that leave the manifold use the multiplier ``Sym(X^H G)``. Relative errors of the gradient show
    from about 1e-6 in double precision, and from about 0.1 in single.

    >>> import torch
    >>> import ortholand as ol
    >>> C = torch.diag(torch.arange(6.0, dtype=torch.float64))
    >>> x0 = ol.random_orthogonal(6, 2, seed=0, dtype=torch.float64)
    >>> result = check_gradient(lambda X: (X * (C @ X)).sum(), lambda X: C @ X, x0)
    >>> result.ok, round(result.slope)
    (False, 1)
    >>> "jac must be multiplied by 2" in result.message
    True
    """
    probe = Probe(fun, x0, jac, None, args, seed)
    X, G, value = probe.X, probe.G, probe.value
    N = probe.normal()
    curves = [(probe.along(xi), [value, inner(G, xi)]) for xi in probe.directions]
    tangent = probe.expand(curves, norm(G))
    normal = probe.expand([(lambda t: X + t * N, [value, inner(G, N)])], norm(G))
    gradient_norm = norm(remove_normal(X, G))
    sentences = [
        f"The gradient {_verdict(tangent, normal)}. Along the manifold f differs from its Taylor "
        f"polynomial {tangent.finding}; across it, {normal.finding}.",
        _explain_gradient(probe, tangent, normal),
    ]
    if gradient_norm <= probe.eps**0.5 * norm(G):
        sentences.append(
            "This says little: the Riemannian gradient is zero at x0 up to rounding, and any "
            "multiple of it would pass. Check at a random x0."
        )
    return CheckResult(
        tangent.verdict == normal.verdict == "right",
        *tangent[:3],
        " ".join(filter(None, sentences)),
        normal_slope=normal.slope,
        normal_errors=normal.errors,
        gradient_norm=gradient_norm * probe.objective.scale,
    )


def check_hessian(
    fun: Callable[..., Any],
    x0: Array,
    *,
    jac: Callable[..., Any] | bool | None = None,
    hessp: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    seed: int | torch.Generator = 0,
) -> CheckResult:
    """Check that hessp is the Euclidean Hessian of fun; run :func:`check_gradient` first.

    Args:
        fun: the cost; it and all else but hessp are as for :func:`check_gradient`.
        x0: near the point of the check.
        jac: the gradient.
        args: further arguments of the functions.
        seed: seed of the directions.
        hessp: ``hessp(X, V, *args)``, the Euclidean Hessian at X applied to V, without any
            projection. None: check what ``minimize(method="newton")`` would use instead, autograd,
            or differences of jac if there is a jac.

    The Riemannian Hessian that follows from jac and hessp must fit f to third order along the
    manifold, be symmetric, and be linear. (It is tangent by construction.) Relative errors of the
    Hessian show from about 1e-4 in double precision, and from about 0.1 in single.

    >>> import torch
    >>> import ortholand as ol
    >>> C = torch.diag(torch.arange(6.0, dtype=torch.float64))
    >>> x0 = ol.random_orthogonal(6, 2, seed=0, dtype=torch.float64)
    >>> result = check_hessian(lambda X: (X * (C @ X)).sum(), x0, hessp=lambda X, V: 2 * C @ V)
    >>> result.ok, round(result.slope)
    (True, 3)
    """
    probe = Probe(fun, x0, jac, hessp, args, seed)
    X, G = probe.X, probe.G
    product = probe.objective.hessian(X, G)

    def hessian(V: Tensor) -> Tensor:
        return riemannian_hessian(X, V, gradient=G, hessian_product=product(V))

    curves = [
        (probe.along(xi), [probe.value, inner(G, xi), inner(hessian(xi), xi) / 2])
        for xi in probe.directions
    ]
    size = norm(G) + norm(product(probe.directions[0]))
    tangent = probe.expand(curves, size)
    symmetry, linearity = _algebra(hessian, probe.tangent(), probe.tangent(), size)
    tolerance = probe.eps**0.4  # differences of gradients are good to eps^(1/2)
    algebra = " ".join(
        f"It is not {rule} differ by {error:.1e}."
        for rule, error in [
            ("symmetric: <H a, b> and <a, H b>", symmetry),
            ("linear: H(a + 2 b) and H a + 2 H b", linearity),
        ]
        if not error <= tolerance  # NaN too
    )
    sentences = [
        f"The Hessian {'is wrong' if algebra else _verdict(tangent)}. Along the manifold f differs "
        f"from its Taylor polynomial {tangent.finding}.",
        _explain_hessian(probe, product, tangent),
        algebra,
    ]
    return CheckResult(
        tangent.verdict == "right" and not algebra,
        *tangent[:3],
        " ".join(filter(None, sentences)),
        symmetry_error=symmetry,
        linearity_error=linearity,
    )


class Probe:
    """f, its gradient G at the orthonormal X nearest to x0, and random directions there.

    Attributes:
        directions: tangent vectors; in single precision a mean over several is needed, because f
            itself is not smooth enough.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        x0: Array,
        jac: Callable[..., Any] | bool | None,
        hessp: Callable[..., Any] | None,
        args: Sequence[Any],
        seed: int | torch.Generator,
    ) -> None:
        variables = one_matrix(x0)
        self.objective = Objective(fun, variables, jac=jac, hessp=hessp, args=args)
        start = variables.start
        sizes = torch.linalg.svdvals(start) if all_finite(start) else torch.zeros(1)
        if not sizes[-1] > 1e-3 * sizes[0]:
            raise ValueError(
                "x0 must be finite and of full rank, so that it has a nearest orthonormal matrix, "
                f"but its smallest singular value is {float(sizes[-1]):.1e}. Use a random one: "
                f"ortholand.random_orthogonal({variables.shape[0]}, {variables.shape[1]}, seed=0)."
            )
        self.X, self.eps = polar_projection(start), precision(start)
        # With the seed itself directions would depend on an x0 that was drawn with it.
        is_random = isinstance(seed, torch.Generator)
        self.random = seed if is_random else torch.Generator().manual_seed(seed + SEED_OFFSET)
        self.value, self.G = self.objective.value_and_gradient(self.X)
        self.directions = [self.tangent() for _ in range(2 if self.eps < 1e-10 else 8)]

    def _noise(self, rows: int) -> Tensor:
        shape, random = (rows, self.X.shape[1]), self.random
        noise = torch.randn(shape, generator=random, dtype=self.X.dtype, device=random.device)
        return noise.to(self.X.device)

    def tangent(self) -> Tensor:
        """A random tangent vector as long as X: its entries are of the size of X's."""
        V = remove_normal(self.X, self._noise(len(self.X)))
        if norm(V) < 1e-3:  # a real 1 x 1 matrix cannot move
            return torch.zeros_like(self.X)
        return V * (self.X.shape[-1] ** 0.5 / norm(V))

    def value_at(self, X: Tensor) -> float:
        return self.objective.value_and_gradient(X)[0]

    def normal(self) -> Tensor:
        """A random normal vector ``X S``, S Hermitian."""
        S = sym(self._noise(self.X.shape[1]))
        return self.X @ S * (NORMAL_LENGTH / norm(S))

    def along(self, xi: Tensor) -> Curve:
        """The curve with velocity xi."""
        return lambda t: polar_projection(self.X + t * xi)

    def measured(self, order: int) -> tuple[list[Tensor], list[float]]:
        """Tangent directions, and f's first or second derivatives along them by differences."""
        h = self.eps ** (1 / (order + 2))
        directions = [self.tangent() for _ in range(N_DIAGNOSTIC)]

        def derivative(xi: Tensor) -> float:
            after, before = (self.value_at(self.along(xi)(t)) for t in (h, -h))
            change = after - before if order == 1 else after - 2 * self.value + before
            return change / (2 * h if order == 1 else h**2)

        return directions, [derivative(xi) for xi in directions]

    def expand(self, curves: list[tuple[Curve, list[float]]], size: float) -> "Expansion":
        """Compare f along curves with ``taylor[0] + taylor[1] t + taylor[2] t^2 + ...``.

        Errors are root mean squares over the curves: a single one passes through zero where terms
        cancel. The size of the derivatives shows which terms of the polynomial are rounding.
        """
        eps, lowest = self.eps, round(math.log10(self.eps) / 2)
        steps = np.logspace(lowest, 0, PER_DECADE * -lowest + 1)
        # Where X hardly moves, f changes by rounding only.
        tiny = eps * np.arange(1, 9)
        t = np.concatenate([tiny, steps])
        values = np.array([[self.value_at(curve(s)) for s in t] for curve, _ in curves])
        polynomials = np.array([np.polyval(taylor[::-1], t) for _, taylor in curves])
        with np.errstate(invalid="ignore", over="ignore"):
            errors = np.sqrt(np.mean((values - polynomials) ** 2, axis=0))
            noise = np.maximum(errors[: len(tiny)].max(), eps * np.abs(values).max(axis=0))
        errors, noise = errors[len(tiny) :], noise[len(tiny) :]
        terms = np.abs([taylor for _, taylor in curves]).max(axis=0)
        terms[1:][terms[1:] < 100 * eps * size] = 0
        slope, verdict, finding = _judge(steps, errors, noise, terms, eps)
        errors = errors * self.objective.scale
        return Expansion(slope, tuple(steps.tolist()), tuple(errors.tolist()), verdict, finding)


class Expansion(NamedTuple):
    """How far f is from its Taylor polynomial along a curve, and the verdict."""

    slope: float
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    verdict: Verdict
    finding: str  # what was seen, to follow "f differs from its Taylor polynomial "


def _judge(
    steps: np.ndarray, errors: np.ndarray, noise: np.ndarray, terms: np.ndarray, eps: float
) -> tuple[float, Verdict, str]:
    order, tolerance = len(terms), 0.15 if eps < 1e-10 else 0.4  # few decades in single precision
    if not (np.isfinite(errors).all() and np.isfinite(terms).all()):
        return math.nan, "wrong", "by something infinite or NaN: fun or a derivative is not finite"
    length, lines = _lines(steps, errors, noise)
    if not lines:
        return math.nan, *_judge_noise(errors.max(), noise.max(), terms[1:].max(), eps)
    _, start, slope = min(lines)
    flattest = min([slope, *(one for off, i, one in lines if i < start and off < STRAIGHT)])
    if slope < order - tolerance:
        finding = f"like t^{slope:.2f}, not like t^{order}"
        if (length <= PER_DECADE or eps > 1e-10) and slope > order - 0.7:
            return slope, "undecided", f"{finding}, but over a decade at most"
        return slope, "wrong", finding
    if flattest < order - 0.3:
        finding = f"like t^{slope:.2f}, but like t^{flattest:.2f} for smaller t"
        return flattest, "wrong", f"{finding}, so something small is missing"
    return slope, "right", f"like t^{slope:.2f}, where t^{order} is right"


def _judge_noise(error: float, noise: float, term: float, eps: float) -> tuple[Verdict, str]:
    """The verdict if no error stands out from the noise, by the largest of each."""
    constant = term == 0 and error <= ABOVE_NOISE * noise
    if constant or error <= eps**0.5 * term or (error <= 100 * noise and term >= 1e4 * noise):
        return "right", "by rounding only: it is exact"
    return "undecided", "by hardly more than the noise of fun, too little to measure"


def _lines(
    steps: np.ndarray, errors: np.ndarray, noise: np.ndarray
) -> tuple[int, list[tuple[float, int, float]]]:
    """Lines through all decades, or else half decades, in which no error is noise.

    The number of steps in each, and their deviations, first steps and slopes.
    """
    above = errors > ABOVE_NOISE * noise
    x, y = np.log10(steps), np.log10(np.maximum(errors, np.finfo(float).tiny))
    for length in (PER_DECADE + 1, PER_DECADE // 2 + 1):
        parts = [slice(i, i + length) for i in range(len(x) - length + 1)]
        found = []
        for part in (part for part in parts if above[part].all()):
            line = np.polyfit(x[part], y[part], 1)
            deviation = np.sqrt(np.mean((y[part] - np.polyval(line, x[part])) ** 2))
            found.append((float(deviation), part.start, float(line[0])))
        if found:
            return length, found
    return 0, []


def _algebra(hessian: HessianProduct, a: Tensor, b: Tensor, size: float) -> tuple[float, float]:
    """How far a Hessian is from symmetric, and from linear.

    It is a difference of terms of the given size, and may be mere rounding of them.
    """
    Ha, Hb = hessian(a), hessian(b)
    size = max(norm(Ha) + norm(Hb) + size, torch.finfo(a.dtype).tiny)
    symmetry = abs(inner(Ha, b) - inner(a, Hb)) / (size * max(norm(a), 1.0))
    return symmetry, norm(hessian(a + 2 * b) - Ha - 2 * Hb) / size


def _verdict(*expansions: Expansion) -> str:
    verdicts = [expansion.verdict for expansion in expansions]
    if "wrong" in verdicts:
        return "is wrong"
    return "cannot be judged" if "undecided" in verdicts else "is right"


def _explain_gradient(probe: Probe, tangent: Expansion, normal: Expansion) -> str:
    X, G = probe.X, probe.G
    if "undecided" in (tangent.verdict, normal.verdict):
        return NOISY
    if tangent.verdict == normal.verdict == "right" or math.isnan(tangent.slope + normal.slope):
        return ""
    if tangent.verdict == "right":
        projected = norm(sym(X.mH @ G)) <= 1e-3 * norm(G)
        return (
            f"jac is {'projected, like a Riemannian gradient' if projected else 'not Euclidean'}: "
            "return the derivative with respect to the entries of X as if they were free. Solvers "
            "that leave the manifold need it."
        )
    directions, measured = probe.measured(1)
    candidates = {"jac": G}
    if X.is_complex():
        candidates["the conjugate of jac"] = G.conj()
    if is_square(X):
        candidates |= {"the transpose of jac": G.mT, "the conjugate transpose of jac": G.mH}
    for name, candidate in candidates.items():
        factor = _factor(measured, [inner(candidate, xi) for xi in directions], X)
        if factor is not None:
            return _mistake(name, "jac", factor)
    return (
        "Typical reasons: a missing factor 2; a transposed or (for complex X) conjugated gradient; "
        "a mean in fun and a sum in jac; different data in fun and jac."
    )


def _explain_hessian(probe: Probe, product: HessianProduct, tangent: Expansion) -> str:
    X = probe.X
    if tangent.verdict == "undecided":
        return NOISY
    if tangent.verdict == "right" or math.isnan(tangent.slope):
        return ""
    if tangent.slope < 1.5:
        return "The gradient is wrong already: see check_gradient."
    directions, measured = probe.measured(2)
    from_hessp = [inner(product(xi), xi) for xi in directions]
    multiplier = sym(X.mH @ probe.G)
    euclidean = [m + inner(xi @ multiplier, xi) for m, xi in zip(measured, directions, strict=True)]
    factor = _factor(euclidean, from_hessp, X)
    if factor is not None:
        return _mistake("hessp", "hessp", factor)
    if _factor(measured, from_hessp, X) is not None:
        return (
            "hessp looks like a Riemannian Hessian. Return the Euclidean one, the derivative of "
            "the Euclidean gradient along V; the solver adds the manifold's part."
        )
    return (
        "The gradient is right, so hessp is to blame: it must be the derivative of jac along V, "
        "hessp(X, V) = lim (jac(X + h V) - jac(X)) / h."
    )


NOISY = (
    "The noise of fun hides the errors to be measured: use double precision, or remove large "
    "constants from fun."
)


def _mistake(name: str, function: str, factor: float) -> str:
    multiplied = "" if math.isclose(factor, 1, rel_tol=1e-3) else f" multiplied by {factor:.4g}"
    if name == function:
        return f"{function} must be{multiplied}: then it fits fun."
    return f"Instead of {function} return {name}{multiplied}: that fits fun."


def _factor(measured: list[float], predicted: list[float], X: Tensor) -> float | None:
    """The number by which to multiply the predictions to make them right, if there is one."""
    n, p = X.shape
    dimension = 2 * n * p - p * p if X.is_complex() else n * p - p * (p + 1) // 2
    m, q = np.array(measured), np.array(predicted)
    if dimension < N_DIAGNOSTIC or not q @ q > 0:
        return None  # in few dimensions a factor may fit by chance
    factor = float(m @ q / (q @ q))
    tolerance = 1e-4 if precision(X) < 1e-10 else 3e-2
    return factor if np.linalg.norm(m - factor * q) <= tolerance * np.linalg.norm(m) else None
