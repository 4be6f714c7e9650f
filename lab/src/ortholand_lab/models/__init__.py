"""Networks of the experiments, randomly initialised from a seed."""

from ortholand_lab.models.lenet import LeNet5
from ortholand_lab.models.mlp import TanhMLP, relu_mlp
from ortholand_lab.models.resnet import ResNet, resnet18

__all__ = ["LeNet5", "ResNet", "TanhMLP", "relu_mlp", "resnet18"]
