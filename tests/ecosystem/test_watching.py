"""Callbacks that log distances from the manifold, and steps skipped or shortened."""

import copy

import pytest
import torch

import ortholand as ol
from ortholand.integrations.watching import measurements
from tests.ecosystem.test_hubs import Net, data, train

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore:.*is frozen")]
NAMES = {"orthogonality_error", "skipped_steps", "limited_steps"}


class Spoilt(Net):
    """Every second of its losses is NaN, so that steps are skipped."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, inputs, labels=None):
        self.calls += 1
        out = super().forward(inputs, labels)
        return {**out, "loss": out["loss"] * (torch.nan if self.calls % 2 == 0 else 1.0)}


def check(last):
    """A run of 12 steps, 6 of which its 10 parameters skip, by hand and watched."""
    model = Spoilt()
    optimizer = ol.LandingSGD(model.parameters(), lr=30.0)
    train(model, optimizer)
    expected = measurements(optimizer)
    assert expected["skipped_steps"] == 6 * 10
    assert expected["limited_steps"] > 0
    assert expected["orthogonality_error"] == ol.orthogonality_error(optimizer) > 0
    assert {name: last[name] for name in NAMES} == pytest.approx(expected, rel=1e-6)


def test_plain():
    model = Net()
    optimizer = ol.LandingAdam(model.parameters(), lr=0.01)
    train(model, optimizer)
    found = measurements(optimizer)
    assert found.keys() == NAMES
    assert found["orthogonality_error"] < 1e-4
    both = measurements(optimizer, copy.deepcopy(optimizer), torch.optim.SGD([torch.ones(3)]))
    assert both == {k: v * (1 + k.endswith("steps")) for k, v in found.items()}
    assert measurements(torch.optim.SGD([torch.ones(3)])) == {}
    accelerate = pytest.importorskip("accelerate")
    assert measurements(accelerate.Accelerator(cpu=True).prepare(optimizer)) == found


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("every", [1, None])
def test_lightning(tmp_path, every, monkeypatch):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    from ortholand.integrations import lightning

    calls = []

    def counted(*optimizers):
        calls.append(optimizers)
        return measurements(*optimizers)

    monkeypatch.setattr(lightning, "measurements", counted)

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Spoilt()

        def training_step(self, batch, _):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            return ol.LandingSGD(self.parameters(), lr=30.0)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[lightning.OrthogonalityMonitor(every)],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=4,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(*data()), batch_size=8))
    check({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert len(trainer.logger.experiment.metrics) == 0  # all were written
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert set(lines[0].split(",")) >= NAMES
    assert len(lines) == 1 + 3
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[lightning.OrthogonalityMonitor(1)],
        accumulate_grad_batches=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert len(calls) == (12 if every else 3)
    calls.clear()
    trainer.fit(Module(), DataLoader(TensorDataset(*data()), batch_size=8))
    assert len(calls) == 4  # once for each step


@pytest.mark.usefixtures("_forget_the_accelerator")
def test_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from ortholand.integrations.transformers import OrthogonalityMonitor

    inputs, labels = data()
    trainer = transformers.Trainer(
        Spoilt(),
        transformers.TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            num_train_epochs=1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            logging_steps=4,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)],
        optimizer_cls_and_kwargs=(ol.LandingSGD, {"lr": 30.0}),
    )
    trainer.add_callback(OrthogonalityMonitor(trainer.log))
    trainer.train()
    history = trainer.state.log_history
    watched = [entry for entry in history if "orthogonality_error" in entry]
    assert [entry["step"] for entry in watched] == [4, 8, 12]
    assert sum("loss" in entry for entry in history) == 3  # the Trainer's own
    check(watched[-1])
