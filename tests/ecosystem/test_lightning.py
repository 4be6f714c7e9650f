"""LandingSGD and LandingAdam in Lightning, unchanged: the same weights as a loop by hand."""

import pytest
import torch

import ortholand as ol

pytest.importorskip("lightning", reason="needs lightning: pip install 'ortholand[ecosystem]'")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

pytestmark = [
    pytest.mark.ecosystem,
    # Lightning 2.6 uses what torch 2.13 has deprecated,
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    # and gives advice that does not suit a tiny task.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Module(LightningModule):
    """What a user writes; ortholand is in ``configure_optimizers`` and nowhere else."""

    def __init__(self, task, accumulate=1):
        super().__init__()
        self.model, self.task, self.accumulate = task.model(), task, accumulate

    def training_step(self, batch, _):
        return self.model(*batch)["loss"]

    def configure_optimizers(self):
        optimizer = self.task.make_optimizer(self.model)
        scheduler = self.task.make_scheduler(optimizer, self.accumulate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Module):
    """Lightning's manual optimization, which hands out a wrapped optimizer."""

    automatic_optimization = False

    def training_step(self, batch, _):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(self.model(*batch)["loss"])
        optimizer.step()
        scheduler.step()
        self.log("error", ol.orthogonality_error(optimizer))
        self.log("skipped", optimizer.skipped_steps())


class Plateau(Module):
    """A scheduler that Lightning steps with a logged number; this one never improves."""

    def training_step(self, batch, _):
        loss = super().training_step(batch, _)
        self.log("constant", 1.0, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.task.make_optimizer(self.model)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "constant"},
        }


def fit(task, folder, module=Module, *, epochs=4, resume=None, **options):
    """A trained module and its trainer, with a checkpoint in the folder after every epoch."""
    module = module(task, options.get("accumulate_grad_batches", 1))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, task.loader(), ckpt_path=resume)
    return module, trainer


@pytest.mark.parametrize(
    ("options", "by_hand", "tolerance"),
    [
        ({}, {}, 0.0),
        ({"gradient_clip_val": 0.2}, {"clip": 0.2}, 1e-6),  # sums a norm in another order
        ({"accumulate_grad_batches": 3}, {"accumulate": 3}, 0.0),
        ({"precision": "bf16-mixed"}, {"bfloat16": True}, 0.0),
    ],
    ids=["plain", "clipped", "accumulated", "bfloat16"],
)
def test_the_same_as_by_hand(task, tmp_path, assert_same_state, options, by_hand, tolerance):
    module, trainer = fit(task, tmp_path, **options)
    model, optimizer, losses = task.train_by_hand(**by_hand)
    assert_same_state((module.model, trainer.optimizers[0]), (model, optimizer), tolerance)
    task.check_trained(module.model, trainer.optimizers[0])
    assert len(losses) == trainer.global_step * options.get("accumulate_grad_batches", 1)


def test_manual_optimization_is_the_same_too(task, tmp_path, assert_same_state):
    module, trainer = fit(task, tmp_path, Manual)
    assert_same_state((module.model, trainer.optimizers[0]), task.train_by_hand()[:2])
    assert trainer.callback_metrics["error"] < 1e-4
    assert trainer.callback_metrics["skipped"] == 0


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(task, tmp_path, assert_same_state):
    whole = fit(task, tmp_path / "whole")
    fit(task, tmp_path / "first", epochs=2)
    rest = fit(task, tmp_path / "rest", resume=tmp_path / "first" / "epoch=1.ckpt")
    assert_same_state(
        (rest[0].model, rest[1].optimizers[0]), (whole[0].model, whole[1].optimizers[0])
    )
    task.check_trained(rest[0].model, rest[1].optimizers[0])


def test_checkpoints_hold_no_code_of_ours(task, tmp_path):
    fit(task, tmp_path, epochs=1)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["orthogonal"] is True


def test_a_scheduler_on_a_monitored_number(task, tmp_path):
    _, trainer = fit(task, tmp_path, Plateau, epochs=3)
    start = task.make_optimizer(task.model()).param_groups
    for group, before in zip(trainer.optimizers[0].param_groups, start, strict=True):
        assert group["lr"] == pytest.approx(before["lr"] / 4)


def test_bfloat16_weights_stay_as_near_as_they_can_be_stored(task, tmp_path):
    module, trainer = fit(task, tmp_path, precision="bf16-true")
    assert all(p.dtype == torch.bfloat16 for p in module.model.parameters())
    # Half a unit in the last place of 8 bits, in each of p columns of norm 1.
    assert ol.orthogonality_error(trainer.optimizers[0]) < 2 * 2**-9 * 20**0.5
    with torch.no_grad():
        loss = module.model.float()(*task.dataset().tensors)["loss"]
    assert loss < 2 / 3 * task.loss(task.model())
