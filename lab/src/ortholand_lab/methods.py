"""How each method that the paper compares trains a model with orthogonal weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ortholand.geometry.manifold import distance
from ortholand.geometry.views import ViewName, as_matrices, as_weight, is_fixed
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.parameters import Predicate, orthogonalize_, param_groups
from ortholand.trivializations import trivialize_
from ortholand_lab.textbook import RETRACTION_FORMS, MatrixExponential, textbook

TRAINING_METHODS = (
    "landing",
    "landing-momentum",
    "exponential",
    "cayley",
    "trivialization-sgd",
    "trivialization-momentum",
    "trivialization-adam",
    "trivialization-rmsprop",
)
RETRACTION_METHODS = ("exponential", "cayley")
TRIVIALIZATION_METHODS = tuple(m for m in TRAINING_METHODS if m.startswith("trivialization"))
ADAPTIVE_METHODS = ("trivialization-adam", "trivialization-rmsprop")


def as_in_the_paper(method: str) -> str:
    """The name of a method as the paper has it: ``exp(A) X`` by torch's functions, ``W = exp(A)``.

    The verdicts on the paper rest on these; the others are written with care, which is ours.
    """
    return f"{method}-identity" if method in TRIVIALIZATION_METHODS else textbook(method)


def careful(method: str) -> str:
    """The name of our method that does the same as one of the paper's."""
    return method.removesuffix("-textbook").removesuffix("-identity")


PAPER_METHODS = tuple(map(as_in_the_paper, TRAINING_METHODS))

PAPER_RULE = "frobenius"  # the paper's ball; the library's default is in the spectral norm

_EUCLIDEAN: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}
_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "landing": partial(LandingSGD, safe_step=PAPER_RULE),
    "landing-momentum": partial(LandingSGD, safe_step=PAPER_RULE),
    **{name: partial(RiemannianSGD, retraction=r) for name, r in RETRACTION_FORMS.items()},
    **{
        f"trivialization-{name}{start}": kind
        for start in ("", "-identity")
        for name, kind in _EUCLIDEAN.items()
    },
}


@dataclass(frozen=True)
class Trainee:
    """A model that is ready to be trained by a method.

    Args:
        model: the model; calling it is a forward pass.
        optimizer: for all its parameters: a group of the orthogonal ones, then one of the others.
        orthogonal: where the orthogonal weights are: modules and the names of their weights.
        view: how these are viewed as matrices.
    """

    model: nn.Module
    optimizer: Optimizer
    orthogonal: tuple[tuple[nn.Module, str], ...]
    view: ViewName

    def step(self, loss: Tensor) -> None:
        """Step down the gradient of the loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """The current orthogonal weights, however they are parametrized."""
        return [getattr(module, name) for module, name in self.orthogonal]

    @torch.no_grad()
    def orthogonality_error(self) -> float:
        """``||X^T X - I||_F`` over all orthogonal matrices together, in float64."""
        return float(torch.linalg.vector_norm(self._errors()))

    @torch.no_grad()
    def largest_error(self) -> float:
        """The error of the matrix furthest from the manifold; NaN if one has a NaN."""
        return float(self._errors().max())

    def _errors(self) -> Tensor:
        matrices = [as_matrices(X.double(), self.view) for X in self.weights()]
        return torch.cat([distance(X).flatten() for X in matrices])


def prepare(
    model: nn.Module,
    method: str,
    *,
    orthogonal: Predicate,
    view: ViewName,
    lr: float,
    momentum: float = 0.9,
    retraction_momentum: float = 0.0,
    plain_lr: float | None = None,
    plain_momentum: float = 0.0,
    plain_weight_decay: float = 0.0,
) -> Trainee:
    """Prepare a model for training by a method; its orthogonal weights are projected first.

    So all methods start at the same point, including the trivializations: ``W = B exp(A)`` from
    the weight B and A = 0, where A is small and the exponential cheapest. Those from the identity,
    ``W = exp(A)``, reach determinants +1 only: there matrices of the others have a column
    reversed.

    Args:
        model: the model, changed in place.
        method: one of ``TRAINING_METHODS`` or ``PAPER_METHODS``, or any other retraction.
        orthogonal: which parameters are orthogonal.
        view: how these are viewed as matrices.
        lr: learning rate of the orthogonal weights.
        momentum: their momentum, for the methods with momentum in their names.
        retraction_momentum: their momentum, for the retractions.
        plain_lr: learning rate of the other parameters; ``lr`` if not given.
        plain_momentum: momentum of the other parameters, if the optimizer is a kind of SGD; Adam
            and RMSprop keep torch's defaults.
        plain_weight_decay: weight decay of the other parameters.
    """
    if method not in _OPTIMIZERS:
        raise ValueError(f"The method must be one of {tuple(_OPTIMIZERS)}, got {method!r}.")
    orthogonalize_(model, orthogonal=orthogonal, view=view)
    options: dict[str, Any] = {"lr": lr}
    others: dict[str, Any] = {
        "lr": lr if plain_lr is None else plain_lr,
        "weight_decay": plain_weight_decay,
    }
    if not is_adaptive(method):
        options["momentum"] = _momentum(method, momentum, retraction_momentum)
        others["momentum"] = plain_momentum
    groups = param_groups(
        model, orthogonal, view=view, options=options, other_options=others
    )  # before the trivialization, which keeps the parameters and changes their names
    chosen = [name for name, _ in groups[0]["params"]]
    # 1 x 1 kernels are signs, which no method can change.
    groups[0]["params"] = [(n, p) for n, p in groups[0]["params"] if not is_fixed(p, view)]
    if is_trivialization(method):
        from_identity = method.endswith("-identity")
        if from_identity:
            _make_rotations_([p for _, p in groups[0]["params"]], view)
        base = "identity" if from_identity else "weight"
        moving = {name for name, _ in groups[0]["params"]}
        trivialize_(model, lambda name, _: name in moving, view=view, base=base)
        for name in moving if from_identity else ():
            module, attribute = _place(model, name)
            chain = module.get_submodule(f"parametrizations.{attribute}")
            assert isinstance(chain, nn.ModuleList)
            chain[0] = MatrixExponential()
        groups = [_for_torch(group) for group in groups]
    optimizer = _OPTIMIZERS[method](groups, lr=lr)
    return Trainee(model, optimizer, tuple(_place(model, name) for name in chosen), view)


def is_trivialization(method: str) -> bool:
    """Whether a method is a trivialization, from whatever base point."""
    return method.startswith("trivialization-")


def is_adaptive(method: str) -> bool:
    """Whether a method is a trivialization whose optimizer is not a kind of SGD."""
    return method.removesuffix("-identity") in ADAPTIVE_METHODS


def has_momentum(method: str) -> bool:
    """Whether a method has momentum by its name."""
    return method.removesuffix("-identity").endswith("-momentum")


def _momentum(method: str, momentum: float, retraction_momentum: float) -> float:
    if method in RETRACTION_FORMS:
        return retraction_momentum
    return momentum if has_momentum(method) else 0.0


@torch.no_grad()
def _make_rotations_(weights: list[nn.Parameter], view: ViewName) -> None:
    """Reverse a column of every matrix of determinant -1, which no ``exp(A)`` reaches."""
    for p in weights:
        X = as_matrices(p, view).clone()
        X[..., 0] *= torch.linalg.det(X).sign().unsqueeze(-1)
        p.copy_(as_weight(X, p, view))


def _for_torch(group: dict[str, Any]) -> dict[str, Any]:
    """A group without the options that torch's own optimizers do not know."""
    return {name: value for name, value in group.items() if name not in ("orthogonal", "view")}


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a parameter belongs to, and its name there."""
    module, _, attribute = name.rpartition(".")
    return model.get_submodule(module), attribute
