"""Matrices, gradients and options of all kinds, drawn by hypothesis, for landing optimizers."""

import torch
from hypothesis import strategies as st

import ortholand as ol
from ortholand.geometry import polar_projection

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
            "safe_step": draw(st.sampled_from(["frobenius", "spectral"])),
            "attraction": draw(st.sampled_from(["coupled", "decoupled", "after"])),
            "omega": draw(st.sampled_from([0.5, 0.5, 0.2, 0.0])),
            "fused": draw(st.sampled_from([None, None, False])),
        },
        "method": draw(st.sampled_from(["sgd", "sgd", "adam", "muon"])),
    }


def gradient_like(kind, X, generator, k):
    noise = torch.randn(X.shape, generator=generator, dtype=X.dtype)
    if kind == "rank one":
        return noise[..., :1] @ noise[..., :1, :]
    if kind == "normal":  # R is nothing but rounding
        H = X.mH @ noise
        return X @ (H + H.mH)
    if kind == "orthogonal":
        return polar_projection(noise)
    return noise * 10.0 ** (k - 1) if kind == "varying" else noise


def make_optimizer(X, scene):
    options = {"view": "kernel", **scene["options"]}
    if scene["method"] == "sgd":
        return ol.LandingSGD([X], **options)
    del options["dampening"]
    if scene["method"] == "muon":
        return ol.LandingMuon([X], **options)
    momentum = options.pop("momentum")
    del options["nesterov"]
    return ol.LandingAdam([X], betas=(momentum, 0.999), **options)
