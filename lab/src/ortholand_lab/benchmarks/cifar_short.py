"""ResNet-18 on CIFAR-10 for as long as a processor without a GPU can be asked to train it."""

from dataclasses import replace
from functools import partial

from ortholand_lab.experiments import classification
from ortholand_lab.experiments.cifar import (
    CIFAR_METHODS,
    EPOCH,
    PAPER,
    TRAINED,
    TRAINING_CLAIMS,
    CifarSettings,
    plan_trainings,
    start_resnet,
)
from ortholand_lab.study.spec import Study

_SHORT = replace(
    PAPER,
    methods=CIFAR_METHODS,
    learning_rates=(0.5,),
    seeds=1,
    iterations=TRAINED,
    lr_drop=TRAINED * PAPER.lr_drop // PAPER.iterations,
    points=13,
    warm_up=0,
    repetitions=5,
)

CIFAR_SHORT: Study[CifarSettings, classification.TrainingRun] = Study(
    name="cifar-short",
    title="ResNet-18 on CIFAR-10, a short training",
    summary=(
        f"The experiment cifar with one learning rate, 0.5, one seed and {TRAINED:,} iterations: "
        f"{TRAINED // EPOCH} epochs of all of CIFAR-10, or 50 of one of its five training files. "
        f"The paper's training runs are {PAPER.iterations // TRAINED} times as long. Rates are "
        "divided by 10 after two thirds, as there. Below the full preset a network with a "
        "fraction of the channels (the width below, of 64) and far fewer iterations."
    ),
    settings={
        "smoke": replace(
            _SHORT,
            width=4,
            batch_size=16,
            iterations=6,
            lr_drop=4,
            points=2,
            test_images=50,
            repetitions=2,
        ),
        "quick": replace(
            _SHORT, width=8, iterations=100, lr_drop=67, points=5, test_images=500, repetitions=3
        ),
        "full": _SHORT,
    },
    plan=plan_trainings,
    run=partial(classification.run_unit, start_resnet),
    claims=TRAINING_CLAIMS,
    figures=[
        classification.training_figure(
            "cifar-short",
            "ResNet-18 on CIFAR-10, a short training, all methods with momentum and lr 0.5",
        )
    ],
    dataset="cifar10",
    seconds={"smoke": 5, "quick": 20, "full": 6_000},
)
