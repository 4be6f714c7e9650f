"""Orthogonal Procrustes, p = 40 (the paper's figure 3): landing and the four retractions."""

from ortholand.lab.experiments.procrustes.claims import PROCRUSTES_CLAIMS
from ortholand.lab.experiments.procrustes.figures import PROCRUSTES_FIGURES
from ortholand.lab.experiments.procrustes.runs import ProcrustesSettings, plan, run_unit
from ortholand.lab.study.spec import Study

PROCRUSTES = Study(
    name="procrustes",
    title="Orthogonal Procrustes: distance to the optimum and to the manifold",
    paper_figure="Figure 3",
    summary=(
        "Gradient descent on f(X) = ||XA - B||^2 / p with A and B standard normal, from the "
        "identity and with the step eta = 0.1: by the landing algorithm, with the safe step, and "
        "by the exponential, polar, Cayley and QR retractions. The paper prints f without 1 / p; "
        "that is run too, as an extra, because at that scale the safe step alone sets the pace "
        "and nothing lands. Landing with momentum is the other extra. The optimum is the best "
        "matrix of determinant +1, the determinant of the start, whose sign no method changes. "
        "How many iterations it takes to get there depends on the smallest curvature at the "
        "optimum, which varies much from seed to seed; distances are measured in float64. Where "
        "the retractions are run for fewer iterations than landing (the retraction share below), "
        "figures and comparisons end where they do. What is said about time rests on a run of its "
        "own, in which the methods take turns iteration by iteration, after a warm-up; medians "
        "are compared, and figures by time show iterations times the median time of one."
    ),
    settings={
        "smoke": ProcrustesSettings(
            p=10, iterations=400, extra_iterations=250, warm_up=10, repetitions=20
        ),
        "quick": ProcrustesSettings(
            iterations=18_000, retraction_share=0.5, extra_iterations=2_500
        ),
        "paper": ProcrustesSettings(),
    },
    plan=plan,
    run=run_unit,
    claims=PROCRUSTES_CLAIMS,
    figures=PROCRUSTES_FIGURES,
    revision=2,
)

__all__ = ["PROCRUSTES", "ProcrustesSettings"]
