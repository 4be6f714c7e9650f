"""The paper's experiments: ``ortholand reproduce`` runs them.

Experiments are specifications (:mod:`.spec`). Running them (:mod:`.runner`) leaves records
(:mod:`.records`), and claims, figures and the report are made from the records alone. A new
experiment is one module with an :class:`~ortholand.experiments.spec.Experiment`, and one line here.
"""

from ortholand.experiments.procrustes import PROCRUSTES
from ortholand.experiments.spec import AnyExperiment

EXPERIMENTS: dict[str, AnyExperiment] = {
    experiment.name: experiment for experiment in (PROCRUSTES,)
}

__all__ = ["EXPERIMENTS"]
