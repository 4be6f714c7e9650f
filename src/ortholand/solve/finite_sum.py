"""``minimize_finite_sum``: costs that are means of many terms."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ortholand.solve.arrays import Array
from ortholand.solve.batches import FiniteSum, open_source
from ortholand.solve.loop import Loop
from ortholand.solve.manifold_cost import ManifoldCost
from ortholand.solve.manifolds import GeneralizedStiefel, Stiefel, geometry_of, one_matrix
from ortholand.solve.methods.stochastic import SAGA, SGD, StochasticLanding
from ortholand.solve.options import (
    Status,
    check_lam,
    check_options,
    is_count,
    is_number,
    is_whole,
    limits_from,
)
from ortholand.solve.run import Run, best_on_manifold, reporter, result_of

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

METHODS: dict[str, type[StochasticLanding]] = {"saga": SAGA, "sgd": SGD}
NEXT = {
    "saga": "Raise epochs, start from this x, or take smaller batches: more steps per epoch.",
    "sgd": "Steps along single batches end in noise, which grows with their length: use "
    "method='saga', or another decay or lr.",
}


def minimize_finite_sum(
    fun: Callable[..., Any],
    x0: Array,
    *,
    n_terms: int | None = None,
    data: Iterable[Any] | None = None,
    jac: Callable[..., Any] | bool | None = None,
    manifold: Any = None,
    method: str = "saga",
    batch_size: int | None = None,
    lr: float | None = None,
    lam: float | None = None,
    epochs: int = 100,
    gtol: float | None = None,
    seed: int | torch.Generator = 0,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> "OptimizeResult":
    """Minimise a mean of many terms over matrices with orthonormal columns (rows, if wide).

    Args:
        fun: mean of the terms of a batch: ``fun(X, indices)`` with ``n_terms``, where indices
            is an int64 array or tensor; ``fun(X, batch)`` with ``data``.
        x0: where to start: one matrix with orthonormal columns, NumPy or torch, real or complex.
        n_terms: number of terms, for the interface by indices.
        data: batches, for the interface by data: a list, a DataLoader, or any other iterable that
            can be read repeatedly. Batches are weighted by their number of rows. SAGA needs the
            same batches each time: a DataLoader must not shuffle (SAGA draws the order itself), and
            other iterables are read once and kept.
        jac: mean of the Euclidean gradients, with the arguments of fun; True if fun returns
            (value, gradient); None for tensors: autograd computes it.
        manifold: ``ol.Stiefel()``, the same as None; or ``ol.GeneralizedStiefel(B)`` with a dense
            B in its Cholesky form.
        method: ``"saga"`` or ``"sgd"``.
        batch_size: number of indices in a batch; None: such that there are 100 batches.
        lr: step size; None: a third of the inverse of the largest curvature of some batches' costs,
            found by power iterations on gradient differences at the start. SAGA raises it by half
            after each epoch that lowers f, and its gradient by less than half, until one raises f:
            then it goes back, halves it and keeps it.
        lam: attraction to the manifold; None: ``1 / (4 lr)``, so that each step about halves the
            distance, whatever the scale of f. (The paper's value, 1, suits costs of about that
            scale: scaling the data by ten leaves the iterates at the edge of the ball.)
        epochs: largest number of epochs; an epoch is as many steps as there are batches, and a
            pass over all batches for f and its gradient.
        gtol: the norm of the Riemannian gradient must fall to this fraction of its first value;
            None: the square root of the precision, 1.5e-8 in float64.
        seed: seed of the order of batches.
        callback: called after each epoch, as in :func:`ortholand.minimize`.
        options: ``atol``, ``maxtime`` (seconds, checked after each epoch); ``eps`` and
            ``safe_step`` (its rule); ``shuffle`` (True; False keeps indices or lists of batches in
            their order); for sgd ``momentum`` (0) and ``decay`` (0.5): the step falls like
            ``lr / (1 + epochs)^decay``, and stays constant for 0.

    Returns:
        SciPy's ``OptimizeResult`` as :func:`ortholand.minimize` returns it, with the
        final ``lr`` and ``lam``, and ``shortened``, the share of steps that safety made shorter
        than lr; ``nit`` counts epochs, ``nfev`` and ``njev`` batches.

    SAGA keeps one gradient per batch, n x p numbers each. Each epoch ends on the manifold.

    >>> import torch
    >>> import ortholand as ol
    >>> Z = torch.randn(500, 6, generator=torch.Generator().manual_seed(0)).double()
    >>> Z = Z * torch.arange(1, 7)  # principal component analysis, 500 terms
    >>> x0 = ol.random_orthogonal(6, 2, seed=0, dtype=torch.float64)
    >>> def fun(X, indices):
    ...     return -(Z[indices] @ X).square().sum(1).mean()
    >>> minimize_finite_sum(fun, x0, n_terms=500).success
    True
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}.")
    _check_numbers(epochs, lr, lam)
    limits, rest = limits_from(options, gtol, epochs, epochs)
    report = reporter(callback, limits.display)
    constructor = METHODS[method]
    check_options(method, constructor.rules, rest)
    _check_manifold(manifold)
    shuffle, random = rest.pop("shuffle", True), random_from(seed)
    solver = constructor(random, lr, lam, **rest)
    variables = one_matrix(x0, manifold)
    source = open_source(n_terms, data, batch_size, method, shuffle, random, variables)
    objective = FiniteSum(fun, variables, source, jac=jac, remember=method == "saga")
    geometry = geometry_of(variables)
    with torch.no_grad():
        cost = ManifoldCost(objective, geometry)
        run = Run(cost, limits)
        loop = Loop(run, solver, report)
        status = loop.from_point(cost.at(*geometry.settle(variables.start), measured=True))
    lr = solver.lr / objective.scale
    result = result_of(run, best_on_manifold(run, status), status, advice_for(method, epochs, lr))
    result.update(lr=lr, lam=solver.lam * objective.scale)
    result.shortened = solver.n_shortened / max(1, solver.n_taken)
    return result


def _check_numbers(epochs: Any, lr: Any, lam: Any) -> None:
    if not is_count(epochs):
        raise ValueError(f"epochs must be a whole number >= 1, got {epochs!r}.")
    if lr is not None and not (is_number(lr) and 0 < lr < math.inf):
        raise ValueError(f"lr must be a number > 0, or None to have it chosen, got {lr!r}.")
    check_lam(lam)


def _check_manifold(manifold: Any) -> None:
    is_general = isinstance(manifold, GeneralizedStiefel)
    if is_general and not manifold.changes_variables:
        raise ValueError(
            f"minimize_finite_sum needs B as a matrix that it can factorise, got {manifold!r}. For "
            "a B that is known by its products, or sampled in batches, use minimize with all terms "
            "in fun, or minimize_sampled of ortholand_lab.solvers."
        )
    if not (is_general or manifold is None or type(manifold) is Stiefel or manifold is Stiefel):
        raise ValueError(
            "manifold must be ol.Stiefel() or ol.GeneralizedStiefel(B) in minimize_finite_sum, got "
            f"{manifold!r}. For others use minimize, with all terms in fun."
        )


def advice_for(method: str, epochs: float, lr: float) -> dict[Status, str]:
    """The messages that differ from those of ``minimize``; what was reached is filled in later."""
    return {
        Status.MAXITER: f"Stopped after epochs={epochs}: {{}}. {NEXT[method]}",
        Status.STALLED: f"Epochs lower neither f nor its gradient, with lr={lr:.1e}: {{}}. "
        "If that is small, it is what the precision of fun allows: raise gtol, or use float64. "
        "Otherwise your lr is too large, or jac is not fun's gradient, or batches change: try "
        "ortholand.check_gradient(fun, jac, x0, args=(batch,)).",
    }


def random_from(seed: Any) -> torch.Generator:
    if isinstance(seed, torch.Generator) and seed.device.type == "cpu":
        return seed
    if not is_whole(seed):
        raise TypeError(f"seed must be a whole number or a torch.Generator on the CPU, got {seed}.")
    return torch.Generator().manual_seed(int(seed))
