"""PCA on tall matrices, beyond the paper: landing against the QR and Cayley retractions.

The paper leaves the Stiefel manifold, n x p with n > p, to future work, and expects that landing
need not be much faster there, since the Cayley retraction takes a solve of size 2p only.
"""

from ortholand.lab.experiments.stiefel.claims import STIEFEL_CLAIMS
from ortholand.lab.experiments.stiefel.figures import STIEFEL_FIGURES
from ortholand.lab.experiments.stiefel.runs import (
    LANDING_TIMED,
    StiefelSettings,
    plan,
    run_unit,
)
from ortholand.lab.study.spec import Study

STIEFEL = Study(
    name="stiefel",
    title="PCA on tall matrices: landing against QR and Cayley",
    summary=(
        "f(X) = -Tr(X^T C X) over n x p matrices with orthonormal columns, from a random start, in "
        "float32. C has eigenvalues from 1 to 0.5 on the subspace that is looked for and from 0.25 "
        "to 0 elsewhere, and is diagonal: all methods treat rotated problems alike, so this is as "
        "general as any C, but the gradient costs next to nothing and the methods' own time is "
        "seen. (What a dense C would cost is timed too. A diagonal C also lets the subspace error "
        "fall below the rounding of float32, so only errors down to 1e-3 are compared.) Landing "
        "as it is by default (spectral rule of the safe step), moving first and then landing, and "
        "coupled by the tight and the Frobenius rule, compared with RiemannianSGD with the QR and "
        "Cayley retractions; the same step eta = 1 for "
        "all, with lam = 1/2, so that eta lam = 1/2 lands at once. The library's QR is Cholesky's "
        "from 64 columns on, and its Cayley a solve of size 2p; QR by Householder's method, as a "
        "short program has it, is timed too. Times are medians of iterations that took turns, on "
        f"one thread; landing's of iterations {', '.join(map(str, LANDING_TIMED))}, weighted by "
        "how many are like them: the first pay for better bounds of the safe step. Errors are "
        "measured in float64. Quick and smoke have smaller matrices."
    ),
    settings={
        "smoke": StiefelSettings(n=200, sizes=(10, 20, 40), every=4, repetitions=5),
        "quick": StiefelSettings(n=2_000, sizes=(50, 100, 200, 300), every=4),
        "paper": StiefelSettings(),
    },
    plan=plan,
    run=run_unit,
    claims=STIEFEL_CLAIMS,
    figures=STIEFEL_FIGURES,
    seconds={"smoke": 4, "quick": 50, "paper": 1200},
)

__all__ = ["STIEFEL", "StiefelSettings"]
