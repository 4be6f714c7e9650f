"""The plain script with an orthogonal first layer, by geoopt (tall matrices only)."""

import geoopt
import torch
from torch import nn

torch.manual_seed(0)


class OrthogonalLinear(nn.Module):
    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        start = nn.init.orthogonal_(torch.empty(n_inputs, n_outputs))
        self.weight = geoopt.ManifoldParameter(start, manifold=geoopt.Stiefel())
        self.bias = nn.Parameter(torch.zeros(n_outputs))

    def forward(self, inputs):
        return inputs @ self.weight + self.bias


model = nn.Sequential(OrthogonalLinear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = geoopt.optim.RiemannianSGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(128, 64), torch.randint(10, (128,))
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
