"""What a data set is, where it was found, and errors for files that cannot be used."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor


class DatasetError(ValueError):
    """A data set is not where it should be, or one of its files cannot be used."""


@dataclass(frozen=True)
class Dataset:
    """Labelled images, split into training and test.

    Args:
        name: which one: "MNIST", "CIFAR-10", "digits".
        train_images: uint8, ``(N, channels, height, width)``.
        train_labels: int64, ``(N,)``, from 0 to 9.
        test_images: as ``train_images``.
        test_labels: as ``train_labels``.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Source:
    """Where a data set was found.

    Args:
        identity: what it is, for the records: numbers made with another are not comparable.
        notice: what the user must know about it; usually empty.
        load: reads it.
    """

    identity: str
    notice: str
    load: Callable[[], Dataset]


class KnownFile(NamedTuple):
    """A file as published: name, and size and SHA-256 of its uncompressed content."""

    name: str
    size: int
    sha256: str


def is_file(path: Path) -> bool:
    """Whether there is a file that may be read."""
    try:
        return path.is_file()
    except OSError:  # a folder that is closed to us
        return False


def check_content(path: Path, content: bytes, known: KnownFile) -> None:
    """Raise unless the content is what was published, bit for bit."""
    if len(content) < known.size:
        raise unusable(path, f"it ends after {len(content):,} of {known.size:,} bytes")
    if len(content) > known.size:
        raise unusable(path, f"it has more than {known.size:,} bytes")
    if hashlib.sha256(content).hexdigest() != known.sha256:
        raise unusable(path, "its SHA-256 checksum is not that of the published file")


def unusable(path: Path, reason: str) -> DatasetError:
    """The error for a damaged file."""
    return DatasetError(
        f"{path} is not a usable {path.name}: {reason}. "
        "Delete it and run again, or put a whole copy in its place."
    )
