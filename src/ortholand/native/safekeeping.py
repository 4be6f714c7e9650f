"""The folder of compiled code: checks that it is the user's own and its contents are intact.

Loading a library runs it. So nothing is loaded that somebody else could have put there, or that is
not, byte for byte, what was compiled: each library has a *seal*, a small file with its length and
hash. (Loading a truncated library would end the process.)
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
    """The folder of compiled code, created if necessary.

    Raises:
        NoCodeError: if it cannot be used, or if others could write to it.
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
    """Raise if somebody else could write to a folder or replace it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NoCodeError(f"the cache folder {folder} is a link: remove it, or {ELSEWHERE}")
    _check_owner(status, f"the cache folder {folder}", folder)
    if _knows_owners():
        # The literal path too, if links lead elsewhere: whoever can write there can change them.
        for parent in [*folder.parents, *folder.resolve().parents]:
            _check_parent(parent)


def check_own_file(path: Path) -> None:
    """Raise unless a file in the cache is a plain one that nobody else can have written."""
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
    # With the sticky bit, as in /tmp, only owners can rename or remove its contents.
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
    """Whether a cached library exists and is unchanged since it was compiled.

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
