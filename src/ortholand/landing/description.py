"""A landing step as a whole: moments, and how the matrix moves along them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ortholand.landing.attraction import LandingOptions
from ortholand.landing.moments import Moments
from ortholand.landing.step import PendingStep, Rows

GRAM_FROM = 8  # rows per column from which p x p products cost less than they save (make bench)
GramStep = Callable[[Tensor, Tensor, dict[str, Tensor], Rows], PendingStep]


@dataclass(frozen=True)
class LandingStep:
    """What engines step by where nothing of it is overridden."""

    moments: Moments
    options: LandingOptions

    @property
    def gram_step(self) -> GramStep | None:
        """The step of tall matrices in the Gram form; None: :attr:`why_not_gram`."""
        return None if self.why_not_gram else self._gram_step

    @property
    def why_not_gram(self) -> str | None:
        """What has no Gram form."""
        attraction, rule = self.options.attraction, self.options.rule
        if attraction.coefficients is None:
            return f"attraction {attraction.name!r} has no Gram form"
        if rule is not None and rule.squared_gram_bound is None:
            return f"safe_step {rule.name!r} has no Gram form"
        return None

    def gram_pays(self, n: int, p: int) -> bool:
        """Whether the Gram form is the quicker one of whole matrices n x p.

        Beside products with n rows it has some of p x p matrices; not so along a field.
        """
        along_field = self.options.attraction.field_coefficients is not None
        return (along_field and self.moments.go_along_fields) or n >= GRAM_FROM * p

    def _gram_step(self, X: Tensor, G: Tensor, state: dict[str, Tensor], rows: Rows) -> PendingStep:
        return self.moments.gram_step(X, G, state, self.options, rows)

    @property
    def why_not_compiled(self) -> str | None:
        """What has no compiled form; None where all has."""
        attraction, rule = self.options.attraction, self.options.rule
        if isinstance(self.options.lr, Tensor):
            return "tensor lr, which compiled code would have to wait for"
        if attraction.compiled is None:
            return f"attraction {attraction.name!r} has no compiled form"
        if rule is not None and rule.compiled is None:
            return f"safe_step {rule.name!r} has no compiled form"
        return None
