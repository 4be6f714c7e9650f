"""PLAM and landing (the paper's appendix): both are infeasible, one of them can explode."""

from ortholand.lab.experiments.plam.claims import PLAM_CLAIMS
from ortholand.lab.experiments.plam.figures import PLAM_FIGURES
from ortholand.lab.experiments.plam.runs import EXPLODED, LANDED, PlamSettings, plan, run
from ortholand.lab.study.spec import Study

PLAM = Study(
    name="plam",
    title="PLAM compared with landing",
    paper_figure="Appendix C",
    summary=(
        "PLAM (Gao et al., 2019) follows G - Sym(G X^T) X + lam (X X^T - I) X, which equals the "
        "landing field on the manifold only. Both are run on f(X) = ||AX - B||^2 for 2 x 2 "
        "matrices A and B of standard normal entries, from the identity, with lam = 1 and the "
        "step 1e-3, in float64: ten problems in the paper, of which it says that PLAM always "
        "explodes; here 1,000, the first ten of which are drawn. A problem has exploded from "
        f"distance {EXPLODED:.0e} on, and landed below {LANDED:g}. Then the paper's example, f = "
        "||alpha X - diag(1, 0)||^2 from diag(1, 1 + delta), for alphas on both sides of the "
        "printed boundary (alpha^2 = lam) and of the corrected one (2 alpha^2 = lam). Landing has "
        "its safe step. Quick has fewer iterations than the paper preset (the paper does not say "
        "how many it has); smoke has fewer problems and too few iterations to decide all."
    ),
    settings={
        "smoke": PlamSettings(problems=100, iterations=1_000),
        "quick": PlamSettings(iterations=10_000),
        "paper": PlamSettings(),
    },
    plan=plan,
    run=run,
    claims=PLAM_CLAIMS,
    figures=PLAM_FIGURES,
    seconds={"smoke": 3, "quick": 15, "paper": 60},
)
