"""The table behind the conformance suite: a new optimizer is one file and one row here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import ortholand as ol


@dataclass(frozen=True)
class Case:
    """An optimizer with options, and what it shares state and errors with."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    bad_options: tuple[tuple[dict[str, Any], type[Exception], str], ...] = ()

    def __call__(self, params: Any, **overrides: Any) -> torch.optim.Optimizer:
        return self.make(params, **{"lr": 0.1, **self.options, **overrides})


SGD_ERRORS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"lr": -0.1}, ValueError, r"lr must be at least 0, got -0.1.*maximize=True"),
    ({"lr": float("nan")}, ValueError, "lr must be finite, got nan"),
    ({"lr": torch.ones(2)}, ValueError, r"one element, got shape \(2,\)"),
    ({"lr": "fast"}, TypeError, "lr must be a number, got 'fast'"),
    ({"momentum": -1.0}, ValueError, "momentum must be at least 0, got -1.0"),
    ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0"),
    ({"dampening": float("inf")}, ValueError, "dampening must be finite"),
    ({"nesterov": True}, ValueError, "nesterov=True needs momentum > 0"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "dampening = 0"),
    ({"orthogonal": 1}, TypeError, "orthogonal must be True or False, got 1"),
    ({"maximize": "yes"}, TypeError, "maximize must be True or False"),
    ({"foreach": 1}, TypeError, "foreach must be True or False"),
    ({"view": "rows"}, ValueError, r"view must be one of \('matrix', 'kernel'\), got 'rows'"),
)
BALL_ERRORS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"lam": -1.0}, ValueError, "lam must be finite and at least 0, got -1.0"),
    ({"eps": 1.0}, ValueError, r"eps must be in \(0, 1\), got 1.0"),
    ({"eps": 0.0}, ValueError, r"eps must be in \(0, 1\), got 0.0"),
    ({"safe_step": "paper"}, ValueError, r"one of \('frobenius', 'tight'\), got 'paper'"),
)

CASES = [
    Case("LandingSGD", ol.LandingSGD, {}, SGD_ERRORS + BALL_ERRORS),
    Case("LandingSGD-momentum", ol.LandingSGD, {"momentum": 0.9, "dampening": 0.1}),
    Case(
        "LandingSGD-nesterov-tight",
        ol.LandingSGD,
        {"momentum": 0.9, "nesterov": True, "safe_step": "tight"},
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
