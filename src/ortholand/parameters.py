"""Helpers for the parameters of a model: choose the orthogonal ones, project them, watch them."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from ortholand.geometry.matrices import without_autocast
from ortholand.geometry.scales import Scale, check_scale, check_scale_fits, scale_of
from ortholand.geometry.views import (
    Blocks,
    View,
    ViewName,
    check_weight,
    plain_blocks,
    view_of,
)
from ortholand.marks import Computed, Marked, computed_weights, mark, marked, own_parameter
from ortholand.weights import all_finite, distances, project_, randomize_

Predicate = Callable[[str, nn.Parameter], bool]
Selector = str | type[nn.Module] | nn.Module | Predicate
Selectors = Selector | Iterable[Selector]
Init = Literal["project", "random", "keep"]
Reduce = Literal["max", "mean"]
T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)

# No options of a mark.
RESERVED = ("params", "param_names", "orthogonal", "view", "blocks", "scale")


class Which(TypedDict, total=False):
    """Which weights a function means, and how it views them."""

    orthogonal: Selectors | None
    view: ViewName | None
    blocks: Blocks | None
    scale: Scale | None


@torch.no_grad()
def orthogonal(
    module: Module,
    name: str = "weight",
    *,
    init: Init = "project",
    seed: int | torch.Generator | None = None,
    view: ViewName = "matrix",
    blocks: Blocks | Literal["gates", "qkv"] | None = None,
    scale: Scale = 1.0,
    options: Mapping[str, Any] | None = None,
) -> Module:
    """Mark a weight as orthogonal, where the model is defined, and make it so.

    :func:`param_groups`, :func:`orthogonalize_` and :func:`orthogonality_error` find marked weights
    by themselves. The weight stays a plain parameter under its name: nothing is computed in a
    forward pass, and an optimizer of this library must keep it on the manifold.

    Args:
        module: the module that holds the weight itself, such as ``nn.Linear``.
        name: the weight's name in the module.
        init: ``"project"``: the nearest orthonormal matrices. ``"random"``: new ones, uniformly
            distributed. ``"keep"``: unchanged, for a weight that is orthogonal already.
        seed: for ``init="random"``: an integer, or a generator on the weight's device.
        view: how the weight is viewed as matrices: ``"matrix"``, ``"kernel"``, ``"rows"``,
            ``"columns"`` or ``"vector"``.
        blocks: (r, c), if the weight is a grid of r x c equal blocks, each orthogonal by itself;
            ``"gates"`` for those of ``nn.LSTM``, ``nn.GRU`` and their cells; ``"qkv"`` for
            ``in_proj_weight`` of ``nn.MultiheadAttention``.
        scale: the multiple of an orthonormal matrix that the weight is: a positive number, or
            ``"fan"``.
        options: further options of its group, such as ``lr``; they override those given to
            :func:`param_groups`.

    Returns:
        The module, so that the call can wrap its construction. A second mark replaces the
        first. On the meta device the weight is only marked: once the model has values, call
        ``orthogonalize_(model)``. Do the same after anything that re-initialises the weight.

    >>> import ortholand as ol
    >>> from torch import nn
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.mix = ol.orthogonal(nn.Linear(8, 8))
    ...         self.out = nn.Linear(8, 2)
    >>> for group in ol.param_groups(Block()):
    ...     print(group["orthogonal"], [name for name, _ in group["params"]])
    True ['mix.weight']
    False ['mix.bias', 'out.weight', 'out.bias']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be the nn.Module that holds the weight, got {type(module).__name__}. "
            'Example: ortholand.orthogonal(layer, "weight").'
        )
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {get_args(Init)}, got {init!r}.")
    if (init == "random") != (seed is not None):
        raise ValueError(
            'init="random" needs a seed, and no other init takes one, but got '
            f'init={init!r} and seed={seed!r}. Example: init="random", seed=0.'
        )
    further = dict(options or {})
    if reserved := [key for key in RESERVED if key in further]:
        raise ValueError(
            f"options of a mark are further options of its group, but {reserved[0]!r} is not one. "
            "view, blocks and scale are separate arguments."
        )
    check_scale(scale)
    _reshard(module)
    weight = own_parameter(module, name, name)
    label = f"{name!r} of this {type(module).__name__}"
    grid = _named_blocks(blocks, module, name) if isinstance(blocks, str) else plain_blocks(blocks)
    constraint = {"view": view, "blocks": grid, "scale": scale}
    seen = view_of(constraint)
    check_weight(weight, label, seen)
    number = scale_of(scale, weight.shape, seen)
    check_scale_fits(number, weight.dtype, label)
    if weight.device.type != "meta":
        if init == "project":
            orthogonalize_([{"params": [(label, weight)], **constraint}])
        elif seed is not None:
            randomize_(weight, seed, seen, number)
    mark(module, name, {**constraint, **further})
    return module


def _named_blocks(blocks: str, module: nn.Module, name: str) -> Blocks:
    """The grid that a name means for a weight of a module."""
    is_gated = isinstance(module, nn.RNNBase | nn.RNNCellBase) and name.startswith("weight_")
    if blocks == "gates" and is_gated and not name.startswith("weight_hr"):
        bias_free: Any = module
        return getattr(module, name).shape[0] // bias_free.hidden_size, 1
    if blocks == "qkv" and isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return 3, 1
    raise ValueError(
        'blocks must be (r, c), "gates" for weight_ih and weight_hh of an nn.LSTM or nn.GRU, or '
        f'"qkv" for in_proj_weight of an nn.MultiheadAttention, got {blocks!r} for {name!r} of a '
        f"{type(module).__name__}. Say how many blocks it has, such as blocks=(3, 1)."
    )


def param_groups(
    model: nn.Module,
    orthogonal: Selectors | None = None,
    *,
    view: ViewName | None = None,
    blocks: Blocks | None = None,
    scale: Scale | None = None,
    options: Mapping[str, Any] | None = None,
    other_options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Split a model's parameters into orthogonal groups and the rest, for any optimizer here.

    Args:
        model: the model.
        orthogonal: which parameters are orthogonal: a name pattern (``"layers.*.weight"``), a
            module type (``nn.Conv2d``), a module, a predicate ``(name, parameter) -> bool``, or
            several of these. A pattern, a type or a module takes the parameters of rank 2 or
            more that it covers, and leaves biases to the rest. Weights that the model itself
            marks (:func:`orthogonal`) are always orthogonal; None selects only these. A shared
            weight has all its names. A weight that is computed from other parameters (by a
            parametrization, ``weight_norm``, ``spectral_norm``) is refused.
        view: how the selected weights are viewed as matrices, ``"matrix"`` if not given. Marked
            weights have their own.
        blocks: (r, c), if they are grids of blocks, each orthogonal by itself (:func:`orthogonal`).
        scale: the multiple of orthonormal matrices that the selected weights are, as in the
            optimizers: a positive number, or ``"fan"``; None leaves it to the optimizer. Marked
            weights have their own.
        options: further options of the orthogonal groups, such as ``lr``.
        other_options: further options of the rest, such as ``weight_decay``.

    Returns:
        Groups with named parameters: the selected weights, the marked ones (one group for each set
        of options), the rest; no group is empty. Frozen parameters are left out. Call it
        after ``fully_shard``, which replaces the parameters.

    >>> import ortholand
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> for group in param_groups(model, orthogonal="0.*"):
    ...     print(group["orthogonal"], [name for name, _ in group["params"]])
    True ['0.weight']
    False ['0.bias', '2.weight', '2.bias']
    """
    given = _given(view=view, blocks=blocks, scale=scale)
    _reshard(model)
    marks = _marks(model)
    seen = view_of(given)
    chosen = _select(model, orthogonal, seen) if orthogonal is not None else set()
    _check_agreement(marks, chosen if orthogonal is not None else None, given)
    selected: dict[str, Any] = {"orthogonal": True, "view": "matrix", **given, **(options or {})}
    rest: dict[str, Any] = {"orthogonal": False, **(other_options or {})}
    groups, marked_groups = [{"params": [], **each} for each in (selected, rest)], []
    for name, p in _trainable(model):
        group = groups[0 if p in chosen else 1]
        if p in marks:
            wanted = {"orthogonal": True, **(options or {}), **marks[p].options}
            alike = [g for g in marked_groups if {**g, "params": 0} == {**wanted, "params": 0}]
            if not alike:
                marked_groups.append({"params": [], **wanted})
            group = (alike or marked_groups)[-1]
        group["params"].append((name, p))
    return [group for group in [groups[0], *marked_groups, groups[1]] if group["params"]]


def selected_parameters(model: nn.Module, orthogonal: Selectors) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters that selectors match, in the model's order; marks are ignored."""
    _reshard(model)
    chosen = _select(model, orthogonal)
    return [(name, p) for name, p in _trainable(model) if p in chosen]


@torch.no_grad()
def orthogonalize_(
    target: T,
    *,
    orthogonal: Selectors | None = None,
    view: ViewName | None = None,
    blocks: Blocks | None = None,
    scale: Scale | None = None,
) -> T:
    """Replace orthogonal weights, in place, by the nearest matrices with orthonormal columns.

    Args:
        target: a tensor, tensors, groups from :func:`param_groups`, an optimizer, or a
            model (whose parameters ``orthogonal`` or its marks select).
        orthogonal: for a model, as in :func:`param_groups`.
        view: how tensors or a model's weights are viewed as matrices, ``"matrix"`` if not given.
            Groups, optimizers and marks have their own.
        blocks: (r, c), if weights are grids of blocks, as for :func:`orthogonal`.
        scale: the multiple of orthonormal matrices to make them: a number, 1 if not given, or
            ``"fan"``. Groups, optimizers and marks have their own.

    Returns:
        The target, so that calls can be nested.

    Weights of a sharded model (FSDP2's DTensors) are projected too, and all ranks must call it:
    each matrix is gathered on one rank, a different one for each, and scattered again.

    Nothing is changed if any weight is rejected. Frozen parameters are projected only if they
    are passed directly.

    >>> import torch, ortholand
    >>> W = orthogonalize_(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
    >>> W
    tensor([[1., 0.],
            [0., 1.]])
    """
    given = _given(view=view, blocks=blocks, scale=scale)
    weights = _checked_weights(target, orthogonal, given)
    for weight in weights:
        if not all_finite(weight.tensor):
            raise ValueError(
                f"Only finite weights can be projected, but {weight.name} has NaN or infinite "
                "entries. Initialise it again."
            )
    with without_autocast(w.tensor for w in weights):
        for this in dict.fromkeys(w.view for w in weights):
            project_([(w.tensor, w.scale) for w in weights if w.view == this], this)
    return target


@overload
def orthogonality_error(  # pyrefly: ignore[inconsistent-overload]
    target: Any, *, reduce: None, spectral: bool = False, **which: Unpack[Which]
) -> dict[str, float]: ...
@overload
def orthogonality_error(  # pyrefly: ignore[inconsistent-overload]
    target: Any, *, reduce: Reduce = "max", spectral: bool = False, **which: Unpack[Which]
) -> float: ...
@torch.no_grad()
def orthogonality_error(
    target: Any,
    *,
    orthogonal: Selectors | None = None,
    view: ViewName | None = None,
    blocks: Blocks | None = None,
    scale: Scale | None = None,
    reduce: Reduce | None = "max",
    spectral: bool = False,
) -> float | dict[str, float]:
    """How far orthogonal weights are from the manifold: ``||X^H X - I||_F``, ready to log.

    Args:
        target: as for :func:`orthogonalize_`; for an optimizer, its orthogonal groups.
        orthogonal: for a model, as in :func:`param_groups`.
        view: as for :func:`orthogonalize_`.
        blocks: as for :func:`orthogonalize_`.
        scale: as for :func:`orthogonalize_`; the error is that of X = weight / scale.
        reduce: ``"max"`` or ``"mean"`` over all matrices, or ``None`` for a dictionary from each
            parameter's name to the largest error of its matrices.
        spectral: return ``||X^H X - I||_2`` instead, by eigenvalues: by default the landing
            optimizers' safe step keeps this within eps.

    On a sharded model all ranks must call it, and all get the same numbers. Gram matrices are
    summed over ranks; no weight is gathered.

    >>> import torch
    >>> orthogonality_error(torch.diag(torch.tensor([1.0, 2.0])))
    3.0
    """
    if reduce not in ("max", "mean", None):
        raise ValueError(f"reduce must be 'max', 'mean' or None, got {reduce!r}.")
    given = _given(view=view, blocks=blocks, scale=scale)
    weights = _checked_weights(target, orthogonal, given)
    with without_autocast(w.tensor for w in weights):
        each = [
            distances(w.tensor, w.view, spectral=spectral, scale=w.scale).flatten().cpu().double()
            for w in weights
        ]
    if reduce is None:
        return {w.name: float(d.max()) for w, d in zip(weights, each, strict=True)}
    if not each:
        return 0.0
    together = torch.cat(each)
    return float(together.max() if reduce == "max" else together.mean())


def _fsdp_modules(model: nn.Module, name: str) -> list[Any]:
    """The parts of a model that are of a class of FSDP; this never imports FSDP."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [m for m in model.modules() if isinstance(m, getattr(fsdp, name))] if fsdp else []


def _reshard(model: nn.Module) -> None:
    """Make FSDP2 release the unsharded weights that it may hold after a forward pass.

    They are copies: changing or optimizing them does not change the model.
    """
    for part in _fsdp_modules(model, "FSDPModule"):
        part.reshard()


def _trainable(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    for name, p in model.named_parameters(remove_duplicate=remove_duplicate):
        if p.requires_grad:
            yield name, p


def _given(**options: Any) -> dict[str, Any]:
    """Those options, of view, blocks and scale, that the user gave; checked."""
    given = {name: value for name, value in options.items() if value is not None}
    if "blocks" in given:
        given["blocks"] = plain_blocks(given["blocks"])
    view_of(given)
    check_scale(given.get("scale", 1.0))
    return given


def _marks(model: nn.Module) -> dict[nn.Parameter, Marked]:
    """The marked parameters; one that several modules share may be marked by several."""
    marks: dict[nn.Parameter, Marked] = {}
    try:
        for each in marked(model):
            first = marks.setdefault(each.parameter, each)
            if first.options != each.options:
                raise ValueError(
                    f"A weight has one mark, but {first.name} and {each.name} are one parameter, "
                    f"marked with {first.options} and {each.options}. Mark it once, or identically."
                )
            check_weight(each.parameter, each.name, view_of(each.options))
    except ValueError as error:
        raise ValueError(f"{error}{_advice_on_flat_weights(model)}") from None
    return marks


def _check_agreement(
    marks: Mapping[nn.Parameter, Marked],
    selected: set[nn.Parameter] | None,
    given: Mapping[str, Any],
) -> None:
    """Raise unless marks and selectors together say which weights are orthogonal, and how."""
    if selected is None and not marks:
        raise ValueError(
            "For a model, say which parameters are orthogonal: orthogonal=nn.Linear, "
            'orthogonal="layers.*.weight", or a predicate; or mark them where the model is '
            "defined: ortholand.orthogonal(module)."
        )
    for key, value in given.items():
        if selected is None:
            raise ValueError(
                f"{key} belongs to weights that orthogonal=... selects, but got {key}={value!r} "
                f"without a selection. Marked weights state their own {key}: "
                f"ortholand.orthogonal(module, {key}={value!r})."
            )
        for each in (marks[p] for p in selected & marks.keys()):
            if value != each.options.get(key):
                raise ValueError(
                    f"A weight has one {key}, but {each.name} is marked with "
                    f"{key}={each.options.get(key)!r} and selected with {key}={value!r}. Do not "
                    f"select it, or mark it again: ortholand.orthogonal(module, {key}={value!r})."
                )


class _Weight(NamedTuple):
    name: str
    tensor: Tensor
    view: View
    scale: float


def _checked_weights(
    target: Any, orthogonal: Selectors | None, given: dict[str, Any]
) -> list[_Weight]:
    """The orthogonal weights of whatever the user passed, all of them matrices with values."""
    weights = []
    for g, group in enumerate(_groups_of(target, orthogonal, given)):
        if not group.get("orthogonal", True):
            continue
        seen, scale_there = view_of(group), group.get("scale", 1.0)
        check_scale(scale_there)
        for i, member in enumerate(_as_list(group["params"])):
            name, tensor = member if isinstance(member, tuple) else (f"{g}.{i}", member)
            name = group["param_names"][i] if group.get("param_names") else name
            check_weight(tensor, name, seen, moves=False)
            if tensor.device.type == "meta":
                raise ValueError(
                    f"A weight must have values, but {name} is on the meta device. Initialise it "
                    'first: model.to_empty(device="cpu"), then reset_parameters() of its modules.'
                )
            number = scale_of(scale_there, tensor.shape, seen)
            check_scale_fits(number, tensor.dtype, name)
            weights.append(_Weight(name, tensor, seen, number))
    return weights


def _groups_of(
    target: Any, orthogonal: Selectors | None, given: dict[str, Any]
) -> Iterable[Mapping[str, Any]]:
    """Parameter groups for whatever the user passed."""
    if isinstance(target, nn.Module):
        return param_groups(target, orthogonal, **given)
    if orthogonal is not None:
        raise ValueError(f"orthogonal=... selects from a model, but got {type(target).__name__}.")
    groups = target.param_groups if isinstance(target, Optimizer) else _as_list(target)
    if groups and all(isinstance(group, Mapping) for group in groups):
        for name in given:
            raise ValueError(f"Groups state their own {name}: leave {name} out, or set it there.")
        return groups
    for tensor in groups:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "Expected a tensor, tensors, parameter groups, an optimizer or a model, got "
                f"{type(tensor).__name__}."
            )
    return [{"params": [(str(i), tensor) for i, tensor in enumerate(groups)], **given}]


def _as_list(target: Any) -> list[Any]:
    return [target] if isinstance(target, Tensor | Mapping) else list(target)


def _select(model: nn.Module, orthogonal: Selectors, view: View = "matrix") -> set[nn.Parameter]:
    """The parameters that any selector matches; each must match at least one."""
    single = isinstance(orthogonal, str | nn.Module) or not isinstance(orthogonal, Iterable)
    computed = list(computed_weights(model))
    # Trainable parameters by each of their names, and by those of the weights they compute.
    named = list(_trainable(model, remove_duplicate=False))
    named += [(w.label, p) for w in computed for p in w.ingredients if p.requires_grad]
    chosen: set[nn.Parameter] = set()
    for selector in [orthogonal] if single else orthogonal:
        matches = _matcher(model, computed, selector)
        found = {p: name for name, p in named if matches(name, p)}
        if not found:
            matrices = dict.fromkeys(name for name, p in named if p.ndim > 1)
            raise ValueError(
                f"orthogonal={selector!r} selects no trainable parameter of rank 2 or more. "
                f"The model has: {', '.join(matrices) or 'none'}." + _advice_on_flat_weights(model)
            )
        for weight in computed:
            if not found.keys().isdisjoint(weight.ingredients):
                raise weight.error(weight.label)
        for p, name in found.items():
            check_weight(p, repr(name), view, moves=False)
        chosen |= found.keys()
    return chosen


def _matcher(model: nn.Module, computed: Iterable[Computed], selector: Selector) -> Predicate:
    """Whether a selector matches a parameter with a name."""
    if isinstance(selector, str):
        return lambda name, p: (
            name == selector
            or (p.ndim > 1 and (fnmatchcase(name, selector) or name.startswith(f"{selector}.")))
        )
    if isinstance(selector, nn.Module):
        covered = set(selector.parameters())
    elif isinstance(selector, type):
        modules = [m for m in model.modules() if isinstance(m, selector)]
        covered = {p for m in modules for p in m.parameters(recurse=False)}
        covered.update(*(w.ingredients for w in computed if isinstance(w.module, selector)))
    elif callable(selector):
        return selector
    else:
        raise TypeError(
            "orthogonal must be a name pattern, a module type, a module, a predicate "
            f"(name, parameter) -> bool, or several of these; got {selector!r}."
        )
    return lambda _, p: p.ndim > 1 and p in covered


def _advice_on_flat_weights(model: nn.Module) -> str:
    if not _fsdp_modules(model, "FullyShardedDataParallel"):
        return ""
    return (
        " FullyShardedDataParallel (FSDP1) flattens all weights into one vector; use fully_shard "
        "(FSDP2), which keeps them as matrices."
    )
