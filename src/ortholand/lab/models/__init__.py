"""Networks of the paper's experiments. Their random start is given by a seed."""

from ortholand.lab.models.lenet import LeNet5
from ortholand.lab.models.mlp import TanhMLP
from ortholand.lab.models.resnet import ResNet, resnet18

__all__ = ["LeNet5", "ResNet", "TanhMLP", "resnet18"]
