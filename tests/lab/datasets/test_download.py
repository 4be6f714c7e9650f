"""Downloads from a server on this machine; never from the network."""

import os
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ortholand_lab.datasets import download, find_dataset, search

STAND_IN = "digits of scikit-learn"
FILES = [
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def with_mirrors(monkeypatch, *mirrors):
    monkeypatch.setitem(
        search.DATASETS, "mnist", replace(search.DATASETS["mnist"], mirrors=mirrors)
    )


def test_mnist_is_downloaded_once(mnist_mirror, own_cache):
    told = []
    first = find_dataset("mnist", tell=told.append)
    assert (first.identity, first.notice) == ("MNIST", "")
    assert first.load().train_images.shape == (12, 1, 28, 28)
    assert names_in(own_cache) == ["mnist"]
    assert names_in(own_cache / "mnist") == FILES
    assert [line.split()[1].rsplit("/", 1)[-1] for line in told] == mnist_mirror.asked
    assert sorted(mnist_mirror.asked) == FILES
    mnist_mirror.asked.clear()
    assert find_dataset("mnist").identity == "MNIST"
    assert mnist_mirror.asked == []


def test_of_the_archive_only_what_is_wanted_is_unpacked(cifar_mirror, cifar_files, own_cache):
    source = find_dataset("cifar10")
    assert (source.identity, source.notice) == ("CIFAR-10", "")
    assert names_in(own_cache) == ["cifar-10-batches-bin"]
    assert names_in(own_cache / "cifar-10-batches-bin") == sorted(cifar_files.contents)
    assert not list(own_cache.parent.rglob("*evil*"))
    assert not Path("/tmp/evil").exists()


def serve_nothing(server):
    server.served.clear()


def serve_one_too_few(server):
    del server.served["t10k-labels-idx1-ubyte.gz"]


def change_a_byte(server):
    body = server.served["train-images-idx3-ubyte.gz"]
    server.served["train-images-idx3-ubyte.gz"] = body[:-1] + bytes([body[-1] ^ 1])


def cut_the_body(server):
    name = "train-images-idx3-ubyte.gz"
    server.promised[name] = len(server.served[name])
    server.served[name] = server.served[name][:500]


def send_less(server):
    server.served["train-images-idx3-ubyte.gz"] = b"<html>Please log in</html>"


def send_more(server):
    server.served["train-images-idx3-ubyte.gz"] += b"x"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (serve_nothing, "HTTP 404"),
        (serve_one_too_few, "t10k-labels-idx1-ubyte.gz: HTTP 404"),
        (change_a_byte, "train-images-idx3-ubyte.gz has the wrong SHA-256 checksum"),
        (cut_the_body, "had 500 bytes instead of"),
        (send_less, "had 26 bytes instead of"),
        (send_more, "bytes instead of"),
    ],
)
def test_a_bad_download_leaves_nothing_and_the_digits_stand_in(
    mnist_mirror, own_cache, spoil, told
):
    spoil(mnist_mirror)
    source = find_dataset("mnist")
    assert source.identity == STAND_IN
    assert told in source.notice
    assert "127.0.0.1" in source.notice
    assert names_in(own_cache) == []


def test_the_content_is_checked_besides_the_transport(
    cifar_mirror, cifar_files, own_cache, monkeypatch
):
    """The archive is the promised one, but what is in it is not the data set."""
    names = [f"cifar-10-batches-bin/{name}" for name in cifar_files.contents]
    published = search.DATASETS["cifar10"]
    [file] = published.remote
    changed = replace(published, remote=(file._replace(members=names[1:]),))
    monkeypatch.setitem(search.DATASETS, "cifar10", changed)
    source = find_dataset("cifar10")
    assert source.identity == STAND_IN
    assert "not all files are there" in source.notice
    assert names_in(own_cache) == []


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_without_a_server_the_digits_stand_in_soon(monkeypatch, mnist_files, own_cache):
    with_mirrors(monkeypatch, f"http://127.0.0.1:{free_port()}/")
    start = time.monotonic()
    source = find_dataset("mnist")
    assert time.monotonic() - start < download.ANSWER_SECONDS
    assert source.identity == STAND_IN
    assert "Connection refused" in source.notice
    assert not own_cache.exists()


def test_servers_that_never_answer_are_given_up_together(monkeypatch, mnist_files):
    monkeypatch.setattr(download, "ANSWER_SECONDS", 0.3)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:  # accepts, and says nothing
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with_mirrors(monkeypatch, *(silent_url + f"{i}/" for i in range(8)))
        start = time.monotonic()
        source = find_dataset("mnist")
    assert time.monotonic() - start < 8 * 0.3
    assert source.identity == STAND_IN
    assert source.notice.count("timed out") + source.notice.count("no answer within 0.3 s") == 8


def test_the_next_mirror_is_tried(monkeypatch, mnist_mirror):
    dead, empty = f"http://127.0.0.1:{free_port()}/", mnist_mirror.url + "empty/"
    with_mirrors(monkeypatch, dead, empty, mnist_mirror.url)
    assert find_dataset("mnist").identity == "MNIST"


def test_a_server_that_stops_in_the_middle_is_given_up(monkeypatch, mnist_mirror, own_cache):
    monkeypatch.setattr(download, "STALL_SECONDS", 0.3)
    name = "train-images-idx3-ubyte.gz"
    release = mnist_mirror.stall(name)
    source = find_dataset("mnist")
    release()
    assert source.identity == STAND_IN
    assert "timed out" in source.notice
    assert names_in(own_cache) == []


@pytest.mark.parametrize("stage", ["fetch", "unpack", "check"])
def test_an_interruption_leaves_nothing(monkeypatch, cifar_mirror, own_cache, stage):
    def interrupt(*_):
        raise KeyboardInterrupt

    if stage == "check":
        changed = replace(search.DATASETS["cifar10"], read=interrupt)
        monkeypatch.setitem(search.DATASETS, "cifar10", changed)
    else:
        monkeypatch.setattr(download, stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        find_dataset("cifar10")
    assert names_in(own_cache) == []


def test_a_folder_in_the_cache_that_lacks_files_is_completed(mnist_mirror, mnist_files, own_cache):
    mnist_files.write(own_cache / "mnist", only="train-images", compress=True)
    assert find_dataset("mnist").identity == "MNIST"
    assert names_in(own_cache / "mnist") == FILES


def test_a_cache_that_cannot_be_written_is_told(mnist_mirror, own_cache):
    own_cache.parent.mkdir(parents=True)
    own_cache.touch()  # a file where the folder should be
    source = find_dataset("mnist")
    assert source.identity == STAND_IN
    assert "could not be put into the cache" in source.notice


def test_what_a_killed_download_left_is_removed_later(mnist_mirror, own_cache):
    for name, age in (("incomplete-old", 2 * download.LEFTOVER_SECONDS), ("incomplete-new", 0)):
        (own_cache / name).mkdir(parents=True)
        (own_cache / name / "half").touch()
        then = time.time() - age
        os.utime(own_cache / name, (then, then))
    find_dataset("mnist")
    assert names_in(own_cache) == ["incomplete-new", "mnist"]
