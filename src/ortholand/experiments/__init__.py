"""The paper's experiments: ``ortholand reproduce`` runs them.

Experiments are specifications (:mod:`.spec`). Running them (:mod:`.runner`) leaves records
(:mod:`.records`), and claims, figures and the report are made from the records alone. A new
experiment is one module with an :class:`~ortholand.experiments.spec.Experiment`, and one line here.
"""

from ortholand.experiments.batch_size import BATCH_SIZE
from ortholand.experiments.cifar import CIFAR
from ortholand.experiments.distillation import DISTILLATION
from ortholand.experiments.illustration import ILLUSTRATION
from ortholand.experiments.mnist import MNIST
from ortholand.experiments.orthogonalization import ORTHOGONALIZATION
from ortholand.experiments.plam import PLAM
from ortholand.experiments.procrustes import PROCRUSTES
from ortholand.experiments.spec import AnyExperiment
from ortholand.experiments.speed import SPEED
from ortholand.experiments.stiefel import STIEFEL

EXPERIMENTS: dict[str, AnyExperiment] = {
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
