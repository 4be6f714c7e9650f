"""LeNet-5, as in the paper."""

from torch import Tensor, nn, tanh
from torch.nn.functional import avg_pool2d

from ortholand_lab.models.seeding import seeded


class LeNet5(nn.Module):
    """Three convolutions and a linear layer, for images of 28 x 28 and ten classes.

    The paper gives the layers. It names neither the activations nor the pooling between them:
    these are tanh and 2 x 2 means, as in LeNet (LeCun et al. 1998). With ReLU, kernels that
    are orthogonal from the start would make the scores grow from layer to layer.

    Args:
        seed: seed of torch's default initialisation.

    >>> import torch
    >>> LeNet5(seed=0)(torch.zeros(4, 1, 28, 28)).shape
    torch.Size([4, 10])
    """

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.conv1 = nn.Conv2d(1, 6, 5)
            self.conv2 = nn.Conv2d(6, 16, 5)
            self.conv3 = nn.Conv2d(16, 120, 4)
            self.linear = nn.Linear(120, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, for images ``(N, 1, 28, 28)``."""
        x = avg_pool2d(tanh(self.conv1(images)), 2)
        x = avg_pool2d(tanh(self.conv2(x)), 2)
        x = tanh(self.conv3(x))
        return self.linear(x.flatten(1))
