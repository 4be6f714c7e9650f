"""The table behind the conformance suite: a new optimizer is one file and one row here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
import torch

import ortholand as ol

Errors = tuple[tuple[dict[str, Any], type[Exception], str], ...]


def sgd_twin(params: Any, group: dict[str, Any]) -> torch.optim.Optimizer:
    """torch's optimizer for the parameters of a plain group."""
    names = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
    return torch.optim.SGD(params, **{name: group[name] for name in names})


def adam_twin(params: Any, group: dict[str, Any]) -> torch.optim.Optimizer:
    make = torch.optim.AdamW if group["decoupled_weight_decay"] else torch.optim.Adam
    names = ("lr", "betas", "weight_decay", "maximize")
    options = {name: group[name] for name in names}
    fused = group["fused"] is None and group["foreach"] is None  # our default
    return make(params, eps=group["adam_eps"], fused=fused, **options)


@dataclass(frozen=True)
class Case:
    """An optimizer with options, and what it shares state and errors with."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    bad_options: Errors = ()
    torch_twin: Callable[..., torch.optim.Optimizer] = sgd_twin
    radius: float = 0.5  # how far from the manifold it may start and go

    def __call__(self, params: Any, **overrides: Any) -> torch.optim.Optimizer:
        return self.make(params, **{"lr": 0.1, **self.options, **overrides})


COMMON_ERRORS: Errors = (
    ({"lr": -0.1}, ValueError, r"lr must be at least 0, got -0.1.*maximize=True"),
    ({"lr": float("nan")}, ValueError, "lr must be finite, got nan"),
    ({"lr": torch.ones(2)}, ValueError, r"one element, got shape \(2,\)"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got 'fast'"),
    ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0"),
    ({"orthogonal": 1}, TypeError, "orthogonal must be True or False, got 1"),
    ({"maximize": "yes"}, TypeError, "maximize must be True or False"),
    ({"foreach": 1}, TypeError, "foreach must be True or False"),
    ({"rounding": "up"}, ValueError, "rounding must be one of .*'compensated'.*, got 'up'"),
    ({"view": "row"}, ValueError, r"view must be one of \('matrix', 'kernel', .*, got 'row'"),
    ({"blocks": (2, 0)}, ValueError, r"blocks must be .*got \(2, 0\). Both must be at least 1"),
    ({"blocks": (2.0, 1)}, TypeError, r"blocks must be two numbers.*Both must be integers"),
    ({"blocks": (True, 1)}, TypeError, r"blocks must be two numbers"),
    ({"blocks": 4}, TypeError, r"blocks must be two numbers, .* got 4. Example: blocks=\(4, 1\)"),
    ({"blocks": "gates"}, ValueError, r"got 'gates'.*ortholand.orthogonal\(module, name"),
    ({"blocks": (2, 1), "view": "kernel"}, ValueError, r"blocks=\(2, 1\) and view='kernel'"),
    ({"scale": 0.0}, ValueError, "scale must be a positive finite number, or .* got 0.0"),
    ({"scale": -2}, ValueError, "scale must be a positive .* got -2.*negate"),
    ({"scale": float("nan")}, ValueError, "scale must be a positive finite number, .* got nan"),
    ({"scale": float("inf")}, ValueError, "scale must be a positive finite number, .* got inf"),
    ({"scale": 10**400}, ValueError, "scale must be a positive finite number"),
    ({"scale": "fun"}, ValueError, "or \"fan\" for .* got 'fun'"),
    ({"scale": True}, TypeError, "scale must be .* got True of type bool"),
    ({"scale": None}, TypeError, "scale must be .* got None of type NoneType"),
    ({"scale": torch.tensor(2.0)}, TypeError, r"scale must be .* of type Tensor: use float"),
    ({"scale": Fraction(7, 2)}, TypeError, r"scale must be .* of type Fraction: use float"),
)
SGD_ERRORS: Errors = (
    *COMMON_ERRORS,
    ({"momentum": -1.0}, ValueError, "momentum must be at least 0, got -1.0"),
    ({"dampening": float("inf")}, ValueError, "dampening must be finite"),
    ({"nesterov": True}, ValueError, "nesterov=True needs momentum > 0"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "dampening = 0"),
)
ADAM_ERRORS: Errors = (
    *COMMON_ERRORS,
    ({"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
    ({"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
    ({"betas": "09"}, TypeError, "betas must be two numbers, got '09'"),
    ({"betas": [0.9, 0.9, 0.9]}, TypeError, "betas must be two numbers"),
    ({"adam_eps": -1.0}, ValueError, "adam_eps must be at least 0, got -1.0"),
    ({"decoupled_weight_decay": 1}, TypeError, "decoupled_weight_decay must be True or False"),
)
MUON_ERRORS: Errors = (
    *ADAM_ERRORS,
    ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    ({"momentum": -0.1}, ValueError, r"momentum must be in \[0, 1\), got -0.1"),
    ({"momentum": float("nan")}, ValueError, "momentum must be finite, got nan"),
    ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
    ({"steps": 0}, ValueError, "steps must be from 1 to 11, got 0"),
    ({"steps": 12}, ValueError, "steps must be from 1 to 11, got 12"),
    ({"steps": 7.0}, TypeError, "steps must be an integer, got 7.0"),
    ({"steps": True}, TypeError, "steps must be an integer, got True"),
)
LAM_ERRORS: Errors = (
    ({"lam": -1.0}, ValueError, "lam must be finite and at least 0, got -1.0"),
    ({"lam": float("nan")}, ValueError, "lam must be finite, got nan"),
    ({"lam": "strong"}, TypeError, "lam must be a number, got 'strong'"),
)
LANDING_ERRORS: Errors = (
    *LAM_ERRORS,
    ({"eps": 1.0}, ValueError, r"eps must be in \(0, 1\), got 1.0"),
    ({"eps": 0.0}, ValueError, r"eps must be in \(0, 1\), got 0.0"),
    ({"eps": "1"}, TypeError, "eps must be a number, got '1'"),
    ({"omega": "half"}, TypeError, "omega must be a number, got 'half'"),
    (
        {"safe_step": "paper"},
        ValueError,
        r"one of \('frobenius', 'spectral'.*\), got 'paper'",
    ),
    ({"attraction": "strong"}, ValueError, "attraction must be one of .*, got 'strong'"),
    ({"omega": 0.6}, ValueError, r"omega must be in \[0, 1/2\], got 0.6"),
    ({"fused": 1}, TypeError, "fused must be True or False, got 1"),
    ({"sharded": "columns"}, ValueError, "sharded must be one of .*, got 'columns'"),
)

MOMENTUM = {"momentum": 0.9, "dampening": 0.1}
NESTEROV = {"momentum": 0.9, "nesterov": True}
RETRACTION_ERRORS: Errors = (
    *SGD_ERRORS,
    ({"retraction": "jump"}, ValueError, "retraction must be one of .*, got 'jump'"),
)

CASES = [
    Case("LandingSGD", ol.LandingSGD, {}, SGD_ERRORS + LANDING_ERRORS),
    Case("LandingSGD-momentum", ol.LandingSGD, MOMENTUM),
    Case("LandingSGD-unfused", ol.LandingSGD, {**NESTEROV, "fused": False}),
    Case("LandingSGD-nesterov-frobenius", ol.LandingSGD, {**NESTEROV, "safe_step": "frobenius"}),
    Case("LandingSGD-spectral", ol.LandingSGD, {**MOMENTUM, "safe_step": "spectral"}),
    Case("LandingSGD-decoupled", ol.LandingSGD, {**MOMENTUM, "attraction": "decoupled"}),
    Case("LandingSGD-after", ol.LandingSGD, {**MOMENTUM, "attraction": "after"}),
    Case("LandingAdam", ol.LandingAdam, {}, ADAM_ERRORS + LANDING_ERRORS, adam_twin),
    Case(
        "LandingAdam-after",
        ol.LandingAdam,
        {"attraction": "after", "safe_step": "frobenius", "decoupled_weight_decay": False},
        torch_twin=adam_twin,
    ),
    Case("LandingAdam-unfused", ol.LandingAdam, {"fused": False}, torch_twin=adam_twin),
    Case("LandingMuon", ol.LandingMuon, {}, MUON_ERRORS + LANDING_ERRORS, adam_twin),
    Case(
        "LandingMuon-coupled",
        ol.LandingMuon,
        {"attraction": "coupled", "nesterov": False, "decoupled_weight_decay": False},
        torch_twin=adam_twin,
    ),
    Case(
        "LandingMuon-decoupled",
        ol.LandingMuon,
        {"attraction": "decoupled", "momentum": 0.0, "safe_step": "frobenius", "steps": 5},
        torch_twin=adam_twin,
    ),
    Case("RiemannianSGD", ol.RiemannianSGD, {}, RETRACTION_ERRORS, radius=0.1),
    *[
        Case(f"RiemannianSGD-{name}", ol.RiemannianSGD, {**o, "retraction": name}, radius=0.1)
        for name, o in (("exponential", MOMENTUM), ("polar", NESTEROV), ("qr", MOMENTUM))
    ],
    Case("PLAM", ol.PLAM, {**MOMENTUM, "lr": 0.01}, SGD_ERRORS + LAM_ERRORS, radius=float("inf")),
    Case("PenaltySGD", ol.PenaltySGD, {"lr": 0.01}, SGD_ERRORS + LAM_ERRORS, radius=float("inf")),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
