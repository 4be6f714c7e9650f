"""The plain script with an orthogonal first layer, by POGO (pogo-torch)."""

import torch
from pogo import POGO, base
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
weight = nn.Parameter(nn.init.orthogonal_(model[0].weight).detach()[None])
del model[0].weight
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
orthogonal_optimizer = POGO([weight], base.SGD(), 0.1)
inputs, labels = torch.randn(128, 64), torch.randint(10, (128,))
for _ in range(20):
    optimizer.zero_grad()
    orthogonal_optimizer.zero_grad()
    model[0].weight = weight[0]
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    orthogonal_optimizer.step()
