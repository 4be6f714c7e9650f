"""A callback for the Trainer of transformers. Needs transformers."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl

from ortholand.integrations.watching import measurements


class OrthogonalityMonitor(TrainerCallback):
    """Logs :func:`.watching.measurements` whenever the Trainer logs.

    Args:
        log: the Trainer's function: ``trainer.add_callback(OrthogonalityMonitor(trainer.log))``.
    """

    def __init__(self, log: Callable[[dict[str, float]], Any]) -> None:
        self.log = log

    def on_step_end(
        self, _args: Any, _state: Any, control: TrainerControl, optimizer: Any = None, **_: Any
    ) -> None:
        """Log, if the Trainer is about to."""
        if control.should_log and (found := measurements(optimizer)):
            self.log(found)
            control.should_log = True  # which logging has cleared
