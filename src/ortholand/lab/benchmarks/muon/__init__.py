"""LandingMuon against manifold Muon by dual ascent and its other rivals, with targets."""

from ortholand.lab.benchmarks.muon.claims import CLAIMS
from ortholand.lab.benchmarks.muon.figures import FIGURES, TABLES
from ortholand.lab.benchmarks.muon.runs import (
    SEEDS,
    TUNING_SEEDS,
    MuonSettings,
    plan,
    run,
)
from ortholand.lab.study.spec import Study

MUON = Study(
    name="muon",
    title="LandingMuon against manifold Muon by dual ascent, SPEL, POGO, torch's Muon and AdamW",
    summary=(
        "Directions: how many inner steps the dual ascent of Bernstein's post on modular manifolds "
        "needs until its direction is tangent to 1e-2 (||Sym(X^T R)|| / ||R||) and within 2 % of "
        "the optimum, with its published rate (0.01, falling linearly to zero over the inner "
        "steps) and with the best of several. Steps are counted in float64 with exact polar "
        "factors, and timed in float32 with the library's msign; both favour it: published code "
        "takes ten iterations in bfloat16 for each. Random gradients have spectral norm 1, "
        "because the rate's effect depends on their scale. For square matrices the dual ascent "
        "starts at the optimum. Training: the post's perceptron 3072-128-64-10 without biases on "
        "CIFAR-10, batches of 1,024, 5 epochs, learning rates that fall linearly to zero; all "
        "three weights on the manifold. Each method takes the rate of its grid with the best mean "
        "test accuracy over other seeds; a grid whose best rate is its edge goes on beyond it. The "
        "value is that of short moves, as a share of the best, summed over the weights; tangency "
        "is that of directions before a retraction."
    ),
    settings={
        "smoke": MuonSettings(
            shapes=((8, 8), (12, 4)),
            layers=((64, 10),),
            cap=20,
            rates=(0.1,),
            seconds=0.02,
            epochs=1,
            grid=1,
            extensions=0,
            tuning_seeds=TUNING_SEEDS[:1],
            seeds=SEEDS[:1],
            test_images=100,
        ),
        "quick": MuonSettings(
            shapes=((64, 64), (128, 64), (300, 100)),
            layers=((128, 64),),
            cap=500,
            seconds=1.0,
            grid=3,
            extensions=0,
            tuning_seeds=TUNING_SEEDS[:1],
            seeds=SEEDS[:2],
        ),
        "full": MuonSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    tables=TABLES,
    dataset="cifar10",
    seconds={"smoke": 20, "quick": 300, "full": 3600},
)
