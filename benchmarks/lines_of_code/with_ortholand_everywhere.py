"""Wide, square, tall and convolution layers orthogonal, by ortholand: the same two lines."""

import torch
from torch import nn

import ortholand as ol

torch.manual_seed(0)
model = nn.Sequential(
    *[nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()],
    *[nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64), nn.Tanh()],
    nn.Linear(64, 10),
)
optimizer = ol.LandingSGD(ol.orthogonalize_(ol.param_groups(model, orthogonal="*")), lr=0.1)
inputs, labels = torch.randn(128, 64), torch.randint(10, (128,))
for _ in range(20):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
