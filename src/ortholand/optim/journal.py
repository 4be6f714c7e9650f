"""What an optimizer remembers from step to step, unless it is copied, pickled or loaded."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.views import view_of
from ortholand.landing.step import LIMITED, SKIPPED
from ortholand.optim.options import Group
from ortholand.optim.plan import Plan, name_of
from ortholand.optim.weights import number_of_matrices
from ortholand.sharding.placement import is_dtensor

States = Mapping[Tensor, Mapping[str, Any]]
# After how many steps to check for frozen weights, and how often from then on.
FIRST_LOOK, LATER_LOOKS = 20, 100
FROZEN = (
    "{name} of shape {shape} is frozen: most of its latest steps were skipped, because they would "
    "not have been finite, or no step from there is safe. Look for NaN or infinite gradients; if "
    "the weight was replaced, project it with ortholand.orthogonalize_(weight), or set scale=... "
    "in its group if it is a multiple of an orthonormal matrix; with lam=0 nothing pulls away from "
    "the edge of the ball. optimizer.skipped_steps() counts such steps."
)


class Journal:
    """What has happened since an optimizer was created or loaded."""

    def __init__(self) -> None:
        # By group: its plan, and its options and their values at the time.
        self.plans: dict[int, tuple[Plan, tuple[str, ...], tuple[Any, ...]]] = {}
        self.terms: dict[Any, Any] = {}  # what ranks must agree on in this step, by process group
        self.warned: set[str] = set()
        self.tried: dict[Any, Any] = {}  # functions of the user's, by what they have been given
        self.steps = 0
        self._last_look = 0
        self._skipped: dict[Tensor, int] = {}  # at the last look
        self._limited: dict[Tensor, int] = {}  # in the run that was resumed

    def begins(self, groups: Sequence[Group], states: States) -> bool:
        """Begin a step; whether ranks should compare their options."""
        self.terms.clear()
        if self.steps == 0:  # the counts of the run that is resumed
            self._skipped = _counts(SKIPPED, states, groups)
            self._limited = _counts(LIMITED, states, groups)
        return self.steps % LATER_LOOKS == 0

    def ends(self) -> bool:
        """End a step; whether to look for frozen weights."""
        self.steps += 1
        return self.steps == FIRST_LOOK or self.steps % LATER_LOOKS == 0

    def limited_share(self, p: Tensor, state: Mapping[str, Any], matrices: int) -> float | None:
        """Share of a weight's steps that were less than lr; None before a step, or on meta."""
        count = state.get(LIMITED)
        if count is None or not self.steps or count.is_meta:
            return None
        return (int(count) - self._limited.get(p, 0)) / (self.steps * matrices)

    def look_for_frozen_weights(self, groups: Sequence[Group], states: States) -> None:
        """Warn, once, about weights that skipped most recent steps; reads their counts."""
        window, before = self.steps - self._last_look, self._skipped
        self._last_look, self._skipped = self.steps, _counts(SKIPPED, states, groups)
        for group in groups:
            for i, p in enumerate(group["params"]):
                is_whole = group["orthogonal"] and not is_dtensor(p)
                matrices = number_of_matrices(p, view_of(group)) if is_whole else 1
                skipped = self._skipped.get(p, 0) - before.get(p, 0)
                if skipped > matrices * window / 2 and FROZEN not in self.warned:
                    self.warned.add(FROZEN)
                    message = FROZEN.format(name=name_of(group, i), shape=tuple(p.shape))
                    warnings.warn(message, stacklevel=4)


def is_readable(count: object) -> bool:
    """Whether a count has a value that Python may read."""
    return type(count) is Tensor and not count.is_meta


def _counts(name: str, states: States, groups: Sequence[Group]) -> dict[Tensor, int]:
    """The counts of weights, for which the host waits once per device."""
    counts = [(p, state[name]) for p, state in states.items() if is_readable(state.get(name))]
    if any(group.get("capturable") for group in groups):  # a device must not be read then
        counts = [(p, count) for p, count in counts if count.is_cpu]
    found: dict[Tensor, int] = {}
    for device in {count.device for _, count in counts}:
        here = {p: count for p, count in counts if count.device == device}
        found.update(zip(here, torch.stack([*here.values()]).tolist(), strict=True))
    return found
