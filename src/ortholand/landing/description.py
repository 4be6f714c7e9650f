"""A landing step as a whole: moments, and how the matrix moves along them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ortholand.landing.attraction import Attraction, LandingOptions
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.muon import MuonMoments
from ortholand.landing.step import PendingStep, Rows
from ortholand.safe_step import SafeStepRule

GRAM_FROM = 8  # rows per column from which p x p products cost less than they save (make bench)
Moments = Momentum | AdamMoments | MuonMoments
GramStep = Callable[[Tensor, Tensor, dict[str, Tensor], Rows], PendingStep]


@dataclass(frozen=True)
class LandingStep:
    """The step that engines take if none of it is overridden."""

    moments: Moments
    options: LandingOptions

    @property
    def gram_step(self) -> GramStep | None:
        """The step of tall matrices in the Gram form, or None (see :attr:`why_not_gram`)."""
        return None if self.why_not_gram else self._gram_step

    @property
    def why_not_gram(self) -> str | None:
        """What has no Gram form; None if everything has one."""
        return self._patched or self._missing(
            "Gram", lambda a: a.coefficients is None, lambda r: r.squared_gram_bound is None
        )

    @property
    def stays_finite(self) -> bool:
        """Whether its results are finite where it is taken: the library's own rules bound them."""
        rule, attraction = self.options.rule, self.options.attraction
        known = rule is not None and rule.compiled is not None and attraction.compiled is not None
        return known and not self._patched

    def gram_pays(self, n: int, p: int) -> bool:
        """Whether the Gram form is quicker for whole n x p matrices.

        It adds products of p x p matrices to those with n rows, except along a field.
        """
        if not self.moments.gram_pays:
            return False
        along_field = self.options.attraction.field_coefficients is not None
        return (along_field and self.moments.go_along_fields) or n >= GRAM_FROM * p

    def _gram_step(self, X: Tensor, G: Tensor, state: dict[str, Tensor], rows: Rows) -> PendingStep:
        return self.moments.gram_step(X, G, state, self.options, rows)

    @property
    def _patched(self) -> str | None:
        """What was patched after it was defined, so that its faster forms may no longer apply."""
        attraction, rule = self.options.attraction, self.options.rule
        if attraction.is_patched:
            return f"patched attraction {attraction.name!r}"
        return f"patched safe_step {rule.name!r}" if rule is not None and rule.is_patched else None

    def _missing(
        self,
        form: str,
        of_attraction: Callable[[Attraction], bool],
        of_rule: Callable[[SafeStepRule], bool],
    ) -> str | None:
        attraction, rule = self.options.attraction, self.options.rule
        if of_attraction(attraction):
            return f"attraction {attraction.name!r} has no {form} form"
        if rule is not None and of_rule(rule):
            return f"safe_step {rule.name!r} has no {form} form"
        return None
