"""MNIST from its idx files, compressed or not."""

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ortholand_lab.datasets.base import Dataset, KnownFile, check_content, is_file, unusable

NAME = "MNIST"
PLACES = ("", "mnist", "MNIST/raw")  # in a folder with data; the last is torchvision's
SIDE = 28

# SHA-256 of images and labels for training, images and labels for testing.
SUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def _known(name: str) -> KnownFile:
    """A file as published: a magic number and the sizes, then a byte for each pixel or label."""
    count = 60_000 if name.startswith("train") else 10_000
    return KnownFile(name, 16 + count * SIDE**2 if "idx3" in name else 8 + count, SUMS[name])


FILES = tuple(map(_known, SUMS))


def wanted() -> str:
    """What is looked for, in words."""
    return ", ".join(file.name for file in FILES) + " (each with .gz or without)"


def locate(place: Path) -> tuple[Path, ...]:
    """The four files, if all are there."""
    paths = []
    for file in FILES:
        candidates = (place / file.name, place / f"{file.name}.gz")
        paths += [path for path in candidates if is_file(path)][:1]
    return tuple(paths) if len(paths) == len(FILES) else ()


def identity(paths: tuple[Path, ...]) -> str:  # noqa: ARG001
    """What these files are: there is only one MNIST."""
    return NAME


def read(paths: tuple[Path, ...]) -> Dataset:
    """Read and check the four files.

    Raises:
        DatasetError: if one of them is damaged.
    """
    train_images, train_labels, test_images, test_labels = (
        read_idx(path, known) for path, known in zip(paths, FILES, strict=True)
    )
    return Dataset(
        NAME,
        train_images.reshape(-1, 1, SIDE, SIDE),
        train_labels.long(),
        test_images.reshape(-1, 1, SIDE, SIDE),
        test_labels.long(),
    )


def read_idx(path: Path, known: KnownFile) -> Tensor:
    """The array in an idx file: a magic number, the sizes, the bytes."""
    content = _content(path, known.size)
    check_content(path, content, known)
    start = 16 if "idx3" in known.name else 8
    _, *shape = struct.unpack(f">{start // 4}I", content[:start])
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(shape)


def _content(path: Path, size: int) -> bytes:
    """The content of a file, compressed or not, read up to one byte beyond the expected size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(size + 1)
    except EOFError as error:
        raise unusable(path, "the compressed data end too early") from error
    except zlib.error as error:
        raise unusable(path, f"the compressed data are damaged ({error})") from error
    except OSError as error:  # gzip's own error is one too
        raise unusable(path, f"it cannot be read ({error})") from error
