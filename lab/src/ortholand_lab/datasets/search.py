"""Finds a data set: option, environment variable, cache folder, download, or the digits."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ortholand.cache import cache_folder
from ortholand_lab.datasets import cifar10, digits, mnist
from ortholand_lab.datasets.base import Dataset, DatasetError, Source
from ortholand_lab.datasets.download import DownloadError, RemoteFile, download_folder

Name = Literal["mnist", "cifar10"]
FOLDER_VARIABLE = "ORTHOLAND_DATA"
OFFLINE_VARIABLE = "ORTHOLAND_OFFLINE"

Paths = tuple[Path, ...]


@dataclass(frozen=True)
class Published:
    """A data set that exists as files: how they are found, read and downloaded.

    Args:
        title: its name.
        places: folders inside a folder with data in which the files may be.
        wanted: what is looked for, in words.
        locate: the files in a place, or nothing.
        identity: what the files are; the title if they are complete.
        read: the data set in the files.
        folder: where in the cache a download goes.
        mirrors: where to download from.
        remote: what to download.
        stand_in: the digits, in the shape of its images.
    """

    title: str
    places: tuple[str, ...]
    wanted: Callable[[], str]
    locate: Callable[[Path], Paths]
    identity: Callable[[Paths], str]
    read: Callable[[Paths], Dataset]
    folder: str
    mirrors: tuple[str, ...]
    remote: tuple[RemoteFile, ...]
    stand_in: Callable[[], Dataset]

    def find_in(self, folder: Path) -> Source | None:
        """The data set in a folder or the usual places inside it.

        Raises:
            DatasetError: if a file is damaged. Files are read right away, rather than failing after
                hours of computing.
        """
        for place in self.places:
            paths = self.locate(folder / place)
            if paths:
                self.read(paths)
                identity = self.identity(paths)
                return Source(identity, self.notice(identity), partial(self.read, paths))
        return None

    def notice(self, identity: str) -> str:
        """What a reader must know about a run with this data: a stand-in, or a part."""
        if identity == digits.IDENTITY:
            return (
                f"Not {self.title}: the {digits.IDENTITY} stand in for it (1,500 images of 8 x 8 "
                "pixels for training, 297 for testing, enlarged). "
                f"These numbers say nothing about {self.title}."
            )
        if identity in ("", self.title):
            return ""
        return f"Not all of {self.title}: {identity.removeprefix(f'{self.title}, ')}."

    def check_whole(self, folder: Path) -> None:
        """Raise unless a downloaded folder is complete and undamaged."""
        paths = self.locate(folder)
        if not paths or self.identity(paths) != self.title:
            raise DatasetError(f"not all files are there; {self.wanted()}")
        self.read(paths)


DATASETS: dict[str, Published] = {
    "mnist": Published(
        title=mnist.NAME,
        places=mnist.PLACES,
        wanted=mnist.wanted,
        locate=mnist.locate,
        identity=mnist.identity,
        read=mnist.read,
        folder="mnist",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        remote=(
            RemoteFile(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            RemoteFile(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            RemoteFile(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            RemoteFile(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        stand_in=partial(digits.read, 1, mnist.SIDE),
    ),
    "cifar10": Published(
        title=cifar10.NAME,
        places=cifar10.PLACES,
        wanted=cifar10.wanted,
        locate=cifar10.locate,
        identity=cifar10.identity,
        read=cifar10.read,
        folder=cifar10.FOLDER,
        mirrors=(
            "https://www.cs.toronto.edu/~kriz/",
            "https://cave.cs.toronto.edu/kriz/",
            "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
        ),
        remote=(
            RemoteFile(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                members=tuple(
                    f"{cifar10.FOLDER}/{file.name}"
                    for file in (*cifar10.TRAIN_FILES, cifar10.TEST_FILE)
                ),
            ),
        ),
        stand_in=partial(digits.read, cifar10.SHAPE[0], cifar10.SHAPE[1]),
    ),
}


def find_dataset(
    name: Name,
    folder: Path | None = None,
    *,
    offline: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Source:
    """Find a data set.

    Args:
        name: which one.
        folder: where it must be. If not given: the folder that the environment variable
            ORTHOLAND_DATA names, the cache folder, a download into it, or if all else fails
            scikit-learn's digits in its place, with a notice.
        offline: do not download, like the environment variable ORTHOLAND_OFFLINE=1.
        tell: called with the progress of a download.

    Raises:
        DatasetError: if it is not in the folder given, or if a file of it is damaged.
    """
    published = DATASETS[name]
    if folder is not None:
        source = published.find_in(folder)
        if source is None:
            raise DatasetError(_not_in(published, folder))
        return source
    for candidate in _folders():
        source = published.find_in(candidate)
        if source is not None:
            return source
    if offline or os.environ.get(OFFLINE_VARIABLE, "0") not in ("", "0"):
        return _stand_in(published, "was not looked for on the network")
    return _downloaded(published, tell)


def data_notice(name: Name, identity: str) -> str:
    """What a report must say about a run with this data; usually nothing."""
    return DATASETS[name].notice(identity)


def dataset_title(name: Name) -> str:
    """The name of a data set."""
    return DATASETS[name].title


def _folders() -> Iterator[Path]:
    """Where data sets may be; the cache last, because there may be no home folder for it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        yield Path(folder).expanduser()
    yield _cache()


def _cache() -> Path:
    try:
        return cache_folder()
    except RuntimeError as error:
        raise DatasetError(str(error)) from error


def _downloaded(published: Published, tell: Callable[[str], None]) -> Source:
    cache = _cache()
    try:
        download_folder(
            cache / published.folder,
            published.mirrors,
            published.remote,
            published.check_whole,
            tell,
        )
    except DownloadError as error:
        return _stand_in(published, f"could not be downloaded ({error})")
    except OSError as error:
        return _stand_in(published, f"could not be put into the cache ({error})")
    source = published.find_in(cache)
    if source is None:
        return _stand_in(published, f"was downloaded, but has gone from {cache}")
    return source


def _stand_in(published: Published, why: str) -> Source:
    notice = (
        f"{published.title} was not found, and {why}. {published.notice(digits.IDENTITY)} "
        f"With the real files: --data DIR, or {FOLDER_VARIABLE}=DIR."
    )
    return Source(digits.IDENTITY, notice, published.stand_in)


def _not_in(published: Published, folder: Path) -> str:
    places = ", ".join(str(folder / place) for place in published.places)
    return (
        f"{published.title} is not in {folder}: looked for {published.wanted()} in {places}. "
        "Put the files there, or leave the folder out to have them downloaded."
    )
