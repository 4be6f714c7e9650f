"""What every optimizer with orthogonal weights shares: groups, state and the step.

A method is a subclass that says how matrices ``(..., n, p)``, n >= p, step (``matrix_step``).
"""

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ortholand.geometry.matrices import without_autocast
from ortholand.geometry.views import plain_blocks
from ortholand.landing.attraction import redefined
from ortholand.landing.description import LandingStep, Moments
from ortholand.landing.moments import generator, transport
from ortholand.landing.point import Point
from ortholand.landing.step import LIMITED, SKIPPED, MatrixStep, Slot, StateKind
from ortholand.optim.engines import claimed, claimed_plain
from ortholand.optim.journal import Journal
from ortholand.optim.loading import load_bit_for_bit
from ortholand.optim.marked import by_marks
from ortholand.optim.options import COMMON, CONSTRAINT, Group, check_each, scalar_lr
from ortholand.optim.plain import Agreement, plain_step
from ortholand.optim.plan import Plan, can_last
from ortholand.optim.start import check_change, check_group
from ortholand.sharding.placement import is_dtensor


class OrthogonalOptimizer(Optimizer):
    """Base of the optimizers. Options of groups (``CONSTRAINT``) say what is constrained."""

    # Options that constructors take beside their own arguments, with defaults.
    further_options: ClassVar[Mapping[str, Any]] = COMMON
    # Methods that a landing step replaces, unless they are newer than it and its ``moments``.
    hooks: ClassVar = ("matrix_step", "move", "generator", "transport", "state_kinds")
    warns_of_frozen_weights: ClassVar[bool] = True
    keeps_generators: ClassVar[bool] = False  # whether ``generator`` is the library's

    _awaits_values = False  # whether a weight was on the meta device when it was to be checked
    _is_starting = False  # whether the constructor is adding groups, which it checks afterwards

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        given = {**self.further_options, **defaults}
        self.defaults = {name: self.converted(name, value) for name, value in given.items()}
        self._journal = Journal()
        self._check_all_options(self.defaults)
        self._is_starting = True
        super().__init__(by_marks(params, self.defaults), self.defaults)
        del self._is_starting
        # Before weights are checked, because with other groups there would be other messages.
        self._compare_ranks()
        for group in self.param_groups:
            self._check_group(group)

    # What a method provides.

    @classmethod
    def converted(cls, name: str, value: Any) -> Any:
        """The value of an option as a group keeps it."""
        return plain_blocks(value) if name == "blocks" else value

    def check_options(self, options: Group) -> None:
        """Raise on invalid options of this method, beyond those of :mod:`.options`."""

    def start_radius(self, group: Group) -> float:
        """How far from the manifold an orthogonal parameter may start."""
        raise NotImplementedError

    def moments(self, group: Group) -> Moments:
        """What makes directions of gradients, with the group's options."""
        raise NotImplementedError

    def state_kinds(self, group: Group) -> Mapping[str, StateKind]:
        """Names and kinds of the state that a weight has: by default, that of the moments."""
        return self.moments(group).state_kinds

    def generator(self, X: Tensor, G: Tensor) -> Tensor:
        """What is accumulated: by default, a generator of the relative gradient."""
        return generator(X, G)

    def transport(self, X: Tensor, buffer: Tensor) -> Tensor:
        """The buffer to keep: by default, without its normal part if X is tall."""
        return transport(X, buffer)

    def move(self, X: Tensor, B: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The new X in the direction that B represents, and which matrices may move there."""
        raise NotImplementedError

    def matrix_step(
        self, X: Tensor, G: Tensor, state: dict[str, Tensor], group: Group
    ) -> MatrixStep:
        """One step of the matrices X, moments, then the move. Changes none of its arguments."""
        hooks = self.generator, self.transport
        direction, new_state = self.moments(group).advance(Point(X), G, state, *hooks)
        return MatrixStep.of(self.move(X, direction.of_length_one(X).B, group), new_state)

    def plain_step(self, slots: list[Slot], group: Group, agree: Agreement | None = None) -> None:
        """One step of the parameters of a group with ``orthogonal=False``.

        ``agree`` maps which parameters may step on this rank to which may step on all ranks.
        """
        plain_step(slots, group, agree)

    def options_at_scale(self, group: Group, scale: float) -> Group:
        """Options with which ``Z = W / scale`` steps, where W is the weight and G its gradient.

        lr refers to W. If lr is an angle, redefine this to ``return group``.
        """
        return {**group, "lr": scalar_lr(group["lr"]) / scale}

    def landing_step(self, group: Group) -> LandingStep | None:
        """A description of ``matrix_step`` for engines; if None, they must call the method."""

    # The step.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; return the closure's value, if given."""
        compiling, journal = torch.compiler.is_compiling(), self._journal
        inside = not compiling and torch.is_inference_mode_enabled()
        if inside and not any(p.is_inference() for p in self._weights()):
            with torch.inference_mode(False):  # else new state could not be written to outside it
                return self._step_without_hooks(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._awaits_values:
            for group in self.param_groups:  # they had no values when they were added
                self._check_group(group)
            self._awaits_values = any(p.device.type == "meta" for p in self._weights())
        if not compiling and journal.begins(self.param_groups, self.state):
            self._compare_ranks()
        only, runs = len(self.param_groups) == 1, []
        for group in self.param_groups:  # all checks first: an error leaves everything as it was
            plan = self.plan(group)
            if plan.orthogonal:
                runs += claimed(group, plan, self.state, only=only)
            else:
                runs += claimed_plain(group, plan, self.state, self.plain_step)
        with without_autocast(self._weights):
            for run in runs:
                run()
        if not compiling and journal.ends() and self.warns_of_frozen_weights:
            journal.look_for_frozen_weights(self.param_groups, self.state)
        return loss

    _step_without_hooks = step  # torch replaces ``step`` by one that runs them

    def plan(self, group: Group) -> Plan:
        """How the weights of the group step: checked and remade when the group changes."""
        journal = self._journal
        if torch.compiler.is_compiling():
            return Plan(self, group, journal.warned)
        is_patched = not self.__dict__.keys().isdisjoint(self.hooks)
        plan, names, values = journal.plans.get(id(group), (None, (), ()))
        if plan and names == (*group,) and all(map(is_, group.values(), values)) and not is_patched:
            return plan
        self._check_all_options(group)
        if plan is not None:
            check_change(group, plan, self.state, lambda: self._check_group(group))
        plan = Plan(self, group, journal.warned)
        lasting = (*group,) if can_last(group) else ()  # else the next step plans again
        if not is_patched:
            journal.plans[id(group)] = plan, lasting, (*group.values(),)
        return plan

    def is_overridden(self, hook: str, *made_for_it: str) -> bool:
        """Whether a method is newer than all that was made for the method it replaces."""
        newer = (redefined(type(self), hook, made) for made in made_for_it)
        return hook in self.__dict__ or all(newer)

    def overridden_parts(self) -> list[str]:
        """The methods that keep engines from taking the landing step."""
        return [hook for hook in self.hooks if self.is_overridden(hook, "landing_step", "moments")]

    @property
    def makes_generators(self) -> bool:
        """Whether the buffers hold the library's own generators, skew if square."""
        return self.keeps_generators and not self.is_overridden("generator", "keeps_generators")

    def _weights(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _compare_ranks(self) -> None:
        """Raise if ranks that share weights have other options or groups."""
        if spread := [p for p in self._weights() if is_dtensor(p)]:
            from ortholand.sharding.agreement import compare_terms  # not before a DTensor

            compare_terms(spread, self.terms)

    def terms(self, ranks: Any) -> Any:
        """What the ranks of a process group must agree on in this step."""
        from ortholand.sharding.agreement import terms_of

        known = self._journal.terms
        if ranks not in known:
            known[ranks] = terms_of(self.param_groups, ranks)
        return known[ranks]

    # Counts.

    def skipped_steps(self) -> int:
        """How many steps have been skipped because they would not have been finite or safe.

        Counts matrices (each kernel or block of a weight), and parameters in
        groups with ``orthogonal=False``. Reads from the device: for logging, not for every step.
        """
        return sum(int(state[SKIPPED]) for state in self.state.values() if SKIPPED in state)

    def limited_steps(self) -> int:
        """How many steps the safe step has made shorter than lr so far.

        Counts matrices, as :meth:`skipped_steps` does, and reads from the device. Many mean that lr
        exceeds what any safe step allows: :func:`ortholand.explain` shows the share of each weight.
        """
        return sum(int(state[LIMITED]) for state in self.state.values() if LIMITED in state)

    # Groups and state.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking all of it; marked weights become a group of their own."""
        if self._is_starting:
            self._add_group(param_group)
            return
        before = len(self.param_groups)
        try:
            for part in by_marks([param_group], self.defaults, self._weights()):
                self._add_group(part)
                self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[before:]
            raise

    def _add_group(self, group: dict[str, Any]) -> None:
        if isinstance(group, dict):  # else torch raises
            group.update({k: self.converted(k, v) for k, v in group.items()})
        super().add_param_group(group)

    def _check_all_options(self, options: Group) -> None:
        check_each(options, self.defaults)
        self.check_options(options)

    def _check_group(self, group: Group) -> None:
        self._check_all_options(group)
        landing = self.landing_step(group)
        spectral = landing is not None and getattr(landing.options.rule, "spectral", False)
        self._awaits_values |= check_group(group, self.start_radius(group), spectral=spectral)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, bit for bit and without sharing memory with ``state_dict``.

        Hooks see and change the same things as in torch. torch's SGD can be continued, and Adam in
        plain groups.

        Raises:
            ValueError: if the state is another optimizer's, or does not fit a weight. Nothing has
                changed then.
        """
        before = self._constraints()
        with torch.inference_mode(False):
            load = super().load_state_dict
            load_bit_for_bit(self, load, self._check_all_options, state_dict)
        # The weights that meet another constraint may come later, but before the next step.
        self._awaits_values |= before != self._constraints()

    def _constraints(self) -> list[list[Any]]:
        return [[group[name] for name in CONSTRAINT] for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: also whether weights are still to be checked."""
        return {**super().__getstate__(), "_awaits_values": self._awaits_values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._journal = Journal()
        # An older version may have saved fewer options.
        self.defaults = {**self.further_options, **self.defaults}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
