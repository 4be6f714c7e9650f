"""Trajectories for p = 2 (the paper's figure 1): landing, a retraction, and the field."""

from ortholand.lab.experiments.illustration.claims import CLAIMS
from ortholand.lab.experiments.illustration.figures import FIGURES
from ortholand.lab.experiments.illustration.runs import IllustrationSettings, plan, run
from ortholand.lab.study.spec import EXPERIMENT_PRESETS, Study

ILLUSTRATION = Study(
    name="illustration",
    title="Trajectories for p = 2: landing and a retraction",
    paper_figure="Figure 1",
    summary=(
        "Gradient descent on f(X) = ||X - X_*||^2 / 2 for 2 x 2 matrices, X_* a rotation, by the "
        "landing algorithm and by the exponential retraction from the same rotation X_0; and by "
        "landing from two starts off the manifold. The paper shows such a picture without its "
        "numbers: problem, starts and step are ours, with a step long enough to be seen. All "
        "iterates are multiples of rotations, so the two coefficients that are drawn say all. "
        "Nothing is random and nothing is reduced: all presets are the same."
    ),
    settings=dict.fromkeys(EXPERIMENT_PRESETS, IllustrationSettings()),
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    seconds=dict.fromkeys(EXPERIMENT_PRESETS, 2),
)
