"""One tiny task, and the training loop a user writes by hand, for the frameworks to agree with."""

import os
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ortholand as ol

# Before any framework is imported: nothing here may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

EPOCHS, BATCHES, BATCH_SIZE = 4, 12, 8

OPTIMIZERS = {
    "sgd": partial(ol.LandingSGD, lr=0.2, momentum=0.9, attraction="after"),
    "adam": partial(ol.LandingAdam, lr=0.05, attraction="after"),
}


class TinyModel(nn.Module):
    """A tall, a square and a wide orthogonal layer, and a head without constraint.

    They are made orthogonal where they are made. To do so where the optimizer is made would be too
    late: Lightning has loaded the weights of a checkpoint by then, and they would move.
    The signature of ``forward`` is the one that the Trainer of transformers asks for.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 8), nn.Tanh()
        )
        self.head = nn.Linear(8, 3)
        ol.orthogonalize_(self.layers, orthogonal=nn.Linear)

    def forward(self, inputs, labels=None):
        logits = self.head(self.layers(inputs))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@dataclass
class Task:
    """What is trained, by one of the optimizers."""

    optimizer: str

    def dataset(self):
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(BATCHES * BATCH_SIZE, 12, generator=generator)
        labels = (inputs @ torch.randn(12, 3, generator=generator)).argmax(1)
        return TensorDataset(inputs, labels)

    def loader(self):
        return DataLoader(self.dataset(), batch_size=BATCH_SIZE)

    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return TinyModel()

    def make_optimizer(self, model):
        return OPTIMIZERS[self.optimizer](self.make_groups(model))

    @staticmethod
    def make_groups(model):
        return ol.param_groups(model, orthogonal="layers.*", other_options={"weight_decay": 0.01})

    def make_scheduler(self, optimizer, accumulate=1):
        """Warms up from 0, and lowers the rate step by step; cycles momentum or betas too."""
        rates = [group["lr"] for group in optimizer.param_groups]
        steps = EPOCHS * BATCHES // accumulate
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1)

    def train_by_hand(self, epochs=EPOCHS, *, clip=None, accumulate=1, bfloat16=False):
        """The plain loop. Returns the model, the optimizer and the loss of every batch."""
        model, losses = self.model(), []
        optimizer = self.make_optimizer(model)
        scheduler = self.make_scheduler(optimizer, accumulate)
        for _ in range(epochs):
            for i, (inputs, labels) in enumerate(self.loader(), start=1):
                with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                    loss = model(inputs, labels)["loss"]
                (loss / accumulate).backward()
                losses.append(loss.item())
                if i % accumulate:
                    continue
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model, optimizer, losses

    def loss(self, model):
        """Over all of the data."""
        with torch.no_grad():
            return model(*self.dataset().tensors)["loss"].item()

    def check_trained(self, model, optimizer):
        """A third of the loss is gone, and the weights are on the manifold."""
        assert self.loss(model) < 2 / 3 * self.loss(self.model())
        errors = ol.orthogonality_error(optimizer, reduce=None)
        assert len(errors) == 3
        assert max(errors.values()) < 1e-4
        assert optimizer.skipped_steps() == 0


@pytest.fixture(params=list(OPTIMIZERS))
def task(request):
    return Task(request.param)


@pytest.fixture
def assert_same_state():
    """Models and optimizers of two runs must agree, by default bit for bit."""

    def check(run, other, tolerance=0.0):
        for ours, theirs in zip(run, other, strict=True):
            ours, theirs = leaves(ours.state_dict()), leaves(theirs.state_dict())
            assert ours.keys() >= theirs.keys()  # torch adds an option of its own on loading
            for path, value in theirs.items():
                if isinstance(value, np.ndarray | float):
                    assert ours[path] == pytest.approx(value, rel=0, abs=tolerance), path
                else:
                    assert ours[path] == value, path

    return check


def leaves(state, path=""):
    """All that is in nested dictionaries and lists, by path; tensors as arrays."""
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {path: state.float().numpy() if isinstance(state, torch.Tensor) else state}
    return {k: v for name, part in items for k, v in leaves(part, f"{path}/{name}").items()}


@pytest.fixture
def _forget_the_accelerator():
    """Its precision and its mode are global; the Trainer is built on it."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
