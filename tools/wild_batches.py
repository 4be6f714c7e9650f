"""Millions of wild steps in batches: how far from the manifold, in units of the ball's radius.

`tools/wild_gradients.py` tries single matrices with everything an optimizer has; this program tries
fewer things on many more matrices. Starts are anywhere in the ball, gradients of all sizes,
directions and multipliers, lr up to 1e6.

    python tools/wild_batches.py --steps 1e6

It prints the largest distance after a step for each kind of step, and every exit from the ball with
the seed of its batch (``--first SEED --steps 1`` repeats it).
"""

import argparse
import math
import random
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import ortholand as ol

DTYPES = (torch.float32, torch.float32, torch.float64, torch.complex64, torch.complex128)
SHAPES = (
    *((1, 1), (2, 2), (3, 3), (5, 5), (8, 8), (13, 13), (20, 20), (33, 33)),  # square
    *((4, 1), (5, 3), (9, 8), (17, 2), (30, 12), (40, 5), (100, 4), (60, 33)),  # tall
    *((3, 5), (2, 17), (12, 30), (6, 150)),  # wide
)
RADII = (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99)
KINDS = ("full", "rank one", "normal", "mixed", "sparse")
MOMENTA: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
)
LARGEST_BATCH = 2000
STEPS = 4  # of each batch


def options_of(rng: random.Random) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """An optimizer with options."""
    make = rng.choice([ol.LandingSGD, ol.LandingSGD, ol.LandingAdam, ol.LandingMuon])
    options: dict[str, Any] = {
        "view": "kernel",  # each matrix of a stack
        "attraction": rng.choice(["coupled", "decoupled", "after"]),
        "safe_step": rng.choice(["spectral", "spectral", "frobenius"]),
        "lr": 10 ** rng.uniform(-4, 6),
        "lam": 10 ** rng.uniform(-2, 2),
        "omega": rng.choice([0.5, 0.3, 0.1, 0.0]),
        "eps": rng.choice(RADII),
        "fused": rng.choice([None, False]),
    }
    if make is ol.LandingSGD:
        options |= rng.choice(MOMENTA)
    return make, options


def start(
    shape: tuple[int, int, int], dtype: torch.dtype, eps: float, *, spectral: bool, g: Any
) -> Tensor:
    """Matrices anywhere in the ball."""
    U, _, Vh = torch.linalg.svd(torch.randn(shape, generator=g, dtype=dtype), full_matrices=False)
    count, p = shape[0], min(shape[1:])
    d = 2 * torch.rand(count, p, generator=g, dtype=torch.float64) - 1
    if not spectral:
        d = d / d.norm(dim=-1, keepdim=True)
    d *= 0.999 * eps * torch.rand(count, 1, generator=g, dtype=torch.float64) ** 0.3
    return (U * (1 + d).sqrt().to(dtype)[:, None, :]) @ Vh


def gradients(X: Tensor, kind: str, rng: random.Random, g: Any) -> Tensor:
    """A gradient for each matrix, each of a size of its own."""
    (count, n, p), dtype = X.shape, X.dtype
    G = torch.randn(X.shape, generator=g, dtype=dtype)
    if kind == "rank one":
        left, right = (torch.randn(s, generator=g, dtype=dtype) for s in ((count, n, 1), (1, p)))
        G = left @ right
    if kind in ("normal", "mixed"):
        C = torch.randn(count, min(n, p), min(n, p), generator=g, dtype=dtype)
        normal = X @ (C + C.mH) if n >= p else (C + C.mH) @ X
        G = normal if kind == "normal" else G + 10 ** rng.uniform(-3, 8) * normal
    if kind == "sparse":
        G = G * (torch.rand(X.shape, generator=g) < 0.1)
    wide = 15 if torch.finfo(dtype).bits == 32 else 100
    size = wide if rng.random() < 0.5 else 3
    exponents = size * (2 * torch.rand(count, 1, 1, generator=g, dtype=torch.float64) - 1)
    return G * (10**exponents).to(G.real.dtype)


def distances(X: Tensor, *, spectral: bool) -> Tensor:
    """``||X^H X - I||`` in the norm of the ball, in double precision."""
    X = X.to(torch.complex128 if X.is_complex() else torch.float64)
    X = X if X.shape[-2] >= X.shape[-1] else X.mT
    D = X.mH @ X - torch.eye(X.shape[-1], dtype=X.dtype)
    norms = torch.linalg.svdvals(D)[..., 0] if spectral else torch.linalg.matrix_norm(D)
    return norms.nan_to_num(math.inf)


def tried(seed: int) -> tuple[int, float, str]:
    """Steps of one batch: how many, the farthest distance over eps, and of what kind."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, (n, p) = rng.choice(DTYPES), rng.choice(SHAPES)
    make, options = options_of(rng)
    spectral, eps = options["safe_step"] == "spectral", options["eps"]
    shape = (min(LARGEST_BATCH, 200_000 // (n * p)), n, p)
    X = nn.Parameter(start(shape, dtype, eps, spectral=spectral, g=g).contiguous())
    optimizer, farthest = make([X], **options), 0.0
    for _ in range(STEPS):
        X.grad = gradients(X.detach(), rng.choice(KINDS), rng, g)
        optimizer.step()
        farthest = max(farthest, float(distances(X.detach(), spectral=spectral).max()) / eps)
    rounding = 60 * torch.finfo(dtype).eps * math.sqrt(max(n, p)) / eps
    kind = f"{make.__name__} {options['attraction']} {options['safe_step']} {str(dtype)[6:]}"
    if farthest > 1 + rounding:
        print(f"seed {seed}: {farthest} of eps, {n} x {p}, {options}, {kind}", flush=True)
        kind = ""
    return STEPS * shape[0], farthest, kind


def main() -> None:
    """Run batches until enough matrices have stepped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=float, default=1e6, help="of single matrices")
    parser.add_argument("--first", type=int, default=0, help="seed of the first batch")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    farthest: dict[str, float] = {}
    steps, seed, exits = 0, arguments.first, 0
    while steps < arguments.steps:
        count, distance, kind = tried(seed)
        steps, seed, exits = steps + count, seed + 1, exits + (not kind)
        farthest[kind] = max(distance, farthest.get(kind, 0.0))
    for kind in sorted(farthest):
        print(f"{kind or 'exits':45} {farthest[kind]:.9f}")
    print(f"{steps} steps of {seed - arguments.first} batches, {exits} batches left the ball")
    sys.exit(exits > 0)


if __name__ == "__main__":
    main()
