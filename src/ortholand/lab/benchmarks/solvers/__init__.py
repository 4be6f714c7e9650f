"""``ortholand.minimize`` against pymanopt, cdopt, smopt and torch's L-BFGS on a parametrization."""

from dataclasses import replace

from ortholand.lab.benchmarks.solvers.claims import ALONE, claims_about
from ortholand.lab.benchmarks.solvers.peers import PARTICIPANTS
from ortholand.lab.benchmarks.solvers.problems import LARGE, MINUTE, USUAL
from ortholand.lab.benchmarks.solvers.runs import SolverSettings, plan, run
from ortholand.lab.benchmarks.solvers.tables import tables_of
from ortholand.lab.study.spec import Study

OURS = (
    "ortholand-default-numpy",
    "ortholand-default-jac",
    "ortholand-newton-numpy",
    "ortholand-lbfgs-numpy",
    "ortholand-bb-numpy",
)
PEERS = tuple(name for name, solver in PARTICIPANTS.items() if not solver.ours)

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
            solvers=(
                *OURS,
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
    claims=claims_about(USUAL),
    tables=tables_of("solvers", USUAL),
    seconds={"smoke": 5, "quick": 180, "full": 3 * 3600},
)

_LARGE = SolverSettings(problems=LARGE, solvers=(*OURS, *PEERS), seeds=1, maxtime=150.0)

SOLVERS_LARGE = replace(
    SOLVERS,
    name="solvers-large",
    title="minimize against its peers on two large problems",
    settings={
        "smoke": replace(
            _LARGE,
            problems=LARGE[:1],
            solvers=("ortholand-default-numpy", "pymanopt-tr-grassmann"),
            gtols=(1e-6,),
            maxtime=5.0,
            repeats=1,
        ),
        "quick": replace(
            _LARGE,
            solvers=("ortholand-default-numpy", "pymanopt-tr", "pymanopt-tr-grassmann"),
            gtols=(1e-6,),
            maxtime=30.0,
        ),
        "full": _LARGE,
    },
    claims=[*claims_about(LARGE), ALONE],
    tables=tables_of("solvers-large", LARGE),
    seconds={"smoke": 10, "quick": 120, "full": 3600},
)

SOLVERS_MINUTE = replace(
    SOLVERS,
    name="solvers-minute",
    title="minimize against its peers on problems of less than a millisecond",
    settings={
        preset: replace(settings, problems=MINUTE) for preset, settings in SOLVERS.settings.items()
    },
    claims=claims_about(MINUTE),
    tables=tables_of("solvers-minute", MINUTE),
    seconds={"smoke": 5, "quick": 60, "full": 900},
)
