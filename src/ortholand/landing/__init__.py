"""What a landing step is: a direction, an attraction to the manifold, a safe step.

A step has three parts, each an object that may be swapped:

- *moments* (:mod:`.moments`) turn gradients into a direction: SGD's momentum, Adam, Muon;
- an *attraction* (:mod:`.attraction`) says where X goes along it;
- a *safe-step rule* (:mod:`ortholand.safe_step`) says how far.

:class:`.description.LandingStep` puts them together: moments, direction, trial move, measured
distance, shortened move, landing. Matrices whose rows are on several ranks step in the *Gram form*
(:mod:`.gram`): one pass over the rows for some p x p matrices, then coefficients, then one pass
that combines columns. Only the sum of Gram matrices is shared.

A new attraction is a subclass of :class:`Attraction` with a ``move``, passed to :func:`register`.
"""

from ortholand.landing.after import After
from ortholand.landing.attraction import (
    ATTRACTIONS,
    Attraction,
    LandingOptions,
    Move,
    find_attraction,
    register,
)
from ortholand.landing.coupled import Coupled
from ortholand.landing.decoupled import Decoupled
from ortholand.landing.gram import Coefficients, Gram
from ortholand.landing.moments import AdamMoments, Momentum
from ortholand.landing.muon import MuonMoments
from ortholand.landing.step import GramSums, MatrixStep, PendingStep, Rows

for _known in (Coupled(), Decoupled(), After()):
    register(_known)

__all__ = [
    "ATTRACTIONS",
    "AdamMoments",
    "After",
    "Attraction",
    "Coefficients",
    "Coupled",
    "Decoupled",
    "Gram",
    "GramSums",
    "LandingOptions",
    "MatrixStep",
    "Momentum",
    "Move",
    "MuonMoments",
    "PendingStep",
    "Rows",
    "find_attraction",
    "register",
]
