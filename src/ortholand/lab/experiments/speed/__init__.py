"""Time of one step as p grows (the paper's figure 2): landing beside the four retractions."""

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
        "landing (field and update) and by the four retractions. Formulas are taken from the "
        "paper's table by way of torch's functions (matrix_exp, svd, solve, qr); beside them "
        "stand the library's retractions, which use series for short steps and Cholesky's "
        "factorisation for QR, and the steps of whole optimizers, LandingSGD with its safe step "
        "against RiemannianSGD. The methods take turns, and medians are compared, on one thread. "
        "The paper times 500 repetitions on a GPU; here there are fewer for large matrices, and "
        "smoke and quick end at smaller sizes. What the paper says of a GPU is not decided by a "
        "run on a CPU."
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
