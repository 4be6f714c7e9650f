"""Benchmarks, run by ``ortholand bench``. Each is a study, and one line here."""

from ortholand.lab.benchmarks.cifar_short import CIFAR_SHORT
from ortholand.lab.benchmarks.epochs import MNIST_EPOCH
from ortholand.lab.benchmarks.half_precision import HALF_PRECISION
from ortholand.lab.benchmarks.muon import MUON
from ortholand.lab.benchmarks.orthogonality import ORTHOGONALITY
from ortholand.lab.benchmarks.sharded import SHARDED
from ortholand.lab.benchmarks.solvers import SOLVERS, SOLVERS_LARGE, SOLVERS_MINUTE
from ortholand.lab.benchmarks.steps import STEPS
from ortholand.lab.study.spec import AnyStudy

BENCHMARKS: dict[str, AnyStudy] = {
    study.name: study
    for study in (
        STEPS,
        ORTHOGONALITY,
        HALF_PRECISION,
        SOLVERS,
        SOLVERS_LARGE,
        SOLVERS_MINUTE,
        SHARDED,
        MUON,
        MNIST_EPOCH,
        CIFAR_SHORT,
    )
}

__all__ = ["BENCHMARKS"]
