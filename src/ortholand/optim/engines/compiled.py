"""The engine of compiled code (:mod:`ortholand.native`), on the CPU.

Small square matrices step all at once, large ones one by one: torch's products, and compiled
passes between them. Whatever gets there was checked first; ``matrix_step`` is the reference for it.
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
from ortholand.geometry.views import as_matrices
from ortholand.landing.attraction import better_bounds
from ortholand.landing.description import LandingStep
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.step import LIMITED, SKIPPED, Slot, StateKind
from ortholand.native import LARGEST_SIZE, Options, address, kernel, large_steps, why_no_code
from ortholand.native.border import PLAIN_TYPES, address_if_plain
from ortholand.optim.plan import Plan
from ortholand.safe_step import SafeStepRule, farthest_before_landing


class CompiledEngine:
    """Steps real matrices in plain memory of the CPU: square ones, and large ones by themselves."""

    name = "compiled"

    def refusal(self, slot: Slot, plan: Plan, *, alone: bool) -> str | None:
        """Why compiled code cannot step a weight."""
        why_not = _group_refusal(plan) or _known_verdict(slot.weight, plan, alone=alone)
        if why_not:
            return why_not
        return _memory_refusal(slot, plan.state_kinds) if _row(slot, plan) is None else None

    def claim(
        self, slots: list[Slot], plan: Plan, *, alone: bool
    ) -> tuple[Callable[[], None] | None, list[Slot]]:
        """The step of all weights that compiled code can step, and those that it cannot.

        Small matrices of one size and type step in one call.
        """
        if _group_refusal(plan) is not None:
            return None, slots
        small: dict[tuple[torch.dtype, int], list[_Row]] = {}
        large: list[Slot] = []
        refused: list[Slot] = []
        for slot in slots:
            weight = slot.weight
            row = None if _known_verdict(weight, plan, alone=alone) else _row(slot, plan)
            if row is None:
                refused.append(slot)
                continue
            if row.size:
                small.setdefault((weight.dtype, row.size), []).append(row)
            else:
                large.append(slot._replace(gradient=row.gradient))
        if not small and not large:
            return None, refused
        return partial(_run, small, large, plan), refused


def _run(
    small: Mapping[tuple[torch.dtype, int], list["_Row"]], large: list[Slot], plan: Plan
) -> None:
    options = _packed_options(plan)
    for (dtype, size), rows in small.items():
        _step_small(rows, dtype, size, options)
    for slot in large:
        _step_large(slot, plan, options)


def _group_refusal(plan: Plan) -> str | None:
    """Why compiled code cannot step any weight of a group."""
    if plan.why_not_compiled is not None:
        return plan.why_not_compiled
    if torch.compiler.is_compiling():
        return "torch.compile sees torch's operations only"
    return None


def _known_verdict(weight: Tensor, plan: Plan, *, alone: bool) -> str:
    """Why compiled code cannot step weights of this shape and type: what one is told, all are."""
    key = (weight.dtype, weight.shape, alone)
    verdict = plan.verdicts.get(key)
    if verdict is None:
        verdict = plan.verdicts[key] = _shape_verdict(weight, plan, alone=alone)
    return verdict


def _shape_verdict(weight: Tensor, plan: Plan, *, alone: bool) -> str:
    """Why compiled code cannot step weights of this shape and type; empty if it can."""
    assert plan.landing is not None
    n, p = _matrix_shape(weight, plan.view)
    why_not = _shape_refusal(weight, n, p, plan.landing, alone=alone)
    if why_not is None:
        why_not = why_no_code(weight.dtype, n if _is_small(n, p) else LARGEST_SIZE + 1)
        if why_not is not None and plan.fused:
            _warn_once(why_not, plan.warned)
    return why_not or ""


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
    if not p.is_contiguous():
        return f"memory that is not contiguous, strides {p.stride()}: use weight.contiguous()"
    if not all(slot.state[name].is_contiguous() for name in kinds):
        return "state that is not contiguous"
    return "memory that was freed, or is marked as negated"


def _shape_refusal(
    p: Tensor, n: int, columns: int, step: LandingStep, *, alone: bool
) -> str | None:
    """Why there is no compiled step for matrices of this shape; None if there is one."""
    if _is_small(n, columns):
        return None
    many = p.numel() != n * columns
    if many:
        return f"several matrices of {n} x {columns}: compiled are square ones up to {LARGEST_SIZE}"
    attraction, moments = step.options.attraction, step.moments
    if attraction.field_coefficients is None or not isinstance(moments, Momentum):
        what = "Adam" if isinstance(moments, AdamMoments) else f"attraction {attraction.name!r}"
        return f"{n} x {columns} with {what}: compiled are square matrices up to {LARGEST_SIZE}"
    if n == columns:
        damped = moments.nesterov or moments.dampening
        return f"{n} x {n} with nesterov or dampening" if damped else None
    if moments.momentum:
        return f"{n} x {columns} with momentum: square ones are compiled"
    if not alone and n * columns <= LARGEST_SIZE**2:
        return "several small weights that are not square: a batch is quicker"
    return None


def _is_small(n: int, p: int) -> bool:
    return n == p <= LARGEST_SIZE


def _matrix_shape(p: Tensor, view: str) -> tuple[int, int]:
    """Rows and columns of the weight's matrices, as they lie in memory."""
    if view == "kernel":
        return p.shape[-2], p.shape[-1]
    return p.shape[0], p.numel() // p.shape[0]


_ROW_LENGTH = 8  # integers in ``struct Parameter`` of ``landing.cpp``


class _Row(NamedTuple):
    """Where a weight, its gradient and its state are."""

    places: list[int]  # ``struct Parameter`` of ``landing.cpp``
    state: dict[str, Any]
    written: list[Tensor]  # autograd must know that they are written to
    gradient: Tensor  # contiguous; held until the step is done
    size: int  # of small square matrices; else 0


def _row(slot: Slot, plan: Plan) -> _Row | None:
    """None unless all is real numbers in plain memory."""
    p, G, state, kinds = slot.weight, slot.gradient, slot.state, plan.state_kinds
    if type(G) is not Tensor or p.is_inference():
        return None
    if not G.is_contiguous():
        if not G.data_ptr():  # freed, and not to be read
            return None
        G = G.contiguous()
    dtype, numel = p.dtype, p.numel()
    n, columns = _matrix_shape(p, plan.view)
    count, written = numel // (n * columns), [p]
    places = [address_if_plain(p, dtype, numel), address_if_plain(G, dtype, numel)]
    for name, kind in kinds.items():
        value = state[name]
        places.append(address_if_plain(value, dtype, numel if kind == "matrix" else count))
        written.append(value)
    if None in places:
        return None
    nothing = [0] * (_ROW_LENGTH - 3 - len(places))
    row = [*cast("list[int]", places), *nothing, count, 0, 0]
    return _Row(row, state, written, G, n if _is_small(n, columns) else 0)


def _step_small(rows: list[_Row], dtype: torch.dtype, size: int, options: bytes) -> None:
    """Step square matrices of one small size."""
    step = kernel(dtype, size)
    assert step is not None  # refusal
    packed = array("q")
    for row in rows:
        packed.fromlist(row.places)
        increment_version(row.written)
    step(options, packed.buffer_info()[0], len(rows), size)
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
        return _Field(torch.mm(S, X, out=P), d, 0.0)
    return _Field(torch.mm(S, X), d, 0.0, P)


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
    return _Field(field, d, tangency_bound(X.shape[0], dtype, d, norm))


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
    L, d, error, new_buffer = field
    dtype, numel, rule, lr = p.dtype, p.numel(), landing.options.rule, landing.options.lr
    place = address(L, dtype, numel)
    norm = passes.ortholand_norm(place, numel)
    eta = passes.ortholand_step(norm, d, error, options)
    if rule is not None and rule.improves and not (eta >= lr and d <= landing.options.aim):
        X, F = _one_matrix(p, plan), _one_matrix(L.view_as(p), plan)
        free, is_inside = torch.full((), d, dtype=dtype), d <= landing.options.aim
        for bound, distance in better_bounds(
            landing.options, F, free, lambda: gram_minus_identity(X), stops=is_inside
        ):
            d = float(distance)
            eta = passes.ortholand_step(float(bound), d, error, options)
            if is_inside and eta >= lr:
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
