"""No landing optimizer leaves the ball ||X^H X - I|| <= eps, whatever it is given."""

import math

import torch
from hypothesis import given
from torch import nn

import ortholand as ol
from ortholand.geometry import distance
from ortholand.safe_step import MARGIN
from tests.grids import examples
from tests.optim.scenes import gradient_like, make_optimizer, scenes


@examples(1000)
@given(scenes())
def test_the_distance_never_exceeds_eps_beyond_rounding(scene):
    """4 matrices, 5 steps each: 4,000 matrices of all shapes, types, rules, scales, methods."""
    check_that_it_stays_in_the_ball(scene)


def check_that_it_stays_in_the_ball(scene):
    dtype, options = scene["dtype"], scene["options"]
    unit = torch.finfo(dtype).eps
    wide_type = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(scene["seed"])
    n, p = scene["shape"]
    X = nn.Parameter(ol.random_orthogonal(4, n, p, seed=generator, dtype=dtype))
    # Storing X in its type moves each entry by up to unit / 2 of itself, a few times in 5 steps.
    rounding = 8 * unit * (math.sqrt(n) + math.sqrt(p))
    if ol.orthogonality_error(X, view="kernel") > options["eps"]:
        return  # a bfloat16 start can be further away than a tiny eps
    sign = torch.linalg.det(X.detach().to(wide_type)).real.sign() if n == p else None
    optimizer = make_optimizer(X, scene)
    pulls = {"coupled": options["lam"], "decoupled": options["omega"], "after": 1.0}
    pull = pulls[options["attraction"]]
    in_norm = {"spectral": options["safe_step"] == "spectral"}
    for k in range(5):
        current = X.detach().to(torch.complex64 if dtype.is_complex else torch.float32)
        G = scene["scale"] * gradient_like(scene["kind"], current, generator, k)
        X.grad = G.to(dtype)
        finite = bool(torch.isfinite(X.grad).all())
        skipped = optimizer.skipped_steps()
        nearest = options["eps"] - distance(X.detach().to(wide_type), **in_norm).max().item()
        # Where distances are known by bounds only, d <= ||D^4||_F^(1/4) <= p^(1/8) d, all that may
        # be at the edge is, and a step ends a little inside.
        spread = min(n, p) ** (1 / 8) - 1 + 2 * MARGIN
        margin = spread * options["eps"] if in_norm["spectral"] else 0.0
        at_edge = nearest <= 1e3 * unit + margin
        optimizer.step()
        assert torch.isfinite(X).all()
        reached = distance(X.detach().to(wide_type), **in_norm).max().item()
        assert reached <= options["eps"] + rounding
        # A finite step is taken, unless at the edge nothing pulls the matrix away from it.
        assert not finite or optimizer.skipped_steps() == skipped or (at_edge and not pull)
    if sign is not None and not dtype.is_complex:
        assert torch.equal(torch.linalg.det(X.detach().to(wide_type)).sign(), sign)
