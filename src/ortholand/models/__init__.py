"""Networks of the paper's experiments. Their random start is given by a seed."""

from ortholand.models.lenet import LeNet5
from ortholand.models.mlp import TanhMLP
from ortholand.models.resnet import ResNet, resnet18

__all__ = ["LeNet5", "ResNet", "TanhMLP", "resnet18"]
