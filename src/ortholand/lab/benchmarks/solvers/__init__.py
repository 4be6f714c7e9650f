"""``ortholand.minimize`` against pymanopt, cdopt, smopt and torch's L-BFGS on a parametrization."""

from ortholand.lab.benchmarks.solvers.claims import CLAIMS
from ortholand.lab.benchmarks.solvers.problems import PROBLEMS
from ortholand.lab.benchmarks.solvers.runs import SolverSettings, plan, run
from ortholand.lab.benchmarks.solvers.tables import TABLES
from ortholand.lab.study.spec import Study

SOLVERS = Study(
    name="solvers",
    title="minimize against pymanopt, cdopt, smopt and torch's L-BFGS",
    summary=(
        "Same data, same start, same rule: the norm of the Riemannian gradient has fallen by gtol. "
        "The rule is checked here, at the point a solver returns, projected onto the manifold. "
        "Solvers with such a rule of their own stop by it, with a tighter tolerance if the check "
        "fails; the others are stopped from outside, at the first gradient where it holds. Solvers "
        "take turns in random order, and runs under a second are repeated. Processor time of one "
        "thread, medians over the seeds: "
        "a run that does not get there has taken infinitely long, and whoever has missed too many "
        "seeds is not run with the rest (*), nor at the tighter tolerance with a seed that missed "
        "the looser one. Peers that are not installed are left out."
    ),
    settings={
        "smoke": SolverSettings(
            problems=("procrustes-planted",),
            solvers=("ortholand-default-numpy", "ortholand-bb-torch", "pymanopt-sd", "pymanopt-tr"),
            seeds=1,
            gtols=(1e-6,),
            maxtime=5.0,
            repeats=2,
        ),
        "quick": SolverSettings(
            problems=tuple(PROBLEMS)[:-2],  # all but the large ones
            solvers=(
                "ortholand-default-numpy",
                "ortholand-default-jac",
                "ortholand-newton-numpy",
                "ortholand-lbfgs-numpy",
                "ortholand-bb-numpy",
                "pymanopt-cg",
                "pymanopt-tr",
                "pymanopt-cg-grassmann",
                "pymanopt-tr-grassmann",
                "smopt-slpg",
                "cdopt-lbfgs",
            ),
            maxtime=1.5,
            patience=1,
        ),
        "full": SolverSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    tables=TABLES,
    seconds={"smoke": 5, "quick": 180, "full": 3 * 3600},
)
