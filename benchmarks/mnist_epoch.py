"""One whole epoch of LeNet-5 on MNIST by each method, in turn, batches of 4.

Time, test error on all 10,000 images, and orthogonality error of all kernels together. Learning
rates are fixed, each method's best on the paper's grid after some hundred iterations.

Run: ``python benchmarks/mnist_epoch.py --data DIR``. It takes about 20 minutes, most of them for
the trivializations; ``--methods landing,exponential,cayley`` is quicker.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from networks import Course, print_table, train_in_turn
from ortholand.lab.datasets import find_dataset
from ortholand.lab.experiments.classification import Task
from ortholand.lab.methods import TRAINING_METHODS
from ortholand.lab.experiments.mnist import start
from ortholand.lab.study.spec import Context

BATCH_SIZE = 4
RATES = {
    "landing": 4.0**-2,
    "exponential": 4.0**-2,
    "cayley": 4.0**-2,
    "trivialization-sgd": 4.0**-2,
    "landing-momentum": 4.0**-4,
    "trivialization-momentum": 4.0**-4,
    "trivialization-adam": 4.0**-4,
    "trivialization-rmsprop": 4.0**-4,
}


def main(
    data: Annotated[Path | None, typer.Option(help="Folder with the MNIST files.")] = None,
    methods: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(TRAINING_METHODS),
    batches: Annotated[int, typer.Option(help="0 for a whole epoch.")] = 0,
    rate_factor: Annotated[float, typer.Option(help="Of all learning rates.")] = 1.0,
    seed: int = 0,
) -> None:
    """Train, and print a table."""
    torch.set_num_threads(1)
    source = find_dataset("mnist", data)
    context = Context(seed, torch.device("cpu"), lambda _: None, source.load())
    assert context.data is not None
    iterations = batches or len(context.data.train_images) // BATCH_SIZE
    courses = {}
    for method in methods.split(","):
        lr = rate_factor * RATES[method]
        task = Task(method, lr, BATCH_SIZE, iterations, points=1, test_images=10_000)
        courses[method] = Course(start(task, context), lr)
    train_in_turn(courses, iterations, report_every=min(1_000, iterations))
    title = f"LeNet-5 on {source.identity}, {iterations:,} batches of {BATCH_SIZE}"
    print_table(courses, title, test_images=10_000)


if __name__ == "__main__":
    typer.run(main)
