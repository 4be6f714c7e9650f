"""Lost pixels: a matrix of low rank from half of its entries, as U S V^T.

    python examples/matrix_completion.py --out matrix_completion.png

The rows of a matrix are the 1,797 digits of scikit-learn, minus the mean digit, and half of their
pixels are hidden. They are filled in by the matrix of rank r that best fits the visible ones,

    minimise  1/2 ||seen (U S V^T - M)||^2 + ridge/2 ||U S V^T||^2,

a product: U and V have orthonormal columns, and S is free, diagonal or any r x r matrix. The twin
writes the same matrices as A B^T with nothing orthonormal, minimised by SciPy's L-BFGS. pymanopt's
product manifold is run too, if installed. All start from the same matrix and use gradients alone.

M is measured in a unit that makes singular values about 1, for all contestants. U has no unit and S
has that of M, so otherwise their curvatures would differ by its square.

Needs scikit-learn, matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import ortholand as ol
from showing import LOOKS, cell, make_table, two_panels

Array = NDArray[np.float64]
Blocks = dict[str, Array]

SHOWN = 6  # digits in the figure
CLOSE = 1e-8  # a cost this near to the best, relatively, is as good


# --- the problem


@dataclass(frozen=True)
class Completion:
    """A matrix in some unit, and a mask that is 1 where an entry was seen."""

    truth: Array
    seen: Array
    ridge: float
    unit: float

    def fit(self, M: Array) -> tuple[float, Array]:
        """Half the squared error on what was seen, and its gradient with respect to M."""
        residual = self.seen * (M - self.truth)
        return float(np.vdot(residual, residual)) / 2, residual

    def hidden_error(self, M: Array) -> float:
        """Root mean square error of the entries that were not seen, in the original unit."""
        return self.unit * float(np.sqrt(np.mean((M - self.truth)[self.seen == 0] ** 2)))

    def cost(self, x: Blocks) -> tuple[float, Blocks]:
        """Cost and Euclidean gradient with respect to U, S and V; ``||U S V^T|| = ||S||``."""
        U, S, V = x["U"], full(x["S"]), x["V"]
        value, R = self.fit(U @ S @ V.T)
        RV = R @ V
        slope = U.T @ RV + self.ridge * S
        gradient = {
            "U": RV @ S.T,
            "S": slope.diagonal().copy() if x["S"].ndim == 1 else slope,
            "V": R.T @ (U @ S),
        }
        return value + self.ridge / 2 * float(np.vdot(S, S)), gradient

    def free_cost(self, numbers: Array) -> tuple[float, Array]:
        """Cost and gradient with respect to all entries of A and B."""
        A, B = self.factors(numbers)
        value, R = self.fit(A @ B.T)
        gram_A, gram_B = A.T @ A, B.T @ B  # ||A B^T||^2 is the trace of their product
        gradient = R @ B + self.ridge * A @ gram_B, R.T @ A + self.ridge * B @ gram_A
        value += self.ridge / 2 * float(np.vdot(gram_A, gram_B))
        return value, np.concatenate([part.ravel() for part in gradient])

    def factors(self, numbers: Array) -> tuple[Array, Array]:
        """A and B."""
        rank = len(numbers) // sum(self.truth.shape)
        split = self.truth.shape[0] * rank
        return numbers[:split].reshape(-1, rank), numbers[split:].reshape(-1, rank)


def full(S: Array) -> Array:
    """A matrix, also where only its diagonal is given."""
    return np.diag(S) if S.ndim == 1 else S


def hide(
    data: Array, share: float, rank: int, ridge: float, seed: int
) -> tuple[Completion, Blocks]:
    """Chance decides what is seen. The problem, and its start: the largest singular values of M."""
    seen = (np.random.default_rng(seed).random(data.shape) < share).astype(float)
    truth = data - (seen * data).sum(0) / np.maximum(seen.sum(0), 1)
    U, s, Vt = np.linalg.svd(seen * truth / share, full_matrices=False)
    unit = float(s[:rank].mean())
    start = {"U": U[:, :rank], "S": s[:rank] / unit, "V": Vt[:rank].T}
    return Completion(truth / unit, seen, ridge, unit), start


# --- the contestants


@dataclass(frozen=True)
class Run:
    """What a contestant did: its matrix, and the lowest cost so far at each evaluation."""

    M: Array
    costs: Array
    seconds: Array
    error: float | None  # of U and V, from orthonormal

    def reached(self, best: float) -> int | None:
        """The first evaluation as good as the best cost, if there is one."""
        good = np.flatnonzero(self.costs <= best + CLOSE * abs(best))
        return int(good[0]) if len(good) else None


class Watched:
    """A function that returns (cost, gradient), and a clock beside it."""

    def __init__(self, function: Callable[[Any], tuple[float, Any]]) -> None:
        self.function, self.begin = function, time.process_time()
        self.costs: list[float] = []
        self.seconds: list[float] = []

    def __call__(self, x: Any) -> tuple[float, Any]:
        """Evaluate, and note when."""
        value, gradient = self.function(x)
        self.costs.append(value)
        self.seconds.append(time.process_time() - self.begin)
        return value, gradient

    def run(self, M: Array, *orthonormal: Array) -> Run:
        """What came of it."""
        errors = [np.linalg.norm(Q.T @ Q - np.eye(Q.shape[1])) for Q in orthonormal]
        costs = np.minimum.accumulate(self.costs)
        return Run(M, costs, np.array(self.seconds), float(max(errors)) if errors else None)


def by_landing(problem: Completion, start: Blocks) -> Run:
    """The product with a diagonal S. Matrices have orthonormal columns, a vector is free."""
    cost = Watched(problem.cost)
    x = ol.minimize(cost, start, jac=True).x
    return cost.run(x["U"] @ full(x["S"]) @ x["V"].T, x["U"], x["V"])


def by_landing_full(problem: Completion, start: Blocks) -> Run:
    """The product with any S, which must be said to be free."""
    cost = Watched(problem.cost)
    manifold = {"U": ol.Stiefel(), "S": ol.Euclidean(), "V": ol.Stiefel()}
    x = ol.minimize(cost, {**start, "S": full(start["S"])}, jac=True, manifold=manifold).x
    return cost.run(x["U"] @ x["S"] @ x["V"].T, x["U"], x["V"])


def by_scipy(problem: Completion, start: Blocks) -> Run:
    """The twin A B^T: all its entries are free."""
    cost, root = Watched(problem.free_cost), np.sqrt(start["S"])
    numbers = np.concatenate([(start[name] * root).ravel() for name in "UV"])
    limits = {"maxiter": 10_000, "maxfun": 20_000, "ftol": 0, "gtol": 1e-9}
    result = scipy.optimize.minimize(cost, numbers, jac=True, method="L-BFGS-B", options=limits)
    A, B = problem.factors(result.x)
    return cost.run(A @ B.T)


def by_pymanopt(problem: Completion, start: Blocks) -> Run:
    """The product with a diagonal S, by pymanopt's conjugate gradients."""
    import pymanopt
    from pymanopt.manifolds import Euclidean, Product, Stiefel

    cost, last = Watched(problem.cost), {}
    shapes = [start[name].shape for name in "USV"]
    product = Product([Stiefel(*shapes[0]), Euclidean(*shapes[1]), Stiefel(*shapes[2])])

    def evaluate(*point: Array) -> tuple[float, Blocks]:
        if last.get("U") is not point[0]:  # cost and gradient are asked for one after the other
            last.update(U=point[0], found=cost(dict(zip("USV", point, strict=True))))
        return last["found"]

    @pymanopt.function.numpy(product)
    def value(U: Array, S: Array, V: Array) -> float:
        return evaluate(U, S, V)[0]

    @pymanopt.function.numpy(product)
    def gradient(U: Array, S: Array, V: Array) -> list[Array]:
        return [evaluate(U, S, V)[1][name] for name in "USV"]

    solver = pymanopt.optimizers.ConjugateGradient(
        verbosity=0, min_gradient_norm=1e-8, max_iterations=10_000, max_time=60
    )
    task = pymanopt.Problem(product, value, euclidean_gradient=gradient)
    U, S, V = solver.run(task, initial_point=[start[name] for name in "USV"]).point
    return cost.run((U * S) @ V.T, U, V)


CONTESTANTS: dict[str, Callable[[Completion, Blocks], Run]] = {
    "U S Vᵀ, any S": by_landing_full,
    "U diag(s) Vᵀ": by_landing,
    "A Bᵀ, free (SciPy)": by_scipy,
    "U diag(s) Vᵀ (pymanopt)": by_pymanopt,
}


# --- telling and drawing


def table(problem: Completion, runs: dict[str, Run]) -> Table:
    """What came out."""
    best = min(run.costs[-1] for run in runs.values())
    headings = ("as", "cost", "error", "evaluations", "seconds", "‖UᵀU - I‖")
    rows = []
    for name, run in runs.items():
        at = run.reached(best)
        seconds = None if at is None else float(run.seconds[at])
        result = (f"{run.costs[-1]:.6f}", f"{problem.hidden_error(run.M):.4f}")
        effort = (cell(at and at + 1, ",d"), cell(seconds, ".2f"), cell(run.error, ".0e"))
        rows.append((name, *result, *effort))
    nothing = problem.hidden_error(np.zeros_like(problem.truth))
    caption = (
        f"Error: root mean square of hidden pixels; {nothing:.4f} for the mean digit. "
        f"Evaluations and seconds: until the cost was within {CLOSE:.0e} of the best"
    )
    return make_table("Hidden pixels filled in", headings, rows, caption)


def draw(problem: Completion, data: Array, runs: dict[str, Run], path: Path) -> None:
    """Some digits as they were seen, filled in, and as they are; and how costs fell."""
    with two_panels(path, "Digits, of which half the pixels were hidden") as (left, right):
        side = int(data.shape[1] ** 0.5)
        mean = data - problem.unit * problem.truth
        filled = mean + problem.unit * next(iter(runs.values())).M
        hidden = np.where(problem.seen == 1, data, np.nan)
        names = ("seen", "filled in", "true")
        left.set_facecolor("#F4D9B8")
        for row, pictures in enumerate((hidden, filled, data)):
            for column, picture in enumerate(pictures[:SHOWN]):
                edges = (column + 0.04, column + 0.96, row + 0.96, row + 0.04)
                image = picture.reshape(side, -1)
                left.imshow(image, cmap="gray_r", vmin=0, vmax=data.max(), extent=edges)
        left.set(xlim=(0, SHOWN), ylim=(3, 0), xticks=[])
        left.set_yticks([0.5, 1.5, 2.5], names)
        left.grid(visible=False)
        best = min(run.costs[-1] for run in runs.values())
        for look, (name, run) in zip(LOOKS, runs.items(), strict=False):
            above = np.maximum(run.costs / best - 1, 1e-15)
            right.loglog(run.seconds, above, label=name, **look)
        right.axhline(CLOSE, color="#BBBBBB", linewidth=0.8)
        right.set(
            xlabel="seconds of the processor", title="cost / the best cost - 1", ylim=(1e-12, None)
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("matrix_completion.png"), help="figure")
    parser.add_argument("--rank", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.5, help="of the pixels that are seen")
    parser.add_argument("--ridge", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="of what is hidden")
    parser.add_argument("--quick", action="store_true", help="300 digits, rank 4")
    options = parser.parse_args(arguments)
    from sklearn.datasets import load_digits

    data = load_digits().data[: 300 if options.quick else None] / 16
    rank = min(options.rank, 4) if options.quick else options.rank
    problem, start = hide(data, options.share, rank, options.ridge, options.seed)
    console, runs = Console(), {}
    for name, contestant in CONTESTANTS.items():
        if contestant is by_pymanopt and not find_spec("pymanopt"):
            continue
        with console.status(f"{name} ..."):
            runs[name] = contestant(problem, start)
    console.print(table(problem, runs))
    draw(problem, data, runs, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
