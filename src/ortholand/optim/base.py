"""What every optimizer with orthogonal weights shares: groups, plans, state, errors.

A method is a subclass that says how matrices ``(..., n, p)``, n >= p, step (``matrix_step``) and
how the unconstrained parameters do (``plain_step``). The engines (:mod:`.engines`) decide who
computes a step.
"""

import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ortholand.geometry.precision import without_autocast
from ortholand.geometry.rounding import ROUNDING_STATE
from ortholand.geometry.scales import NUMBERS, scale_of
from ortholand.geometry.views import check_weight
from ortholand.landing.attraction import redefined
from ortholand.landing.description import LandingStep
from ortholand.landing.step import COUNTS, LIMITED, SKIPPED, MatrixStep, Slot, StateKind
from ortholand.optim.checks import check_common_options, gradient_error, scalar_lr
from ortholand.optim.engines import claimed_at_once, claimed_plain
from ortholand.optim.loading import load_bit_for_bit
from ortholand.optim.plain import Agreement
from ortholand.optim.plan import Plan
from ortholand.optim.weights import (
    check_entries_apart,
    check_start,
    name_of,
    number_of_matrices,
    position_of,
    prepare_plain_state,
    prepare_state,
)
from ortholand.sharding.agreement import compare_terms, terms_of
from ortholand.sharding.placement import is_dtensor, is_elsewhere

Group = Mapping[str, Any]

# After how many steps to check for frozen weights, and how often from then on.
FIRST_LOOK, LATER_LOOKS = 20, 100
FROZEN = "frozen"
OF_NO_VIEW = (*COUNTS, *ROUNDING_STATE)  # state that does not depend on a weight's view
NO_OPTIONS = ("params", "param_names", "lr")  # of a group; a tensor lr is read where it is used


class OrthogonalOptimizer(Optimizer):
    """Base of the optimizers. Group options ``orthogonal`` and ``view`` say what is constrained."""

    # Methods that a landing step replaces, unless they are newer than ``landing_step``.
    hooks: ClassVar[tuple[str, ...]] = (
        "matrix_step",
        "move",
        "generator",
        "transport",
        "state_kinds",
    )

    warns_of_frozen_weights: ClassVar[bool] = True
    keeps_generators: ClassVar[bool] = False  # whether ``generator`` is the library's

    _awaits_values = False  # whether a weight was on the meta device when it was to be checked
    _is_starting = False  # whether the constructor is adding groups, which it checks afterwards
    _n_steps = 0
    _last_look = 0

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        defaults.setdefault("scale", 1.0)
        self._check_all_options(defaults)
        self._is_starting = True
        super().__init__(params, defaults)
        del self._is_starting
        # Before weights are checked, because with other groups there would be other messages.
        self._compare_ranks()
        for group in self.param_groups:
            self._check_group(group)

    # What a method provides.

    def check_options(self, options: Group) -> None:
        """Raise on invalid options of this method."""
        raise NotImplementedError

    def start_radius(self, group: Group) -> float:
        """How far from the manifold an orthogonal parameter may start."""
        raise NotImplementedError

    def is_ball_spectral(self, group: Group) -> bool:  # noqa: ARG002
        """Whether :meth:`start_radius` is in the spectral norm, not the Frobenius norm."""
        return False

    def state_kinds(self, group: Group) -> Mapping[str, StateKind]:
        """Names and kinds of the state that a weight has."""
        raise NotImplementedError

    def matrix_step(
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group
    ) -> MatrixStep:
        """One step of the matrices X with gradients G. Changes none of its arguments."""
        raise NotImplementedError

    def plain_step(self, slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
        """One step of the parameters of a group with ``orthogonal=False``.

        ``agree`` maps which parameters may step on this rank to which may step on all ranks.
        """
        raise NotImplementedError

    def options_at_scale(self, group: Group, scale: float) -> Group:
        """Options with which ``Z = W / scale`` steps, where W is the weight and G its gradient.

        lr refers to W, so Z steps by ``lr / scale``. An lr that is an angle is the same for both:
        then redefine this to ``return group``.
        """
        return {**group, "lr": scalar_lr(group["lr"]) / scale}

    def landing_step(self, group: Group) -> LandingStep | None:  # noqa: ARG002
        """A description of ``matrix_step`` for engines; if None, they must call the method."""
        return None

    # What all methods share.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return the closure's value, if given."""
        compiling = torch.compiler.is_compiling()
        if not compiling and torch.is_inference_mode_enabled() and not self._made_in_inference:
            with torch.inference_mode(False):  # else new state could not be written to outside it
                return self._step_without_hooks(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._awaits_values:
            self._check_values()
        if not compiling:
            self.__dict__.pop("_known_terms", None)
            if self._n_steps == 0:
                self._note_skips()
            if self._n_steps % LATER_LOOKS == 0:
                self._compare_ranks()
        runs: list[Callable[[], None]] = []
        for group in self.param_groups:  # all checks first: an error leaves everything as it was
            runs += self._claimed(group, self.plan(group))
        with without_autocast(self._weights):
            for run in runs:
                run()
        if not compiling:
            self._n_steps = n = self._n_steps + 1
            if n == FIRST_LOOK or n % LATER_LOOKS == 0:
                self._look_for_frozen_weights()
        return loss

    _step_without_hooks = step  # torch replaces ``step`` by one that runs them

    @property
    def _made_in_inference(self) -> bool:
        return any(p.is_inference() for p in self._weights())

    def _compare_ranks(self) -> None:
        """Raise if ranks that share weights have other options or groups."""
        spread = [p for p in self._weights() if is_dtensor(p)]
        if spread:
            compare_terms(spread, self._terms)

    def _terms(self, ranks: Any) -> Any:
        """What the ranks of a process group must agree on in this step."""
        known: dict[Any, Any] = self.__dict__.setdefault("_known_terms", {})
        if ranks not in known:
            known[ranks] = terms_of(self.param_groups, ranks)
        return known[ranks]

    def _weights(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _claimed(self, group: Group, plan: Plan) -> list[Callable[[], None]]:
        if group["orthogonal"]:
            slots, only = partial(self._slots, group, plan), len(self.param_groups) == 1
            return claimed_at_once(group, self.state, plan, slots, only=only)
        slots = self._slots(group, plan)
        return claimed_plain(slots, plan, partial(self.plain_step, group=group))

    def plan(self, group: Group) -> Plan:
        """How the weights of the group step: checked and remade when the group changes."""
        if torch.compiler.is_compiling():
            return self._make_plan(group)
        plans: dict[int, _KnownPlan] = self.__dict__.setdefault("_plans", {})
        known = plans.get(id(group))
        if known is not None and known.is_of(self, group):
            return known.plan
        self._check_all_options(group)
        if known is not None:
            self._check_change(group, known.plan)
        plan = self._make_plan(group)
        if self.__dict__.keys().isdisjoint(self.hooks):
            plans[id(group)] = _KnownPlan.of(group, plan)
        return plan

    def _make_plan(self, group: Group) -> Plan:
        changed = [name for name in self.hooks if self._is_overridden(name, "landing_step")]
        landing = self.landing_step(group)
        why_not = f"{type(self).__name__} has no landing step" if landing is None else ""
        if landing is not None and changed:
            landing, why_not = None, f"overridden {', '.join(changed)}"
        return Plan(
            orthogonal=group["orthogonal"],
            view=group["view"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group.get("fused", False),
            sharded=group.get("sharded", "rows"),
            state_kinds=self.state_kinds(group) if group["orthogonal"] else {},
            matrix_step=lambda X, G, state: self.matrix_step(X, G, state, group),
            landing=landing,
            why_not_landing=why_not,
            name_of=lambda p: name_of(group, position_of(p, group)),
            rescaled=partial(self._rescaled_plan, group),
            terms=self._terms,
            scale_option=group["scale"],
            lasts=not isinstance(group["lr"], Tensor),
            warned=self.__dict__.setdefault("_warned", set()),
        )

    def _rescaled_plan(self, group: Group, scale: float) -> Plan:
        return replace(self._make_plan(self.options_at_scale(group, scale)), scale=scale)

    def _is_overridden(self, hook: str, derived: str) -> bool:
        """Whether a method is newer than what was made for the method it replaces."""
        return hook in self.__dict__ or redefined(type(self), hook, derived)

    @property
    def makes_generators(self) -> bool:
        """Whether the buffers hold the library's own generators, skew if square."""
        return self.keeps_generators and not self._is_overridden("generator", "keeps_generators")

    def _slots(self, group: Group, plan: Plan) -> list[Slot]:
        """The weights of a group that have gradients, with their state; checked, not yet moved."""
        slots, orthogonal = [], group["orthogonal"]
        for i, p in enumerate(group["params"]):
            G = p.grad
            if G is None:
                continue
            if G.layout is not torch.strided or G.shape != p.shape:
                raise gradient_error(p, G, group)
            if is_elsewhere(p):
                continue
            state = self.state[p]
            if orthogonal:
                check_weight(p, name_of(group, i), group["view"])  # it may have been replaced
                prepare_state(p, state, plan.state_kinds, plan.view, group)
            else:
                prepare_plain_state(p, state, group)
            slots.append(Slot(p, G, state))
        return slots

    def skipped_steps(self) -> int:
        """How many steps have been skipped because they would not have been finite or safe.

        Counts matrices (each kernel of a convolution in the view "kernel"), and parameters in
        groups with ``orthogonal=False``. Reads from the device: for logging, not for every step.
        """
        return self._count(SKIPPED)

    @property
    def steps_so_far(self) -> int:
        """How many steps have been requested since the optimizer was created or loaded."""
        return self._n_steps

    def limited_before(self, p: Tensor) -> int:
        """How many steps of a weight had been shortened in the run that was resumed."""
        return self.__dict__.get("_limited_before", {}).get(p, 0)

    def limited_steps(self) -> int:
        """How many steps the safe step has made shorter than lr so far.

        Counts matrices, as :meth:`skipped_steps` does. A large count means that lr exceeds what any
        safe step allows: :func:`ortholand.explain` shows the share for each weight. Reads from the
        device.
        """
        return self._count(LIMITED)

    def _count(self, name: str) -> int:
        return sum(int(state[name]) for state in self.state.values() if name in state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking all of it."""
        super().add_param_group(param_group)
        if self._is_starting:
            return
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, bit for bit and without sharing memory with ``state_dict``.

        torch casts state to the type of its parameter; ours has float32 buffers of
        half-precision weights and integer counts, which must come back as they were saved. Hooks
        see and change the same things as in torch.

        Raises:
            ValueError: if the state is another optimizer's, or does not fit a weight. Nothing has
                changed then. torch's SGD can be continued, and Adam in plain groups.
        """
        load, constraints = super().load_state_dict, self._constraints

        def kinds_of(group: Group) -> Mapping[str, StateKind]:
            self._check_all_options(group)
            return self.state_kinds(group) if group["orthogonal"] else {}

        generators = self.makes_generators
        with torch.inference_mode(False):
            load_bit_for_bit(self, load, state_dict, kinds_of=kinds_of, makes_generators=generators)
        # The weights that meet another constraint may come later, but before the next step.
        self._awaits_values |= self._constraints != constraints

    @property
    def _constraints(self) -> list[tuple[Any, ...]]:
        return [(g["orthogonal"], g["view"], g["scale"]) for g in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: also whether weights are still to be checked."""
        return {**super().__getstate__(), "_awaits_values": self._awaits_values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.setdefault("scale", 1.0)
        # They are of groups now gone.
        for name in ("_plans", "_n_steps", "_last_look", "_seen_skips", "_limited_before"):
            self.__dict__.pop(name, None)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _check_all_options(self, options: Group) -> None:
        check_common_options(options)
        self.check_options(options)

    def _check_group(self, group: Group) -> None:
        self._check_all_options(group)
        for i, p in enumerate(group["params"]):
            check_entries_apart(p, partial(name_of, group, i))
        if not group["orthogonal"]:
            return
        radius, spectral = self.start_radius(group), self.is_ball_spectral(group)
        for i, p in enumerate(group["params"]):
            name = name_of(group, i)
            check_weight(p, name, group["view"])
            if p.device.type == "meta":
                self._awaits_values = True
            else:
                scale = scale_of(group["scale"], p.shape, group["view"])
                check_start(p, name, group["view"], radius, spectral=spectral, scale=scale)

    def _check_values(self) -> None:
        """Check, at their first step, weights that had no values when they were added."""
        for group in self.param_groups:
            self._check_group(group)
        self._awaits_values = any(p.device.type == "meta" for p in self._weights())

    def _check_change(self, group: Group, before: Plan) -> None:
        """Raise if an option changed that makes a weight's state meaningless."""
        orthogonal = group["orthogonal"]
        same_kind = orthogonal == before.orthogonal
        if same_kind and (group["view"] == before.view or not orthogonal):
            if orthogonal and group["scale"] != before.scale_option:
                self._check_new_scale(group, before)
            return
        what = "view" if same_kind else "orthogonal"
        old = before.view if same_kind else before.orthogonal
        for i, p in enumerate(group["params"]):
            has_state = any(name not in OF_NO_VIEW for name in self.state.get(p, {}))
            if has_state and (p.ndim > 2 or not same_kind):
                raise ValueError(
                    f"The option {what!r} of a weight with state must not change, but that of "
                    f"{name_of(group, i)} was {old!r} and is {group[what]!r} now. Set it back, or "
                    "remove the state: optimizer.state.pop(weight)."
                )
        self._check_group(group)

    def _check_new_scale(self, group: Group, before: Plan) -> None:
        """Raise unless the weights were multiplied when the scale changed; state fits any."""
        try:
            self._check_group(group)
        except ValueError as error:
            raise ValueError(
                f"When the option scale changes, the weights must follow, but it was "
                f"{before.scale_option!r} and is {group['scale']!r} now, and they have not. "
                f"Set it back, or multiply the weights. {error}"
            ) from None

    def _note_skips(self) -> None:
        """Remember how many steps were skipped before, in the run that is resumed."""
        for name, noted in ((SKIPPED, "_seen_skips"), (LIMITED, "_limited_before")):
            seen: dict[Tensor, int] = self.__dict__.setdefault(noted, {})
            for p, state in self.state.items():
                count = state.get(name)
                if type(count) is Tensor and count.device.type == "cpu":
                    seen[p] = int(count.numpy())

    def _look_for_frozen_weights(self) -> None:
        """Warn, once, about weights that could not take most of their recent steps.

        Reads only counts in host memory, so it waits for no device.
        """
        warned: set[str] = self.__dict__.setdefault("_warned", set())
        if FROZEN in warned or not self.warns_of_frozen_weights:
            return
        seen: dict[Tensor, int] = self.__dict__.setdefault("_seen_skips", {})
        window, self._last_look = self._n_steps - self._last_look, self._n_steps
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                count = self.state.get(p, {}).get(SKIPPED)
                if FROZEN in warned or type(count) is not Tensor or count.device.type != "cpu":
                    continue
                skipped = int(count.numpy())
                matrices = 1
                if group["orthogonal"] and not is_dtensor(p):
                    matrices = number_of_matrices(p, group["view"])
                if skipped - seen.get(p, 0) > matrices * window / 2:
                    warned.add(FROZEN)
                    warnings.warn(frozen_message(name_of(group, i), p), stacklevel=4)
                seen[p] = skipped


def _is_lasting(value: object) -> bool:
    """Whether a value cannot change in place, as a tensor, a list or an unknown object can."""
    if type(value) is tuple:
        return all(map(_is_lasting, value))
    return value is None or isinstance(value, (str, *NUMBERS))


class _KnownPlan(NamedTuple):
    """A plan, and the objects it was made from; it is valid only while they are the same."""

    plan: Plan
    lasts: bool  # whether no option can change in place; if one can, the next step plans again
    options: tuple[str, ...]  # names of the group's, and their values
    values: tuple[Any, ...]

    @classmethod
    def of(cls, group: Group, plan: Plan) -> "_KnownPlan":
        lasts = all(_is_lasting(v) for name, v in group.items() if name not in NO_OPTIONS)
        return cls(plan, lasts, (*group,), (*group.values(),))

    def is_of(self, optimizer: OrthogonalOptimizer, group: Group) -> bool:
        """Whether nothing has changed since. Called in every step, so it must be quick."""
        return (
            self.lasts
            and self.options == (*group,)
            and all(map(operator.is_, group.values(), self.values))
            and optimizer.__dict__.keys().isdisjoint(optimizer.hooks)
        )


def frozen_message(name: str, p: Tensor) -> str:
    """What to say about a weight that does not move."""
    return (
        f"{name} of shape {tuple(p.shape)} is frozen: most of its latest steps were skipped, "
        "because they would not have been finite, or no step from there is safe. Look for NaN "
        "or infinite gradients; if the weight was replaced, project it with "
        "ortholand.orthogonalize_(weight), or set scale=... in its group if it is a multiple of an "
        "orthonormal matrix; with lam=0 nothing pulls away from the edge of the ball. "
        "optimizer.skipped_steps() counts such steps."
    )


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """A constructor's options, from its ``locals()``."""
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}
