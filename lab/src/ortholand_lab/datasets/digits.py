"""The 1,797 digits that come with scikit-learn, which stand in for missing data sets."""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ortholand_lab.datasets.base import Dataset

IDENTITY = "digits of scikit-learn"
TRAIN = 1500  # the first ones; the other 297 are for testing
BRIGHTEST = 16


def read(channels: int, side: int) -> Dataset:
    """The 8 x 8 digits, enlarged to the size of the images they stand in for."""
    from sklearn.datasets import load_digits  # here: an import that others need not pay for

    pixels, target = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = enlarge(pixels.reshape(-1, 8, 8), side).expand(-1, channels, -1, -1).contiguous()
    labels = target.long()
    return Dataset("digits", images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


def enlarge(images: Tensor, side: int) -> Tensor:
    """From (N, 8, 8), values 0 to 16, to (N, 1, side, side), values 0 to 255; bilinear."""
    larger = interpolate(images.double()[:, None], size=(side, side), mode="bilinear")
    return (larger * (255 / BRIGHTEST)).round().to(torch.uint8)
