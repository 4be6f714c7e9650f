import gzip
import struct

import pytest
import torch

from ortholand_lab.datasets import DatasetError, find_dataset, mnist

IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_images_and_labels_are_read(mnist_files, tmp_path, place, compress):
    mnist_files.write(tmp_path / "data" / place, compress=compress)
    source = find_dataset("mnist", tmp_path / "data")
    assert (source.identity, source.notice) == ("MNIST", "")
    data = source.load()
    assert data.name == "MNIST"
    assert data.train_images.dtype == data.test_images.dtype == torch.uint8
    assert torch.equal(data.train_images, mnist_files.images["train"][:, None])
    assert torch.equal(data.train_labels, mnist_files.labels["train"].long())
    assert torch.equal(data.test_images, mnist_files.images["t10k"][:, None])
    assert torch.equal(data.test_labels, mnist_files.labels["t10k"].long())


def test_compressed_and_plain_files_may_be_mixed(mnist_files, tmp_path):
    mnist_files.write(tmp_path / "data", only="images")
    mnist_files.write(tmp_path / "data", only="labels", compress=True)
    assert find_dataset("mnist", tmp_path / "data").identity == "MNIST"


def damage(name, content):
    """Ways in which a file can be wrong, and what must be said of it."""
    digit = content[:-1] + bytes([(content[-1] + 1) % 10])
    return {
        "cut": (content[:-7], f"ends after {len(content) - 7:,} of {len(content):,} bytes"),
        "empty": (b"", "ends after 0"),
        "long": (content + b"more", f"more than {len(content):,} bytes"),
        "magic": (struct.pack(">I", 0x1234) + content[4:], "checksum"),
        "sizes": (content[:4] + struct.pack(">I", 7) + content[8:], "checksum"),
        "changed": (digit, "checksum"),
    }


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", [IMAGES, LABELS])
@pytest.mark.parametrize("kind", ["cut", "empty", "long", "magic", "sizes", "changed"])
def test_a_damaged_file_is_refused(mnist_files, tmp_path, name, kind, compress):
    content, told = damage(name, mnist_files.contents[name])[kind]
    folder = mnist_files.write(tmp_path / "data", compress=compress)
    path = folder / (f"{name}.gz" if compress else name)
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DatasetError, match="Delete it and run again") as caught:
        find_dataset("mnist", folder)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_a_label_out_of_range_is_refused(mnist_files, tmp_path):
    folder = mnist_files.write(tmp_path / "data")
    content = bytearray(mnist_files.contents[LABELS])
    content[-2] = 10
    (folder / LABELS).write_bytes(content)
    with pytest.raises(DatasetError, match="checksum"):
        find_dataset("mnist", folder)


@pytest.mark.parametrize("kind", ["cut", "plain", "scrambled"])
def test_damaged_compression_is_refused(mnist_files, tmp_path, kind):
    folder = mnist_files.write(tmp_path / "data", compress=True)
    path = folder / f"{IMAGES}.gz"
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "plain": mnist_files.contents[IMAGES],
            "scrambled": whole[:100] + bytes(200) + whole[300:],
        }[kind]
    )
    with pytest.raises(DatasetError) as caught:
        find_dataset("mnist", folder)
    assert str(path) in str(caught.value)


def test_a_file_that_changes_after_it_was_found_is_refused_when_it_is_read(mnist_files, tmp_path):
    folder = mnist_files.write(tmp_path / "data")
    source = find_dataset("mnist", folder)
    (folder / LABELS).write_bytes(b"")
    with pytest.raises(DatasetError, match="ends after 0"):
        source.load()


def test_a_bomb_is_not_unpacked(mnist_files, tmp_path):
    folder = mnist_files.write(tmp_path / "data", compress=True)
    content = mnist._content(folder / f"{IMAGES}.gz", 100)
    assert len(content) == 101
