"""The real files, where they are: in $ORTHOLAND_DATA, or in shared/data beside the repository."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

from ortholand_lab.datasets import search

BESIDE = Path(__file__).parents[4] / "shared" / "data"
FOLDER = Path(os.environ.get("ORTHOLAND_DATA") or BESIDE)


def find(name):
    source = search.DATASETS[name].find_in(FOLDER)
    if source is None:
        pytest.skip(f"{name} is not in {FOLDER} (set ORTHOLAND_DATA)")
    return source


def test_mnist():
    data = find("mnist").load()
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.test_images.shape == (10_000, 1, 28, 28)
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert torch.bincount(data.test_labels)[0] == 980
    # The mean and deviation that everyone normalises with.
    pixels = data.train_images.double() / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=1e-4)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=1e-4)


def test_cifar10():
    source = find("cifar10")
    data = source.load()
    assert source.identity.startswith("CIFAR-10")
    assert data.train_images.shape[1:] == (3, 32, 32)
    assert len(data.train_labels) % 10_000 == 0
    assert torch.bincount(data.test_labels).tolist() == 10 * [1000]
    pixels = data.test_images[:2000].double() / 255
    means = pixels.mean(dim=(0, 2, 3))
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.01)  # red, green, blue
    # In pictures, pixels side by side are more alike than distant ones: the layout is right.
    for axis in (2, 3):
        near, far = (difference(pixels, axis, step) for step in (1, 16))
        assert near < far / 2


def difference(pixels, axis, step):
    return float((pixels - pixels.roll(step, axis)).narrow(axis, step, 32 - step).abs().mean())


def test_the_checksums_of_the_downloads_are_those_of_the_files():
    [(paths,)] = [find("mnist").load.args]
    compressed = {path.name: path for path in paths if path.suffix == ".gz"}
    if not compressed:
        pytest.skip("MNIST is there, but not as it is downloaded")
    for file in search.DATASETS["mnist"].remote:
        content = compressed[file.name].read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size, file.sha256)
