"""The engine of compiled code (:mod:`ortholand.native`), on the CPU.

Matrices of up to 128 columns take the whole step at once, those of one shape in one call; larger
ones step one by one: torch's products, and compiled passes between them. All input is checked
first; ``matrix_step`` is the reference.
"""

import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ortholand.geometry.views import matrices_shape
from ortholand.landing.description import LandingStep
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import COUNTS, LIMITED, SKIPPED, Slot, StateKind, count_of
from ortholand.native import (
    LARGEST_SIZE,
    Options,
    kernel,
    tall_kernel,
    why_no_code,
)
from ortholand.native.border import (
    PLAIN_TYPES,
    Extent,
    address_if_dense,
    address_if_plain,
    addresses_if_plain,
)
from ortholand.native.layout import Layout, are_alike, layout_of
from ortholand.optim.plan import Plan
from ortholand.optim.weights import batch_shape
from ortholand.safe_step import SafeStepRule, farthest_before_landing


class CompiledEngine:
    """Steps real matrices in plain CPU memory; those with many columns one by one."""

    name = "compiled"

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:  # noqa: ARG002
        """Why compiled code cannot step a weight."""
        why_not = _group_refusal(plan)
        if why_not:
            return why_not
        verdict = _known_verdict(slot.weight, plan)
        if verdict.why_not:
            return verdict.why_not
        if _row(slot, plan, verdict) is None:
            return _memory_refusal(slot, plan.state_kinds)
        return None

    def claim(
        self,
        slots: list[Slot],
        plan: Plan,
        *,
        alone: bool,  # noqa: ARG002
    ) -> tuple[Callable[[], None] | None, list[Slot]]:
        """The step of all weights that compiled code can step, and those that it cannot.

        Matrices of one shape and type step in one call.
        """
        if _group_refusal(plan) is not None:
            return None, slots
        batches: dict[_Kind, _Batch] = {}
        large: list[Slot] = []
        refused: list[Slot] = []
        standing: dict[int, _Verdict] = {}
        for slot in slots:
            verdict = _known_verdict(slot.weight, plan)
            row = None if verdict.why_not else _row(slot, plan, verdict)
            if row is None:
                refused.append(slot)
            elif verdict.kind is not None:
                batches.setdefault(verdict.kind, _Batch()).add(row, verdict)
                if verdict.contiguous:
                    standing[id(slot.weight)] = verdict
            else:
                large.append(slot._replace(gradient=row.gradient))
        if len(standing) == len(slots):
            plan.standing.update(standing)
        else:
            plan.standing.clear()
        if not batches and not large:
            return None, refused
        return partial(_run, batches, large, plan), refused

    def renew(
        self, params: Iterable[Tensor], states: Mapping[Tensor, dict[str, Any]], plan: Plan
    ) -> Callable[[], None] | None:
        """The step of a group whose weights and state are all as in an earlier step.

        If None, prepare and claim them. All that this would check is checked here too, in one loop:
        the memory of weight, gradient and state, their types and shapes, and that there is no
        other state.
        """
        standing = plan.standing
        batches: dict[_Kind, _Batch] = {}
        batch, kind = _Batch(), None
        for p in params:
            G = p.grad
            if G is None:
                continue
            verdict = standing.get(id(p))  # a guess, checked below
            if verdict is None or type(G) is not Tensor or p.is_inference():
                return None
            state, names = states[p], verdict.names
            if len(state) != verdict.n_state or SKIPPED not in state or LIMITED not in state:
                return None
            tensors: list[Any] = [p, G, *map(state.get, names)]
            places = addresses_if_plain(tensors, verdict.dtype, verdict.extents)
            if places is None:
                return None
            if verdict.kind is not kind:
                kind = cast("_Kind", verdict.kind)
                batch = batches.setdefault(kind, _Batch())
            batch.places += places
            batch.places += verdict.rest
            batch.states.append(state)
            batch.gradients.append(G)
            del tensors[1]
            batch.written += tensors
        return partial(_run, batches, [], plan)


def _run(batches: Mapping["_Kind", "_Batch"], large: list[Slot], plan: Plan) -> None:
    for (dtype, n, p, scale), batch in batches.items():
        _step_whole(batch, dtype, n, p, _packed_options(plan.at_scale(scale)))


def _group_refusal(plan: Plan) -> str | None:
    """Why compiled code cannot step any weight of a group."""
    if plan.why_not_compiled is not None:
        return plan.why_not_compiled
    if torch.compiler.is_compiling():
        return "torch.compile sees torch's operations only"
    return None


_Kind = tuple[torch.dtype, int, int, float]  # type, rows, columns and scale of what steps whole


class _Verdict(NamedTuple):
    """Whether and how compiled code steps weights of one type, shape and memory layout."""

    why_not: str  # empty if it can step them
    dtype: torch.dtype
    kind: _Kind | None = None  # None: by passes
    contiguous: bool = True
    names: tuple[str, ...] = ()  # of the state
    n_state: int = 0  # with the counts
    extents: tuple[Extent, ...] = ()  # of weight, gradient and state
    rest: tuple[int, ...] = ()  # of ``struct Parameter``, after their addresses


def _known_verdict(weight: Tensor, plan: Plan) -> _Verdict:
    """The verdict on a weight, and on all like it."""
    key = (weight.dtype, weight.shape, weight.stride())
    verdict = plan.verdicts.get(key)
    if verdict is None:
        verdict = plan.verdicts[key] = _verdict(weight, plan)
    return verdict


def _verdict(weight: Tensor, plan: Plan) -> _Verdict:
    assert plan.landing is not None
    layout = layout_of(weight.shape, weight.stride(), plan.view)
    n, p = matrices_shape(weight.shape, plan.view)[-2:]
    whole = p <= LARGEST_SIZE
    contiguous = weight.is_contiguous()
    why_not = None if whole else "more than 128 columns"
    if why_not is None and (layout is None or not (whole or contiguous)):
        why_not = f"memory of strides {weight.stride()}: use weight.contiguous()"
    if why_not is None:
        why_not = why_no_code(weight.dtype, n, p)
        if why_not is not None and plan.fused:
            _warn_once(why_not, plan.warned)
    if why_not is not None or layout is None:
        return _Verdict(why_not or "", weight.dtype)
    return _Verdict(
        "",
        weight.dtype,
        kind=(weight.dtype, n, p, plan.scale_of(weight.shape)) if whole else None,
        contiguous=contiguous,
        names=tuple(plan.state_kinds),
        n_state=len(plan.state_kinds) + len(COUNTS),
        extents=_extents(weight.shape, plan),
        rest=(*[0] * (_ADDRESSES - 2 - len(plan.state_kinds)), *layout[2:], 0, 0),
    )


def _extents(shape: torch.Size, plan: Plan) -> tuple[Extent, ...]:
    """The extents of a weight, its gradient and its state."""
    whole, numbers = Extent.of(shape), Extent.of(batch_shape(shape, plan.view))
    state = [whole if kind == "matrix" else numbers for kind in plan.state_kinds.values()]
    return (whole, whole, *state)


def _memory_refusal(slot: Slot, kinds: Mapping[str, StateKind]) -> str:
    """Why weight, gradient or state are not real numbers in plain memory."""
    p, G = slot.weight, slot.gradient
    if type(p) not in PLAIN_TYPES or type(G) is not Tensor:
        return f"a {type(p).__name__} with a gradient that is a {type(G).__name__}"
    if not p.is_cpu:
        return f"on the device {p.device.type!r}, not on the CPU"
    if p.is_inference() or p.is_neg() or G.is_neg():
        return "marked as negated, or made in inference mode"
    if G.dtype is not p.dtype:
        return f"gradient of {G.dtype}, weight of {p.dtype}"
    if any(type(slot.state[name]) not in PLAIN_TYPES for name in kinds):
        return "state that is not a plain tensor"
    return "memory that was freed, or is marked as negated"


_CPU = torch.device("cpu")
_ADDRESSES = 5  # in ``struct Parameter`` of ``steps.h``, whose layout and two counts follow
_ROW_LENGTH = _ADDRESSES + len(Layout._fields) - 2 + 2


class _Row(NamedTuple):
    """Where a weight, its gradient and its state are."""

    places: list[int]  # their addresses, as ``struct Parameter`` of ``steps.h`` begins
    state: dict[str, Any]
    written: list[Tensor]  # autograd must know that they are written to
    gradient: Tensor  # in memory as the weight is; held until the step is done


class _Batch:
    """Matrices of one kind, which step in one call."""

    __slots__ = ("gradients", "places", "states", "written")

    def __init__(self) -> None:
        self.places: list[int] = []  # a ``struct Parameter`` of each weight
        self.states: list[dict[str, Any]] = []
        self.written: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def add(self, row: _Row, verdict: _Verdict) -> None:
        """Add a weight."""
        self.places += row.places
        self.places += verdict.rest
        self.states.append(row.state)
        self.written += row.written
        self.gradients.append(row.gradient)


def _row(slot: Slot, plan: Plan, verdict: _Verdict) -> _Row | None:
    """The row of a weight; None unless everything is real numbers in plain memory."""
    p, G = slot.weight, slot.gradient
    if type(G) is not Tensor or p.is_inference():
        return None
    row = None
    if verdict.contiguous and G.is_contiguous():
        row = _contiguous_row(slot, verdict)
    return _strided_row(slot, plan, verdict) if row is None else row


def _contiguous_row(slot: Slot, verdict: _Verdict) -> _Row | None:
    """The row of a contiguous weight, the usual case."""
    p, G, state = slot
    written = [p, *(state[name] for name in verdict.names)]
    tensors = [p, G, *written[1:]]
    places = addresses_if_plain(tensors, verdict.dtype, verdict.extents)
    return None if places is None else _Row(places, state, written, G)


def _strided_row(slot: Slot, plan: Plan, verdict: _Verdict) -> _Row | None:
    """The row of a weight in any dense layout; tensors laid out differently are copied.

    State is kept in the layout of its weight from then on.
    """
    p, state = slot.weight, slot.state
    dtype, shape, strides = p.dtype, p.shape, p.stride()
    G, written = _laid_out(slot.gradient, p), [p]
    if G is None:
        return None
    places = [address_if_dense(tensor, dtype, shape, strides) for tensor in (p, G)]
    for (name, kind), extent in zip(plan.state_kinds.items(), verdict.extents[2:], strict=True):
        value = state[name]
        if kind == "matrix":
            value = _laid_out(value, p)
            if value is None:
                return None
            state[name] = value
            places.append(address_if_dense(value, dtype, shape, strides))
        else:
            places.append(address_if_plain(value, dtype, extent.numel))
        written.append(value)
    if None in places:
        return None
    return _Row(cast("list[int]", places), state, written, G)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The tensor in another's memory layout; None if it cannot be read."""
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
        return None
    if tensor.shape != like.shape or tensor.dtype is not like.dtype:
        return None
    if are_alike(like.shape, tensor.stride(), like.stride()):
        return tensor
    if not tensor.data_ptr():  # freed, and not to be read
        return None
    with torch.no_grad():
        laid_out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=_CPU)
        return laid_out.copy_(tensor)


def _step_whole(batch: _Batch, dtype: torch.dtype, n: int, p: int, options: bytes) -> None:
    """Step matrices of one shape, each as a whole."""
    packed = array("q", batch.places)
    start, weights = packed.buffer_info()[0], len(batch.states)
    increment_version(batch.written)
    if n == p:
        step = kernel(dtype, p)
        assert step is not None  # refusal
        step(options, start, weights, p)
    else:
        count = sum(packed[_ADDRESSES::_ROW_LENGTH])
        step_tall = tall_kernel(dtype, n, p, count)
        assert step_tall is not None  # refusal
        step_tall(options, start, weights, n, p)
    for i, name in ((2, SKIPPED), (1, LIMITED)):
        counts = packed[_ROW_LENGTH - i :: _ROW_LENGTH]
        if any(counts):
            for state, count in zip(batch.states, counts, strict=True):
                count_of(name, state, _CPU).add_(count)


def _packed_options(plan: Plan) -> bytes:
    threads = torch.get_num_threads()
    packed = plan.packed.get(threads)
    if packed is None:
        assert plan.landing is not None
        packed = plan.packed[threads] = _options(plan, plan.landing, threads).pack()
    return packed


def _options(plan: Plan, step: LandingStep, threads: int) -> Options:
    options, moments = step.options, step.moments
    momentum = moments if isinstance(moments, Momentum) else Momentum()
    adam = moments if isinstance(moments, AdamMoments) else AdamMoments()
    assert options.attraction.compiled is not None
    assert moments.compiled is not None
    assert not isinstance(options.lr, Tensor)
    return Options(
        lr=options.lr,
        scale=plan.scale,
        lam=options.lam,
        eps=options.eps,
        aim=options.aim,
        farthest=farthest_before_landing(options.aim),
        omega=options.omega,
        momentum=momentum.momentum,
        dampening=momentum.dampening,
        beta1=adam.betas[0],
        beta2=adam.betas[1],
        adam_eps=adam.eps,
        attraction=options.attraction.compiled,
        rule=_rule_number(options.rule),
        maximize=plan.maximize,
        moments=moments.compiled,
        nesterov=momentum.nesterov,
        threads=threads,
    )


def _rule_number(rule: SafeStepRule | None) -> int:
    if rule is None:
        return 0
    assert rule.compiled is not None
    return rule.compiled


def _warn_once(reason: str, warned: set[str]) -> None:
    """Warn, once per optimizer, that the compiled steps requested are not available."""
    if reason not in warned:
        warned.add(reason)
        warnings.warn(
            f"fused=True, but there is no compiled code: {reason}. torch's operations step "
            "instead, with the same results; leave fused out to silence this.",
            stacklevel=6,
        )
