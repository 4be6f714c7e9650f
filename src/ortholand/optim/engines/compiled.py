"""The engine of compiled code (:mod:`ortholand.native`), on the CPU.

Matrices of up to 128 columns step all at once, those of one shape in one call; larger ones one by
one: torch's products, and compiled passes between them. Whatever gets there was checked first;
``matrix_step`` is the reference for it.
"""

import ctypes
import warnings
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ortholand.fields import tangency_bound
from ortholand.geometry.matrices import gram_matrix, gram_minus_identity
from ortholand.geometry.views import as_matrices, matrices_shape
from ortholand.landing.attraction import better_bounds
from ortholand.landing.description import LandingStep
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import LIMITED, SKIPPED, Slot, StateKind
from ortholand.native import (
    LARGEST_SIZE,
    Options,
    address,
    kernel,
    large_steps,
    tall_kernel,
    why_no_code,
)
from ortholand.native.border import PLAIN_TYPES, address_if_dense, address_if_plain
from ortholand.native.layout import Layout, are_alike, layout_of
from ortholand.optim.plan import Plan
from ortholand.safe_step import SafeStepRule, farthest_before_landing


class CompiledEngine:
    """Steps real matrices in plain memory of the CPU; those of many columns by themselves."""

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
        whole: dict[tuple[torch.dtype, int, int], list[_Row]] = {}
        large: list[Slot] = []
        refused: list[Slot] = []
        for slot in slots:
            verdict = _known_verdict(slot.weight, plan)
            row = None if verdict.why_not else _row(slot, plan, verdict)
            if row is None:
                refused.append(slot)
            elif verdict.kind is not None:
                whole.setdefault(verdict.kind, []).append(row)
            else:
                large.append(slot._replace(gradient=row.gradient))
        if not whole and not large:
            return None, refused
        return partial(_run, whole, large, plan), refused


def _run(
    whole: Mapping[tuple[torch.dtype, int, int], list["_Row"]], large: list[Slot], plan: Plan
) -> None:
    options = _packed_options(plan)
    for (dtype, n, p), rows in whole.items():
        _step_whole(rows, dtype, n, p, options)
    for slot in large:
        _step_large(slot, plan, options)


def _group_refusal(plan: Plan) -> str | None:
    """Why compiled code cannot step any weight of a group."""
    if plan.why_not_compiled is not None:
        return plan.why_not_compiled
    if torch.compiler.is_compiling():
        return "torch.compile sees torch's operations only"
    return None


class _Verdict(NamedTuple):
    """What compiled code says to weights of one type, shape and memory."""

    why_not: str  # empty if it can step them
    kind: tuple[torch.dtype, int, int] | None = None  # of what steps whole; None: by passes
    contiguous: bool = True
    layout: tuple[int, ...] = ()  # what ``struct Parameter`` wants to know


def _known_verdict(weight: Tensor, plan: Plan) -> _Verdict:
    """What compiled code says to a weight: what one is told, all like it are."""
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
    why_not = None if whole else _large_refusal(weight, n, p, plan.landing)
    if why_not is None and (layout is None or not (whole or contiguous)):
        why_not = f"memory of strides {weight.stride()}: use weight.contiguous()"
    if why_not is None:
        why_not = why_no_code(weight.dtype, n, p)
        if why_not is not None and plan.fused:
            _warn_once(why_not, plan.warned)
    if why_not is not None or layout is None:
        return _Verdict(why_not or "")
    kind = (weight.dtype, n, p) if whole else None
    return _Verdict("", kind, contiguous, layout[2:])


def _memory_refusal(slot: Slot, kinds: Mapping[str, StateKind]) -> str:
    """Why weight, gradient or state are no real numbers in plain memory."""
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
        return "state that is no plain tensor"
    return "memory that was freed, or is marked as negated"


def _large_refusal(weight: Tensor, n: int, p: int, step: LandingStep) -> str | None:
    """Why there is no compiled step for matrices of many columns; None if there is one."""
    if weight.numel() != n * p:
        return f"several matrices of {n} x {p}: compiled are those of up to {LARGEST_SIZE} columns"
    attraction, moments = step.options.attraction, step.moments
    if attraction.field_coefficients is None or not isinstance(moments, Momentum):
        what = "Adam" if isinstance(moments, AdamMoments) else f"attraction {attraction.name!r}"
        return f"{n} x {p} with {what}: compiled are matrices of up to {LARGEST_SIZE} columns"
    if n == p:
        damped = moments.nesterov or moments.dampening
        return f"{n} x {n} with nesterov or dampening" if damped else None
    return f"{n} x {p} with momentum: square ones are compiled" if moments.momentum else None


def _matrix_shape(p: Tensor, view: str) -> tuple[int, int]:
    """Rows and columns of the weight's matrices, as they lie in memory."""
    if view == "kernel":
        return p.shape[-2], p.shape[-1]
    return p.shape[0], p.numel() // p.shape[0]


_ADDRESSES = 5  # in ``struct Parameter`` of ``steps.h``, whose layout and two counts follow
_ROW_LENGTH = _ADDRESSES + len(Layout._fields) - 2 + 2


class _Row(NamedTuple):
    """Where a weight, its gradient and its state are."""

    places: list[int]  # ``struct Parameter`` of ``steps.h``
    state: dict[str, Any]
    written: list[Tensor]  # autograd must know that they are written to
    gradient: Tensor  # in memory as the weight is; held until the step is done


def _row(slot: Slot, plan: Plan, verdict: _Verdict) -> _Row | None:
    """None unless all is real numbers in plain memory."""
    p, G = slot.weight, slot.gradient
    if type(G) is not Tensor or p.is_inference():
        return None
    row = None
    if verdict.contiguous and G.is_contiguous():
        row = _contiguous_row(slot, plan, verdict)
    return _strided_row(slot, plan, verdict) if row is None else row


def _contiguous_row(slot: Slot, plan: Plan, verdict: _Verdict) -> _Row | None:
    """The row of what is contiguous, as nearly all is: a step takes 25 microseconds."""
    p, G, state = slot.weight, slot.gradient, slot.state
    dtype, numel, count, written = p.dtype, p.numel(), verdict.layout[0], [p]
    places = [address_if_plain(p, dtype, numel), address_if_plain(G, dtype, numel)]
    for name, kind in plan.state_kinds.items():
        value = state[name]
        places.append(address_if_plain(value, dtype, numel if kind == "matrix" else count))
        written.append(value)
    return _packed_row(places, verdict, state, written, G)


def _strided_row(slot: Slot, plan: Plan, verdict: _Verdict) -> _Row | None:
    """The row of a weight in any dense layout; what lies otherwise than the weight is copied.

    State is kept in the layout of its weight from then on.
    """
    p, state = slot.weight, slot.state
    dtype, shape, strides = p.dtype, p.shape, p.stride()
    G, written = _laid_out(slot.gradient, p), [p]
    if G is None:
        return None
    places = [address_if_dense(tensor, dtype, shape, strides) for tensor in (p, G)]
    for name, kind in plan.state_kinds.items():
        value = state[name]
        if kind == "matrix":
            value = _laid_out(value, p)
            if value is None:
                return None
            state[name] = value
            places.append(address_if_dense(value, dtype, shape, strides))
        else:
            places.append(address_if_plain(value, dtype, verdict.layout[0]))
        written.append(value)
    return _packed_row(places, verdict, state, written, G)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor | None:
    """The tensor in memory as another; None where it cannot be read."""
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
        return None
    if tensor.shape != like.shape or tensor.dtype is not like.dtype:
        return None
    if are_alike(like.shape, tensor.stride(), like.stride()):
        return tensor
    if not tensor.data_ptr():  # freed, and not to be read
        return None
    with torch.no_grad():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(tensor)


def _packed_row(
    places: list[int | None],
    verdict: _Verdict,
    state: dict[str, Any],
    written: list[Tensor],
    gradient: Tensor,
) -> _Row | None:
    if None in places:
        return None
    nothing = [0] * (_ADDRESSES - len(places))
    row = [*cast("list[int]", places), *nothing, *verdict.layout, 0, 0]
    return _Row(row, state, written, gradient)


def _step_whole(rows: list[_Row], dtype: torch.dtype, n: int, p: int, options: bytes) -> None:
    """Step matrices of one shape, each as a whole."""
    packed = array("q")
    for row in rows:
        packed.fromlist(row.places)
        increment_version(row.written)
    start = packed.buffer_info()[0]
    if n == p:
        step = kernel(dtype, p)
        assert step is not None  # refusal
        step(options, start, len(rows), p)
    else:
        count = sum(packed[_ADDRESSES::_ROW_LENGTH])
        step_tall = tall_kernel(dtype, n, p, count)
        assert step_tall is not None  # refusal
        step_tall(options, start, len(rows), n, p)
    for i, name in ((2, SKIPPED), (1, LIMITED)):
        counts = packed[_ROW_LENGTH - i :: _ROW_LENGTH]
        if any(counts):
            for row, count in zip(rows, counts, strict=True):
                row.state[name].add_(count)


@torch.no_grad()
def _step_large(slot: Slot, plan: Plan, options: bytes) -> None:
    """Step one large matrix: ``X <- X - eta L``, with two temporaries of its size or less."""
    p, landing = slot.weight, plan.landing
    assert landing is not None
    passes = large_steps(p.dtype)
    assert passes is not None  # refusal
    buffer = slot.state["momentum_buffer"] if landing.moments.state_kinds else None
    n, columns = _matrix_shape(p, plan.view)
    if n == columns:
        field = _square_field(p, slot.gradient, buffer, n, options, passes)
    else:
        field = _tall_field(p, slot.gradient, plan, landing, passes)
    taken, limited = _follow(field, p, buffer, plan, landing, options, passes)
    increment_version([p] if buffer is None else [p, buffer])
    if not taken:
        slot.state[SKIPPED].add_(1)
    if limited:
        slot.state[LIMITED].add_(1)


class _Field(NamedTuple):
    """The field of a large matrix, as it lies in memory, and what was found out on the way."""

    L: Tensor
    distance: float
    tangency_error: float
    residual: Callable[[], Tensor]  # gives X^T X - I
    new_buffer: Tensor | None = None


def _square_field(
    p: Tensor, G: Tensor, buffer: Tensor | None, n: int, options: bytes, passes: ctypes.CDLL
) -> _Field:
    """The field of a square matrix, with or without momentum."""
    X, G, dtype, numel = p.view(n, n), G.view(n, n), p.dtype, n * n
    P, S = torch.mm(G, X.mT), gram_matrix(X.mT)
    held = 0 if buffer is None else address(buffer, dtype, numel)
    places = address(P, dtype, numel), address(S, dtype, numel)
    d = passes.ortholand_residual(*places, held, n, options)
    # With momentum P holds the new buffer; else it is free.
    if buffer is None:
        return _Field(torch.mm(S, X, out=P), d, 0.0, partial(gram_minus_identity, X))
    return _Field(torch.mm(S, X), d, 0.0, partial(gram_minus_identity, X), P)


def _tall_field(
    p: Tensor, gradient: Tensor, plan: Plan, landing: LandingStep, passes: ctypes.CDLL
) -> _Field:
    """The field of a tall matrix, or of a wide one by its transpose.

    ``L = X a + G b`` with the attraction's own coefficients, which need no product but L's.
    """
    dtype, numel = p.dtype, p.numel()
    field = torch.empty_like(p, memory_format=torch.contiguous_format)
    X, G, L = (_one_matrix(t, plan) for t in (p, gradient, field))
    D = gram_minus_identity(X)
    d = passes.ortholand_norm(address(D, dtype, D.numel()), D.numel())
    assert landing.options.attraction.field_coefficients is not None
    M = torch.mm(X.mT, G)
    if plan.maximize:
        M.neg_()
    a, b = landing.options.attraction.field_coefficients(D, M, landing.options)
    torch.mm(G, b.neg_() if plan.maximize else b, out=L)
    L.addmm_(X, a)
    norm = passes.ortholand_norm(address(gradient, dtype, numel), numel)
    return _Field(field, d, tangency_bound(X.shape[0], dtype, d, norm), lambda: D)


def _follow(
    field: _Field,
    p: Tensor,
    buffer: Tensor | None,
    plan: Plan,
    landing: LandingStep,
    options: bytes,
    passes: ctypes.CDLL,
) -> tuple[bool, bool]:
    """Follow a field as far as is safe; whether that was done, and less far than lr.

    As :func:`ortholand.landing.attraction.step_length`: better bounds where the free ones bind.
    """
    L, d, error, _, new_buffer = field
    dtype, numel, rule, lr = p.dtype, p.numel(), landing.options.rule, landing.options.lr
    place = address(L, dtype, numel)
    norm = passes.ortholand_norm(place, numel)
    eta = passes.ortholand_step(norm, d, error, options)
    if rule is not None and rule.improves and not (eta >= lr and d <= landing.options.aim):
        F = _one_matrix(L.view_as(p), plan)
        free = torch.full((), d, dtype=dtype)
        for bound, distance in better_bounds(landing.options, F, free, field.residual, stops=True):
            d = float(distance)
            eta = passes.ortholand_step(float(bound), d, error, options)
            if eta >= lr and d <= landing.options.aim:
                break
    held = [0, 0]
    if buffer is not None and new_buffer is not None:
        held = [address(t, dtype, numel) for t in (buffer, new_buffer)]
    places = address(p, dtype, numel), place
    taken = passes.ortholand_move(*places, *held, numel, eta, norm, d, options)
    return bool(taken), rule is not None and eta < lr


def _one_matrix(weight: Tensor, plan: Plan) -> Tensor:
    """The one matrix that a weight is, n >= p: a view of its memory."""
    matrices = as_matrices(weight, plan.view)
    return matrices.reshape(matrices.shape[-2:])


def _packed_options(plan: Plan) -> bytes:
    threads = torch.get_num_threads()
    packed = plan.packed.get(threads)
    if packed is None:
        assert plan.landing is not None
        packed = plan.packed[threads] = _options(plan.landing, plan.maximize, threads).pack()
    return packed


def _options(step: LandingStep, maximize: bool, threads: int) -> Options:
    options, moments = step.options, step.moments
    momentum = moments if isinstance(moments, Momentum) else Momentum()
    adam = moments if isinstance(moments, AdamMoments) else AdamMoments()
    assert options.attraction.compiled is not None
    assert not isinstance(options.lr, Tensor)
    return Options(
        lr=options.lr,
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
        maximize=maximize,
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
    """Whoever asks for compiled steps is told, once per optimizer, that there are none."""
    if reason not in warned:
        warned.add(reason)
        warnings.warn(
            f"fused=True, but there is no compiled code: {reason}. torch's operations step "
            "instead, with the same results; leave fused out to have no warning.",
            stacklevel=6,
        )
