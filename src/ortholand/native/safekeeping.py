"""The folder of compiled code: that it is the user's own, and that what is in it is whole.

Loading a library runs it. So nothing is loaded that somebody else could have put there, and nothing
that is not, byte for byte, what was once compiled: beside each library its *seal*, a small file
with its length and hash. (A library that was cut short would end the process where it is loaded.)
"""

import os
import stat
from pathlib import Path

from ortholand.cache import cache_folder
from ortholand.native.recipe import seal_of

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ELSEWHERE = "set ORTHOLAND_CACHE to a folder of your own"


class NoCodeError(Exception):
    """There is no compiled code; the message says why, and what helps."""


def library_folder() -> Path:
    """Where compiled code is kept: in ``ORTHOLAND_CACHE``, or in the user's cache folder.

    Raises:
        RuntimeError: if neither is known (:func:`ortholand.cache.cache_folder`).
    """
    folder = os.environ.get("ORTHOLAND_CACHE")
    return (Path(folder) if folder else cache_folder()) / "native"


def own_folder() -> Path:
    """The folder of compiled code, made if need be.

    Raises:
        NoCodeError: if there can be none, or if others could put something into it.
    """
    try:
        folder = library_folder().absolute()
    except RuntimeError as error:
        raise NoCodeError(
            "there is no home folder to keep it in: set HOME, XDG_CACHE_HOME or ORTHOLAND_CACHE"
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own_folder(folder)
    except OSError as error:
        raise NoCodeError(
            f"the cache folder {folder} cannot be used ({error}): {ELSEWHERE}"
        ) from error
    return folder


def check_own_folder(folder: Path) -> None:
    """See that nobody else can put something into a folder, or another folder in its place."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NoCodeError(f"the cache folder {folder} is a link: remove it, or {ELSEWHERE}")
    _check_owner(status, f"the cache folder {folder}", folder)
    if _knows_owners():
        # Also what the path says where links lead elsewhere: whoever can write there changes them.
        for parent in [*folder.parents, *folder.resolve().parents]:
            _check_parent(parent)


def check_own_file(path: Path) -> None:
    """See that a file in the cache is a plain one that nobody else can have written."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NoCodeError(f"{path} in the cache is not a plain file: remove it")
    _check_owner(status, f"the cached file {path}", path)


def _check_owner(status: os.stat_result, what: str, path: Path) -> None:
    if not _knows_owners():
        return
    if status.st_uid != os.geteuid():
        raise NoCodeError(
            f"{what} belongs to another user (uid {status.st_uid}, not {os.geteuid()}): {ELSEWHERE}"
        )
    if status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise NoCodeError(
            f"{what} can be written to by others (mode {mode:o}): chmod go-w {path}, or remove it"
        )


def _check_parent(parent: Path) -> None:
    mode = parent.stat().st_mode
    # With the sticky bit, as in /tmp, only owners can rename or remove what is there.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise NoCodeError(
            f"the cache folder is inside {parent}, which everybody can write to "
            f"(mode {stat.S_IMODE(mode):o}): chmod o-w {parent}, or {ELSEWHERE}"
        )


def _knows_owners() -> bool:
    return hasattr(os, "geteuid")  # not on Windows, where modes say nothing either


def seal_path(library: Path) -> Path:
    """The file that says what a library was when it was compiled."""
    return library.with_suffix(".seal")


def is_sealed(library: Path) -> bool:
    """Whether a cached library is there and just as it was compiled.

    Raises:
        NoCodeError: if somebody else could have written it or its seal.
        OSError: if they cannot be read.
    """
    there = [path for path in (library, seal_path(library)) if os.path.lexists(path)]
    for path in there:
        check_own_file(path)
    if len(there) < 2:
        return False
    return seal_path(library).read_bytes() == seal_of(library.read_bytes()).encode()
