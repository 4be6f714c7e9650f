"""What the left and the right half of a digit have in common: canonical correlation.

    python examples/canonical_correlation.py --out canonical_correlation.png

For the halves u and v of an image, canonical correlation analysis looks for directions in which
they go together most: maximise the covariance of U^T u and V^T v over U and V for which U^T u and
V^T v have the identity for covariance. With X = [U; V] / sqrt(2) and B the covariance of the
halves, each by itself, that is a cost under the constraint X^T B X = I. B is a mean over all images
and is never formed: each step takes the images of one batch, for the cost and the constraint.

MNIST is taken from the folder that ORTHOLAND_DATA names, or downloaded; if it is not to be had, the
digits of scikit-learn stand in, and that is said. Needs pip install "ortholand[experiments]".
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
from ortholand.lab.datasets import DatasetError, find_dataset
from showing import LOOKS, make_table, two_panels

BATCH = 128
FEW = 2000  # images whose covariance is enough to start near the constraint
ENOUGH = 0.99  # of the closed form's correlation


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
    return ol.minimize_finite_sum(
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


def draw(halves: Halves, result: OptimizeResult, best: float, path: Path) -> None:
    """How the correlation grew, and the first pairs of directions as images."""
    with two_panels(path, "Canonical correlation of the halves of digits") as (growth, pairs):
        share = -result.history["fun"] / best
        growth.plot(range(len(share)), share, marker="o", label="landing", **LOOKS[0])
        growth.axhline(ENOUGH, label=f"{ENOUGH:.0%} of the closed form", **LOOKS[2])
        growth.set(xlabel="epochs", ylabel="total correlation, share of the closed form")
        # What a direction sees: the covariance of its score with the pixels.
        n = halves.left.shape[1]
        scores = halves.left @ result.x[:n], halves.right @ result.x[n:]
        seen = [h.T @ s for h, s in zip((halves.left, halves.right), scores, strict=True)]
        shown = [
            part[:, : min(5, part.shape[1])].T.reshape(-1, halves.height, n // halves.height)
            for part in seen
        ]
        image = torch.cat([torch.cat(list(part), dim=1) for part in shown], dim=0)
        pairs.imshow(image.numpy(), cmap="RdBu")
        pairs.set(title="left above right", xticks=[], yticks=[])


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
    best = closed_form(halves, options.components, options.ridge).sum()
    rows = [
        ("images", f"{len(images):,}"),
        ("total correlation", f"{-result.fun:.4f}"),
        ("closed form", f"{best:.4f}"),
        ("share", f"{-result.fun / best:.2%}"),
        ("passes over the data, all counted", f"{result.passes:.2f}"),
        ("distance from the constraint", f"{result.distance:.1e}"),
    ]
    console.print(make_table(f"Canonical correlation: {source.identity}", ("", ""), rows))
    draw(halves, result, float(best), options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
