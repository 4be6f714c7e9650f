"""The paper's experiments, run by ``ortholand reproduce``.

Running one leaves records, and claims, figures and the report are made from these alone. A new
experiment is a :class:`~ortholand_lab.study.spec.Study` in a module of its own, and one line here.
"""

from ortholand_lab.experiments.batch_size import BATCH_SIZE
from ortholand_lab.experiments.cifar import CIFAR
from ortholand_lab.experiments.distillation import DISTILLATION
from ortholand_lab.experiments.illustration import ILLUSTRATION
from ortholand_lab.experiments.mnist import MNIST
from ortholand_lab.experiments.orthogonalization import ORTHOGONALIZATION
from ortholand_lab.experiments.plam import PLAM
from ortholand_lab.experiments.procrustes import PROCRUSTES
from ortholand_lab.experiments.speed import SPEED
from ortholand_lab.experiments.stiefel import STIEFEL
from ortholand_lab.study.spec import AnyStudy

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
