"""No landing optimizer leaves the ball ||X^H X - I||_F <= eps, whatever it is given."""

import math
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ortholand as ol

REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]


@st.composite
def scenes(draw):
    dtype = draw(st.sampled_from(REAL + COMPLEX))
    p = draw(st.integers(1, 12))
    n = p + draw(st.sampled_from([0, 0, 1, 5, 40]))
    narrow = dtype == torch.float16  # its largest number is 65504
    decades = st.floats(-5, 3.5) if narrow else st.floats(-30, 30)
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9, 0.99]))
    nesterov = momentum > 0 and draw(st.booleans())
    return {
        "dtype": dtype,
        "shape": (n, p) if draw(st.booleans()) else (p, n),
        "seed": draw(st.integers(0, 2**31)),
        "kind": draw(st.sampled_from(["full", "rank one", "normal", "orthogonal", "varying"])),
        "scale": 10 ** draw(decades),
        "options": {
            "lr": 10 ** draw(st.floats(-6, 6)),
            "lam": draw(st.sampled_from([0.0, 1.0, 10 ** draw(st.floats(-2, 2))])),
            "eps": draw(st.floats(0.05, 0.95)),
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.5])),
            "safe_step": draw(st.sampled_from(["frobenius", "tight"])),
            "attraction": draw(st.sampled_from(["coupled", "decoupled", "after"])),
            "omega": draw(st.sampled_from([0.5, 0.5, 0.2, 0.0])),
            "fused": draw(st.sampled_from([None, None, False])),
        },
        "adam": draw(st.integers(0, 2)) == 0,
    }


def gradient_like(kind, X, generator, k):
    noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    if kind == "rank one":
        return noise[..., :1] @ noise[..., :1, :]
    if kind == "normal":  # R is nothing but rounding
        H = X.mH @ noise
        return X @ (H + H.mH)
    if kind == "orthogonal":
        return ol.polar_projection(noise)
    return noise * 10.0 ** (k - 1) if kind == "varying" else noise


def make_optimizer(X, scene):
    options = {"view": "kernel", **scene["options"]}
    if not scene["adam"]:
        return ol.LandingSGD([X], **options)
    momentum = options.pop("momentum")
    del options["nesterov"], options["dampening"]
    return ol.LandingAdam([X], betas=(momentum, 0.999), **options)


@settings(max_examples=1000)
@given(scenes())
def test_the_distance_never_exceeds_eps_beyond_rounding(scene):
    """4 matrices, 5 steps each: 4,000 matrices of all shapes, types, rules, scales, methods."""
    check_that_it_stays_in_the_ball(scene)


@settings(max_examples=300)
@given(scenes())
def test_nor_does_it_where_all_tall_matrices_step_in_the_gram_form(scene):
    with mock.patch("ortholand.landing.description.GRAM_FROM", 0):
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
    for k in range(5):
        current = X.detach().to(torch.complex64 if dtype.is_complex else torch.float32)
        G = scene["scale"] * gradient_like(scene["kind"], current, generator, k)
        X.grad = G.to(dtype)
        finite = bool(torch.isfinite(X.grad).all())
        skipped = optimizer.skipped_steps()
        nearest = options["eps"] - ol.distance(X.detach().to(wide_type)).max().item()
        at_edge = nearest <= 1e3 * unit
        optimizer.step()
        assert torch.isfinite(X).all()
        distance = ol.distance(X.detach().to(wide_type)).max().item()
        assert distance <= options["eps"] + rounding
        # A finite step is taken, unless at the edge nothing pulls the matrix away from it.
        assert not finite or optimizer.skipped_steps() == skipped or (at_edge and not pull)
    if sign is not None and not dtype.is_complex:
        assert torch.equal(torch.linalg.det(X.detach().to(wide_type)).sign(), sign)
