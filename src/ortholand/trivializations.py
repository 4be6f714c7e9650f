"""Trivializations: weights that are orthogonal by construction, for any Euclidean optimizer.

A weight is computed from unconstrained numbers through the exponential or the Cayley map,
``W = B exp(A)`` with A skew, with torch's ``parametrize`` as bookkeeper.
``torch.nn.utils.parametrizations.orthogonal`` has the same coordinates, but works with n x n
matrices, draws random numbers, and silently replaces weights that are not orthogonal.
"""

from collections.abc import Callable
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ortholand.geometry.exponential import exponential_minus_identity
from ortholand.geometry.manifold import distance, polar_projection
from ortholand.geometry.matrices import (
    add_identity,
    identity_like,
    is_square,
    newton_schulz,
    to_working_dtype,
    wide_dtype,
    without_autocast,
)
from ortholand.geometry.rotations import cayley, skew_cayley, skew_exponential
from ortholand.geometry.views import View, as_matrices, as_weight, check_view, check_weight
from ortholand.parameters import Selectors, selected_parameters

Map = Literal["exp", "cayley"]
Base = Literal["weight", "identity"]
Model = TypeVar("Model", bound=nn.Module)


def trivialize_(
    model: Model,
    orthogonal: Selectors,
    *,
    view: View = "matrix",
    map: Map = "exp",
    base: Base = "weight",
) -> Model:
    """Make weights orthogonal by construction, in place, without changing their values.

    Afterwards any optimizer of ``torch.optim`` on ``model.parameters()`` keeps them orthogonal up
    to rounding. Create the optimizer after this call.

    Args:
        model: the model. The chosen weights must already be orthogonal up to rounding.
        orthogonal: which parameters, as in :func:`param_groups`; marks are ignored here.
        view: how the weights are viewed as matrices.
        map: ``"exp"``, or ``"cayley"``, which is cheaper.
        base: ``"weight"``: ``W = B exp(A)`` from ``B = W`` and ``A = 0``. ``"identity"``:
            ``W = exp(A)``, as in the paper, for square matrices without the eigenvalue -1 (hence
            with determinant +1 if real).

    Returns:
        The model.

    Nothing is changed if any weight is rejected.

    >>> import ortholand, torch
    >>> from torch import nn
    >>> model = ortholand.orthogonalize_(nn.Linear(3, 3), orthogonal="weight")
    >>> optimizer = torch.optim.Adam(trivialize_(model, "weight").parameters())
    >>> [name for name, _ in model.named_parameters()]
    ['bias', 'parametrizations.weight.original']
    """
    for name, value, choices in (("map", map, get_args(Map)), ("base", base, get_args(Base))):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
    chosen = _choose(model, orthogonal, view)
    logarithms = [_logarithm(name, p, view, map) for name, p, *_ in chosen if base == "identity"]
    for i, (_, p, module, attribute) in enumerate(chosen):
        trivialization = Trivialization(p, view=view, map=map)
        trivialization.position = list(module._parameters).index(attribute)
        p.grad = None  # it belongs to the weight, not to A
        parametrize.register_parametrization(module, attribute, trivialization)
        if logarithms:
            with torch.no_grad():
                trivialization.base.copy_(identity_like(trivialization.base))
                p.copy_(logarithms[i])
    return model


@torch.no_grad()
def rebase_(model: Model) -> Model:
    """Move the base point of every trivialized weight to its current value: ``B = W, A = 0``.

    Call it between ``optimizer.step()`` and the next backward pass, every so many steps: it keeps
    A small, where the map distorts little. The optimizer can continue: weights stay the same up to
    rounding, and so do parameter objects and its buffers. Gradients are dropped.

    >>> import ortholand, torch
    >>> from torch import nn
    >>> model = ortholand.orthogonalize_(nn.Linear(2, 2), orthogonal="weight")
    >>> A = trivialize_(model, "weight").parametrizations.weight.original
    >>> A.data.fill_(0.1)  # as an optimizer would
    tensor([[0.1000, 0.1000],
            [0.1000, 0.1000]])
    >>> W = model.weight
    >>> A.any(), torch.allclose(rebase_(model).weight, W), A.any()
    (tensor(True), True, tensor(False))
    """
    weights = _trivialized(model)
    points = [trivialization.matrices(p) for _, _, p, trivialization in weights]
    for (module, name, *_), X in zip(weights, points, strict=True):
        if not torch.isfinite(X).all():
            raise ValueError(
                f"Only finite weights can be base points, but {name} of a "
                f"{type(module).__name__} is not. Go back to a checkpoint."
            )
    for (_, _, p, trivialization), X in zip(weights, points, strict=True):
        with without_autocast([X]):
            # One Newton-Schulz step: rounding errors do not accumulate over many moves.
            trivialization.base.copy_(newton_schulz(X))
        p.zero_()
        p.grad = None
    return model


@torch.no_grad()
def untrivialize_(model: Model) -> Model:
    """Turn every trivialized weight back into a plain parameter with the same values, in place.

    Names and order are as before :func:`trivialize_`. Other parametrizations stay. Create a new
    optimizer afterwards: an old one would step the weights with its state for A.

    >>> from torch import nn
    >>> import ortholand
    >>> model = ortholand.orthogonalize_(nn.Linear(3, 3), orthogonal="weight")
    >>> list(untrivialize_(trivialize_(model, "weight")).state_dict())
    ['weight', 'bias']
    """
    # The last that came is the first to go, because positions were counted in that order.
    for module, name, parameter, trivialization in reversed(_trivialized(model)):
        weight = getattr(module, name)
        after = list(module._parameters)[trivialization.position :]
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for other in after:  # the weight was re-registered last: move these behind it
            module._parameters[other] = module._parameters.pop(other)
        parameter.copy_(weight)
        parameter.grad = None
    return model


class Trivialization(nn.Module):
    """A parametrization of a weight: the point that a map reaches from a base point.

    The parameter V is of the weight's shape. With a square base B, ``W = B exp(A)`` where
    ``A = L - L^H``, L the lower triangle of V: torch's own coordinates. With a tall base (and,
    transposed, a wide one), ``W = exp(K B^H - B K^H) B`` where K is V with its part ``B Z`` along
    B replaced by ``B (L - L^H) / 2``, L the lower triangle of Z: torch's coordinates up to a
    rotation, without completing B to a square matrix.
    """

    def __init__(self, weight: Tensor, *, view: View = "matrix", map: Map = "exp") -> None:
        super().__init__()
        self.view: View = view
        self.map = map
        self.position = 0
        matrices = to_working_dtype(as_matrices(weight.detach(), view))
        # The buffer is named after the map, so that load_state_dict refuses the other map's state.
        self.register_buffer(f"{map}_base", matrices.clone(memory_format=torch.contiguous_format))

    @property
    def base(self) -> Tensor:
        """The base points ``(..., n, p)``, n >= p."""
        return self.get_buffer(f"{self.map}_base")

    def matrices(self, V: Tensor) -> Tensor:
        """The orthogonal matrices ``(..., n, p)``, in float32 if V is half precision."""
        with without_autocast([V]):
            map_, B = _MAPS[self.map], to_working_dtype(self.base)
            Y = to_working_dtype(as_matrices(V, self.view))
            if is_square(B):
                return B @ map_(_skew_of_lower(Y))
            Z = B.mH @ Y
            K = Y + B @ (_skew_of_lower(Z) / 2 - Z)
            n, p = B.shape[-2:]
            if 2 * p < n:
                return _map_thin(_GENERAL_MAPS[self.map], K, B)
            return map_(K @ B.mH - B @ K.mH) @ B

    def forward(self, V: Tensor) -> Tensor:
        """The weight."""
        return as_weight(self.matrices(V), V, self.view).to(V.dtype).contiguous()

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Take an orthogonal weight (``module.weight = ...``) as the new base point, A = 0."""
        _check_orthogonal(weight, "the new weight", self.view)
        self.base.copy_(as_matrices(weight, self.view))
        return torch.zeros_like(weight)

    def extra_repr(self) -> str:
        """The map and the view."""
        return f"map={self.map!r}, view={self.view!r}"


# The maps of skew matrices, and the same maps of any matrix.
_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"exp": skew_exponential, "cayley": skew_cayley}
_GENERAL_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda A: identity_like(A) + exponential_minus_identity(A),
    "cayley": cayley,
}


def _map_thin(map: Callable[[Tensor], Tensor], K: Tensor, B: Tensor) -> Tensor:
    """``f(K B^H - B K^H) B`` for an analytic f from its value at a matrix of size 2p.

    ``K B^H - B K^H = U V^H``, and ``f(U V^H) U = U f(V^H U)``; ``-c B`` is the second half of U.
    For large K this c > 0 balances ``V^H U``, which is not normal.
    """
    c = torch.linalg.vector_norm(K.detach(), dim=(-2, -1), keepdim=True).clamp(min=1)
    U, V = torch.cat([K, -c * B], -1), torch.cat([B, K / c], -1)
    return U @ map(V.mH @ U)[..., K.shape[-1] :] * (-1 / c)


def _choose(
    model: nn.Module, orthogonal: Selectors, view: View
) -> list[tuple[str, nn.Parameter, nn.Module, str]]:
    """The chosen parameters, their modules and their names there, all fit to be trivialized."""
    check_view(view)
    chosen = []
    for name, p in selected_parameters(model, orthogonal):
        holders = [
            (module, attribute)
            for module in model.modules()
            for attribute, other in module._parameters.items()
            if other is p
        ]
        if len(holders) > 1:
            raise ValueError(
                f"A trivialized weight must belong to one module, but {name} is shared by "
                f"{len(holders)}: the others would see A in its place. Share the module instead."
            )
        check_weight(p, name)
        _check_orthogonal(p, name, view)
        chosen.append((name, p, *holders[0]))
    if not chosen:
        raise ValueError(f"orthogonal={orthogonal!r} names no parameter. Example: 'layers.*'.")
    return chosen


def _trivialized(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, Trivialization]]:
    """Modules, names, parameters and maps of the trivialized weights; at least one."""
    found = []
    for module in filter(parametrize.is_parametrized, model.modules()):
        for name, chain in module.get_submodule("parametrizations").named_children():
            first = chain.get_submodule("0")
            if isinstance(first, Trivialization):
                found.append((module, name, chain.get_parameter("original"), first))
    if not found:
        raise ValueError(
            f"The model must have trivialized weights, but this {type(model).__name__} has none. "
            "Call ortholand.trivialize_(model, orthogonal=...) first."
        )
    return found


def _skew_of_lower(V: Tensor) -> Tensor:
    L = V.tril()
    return L - L.mH


@torch.no_grad()
def _logarithm(name: str, weight: nn.Parameter, view: View, map: Map) -> Tensor:
    """V with ``W = exp(L - L^H)``, or the Cayley map's: the coordinates at ``B = I``."""
    X = to_working_dtype(as_matrices(weight, view))
    if not is_square(X):
        raise ValueError(
            f"base='identity' needs square matrices, but {name} has shape "
            f"{tuple(weight.shape)} with view={view!r}. Use base='weight'."
        )
    Y = polar_projection(X.to(wide_dtype(X)))
    K = torch.linalg.solve_ex(add_identity(Y), add_identity(Y, -1)).result
    K = K.nan_to_num(0, 0, 0)  # singular: caught below
    A = 2 * K
    if map == "exp":
        tangents, Q = torch.linalg.eigh(-1j * K)
        A = Q @ (2j * tangents.atan().unsqueeze(-1) * Q.mH)
        A = A if X.is_complex() else A.real
    V = (A.tril(-1) + torch.diag_embed(A.diagonal(dim1=-2, dim2=-1)) / 2).to(X.dtype)
    # The logarithm may miss its matrix, and near the eigenvalue -1 some digits are lost.
    miss = torch.linalg.vector_norm(_MAPS[map](_skew_of_lower(V)) - X, dim=(-2, -1))
    missed = ~(miss <= torch.finfo(X.dtype).eps ** 0.5 * X.shape[-1])
    if missed.any():
        raise ValueError(
            "base='identity' reaches only matrices without the eigenvalue -1 (real: with "
            f"determinant +1), but {name} has {int(missed.sum())} others of "
            f"{missed.numel()}. Use base='weight', or start from "
            "random_orthogonal(..., special=True)."
        )
    return as_weight(V, weight, view)


@torch.no_grad()
def _check_orthogonal(weight: Tensor, name: str, view: View) -> None:
    matrices = as_matrices(weight, view)
    error = float(distance(matrices).max())
    tolerance = min(10 * torch.finfo(weight.dtype).eps * matrices.shape[-2], 0.1)  # of rounding
    if not error <= tolerance:
        raise ValueError(
            f"A trivialization needs weights with ||X^H X - I|| <= {tolerance:.1e}, but {name} "
            f"has {error:.1e}. Project them first: "
            "ortholand.orthogonalize_(model, orthogonal=...)."
        )
