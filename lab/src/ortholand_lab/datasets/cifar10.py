"""CIFAR-10 from its binary version: one byte of label, then 3 x 32 x 32 bytes of image."""

from pathlib import Path

import torch
from torch import Tensor

from ortholand_lab.datasets.base import Dataset, KnownFile, check_content, is_file, unusable

NAME = "CIFAR-10"
FOLDER = "cifar-10-batches-bin"
PLACES = ("", FOLDER)
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
BYTES = 10_000 * RECORD

# SHA-256 of the training files and of the test file.
SUMS = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
*TRAIN_FILES, TEST_FILE = (KnownFile(name, BYTES, sha256) for name, sha256 in SUMS.items())


def wanted() -> str:
    """What is looked for, in words."""
    return f"{TEST_FILE.name} and at least one of {', '.join(f.name for f in TRAIN_FILES)}"


def locate(place: Path) -> tuple[Path, ...]:
    """The training files that exist, then the test file; nothing without one of each."""
    paths = tuple(path for file in (*TRAIN_FILES, TEST_FILE) if is_file(path := place / file.name))
    return paths if len(paths) > 1 and paths[-1].name == TEST_FILE.name else ()


def identity(paths: tuple[Path, ...]) -> str:
    """What these files are: all of CIFAR-10, or which part of its training images."""
    train = paths[:-1]
    if len(train) == len(TRAIN_FILES):
        return NAME
    which = ", ".join(path.stem for path in train)
    return f"{NAME}, {len(train)} of {len(TRAIN_FILES)} training files ({which})"


def read(paths: tuple[Path, ...]) -> Dataset:
    """Read and check the files.

    Raises:
        DatasetError: if one of them is damaged.
    """
    *train, (test_images, test_labels) = (read_batch(path) for path in paths)
    images, labels = zip(*train, strict=True)
    return Dataset(NAME, torch.cat(images), torch.cat(labels), test_images, test_labels)


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of one file."""
    known = {file.name: file for file in (*TRAIN_FILES, TEST_FILE)}[path.name]
    try:
        with path.open("rb") as file:
            content = file.read(known.size + 1)
    except OSError as error:
        raise unusable(path, f"it cannot be read ({error})") from error
    check_content(path, content, known)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].long()
