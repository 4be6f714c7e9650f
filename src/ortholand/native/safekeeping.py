"""The folder of compiled code: checks that it is the user's own and its contents are intact.

Loading a library runs it. So nothing is loaded that somebody else could have put there, or that is
not, byte for byte, what was compiled: each library has a *seal*, a small file with its length and
hash. (Loading a truncated library would end the process.)

Whoever can write to a folder can replace what is in it. So every folder and every link on the way
to the cache must belong to the user or to root, and nobody else may write to a folder on the way,
unless its sticky bit is set, as in /tmp: there only its owner and an entry's own owner can remove
or rename the entry, and both are the user or root. A group may have other members now or later,
so a folder that a group can write to is refused too. (With access control lists, the group's mode
is the most that any of them allows, so they are covered.)
"""

import errno
import os
import stat
from pathlib import Path

from ortholand.cache import cache_folder
from ortholand.native.recipe import seal_of

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ELSEWHERE = "set ORTHOLAND_CACHE to a folder of your own"
MOST_LINKS = 40  # as many as Linux follows


class NoCodeError(Exception):
    """There is no compiled code; the message says why, and what helps."""


def library_folder() -> Path:
    """Where compiled code is kept: in ``ORTHOLAND_CACHE``, or in the user's cache folder.

    RuntimeError if neither is known (:func:`ortholand.cache.cache_folder`).
    """
    folder = os.environ.get("ORTHOLAND_CACHE")
    return (Path(folder) if folder else cache_folder()) / "native"


def own_folder() -> Path:
    """The folder of compiled code, created if necessary. Others must not be able to write to it."""
    try:
        folder = library_folder().absolute()
    except RuntimeError as error:
        raise NoCodeError(
            "there is no home folder to keep it in: set HOME, XDG_CACHE_HOME or ORTHOLAND_CACHE"
        ) from error
    try:
        if _knows_owners():
            _enter(folder.parent)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NoCodeError(
            f"the cache folder {folder} cannot be used ({error}): {ELSEWHERE}"
        ) from error
    if folder.is_symlink():
        raise NoCodeError(f"the cache folder {folder} is a link: remove it, or {ELSEWHERE}")
    _check_owner(folder, f"the cache folder {folder}")
    return folder


def _enter(folder: Path, links: int = 0) -> None:
    """Go to a folder as the system does, link by link: check what is passed, create the rest."""
    if links > MOST_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
    for entry in (*reversed(folder.parents), folder):
        if not os.path.lexists(entry):
            entry.mkdir(mode=0o700, exist_ok=True)
        inside = f"the cache folder is inside {entry}, which"
        mode = _checked_mode(entry, inside, 0, os.geteuid())
        if stat.S_ISDIR(mode) and mode & OTHERS_WRITE and not mode & stat.S_ISVTX:
            raise NoCodeError(
                f"{inside} others can write to (mode {stat.S_IMODE(mode):o}): chmod go-w {entry}, "
                f"or {ELSEWHERE}"
            )
        if stat.S_ISLNK(mode):
            _enter(entry.parent / entry.readlink(), links + 1)


def _check_owner(path: Path, what: str) -> None:
    """Raise if a file or folder is another user's, or others can write to it."""
    if not _knows_owners():
        return
    mode = stat.S_IMODE(_checked_mode(path, what, os.geteuid()))
    if mode & OTHERS_WRITE:
        raise NoCodeError(
            f"{what} can be written to by others (mode {mode:o}): chmod go-w {path}, or remove it"
        )


def _checked_mode(path: Path, what: str, *owners: int) -> int:
    """The mode of a file, folder or link that belongs to one of these users; else an error."""
    found = path.lstat()
    if found.st_uid not in owners:
        raise NoCodeError(
            f"{what} belongs to another user (uid {found.st_uid}, not {os.geteuid()}): {ELSEWHERE}"
        )
    return found.st_mode


def _knows_owners() -> bool:
    return hasattr(os, "geteuid")  # not on Windows, where modes say nothing either


def seal_path(library: Path) -> Path:
    """The file that says what a library was when it was compiled."""
    return library.with_suffix(".seal")


def is_sealed(library: Path) -> bool:
    """Whether a cached library exists, is unchanged since it was made, and is the user's own."""
    there = [path for path in (library, seal_path(library)) if os.path.lexists(path)]
    for path in there:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise NoCodeError(f"{path} in the cache is not a plain file: remove it")
        _check_owner(path, f"the cached file {path}")
    if len(there) < 2:
        return False
    return seal_path(library).read_bytes() == seal_of(library.read_bytes()).encode()


def write_seal(library: Path) -> None:
    """Write down what a library is now."""
    seal = seal_path(library)
    seal.touch(mode=0o600)
    seal.write_text(seal_of(library.read_bytes()))
