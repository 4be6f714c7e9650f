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
        "inputs. Each method runs with the learning rates 1, 0.1, 0.01 and 0.001, and is shown "
        "with the one whose test loss is smallest in the end; where the time or the iterations to "
        "a given test loss are compared, with the one that gets there first. (The paper's "
        "appendix has these four and takes the fastest; its main text names 0.5 for all.) Biases "
        "have the same learning rate, and momentum where the weights have it; with Adam and "
        "RMSprop they are stepped by these. A trivialization is W = B exp(A), started at A = 0 "
        "with the student's weight as B, where the exponential is cheapest; the paper writes W = "
        "exp(A). Everything is in float32; errors are measured in float64. The time of an "
        "iteration is that of the student's forward and backward pass and the step, not of "
        "drawing inputs and asking the teacher; it comes from a run of its own, in which all "
        "methods and learning rates take turns, and is a median. Where times at p = 100 are "
        "compared, all methods have the learning rate 0.01. The preset paper has the paper's "
        "size: p = 100, depth 10, 10,000 iterations, which take hours. Quick has the paper's "
        "depth and batch, but narrower networks (p = 30) and 800 iterations, of which the costly "
        "trivializations do a quarter; it takes the times of single iterations at the paper's "
        "size too. So it shows who learns faster, and less of how errors add up over thousands of "
        "iterations. Smoke is for seeing that all works: tiny networks and a few iterations, "
        "which decide little."
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
