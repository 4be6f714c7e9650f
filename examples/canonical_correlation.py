"""What the left and the right half of a digit have in common: canonical correlation.

    python examples/canonical_correlation.py --out canonical_correlation.png

For the halves u and v of an image, canonical correlation analysis looks for the directions in which
they vary together most: it maximises the covariance of U^T u and V^T v over U and V for which each
of U^T u and V^T v has the identity as covariance. With X = [U; V] / sqrt(2) and B the covariance of
each half by itself, that is a cost under the constraint X^T B X = I. B is a mean over all images
and is never formed: each step uses the images of one batch, for both cost and constraint.

MNIST is read from the folder that ORTHOLAND_DATA names, or downloaded; if neither works, the digits
of scikit-learn replace it, with a notice. Needs pip install . ./lab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from scipy.optimize import OptimizeResult
from torch import Tensor

import ortholand as ol
from ortholand_lab.datasets import DatasetError, find_dataset
from ortholand_lab.solvers import minimize_sampled
from showing import LOOKS, cell, make_table, two_panels

BATCH = 128
FEW = 2000  # images whose covariance is enough to start near the constraint


@dataclass
class Halves:
    """Centred pixels, one row for each image."""

    left: Tensor
    right: Tensor
    height: int

    def cost(self, X: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the correlations' sum over some images, and its gradient."""
        u, v = self.left[indices], self.right[indices]
        n = u.shape[1]
        s, t = u @ X[:n], v @ X[n:]
        gradient = torch.cat([u.T @ t, v.T @ s])
        return -2 * (s * t).sum() / len(u), -2 * gradient / len(u)


def split(images: Tensor) -> Halves:
    """Left and right halves of images (N, 1, height, width) of bytes."""
    pixels = images[:, 0].float() / 255
    middle = pixels.shape[2] // 2
    left, right = (half.flatten(1) for half in (pixels[..., :middle], pixels[..., middle:]))
    return Halves(left - left.mean(0), right - right.mean(0), pixels.shape[1])


def closed_form(halves: Halves, components: int, ridge: float) -> np.ndarray:
    """The canonical correlations, from all covariances, whitened: what the run is compared with."""
    u, v = (half.double().numpy() for half in (halves.left, halves.right))
    factors = [
        np.linalg.cholesky(half.T @ half / len(half) + ridge * np.eye(half.shape[1]))
        for half in (u, v)
    ]
    whitened = np.linalg.solve(factors[0], u.T @ v / len(u))
    whitened = np.linalg.solve(factors[1], whitened.T)
    return np.linalg.svd(whitened, compute_uv=False)[:components]


def analyse(
    halves: Halves, components: int, ridge: float, epochs: int, seed: int
) -> OptimizeResult:
    """X = [U; V] / sqrt(2), by stochastic landing."""
    few = [half[:FEW] for half in (halves.left, halves.right)]
    n = sum(half.shape[1] for half in few)
    start = torch.randn(n, components, generator=torch.Generator().manual_seed(seed))
    return minimize_sampled(
        halves.cost,
        ol.GeneralizedStiefel(ol.Covariance(few, ridge)).project(start),
        n_terms=len(halves.left),
        batch_size=min(BATCH, len(halves.left)),
        jac=True,
        manifold=ol.GeneralizedStiefel(ol.Covariance([halves.left, halves.right], ridge)),
        method="sgd",
        epochs=epochs,
        seed=seed,
    )


def canonical_pairs(
    halves: Halves, X: Tensor, ridge: float
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Correlations within the span that was found, the largest first, and their scores.

    The cost is the same for every rotation of X, so the columns themselves mean nothing.
    """
    n = halves.left.shape[1]
    directions = X.double()[:n].numpy(), X.double()[n:].numpy()
    scores, factors = [], []
    for half, U in zip((halves.left, halves.right), directions, strict=True):
        scores.append(half.double().numpy() @ U)
        factors.append(np.linalg.cholesky(scores[-1].T @ scores[-1] / len(half) + ridge * U.T @ U))
    s, t = (
        np.linalg.solve(factor, score.T).T for factor, score in zip(factors, scores, strict=True)
    )
    turn_s, correlations, turn_t = np.linalg.svd(s.T @ t / len(s))
    return correlations, (s @ turn_s, t @ turn_t.T)


def draw(
    halves: Halves,
    correlations: np.ndarray,
    scores: Sequence[np.ndarray],
    best: np.ndarray,
    path: Path,
) -> None:
    """The correlations, and what their pairs of directions see, put together as digits are."""
    with two_panels(path, "What the halves of digits have in common") as (bars, seen):
        place = np.arange(1, len(best) + 1)
        bars.bar(place - 0.2, best, 0.4, color=LOOKS[2]["color"], label="closed form")
        bars.bar(place + 0.2, correlations, 0.4, color=LOOKS[0]["color"], label="landing")
        bars.set_axisbelow(True)
        bars.grid(axis="x", visible=False)
        bars.set(xlabel="pair", title="canonical correlation", xticks=place, ylim=(0, 1.2))
        # What a direction sees: the covariance of its score with the pixels.
        parts = [
            (half.T.numpy() @ score / len(half)).T.reshape(len(best), halves.height, -1)
            for half, score in zip((halves.left, halves.right), scores, strict=True)
        ]
        pictures = np.concatenate(parts, axis=2)
        columns = int(np.ceil(len(best) ** 0.5))
        limit = np.abs(pictures).max()
        for i, picture in enumerate(pictures):
            row, column = divmod(i, columns)
            edges = (column + 0.03, column + 0.97, row + 0.97, row + 0.03)
            seen.imshow(picture, cmap="RdBu", vmin=-limit, vmax=limit, extent=edges)
            seen.plot([column + 0.5] * 2, edges[2:], color="#7F7F7F", linewidth=0.6)
            seen.text(column + 0.06, row + 0.15, str(i + 1))
        seen.set(xlim=(0, columns), ylim=(row + 1, 0), title="what the pairs see")
        seen.set_axis_off()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 1 if the digits could not be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("canonical_correlation.png"))
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--ridge", type=float, default=0.01, help="added to the covariances")
    parser.add_argument("--epochs", type=int, help="1, or 20 for the few digits of scikit-learn")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = Console()
    try:
        source = find_dataset("mnist")
        images = source.load().train_images
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if source.notice:
        console.print(source.notice)
    halves = split(images)
    epochs = options.epochs or (1 if len(images) > 10 * FEW else 20)
    result = analyse(halves, options.components, options.ridge, epochs, options.seed)
    best = closed_form(halves, options.components, options.ridge)
    correlations, scores = canonical_pairs(halves, result.x, options.ridge)
    rows = [
        ("images", f"{len(images):,}"),
        ("total correlation", f"{-result.fun:.4f}"),
        ("closed form", f"{best.sum():.4f}"),
        ("share", cell(-result.fun / best.sum(), ".2%")),
        ("passes over the data, all counted", f"{result.passes:.2f}"),
        ("distance from the constraint", f"{result.distance:.1e}"),
    ]
    title = f"Canonical correlation: {source.identity}"
    console.print(make_table(title, ("measured", "value"), rows))
    draw(halves, correlations, scores, best, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
