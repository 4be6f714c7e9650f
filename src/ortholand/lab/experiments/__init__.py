"""The paper's experiments, run by ``ortholand reproduce``.

Running one leaves records, and claims, figures and the report are made from these alone. A new
experiment is a :class:`~ortholand.lab.study.spec.Study` in a module of its own, and one line here.
"""

from ortholand.lab.experiments.batch_size import BATCH_SIZE
from ortholand.lab.experiments.cifar import CIFAR
from ortholand.lab.experiments.distillation import DISTILLATION
from ortholand.lab.experiments.illustration import ILLUSTRATION
from ortholand.lab.experiments.mnist import MNIST
from ortholand.lab.experiments.orthogonalization import ORTHOGONALIZATION
from ortholand.lab.experiments.plam import PLAM
from ortholand.lab.experiments.procrustes import PROCRUSTES
from ortholand.lab.experiments.speed import SPEED
from ortholand.lab.experiments.stiefel import STIEFEL
from ortholand.lab.study.spec import AnyStudy

EXPERIMENTS: dict[str, AnyStudy] = {
    experiment.name: experiment
    for experiment in (
        ILLUSTRATION,
        SPEED,
        PROCRUSTES,
        ORTHOGONALIZATION,
        DISTILLATION,
        MNIST,
        CIFAR,
        BATCH_SIZE,
        PLAM,
        STIEFEL,
    )
}

__all__ = ["EXPERIMENTS"]
