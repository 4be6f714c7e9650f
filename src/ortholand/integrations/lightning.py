"""A callback for Lightning's Trainer. Needs lightning: ``pip install lightning``."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ortholand.integrations.watching import measurements


class OrthogonalityMonitor(Callback):
    """Logs :func:`.watching.measurements`: ``Trainer(callbacks=[OrthogonalityMonitor()])``.

    Args:
        every_n_steps: how often; by default, as often as the Trainer logs.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._latest = 0  # a step may take several batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log, if it is time, by the module's own ``log_dict``."""
        every = self.every_n_steps or max(1, trainer.log_every_n_steps)
        if trainer.global_step % every == 0 and trainer.global_step != self._latest:
            self._latest = trainer.global_step
            found = measurements(*trainer.optimizers)
            pl_module.log_dict({name: float(value) for name, value in found.items()})
