from pathlib import Path

import pytest

from ortholand_lab.datasets import (
    DatasetError,
    cache_folder,
    data_notice,
    dataset_title,
    download,
    find_dataset,
)

STAND_IN = "digits of scikit-learn"


@pytest.fixture
def no_network(monkeypatch):
    """Asking any server is a mistake."""

    def never(*_):
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(download, "ask", never)


@pytest.mark.usefixtures("no_network")
def test_a_folder_that_is_given_must_have_the_files(mnist_files, tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHOLAND_DATA", str(mnist_files.write(tmp_path / "elsewhere")))
    folder = mnist_files.write(tmp_path / "given", only="images")
    with pytest.raises(DatasetError) as caught:
        find_dataset("mnist", folder)
    for part in (folder, folder / "mnist", folder / "MNIST/raw", "train-labels-idx1-ubyte"):
        assert str(part) in str(caught.value)
    with pytest.raises(DatasetError, match="nowhere"):
        find_dataset("mnist", tmp_path / "nowhere")


@pytest.mark.usefixtures("no_network")
def test_the_order_is_option_variable_cache(mnist_files, tmp_path, monkeypatch, own_cache):
    cached = mnist_files.write(own_cache / "mnist")
    named = mnist_files.write(tmp_path / "named")
    given = mnist_files.write(tmp_path / "given")

    def loaded_from(**kwargs):
        [paths] = find_dataset("mnist", **kwargs).load.args
        return paths[0].parent

    assert loaded_from() == cached
    monkeypatch.setenv("ORTHOLAND_DATA", str(named))
    assert loaded_from() == named
    assert loaded_from(folder=given) == given
    monkeypatch.setenv("ORTHOLAND_DATA", str(tmp_path / "nothing here"))
    assert loaded_from() == cached


@pytest.mark.usefixtures("no_network")
def test_a_damaged_file_is_an_error_wherever_it_is_found(
    mnist_files, tmp_path, monkeypatch, own_cache
):
    for folder in (own_cache / "mnist", tmp_path / "named"):
        path = mnist_files.write(folder) / "train-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DatasetError, match="ends after") as caught:
            find_dataset("mnist")
        assert str(path) in str(caught.value)
        monkeypatch.setenv("ORTHOLAND_DATA", str(tmp_path / "named"))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("by", ["option", "variable"])
def test_offline_the_digits_stand_in(monkeypatch, own_cache, by):
    if by == "variable":
        monkeypatch.setenv("ORTHOLAND_OFFLINE", "1")
    source = find_dataset("mnist", offline=by == "option")
    assert source.identity == STAND_IN
    for part in ("MNIST was not found", "was not looked for on the network", "--data DIR"):
        assert part in source.notice
    assert not own_cache.exists()


@pytest.mark.usefixtures("no_network")
def test_a_folder_that_may_not_be_looked_into_has_no_data(mnist_files, monkeypatch, own_cache):
    mnist_files.write(own_cache / "mnist")

    def closed(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", closed)
    assert find_dataset("mnist", offline=True).identity == STAND_IN


def test_the_variable_may_say_that_one_is_online(monkeypatch, mnist_mirror):
    monkeypatch.setenv("ORTHOLAND_OFFLINE", "0")
    assert find_dataset("mnist").identity == "MNIST"


def test_what_a_report_tells_of_the_data():
    assert data_notice("mnist", "MNIST") == data_notice("mnist", "") == ""
    assert "stand in" in data_notice("cifar10", STAND_IN)
    assert "say nothing about CIFAR-10" in data_notice("cifar10", STAND_IN)
    part = "CIFAR-10, 1 of 5 training files (data_batch_1)"
    assert data_notice("cifar10", part).startswith("Not all of CIFAR-10: 1 of 5")


def test_the_cache_is_where_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ortholand"


def test_titles():
    assert (dataset_title("mnist"), dataset_title("cifar10")) == ("MNIST", "CIFAR-10")


def test_files_at_hand_need_no_home_and_a_download_says_what_it_lacks(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("no home folder: set XDG_CACHE_HOME")

    monkeypatch.setattr("ortholand_lab.datasets.search.cache_folder", no_home)
    monkeypatch.setenv("ORTHOLAND_DATA", str(tmp_path))
    with pytest.raises(DatasetError, match="XDG_CACHE_HOME"):
        find_dataset("mnist")
