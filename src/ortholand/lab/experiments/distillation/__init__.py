"""Distillation (the paper's figure 5): a student network learns what a teacher network does."""

from ortholand.lab.experiments.distillation.claims import DISTILLATION_CLAIMS
from ortholand.lab.experiments.distillation.figures import DISTILLATION_FIGURES
from ortholand.lab.experiments.distillation.runs import DistillationSettings, plan, run
from ortholand.lab.study.spec import Study

DISTILLATION = Study(
    name="distillation",
    title="Distillation: a tanh network with orthogonal weights learns from another",
    paper_figure="Figure 5",
    summary=(
        "A student network x <- tanh(W x + b), layer after layer, with square orthogonal W, "
        "learns to do what a teacher of the same kind does: the loss is the squared distance of "
        "their outputs, averaged over a batch of standard normal inputs that are new at every "
        "iteration. Weights start Haar-distributed with determinant +1 and biases standard "
        "normal, for teacher and student; all methods start at the same student and see the same "
        "inputs. Each method runs with the learning rates 1, 0.1, 0.01 and 0.001. It is shown "
        "with the one of the smallest final test loss; where time or iterations to a given test "
        "loss are compared, with the one that gets there first. (The paper's appendix has these "
        "four and takes the fastest; its main text names 0.5 for all.) Biases have the same "
        "learning rate, momentum where the weights have it, and Adam or RMSprop where these step "
        "the weights. A trivialization is W = B exp(A), from A = 0 and the student's weight B, "
        "where the exponential is cheapest; the paper writes W = exp(A). Everything is in float32; "
        "errors are measured in float64. The time of an iteration is the median of forward pass, "
        "backward pass and step of the student, without drawing inputs and asking the teacher, in "
        "a run in which all methods and learning rates take turns. Where times at p = 100 are "
        "compared, the learning rate is 0.01. The preset paper has the paper's size: p = 100, "
        "depth 10, 10,000 iterations, which take hours. Quick has the paper's depth and batch, but "
        "narrower networks (p = 30) and 800 iterations, of which the costly trivializations do a "
        "quarter; single iterations are timed at the paper's size, too. So it shows who learns "
        "faster, and less of how errors add up over thousands of iterations."
    ),
    settings={
        "smoke": DistillationSettings(
            p=10, depth=3, batch=32, iterations=30, test_size=100, timed_size=(10, 3), repetitions=5
        ),
        "quick": DistillationSettings(
            p=30, iterations=800, trivialization_share=0.25, repetitions=9
        ),
        "paper": DistillationSettings(),
    },
    plan=plan,
    run=run,
    claims=DISTILLATION_CLAIMS,
    figures=DISTILLATION_FIGURES,
)
