"""What every optimizer with orthogonal weights shares: groups, views, batches, state, errors.

A method is a subclass that says how matrices ``(..., n, p)``, n >= p, step (``matrix_step``) and
how the unconstrained parameters do (``plain_step``).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ortholand.geometry.matrices import real_dtype, to_working_dtype, working_dtype
from ortholand.geometry.sharded import distances
from ortholand.geometry.shards import is_dtensor, is_here, restored, zeros_per_matrix
from ortholand.geometry.views import View, as_matrices, as_weight, check_weight, matrices_shape
from ortholand.optim.checks import check_common_options, check_dense_gradients
from ortholand.optim.plain import SKIPPED, Agreement, State, count_skipped

if TYPE_CHECKING:
    from ortholand.optim.rows import RowStepFunction

Group = Mapping[str, Any]
# Per weight: a tensor of its shape, or a real number for each of its matrices. Both start at zero.
StateKind = Literal["matrix", "number"]

# Up to this many entries a matrix is mostly overhead, and a batch of such matrices steps faster as
# one: 2 to 5 times up to 64 x 64, even at 100 x 100, slower at 256 x 256 (make bench).
BATCH_UP_TO = 100 * 100


class MatrixStep(NamedTuple):
    """The step of a batch of matrices."""

    moved: Tensor  # where the matrices go, (..., n, p)
    taken: Tensor  # which of them may go there, (...); the others stay as they are
    state: dict[str, Tensor]  # the state after a step that is taken, (..., n, p) or (...)


class OrthogonalOptimizer(Optimizer):
    """Base of the optimizers. Group options ``orthogonal`` and ``view`` say what is constrained."""

    _awaits_values = False  # whether a weight was on the meta device when it should be checked

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check_all_options(defaults)
        super().__init__(params, defaults)

    # What a method provides.

    def check_options(self, options: Group) -> None:
        """Raise on options of this method that make no sense."""
        raise NotImplementedError

    def start_radius(self, group: Group) -> float:
        """How far from the manifold an orthogonal parameter may start."""
        raise NotImplementedError

    def state_kinds(self, group: Group) -> Mapping[str, StateKind]:
        """Names and kinds of the state that a weight has."""
        raise NotImplementedError

    def matrix_step(
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group
    ) -> MatrixStep:
        """Step of the matrices X with gradients G. Changes none of its arguments."""
        raise NotImplementedError

    def plain_step(
        self, params: list[Tensor], group: Group, agree: Agreement | None = None
    ) -> None:
        """Step of the parameters of a group with ``orthogonal=False``.

        ``agree``: from which of the parameters this rank may step to which all ranks may.
        """
        raise NotImplementedError

    def shortcut(self, params: list[Tensor], group: Group) -> list[Tensor]:  # noqa: ARG002
        """Step those parameters for which there is a shortcut to ``matrix_step``; the others."""
        return params

    def row_step(self, group: Group) -> "RowStepFunction | None":  # noqa: ARG002
        """How tall matrices step whose rows are on several ranks; None: whole, on one of them."""
        return None

    # What all methods share.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; the closure's value, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradient = [
            [p for p in group["params"] if p.grad is not None] for group in self.param_groups
        ]
        for params in with_gradient:  # all checks first: an error leaves everything as it was
            check_dense_gradients(params)
        if self._awaits_values:
            self._check_values()
        for group, params in zip(self.param_groups, with_gradient, strict=True):
            whole = self._step_sharded(params, group)
            if group["orthogonal"]:
                self.step_whole(whole, group)
            else:
                self.plain_step(whole, group)
        return loss

    def step_whole(self, params: list[Tensor], group: Group) -> None:
        """One step of orthogonal parameters that are all here, not spread over ranks."""
        for bundle in bundles(self.shortcut(params, group), group):
            self._step_bundle(bundle, group)

    def _step_sharded(self, params: list[Tensor], group: Group) -> list[Tensor]:
        """Step the parameters that are spread over ranks; the others."""
        sharded = [p for p in params if is_dtensor(p)]
        if not sharded:
            return params
        from ortholand.optim.sharded import step_sharded  # not before there is a DTensor

        step_sharded(self, sharded, group)
        return [p for p in params if not is_dtensor(p)]

    def skipped_steps(self) -> int:
        """How many steps were not taken so far because they would not have been finite.

        Counts matrices (each kernel of a convolution in the view "kernel"), and parameters in
        groups with ``orthogonal=False``. Reads the device: for logging, not for every step.
        """
        counts = [state[SKIPPED] for state in self.state.values() if SKIPPED in state]
        return sum(int(count) for count in counts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked as a whole before any of it counts."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, bit for bit and without sharing memory with ``state_dict``.

        torch casts state to the type of its parameter; ours is float32 beside half-precision
        weights and integer counts, which must come back as they were saved.
        """
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for i, (p, group) in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and name in self.state[p]:
                    # torch counts Adam's steps on the host.
                    on_host = name == "step" and not group["orthogonal"]
                    device = torch.device("cpu") if on_host else p.device
                    self.state[p][name] = restored(value, p, device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _step_bundle(self, params: list[Tensor], group: Group) -> None:
        view = group["view"]
        X = _together([to_working_dtype(as_matrices(p, view)) for p in params])
        G = _together([_gradient_matrices(p, group) for p in params])
        kinds = self.state_kinds(group)
        state = {
            name: _together(
                [_as_batch(self.load(p, name, group), kind, view) for p in params], kind
            )
            for name, kind in kinds.items()
        }
        result = self.matrix_step(X, G, state, group)
        taken = result.taken[..., None, None] if X.ndim > 2 else result.taken
        moved = _apart(torch.where(taken, result.moved, X), params, view)
        for p, part, ok in zip(params, moved, _apart(result.taken, params, view), strict=True):
            p.copy_(as_weight(part, p, view))
            count_skipped(self.state[p], ok)
        for name, new in result.state.items():
            is_matrix = kinds[name] == "matrix"
            kept = torch.where(taken if is_matrix else result.taken, new, state[name])
            for p, part in zip(params, _apart(kept, params, view), strict=True):
                # As a vector: torch.compile loses what is written to a single float64 number.
                target = self.state[p][name].unsqueeze(0)
                target.copy_(as_weight(part, p, view) if is_matrix else part)

    def load(self, p: Tensor, name: str, group: Group) -> Tensor:
        """A state of a parameter, zero if it is new."""
        state: State = self.state[p]
        if name not in state:
            state[name] = _zero_state(p, self.state_kinds(group)[name], group["view"])
        return state[name]

    def _check_all_options(self, options: Group) -> None:
        check_common_options(options)
        self.check_options(options)

    def _check_group(self, group: Group) -> None:
        self._check_all_options(group)
        if not group["orthogonal"]:
            return
        for i, p in enumerate(group["params"]):
            name = _name_of(group, i)
            check_weight(p, name)
            if p.device.type == "meta":
                self._awaits_values = True
            else:
                _check_start(p, name, group["view"], self.start_radius(group))

    def _check_values(self) -> None:
        """Check weights that had no values when they were added, at the first step they take."""
        for group in self.param_groups:
            self._check_group(group)
        weights = [p for group in self.param_groups for p in group["params"]]
        self._awaits_values = any(p.device.type == "meta" for p in weights)


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """A constructor's options, from its ``locals()``."""
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}


def bundles(params: list[Tensor], group: Group) -> Iterator[list[Tensor]]:
    """Lists of parameters to step as one: of one matrix shape, type and device."""
    if group["foreach"] is False or len(params) == 1:
        yield from ([p] for p in params)
        return
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in params:
        shape = as_matrices(p, group["view"]).shape[-2:]
        alike.setdefault((shape, p.dtype, p.device), []).append(p)
    for (shape, _, _), members in alike.items():
        if group["foreach"] or shape.numel() <= BATCH_UP_TO:
            yield members
        else:
            yield from ([p] for p in members)


def _as_batch(state: Tensor, kind: StateKind, view: View) -> Tensor:
    return as_matrices(state, view) if kind == "matrix" else state


def _zero_state(p: Tensor, kind: StateKind, view: View) -> Tensor:
    dtype = working_dtype(p.dtype)
    if kind == "matrix":
        return torch.zeros_like(p, dtype=dtype)
    shape = matrices_shape(p.shape, view)[:-2]
    if shape and is_dtensor(p) and is_here(p, view):
        return zeros_per_matrix(p, real_dtype(dtype))
    return torch.zeros(shape, dtype=real_dtype(dtype), device=p.device)


def _together(parts: list[Tensor], kind: StateKind = "matrix") -> Tensor:
    """One batch of all the matrices, or their numbers; a single member stays as it is."""
    if len(parts) == 1:
        return parts[0]
    inner = parts[0].shape[-2:] if kind == "matrix" else ()
    return torch.cat([part.reshape(-1, *inner) for part in parts])


def _apart(batch: Tensor, params: list[Tensor], view: View) -> list[Tensor]:
    """The parts of a batch made by :func:`_together` that belong to each parameter."""
    if len(params) == 1:
        return [batch]
    shapes = [as_matrices(p, view).shape[:-2] for p in params]
    parts = batch.split([shape.numel() for shape in shapes])
    return [part.reshape(s + batch.shape[1:]) for part, s in zip(parts, shapes, strict=True)]


def _gradient_matrices(p: Tensor, group: Group) -> Tensor:
    assert p.grad is not None
    G = to_working_dtype(as_matrices(p.grad, group["view"]))
    return -G if group["maximize"] else G


def _name_of(group: Group, i: int) -> str:
    names = group.get("param_names")
    return repr(names[i]) if names else f"parameter {i} of the group"


def _check_start(p: Tensor, name: str, view: View, radius: float) -> None:
    """Raise if a matrix of the weight is outside the ball, or not finite."""
    with torch.no_grad():
        d = float(distances(p, view).max())
    if d <= radius:
        return
    raise ValueError(
        f"An orthogonal parameter must start within {radius} of the manifold "
        f"(||X^T X - I||_F; eps, where that is an option), but {name} of shape {tuple(p.shape)}, "
        f"view {view!r}, is at distance {d:.4g}. Project it first with "
        "ortholand.orthogonalize_(...), which takes a tensor, groups or a model."
    )
