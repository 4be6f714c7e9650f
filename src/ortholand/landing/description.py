"""A landing step as a whole: moments, and how the matrix moves along them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ortholand.landing.after import After
from ortholand.landing.attraction import LandingOptions, Step, redefined
from ortholand.landing.coupled import Coupled
from ortholand.landing.decoupled import Decoupled
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.muon import MuonMoments
from ortholand.landing.step import MatrixStep, PendingStep, Rows
from ortholand.safe_step import Frobenius

Moments = Momentum | AdamMoments | MuonMoments
OURS = (Coupled, Decoupled, After)
GramStep = Callable[[Tensor, Tensor, dict[str, Tensor], Rows], PendingStep]


@dataclass(frozen=True)
class LandingStep:
    """The step that engines take if none of it is overridden."""

    moments: Moments
    options: LandingOptions

    def __call__(self, X: Tensor, G: Tensor, state: dict[str, Tensor]) -> MatrixStep:
        """Moments, then the attraction; batched. Only a CPU branches on values."""
        attraction, point = self.options.attraction, self.options.point(X)
        direction, new_state = self.moments.advance(point, G, state)
        if redefined(type(attraction), "move", "step"):  # a subclass that moves otherwise
            step = Step(*attraction.move(X, direction.of_length_one(X).B, self.options))
        else:
            step = attraction.step(point, direction, self.options)
        return MatrixStep(step.moved, step.taken, new_state, step.limited)

    @property
    def is_ours(self) -> bool:
        """Whether rows of zeros change nothing, and what is returned is new, and finite if safe."""
        return type(self.options.attraction) in OURS

    @property
    def gram_step(self) -> GramStep | None:
        """The step of rows on several ranks, or None (see :attr:`why_not_gram`)."""
        return None if self.why_not_gram else partial(self.moments.gram_step, self.options)

    @property
    def why_not_gram(self) -> str | None:
        """What has no Gram form; None if everything has one."""
        attraction, rule = self.options.attraction, self.options.rule
        cls = type(attraction)
        if attraction.coefficients is None or redefined(cls, "move", "coefficients"):
            return f"attraction {attraction.name!r} has no Gram form"
        if rule is not None and not rule.is_measured and type(rule) is not Frobenius:
            return f"safe_step {rule.name!r} has no Gram form"
        return None
