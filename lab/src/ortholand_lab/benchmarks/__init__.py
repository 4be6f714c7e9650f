"""Benchmarks, run by ``ortholand bench``. Each is a study, and one line here."""

from ortholand_lab.benchmarks.certified import CERTIFIED, CERTIFIED_MNIST
from ortholand_lab.benchmarks.cifar_short import CIFAR_SHORT
from ortholand_lab.benchmarks.epochs import MNIST_EPOCH
from ortholand_lab.benchmarks.half_precision import HALF_PRECISION
from ortholand_lab.benchmarks.isometries import ISOMETRIES
from ortholand_lab.benchmarks.muon import MUON
from ortholand_lab.benchmarks.muon.steps import MUON_STEPS
from ortholand_lab.benchmarks.orthogonality import ORTHOGONALITY
from ortholand_lab.benchmarks.sharded import SHARDED
from ortholand_lab.benchmarks.solvers import (
    SOLVERS,
    SOLVERS_LARGE,
    SOLVERS_MINUTE,
    SOLVERS_USERS,
)
from ortholand_lab.benchmarks.steps import STEPS
from ortholand_lab.study.spec import AnyStudy

BENCHMARKS: dict[str, AnyStudy] = {
    study.name: study
    for study in (
        STEPS,
        ORTHOGONALITY,
        HALF_PRECISION,
        SOLVERS,
        SOLVERS_LARGE,
        SOLVERS_MINUTE,
        SOLVERS_USERS,
        SHARDED,
        MUON,
        MUON_STEPS,
        MNIST_EPOCH,
        CIFAR_SHORT,
        ISOMETRIES,
        CERTIFIED,
        CERTIFIED_MNIST,
    )
}
