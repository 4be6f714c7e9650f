"""Time of one step as p grows (the paper's figure 2): landing and the four retractions."""

from ortholand.lab.experiments.speed.claims import CLAIMS
from ortholand.lab.experiments.speed.figures import FIGURES
from ortholand.lab.experiments.speed.runs import SpeedSettings, plan, run
from ortholand.lab.study.spec import Study

SPEED = Study(
    name="speed",
    title="Time of a step as p grows",
    paper_figure="Figure 2",
    summary=(
        "One step from a random p x p rotation with a random gradient whose singular values are "
        "about 1, step size 0.1, in float32: from the Euclidean gradient to the next iterate, by "
        "landing (field and update) and by the four retractions. Retractions are the paper's "
        "formulas by torch's functions (matrix_exp, svd, solve, qr); the library's own, with "
        "series for short steps and Cholesky's factorisation for QR; and whole steps of "
        "optimizers, LandingSGD with its safe step against RiemannianSGD. All take turns on one "
        "thread, and medians are compared. The paper times 500 repetitions on a GPU; here there "
        "are fewer for large matrices, and smoke and quick end at smaller sizes. A run on a CPU "
        "does not decide what the paper says of a GPU."
    ),
    settings={
        "smoke": SpeedSettings(sizes=(10, 30, 60), repetitions=30),
        "quick": SpeedSettings(
            sizes=(10, 20, 50, 100, 200, 500, 1000), repetitions=60, work=1.25e9
        ),
        "paper": SpeedSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    seconds={"smoke": 3, "quick": 35, "paper": 360},
)
