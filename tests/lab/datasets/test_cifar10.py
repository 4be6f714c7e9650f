import pytest
import torch

from ortholand_lab.datasets import DatasetError, find_dataset


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_images_and_labels_are_read(cifar_files, tmp_path, place):
    cifar_files.write(tmp_path / "data" / place)
    source = find_dataset("cifar10", tmp_path / "data")
    assert (source.identity, source.notice) == ("CIFAR-10", "")
    data = source.load()
    train = list(cifar_files.contents)[:-1]
    assert torch.equal(data.train_images, torch.cat([cifar_files.images[n] for n in train]))
    assert torch.equal(data.train_labels, torch.cat([cifar_files.labels[n] for n in train]).long())
    assert torch.equal(data.test_images, cifar_files.images["test_batch.bin"])
    assert torch.equal(data.test_labels, cifar_files.labels["test_batch.bin"].long())
    assert data.train_images.dtype == torch.uint8


def test_some_training_files_are_enough_and_told(cifar_files, tmp_path):
    folder = cifar_files.write(tmp_path / "data")
    for i in (1, 3, 4):
        (folder / f"data_batch_{i}.bin").unlink()
    source = find_dataset("cifar10", folder)
    assert source.identity == "CIFAR-10, 2 of 5 training files (data_batch_2, data_batch_5)"
    assert source.notice == (
        "Not all of CIFAR-10: 2 of 5 training files (data_batch_2, data_batch_5)."
    )
    data = source.load()
    assert torch.equal(data.train_images[:4], cifar_files.images["data_batch_2.bin"])
    assert torch.equal(data.train_images[4:], cifar_files.images["data_batch_5.bin"])


@pytest.mark.parametrize("only", ["data_batch", "test_batch"])
def test_training_or_test_files_alone_are_not_enough(cifar_files, tmp_path, only):
    folder = cifar_files.write(tmp_path / "data", only=only)
    with pytest.raises(DatasetError, match=r"looked for test_batch.bin and at least one of"):
        find_dataset("cifar10", folder)


@pytest.mark.parametrize("name", ["data_batch_3.bin", "test_batch.bin"])
@pytest.mark.parametrize("kind", ["cut", "long", "label", "changed"])
def test_a_damaged_file_is_refused(cifar_files, tmp_path, name, kind):
    folder = cifar_files.write(tmp_path / "data")
    content = cifar_files.contents[name]
    changed, told = {
        "cut": (content[:-1], "ends after 12,291 of 12,292 bytes"),
        "long": (content + b"x", "more than 12,292 bytes"),
        "label": (b"\xff" + content[1:], "checksum"),
        "changed": (content[:-1] + bytes([content[-1] ^ 1]), "checksum"),
    }[kind]
    (folder / name).write_bytes(changed)
    with pytest.raises(DatasetError, match="Delete it and run again") as caught:
        find_dataset("cifar10", folder)
    assert str(folder / name) in str(caught.value)
    assert told in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_not_there(cifar_files, tmp_path):
    folder = cifar_files.write(tmp_path / "data")
    (folder / "test_batch.bin").unlink()
    (folder / "test_batch.bin").mkdir()
    with pytest.raises(DatasetError, match="is not in"):
        find_dataset("cifar10", folder)
