"""Some hundred steps of ResNet-18 on CIFAR-10 by each method, in turn.

Time per step, test error, and orthogonality error of all kernels together. The paper's batches
have 128 images; those here are smaller, so that a CPU is done in reasonable time, and the share of
the orthogonal kernels in it larger.

Run: ``python benchmarks/cifar_steps.py --data DIR``. A step of a trivialization takes seconds;
``--methods landing-momentum,exponential`` leaves it out.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from networks import Course, print_table, train_in_turn
from ortholand.lab.datasets import find_dataset
from ortholand.lab.experiments.cifar import METHODS, ResNetTask, start
from ortholand.lab.study.spec import Context


def main(
    data: Annotated[Path | None, typer.Option(help="Folder with the CIFAR-10 files.")] = None,
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(METHODS),
    steps: int = 300,
    batch_size: int = 32,
    width: Annotated[int, typer.Option(help="64 for ResNet-18 itself.")] = 64,
    lr: Annotated[float, typer.Option(help="Of the orthogonal kernels.")] = 0.5,
    test_images: int = 2_000,
    threads: int = 1,
    seed: int = 0,
) -> None:
    """Train, and print a table."""
    torch.set_num_threads(threads)
    source = find_dataset("cifar10", data)
    context = Context(seed, torch.device("cpu"), lambda _: None, source.load())
    courses = {}
    for method in methods.split(","):
        task = ResNetTask(method, lr, batch_size, steps, 1, test_images, width=width)
        courses[method] = Course(start(task, context), lr)
    train_in_turn(courses, steps, report_every=min(20, steps))
    title = f"ResNet-18, width {width}, on {source.identity}: {steps} batches of {batch_size}"
    print_table(courses, title, test_images=test_images)


if __name__ == "__main__":
    typer.run(main)
