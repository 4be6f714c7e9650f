"""Time and memory of one optimizer step, with targets.

Every number is a median of repetitions that took turns with their competitors.
"""

from ortholand.lab.benchmarks.steps.claims import CLAIMS
from ortholand.lab.benchmarks.steps.figures import FIGURES, TABLES
from ortholand.lab.benchmarks.steps.runs import StepsSettings, plan, run
from ortholand.lab.study.spec import Study

STEPS = Study(
    name="steps",
    title="Time and memory of one step, against every peer that is installed",
    summary=(
        "One optimizer step with a fixed gradient in float32, safe step on. A peer's cost is all "
        "that a user pays per step: for parametrizations the way forward and backward through "
        "them too. Medians of repetitions that take turns, so that what disturbs one disturbs all; "
        "only ratios within one case mean something on a noisy machine. Targets are judged at one "
        "thread. Memory is what torch's allocator holds at the peak of a step beyond what was "
        "there before, in units of the parameters."
    ),
    settings={
        "smoke": StepsSettings(
            cases=("40x40", "lenet-96-of-5x5"), sizes=(4, 16), counts=(1, 10), seconds=0.05
        ),
        "quick": StepsSettings(seconds=1.0),
        "full": StepsSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    tables=TABLES,
    seconds={"smoke": 15, "quick": 600, "full": 1200},
)
