"""ResNet-18 (He et al. 2016), with torchvision's layers, names and initialisation."""

from torch import Tensor, nn

from ortholand_lab.models.seeding import seeded


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample = None
        if stride != 1 or n_in != n_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features of the next layer."""
        carried = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + carried)


class ResNet(nn.Module):
    """A residual network of basic blocks.

    Args:
        blocks: number of blocks in each of the four stages.
        n_classes: number of outputs.
        width: number of channels in the first stage; each further stage has twice as many.
        seed: seed of the initialisation.
    """

    def __init__(
        self, blocks: tuple[int, int, int, int], n_classes: int, *, width: int, seed: int
    ) -> None:
        super().__init__()
        with seeded(seed):
            self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
            self.layer1 = _stage(width, width, blocks[0], stride=1)
            self.layer2 = _stage(width, 2 * width, blocks[1], stride=2)
            self.layer3 = _stage(2 * width, 4 * width, blocks[2], stride=2)
            self.layer4 = _stage(4 * width, 8 * width, blocks[3], stride=2)
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.fc = nn.Linear(8 * width, n_classes)
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, for images ``(N, 3, H, W)``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(n_classes: int = 10, *, width: int = 64, seed: int) -> ResNet:
    """ResNet-18: two blocks in each stage; a smaller width makes it narrower.

    >>> sum(parameter.numel() for parameter in resnet18(seed=0).parameters())
    11181642
    """
    return ResNet((2, 2, 2, 2), n_classes, width=width, seed=seed)


def _stage(n_in: int, n_out: int, blocks: int, stride: int) -> nn.Sequential:
    rest = (BasicBlock(n_out, n_out, 1) for _ in range(blocks - 1))
    return nn.Sequential(BasicBlock(n_in, n_out, stride), *rest)
