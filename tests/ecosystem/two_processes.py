"""Accelerate, or Lightning, on two processes, beside one process on all the data.

Started as a program: ``torchrun --nproc-per-node 2 two_processes.py accelerate``, or
``python two_processes.py lightning``, which starts its processes itself.
"""

import sys
import warnings

import torch
from torch import nn

import ortholand as ol

STEPS, BATCH = 20, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 8)
        )
        self.head = nn.Linear(8, 3)
        ol.orthogonalize_(self.layers, orthogonal=nn.Linear)

    def forward(self, inputs):
        return self.head(self.layers(inputs))


def new_net():
    torch.manual_seed(0)
    return Net()


def optimizer_of(model):
    groups = ol.param_groups(model, orthogonal="layers.*")
    return ol.LandingAdam(groups, lr=0.01, attraction="after")


def batch(step):
    return torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step))


def loss_of(model, inputs):
    return model(inputs).square().mean()


def alone():
    """The model that one process trains."""
    model = new_net()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return model


def with_accelerate():
    """The model that this process and another train."""
    from accelerate import Accelerator  # here: tests are collected without it

    accelerator, model = Accelerator(cpu=True), new_net()
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    assert isinstance(prepared, nn.parallel.DistributedDataParallel)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = batch(step).chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(loss_of(prepared, mine))
        optimizer.step()
    accelerator.end_training()
    return model


def with_lightning():
    """The model that two processes of Lightning train."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = new_net()

        def training_step(self, step, _):
            return loss_of(self.net, batch(int(step)).chunk(2)[self.global_rank])

        def configure_optimizers(self):
            return optimizer_of(self.net)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",  # a spawned process could not import this class
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps = torch.utils.data.DataLoader(range(STEPS), batch_size=1)
    trainer.fit(module, steps)
    return module.net


def main(framework):
    warnings.simplefilter("ignore")  # advice on tiny tasks
    torch.set_num_threads(1)
    model = {"accelerate": with_accelerate, "lightning": with_lightning}[framework]()
    pairs = zip(model.parameters(), alone().parameters(), strict=True)
    error = max((p - q).abs().max().item() for p, q in pairs)
    assert error < 1e-5, error
    print("two processes agree with one")


if __name__ == "__main__":
    main(sys.argv[1])
