"""LandingSGD and LandingAdam with Hugging Face Accelerate: the same weights as a loop by hand."""

import pytest
import torch

import ortholand as ol

pytest.importorskip("accelerate", reason="needs accelerate: pip install 'ortholand[ecosystem]'")

from accelerate import Accelerator

pytestmark = [pytest.mark.ecosystem, pytest.mark.usefixtures("_forget_the_accelerator")]

EPOCHS = 4


class Run:
    """What a user prepares, and the loop of Accelerate's guide."""

    def __init__(self, task, **options):
        self.accelerator = Accelerator(cpu=True, **options)
        self.task, model = task, task.model()
        optimizer = task.make_optimizer(model)
        scheduler = task.make_scheduler(optimizer, self.accelerator.gradient_accumulation_steps)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, task.loader()
        )

    def train(self, epochs=EPOCHS, clip=None):
        for _ in range(epochs):
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(inputs, labels)["loss"])
                    if clip and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return self

    @property
    def state(self):
        """The plain model and the plain optimizer."""
        return self.accelerator.unwrap_model(self.model), self.optimizer.optimizer


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({}, {"clip": 0.2}),
        ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
        ({"mixed_precision": "bf16"}, {"bfloat16": True}),
    ],
    ids=["plain", "clipped", "accumulated", "bfloat16"],
)
def test_the_same_as_by_hand(task, assert_same_state, options, by_hand):
    run = Run(task, **options).train(clip=by_hand.get("clip"))
    assert_same_state(run.state, task.train_by_hand(**by_hand)[:2])
    model, optimizer = run.state
    task.check_trained(model, optimizer)


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(task, tmp_path, assert_same_state):
    whole = Run(task).train()
    Run(task).train(EPOCHS // 2).accelerator.save_state(str(tmp_path))
    rest = Run(task)
    rest.accelerator.load_state(str(tmp_path))
    rest.train(EPOCHS // 2)
    assert_same_state(rest.state, whole.state)
    task.check_trained(*rest.state)


def test_the_wrapped_optimizer_can_be_asked(task):
    """Accelerate's wrapper is an Optimizer with our groups."""
    run = Run(task).train(epochs=1)
    assert ol.orthogonality_error(run.optimizer) == ol.orthogonality_error(run.optimizer.optimizer)
    assert set(ol.orthogonality_error(run.optimizer, reduce=None)) == {
        "layers.0.weight",
        "layers.2.weight",
        "layers.4.weight",
    }
    assert run.optimizer.optimizer.skipped_steps() == 0


def test_the_saved_optimizer_holds_no_code_of_ours(task, tmp_path):
    Run(task).train(epochs=1).accelerator.save_state(str(tmp_path))
    saved = torch.load(tmp_path / "optimizer.bin", weights_only=True)
    assert [group["orthogonal"] for group in saved["param_groups"]] == [True, False]
