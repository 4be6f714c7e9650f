"""What a landing step is: a direction, an attraction to the manifold, a safe step.

*Moments* (:mod:`.moments`) turn gradients into a direction, an *attraction* (:mod:`.attraction`)
says where X goes along it, and a rule (:mod:`ortholand.safe_step`) how far;
:class:`.description.LandingStep` puts them together. Matrices whose rows are on several ranks step
in the *Gram form* (:mod:`.gram`). A new attraction is a subclass of :class:`Attraction` with a
``move``, passed to :func:`register`.
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
