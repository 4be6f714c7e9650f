"""Accelerate on several processes, started by torchrun, beside one process on all the data."""

import torch
from torch import nn

import ortholand as ol


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


def optimizer_of(model):
    groups = ol.param_groups(model, orthogonal="layers.*")
    return ol.LandingAdam(groups, lr=0.01, attraction="after")


def main():
    from accelerate import Accelerator  # here: tests are collected without it

    torch.manual_seed(0)
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = optimizer_of(twin)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    ranks, rank = accelerator.num_processes, accelerator.process_index
    for k in range(20):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        accelerator.backward(prepared(x.chunk(ranks)[rank]).square().mean())
        optimizer.step()
        twin_optimizer.zero_grad()
        twin(x).square().mean().backward()
        twin_optimizer.step()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    error = max((p - q).abs().max().item() for p, q in pairs)
    assert isinstance(prepared, nn.parallel.DistributedDataParallel)
    assert error < 1e-5, error
    print(f"rank {rank} of {ranks} agrees")
    accelerator.end_training()


if __name__ == "__main__":
    main()
