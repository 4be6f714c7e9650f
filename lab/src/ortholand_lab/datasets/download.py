"""Downloads with checksums: a folder appears whole and checked, or not at all."""

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

ANSWER_SECONDS = 4.0  # within which a server must answer; all the time lost without a network
STALL_SECONDS = 15.0  # within which a server must send something more
TELL_SECONDS = 10.0
CHUNK = 1 << 20
LEFTOVER = "incomplete-"
LEFTOVER_SECONDS = 24 * 3600  # no download takes this long: anything older was killed

# What may go wrong with a request: OSError is the common base of urllib's, ssl's and socket's.
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


class RemoteFile(NamedTuple):
    """A file on the mirrors; for an archive (.tar.gz), the members wanted."""

    name: str
    size: int
    sha256: str
    members: tuple[str, ...] = ()


class DownloadError(Exception):
    """Nothing could be downloaded; the message says why, mirror by mirror."""


def download_folder(
    target: Path,
    mirrors: Sequence[str],
    files: Sequence[RemoteFile],
    check: Callable[[Path], object],
    tell: Callable[[str], None],
) -> None:
    """Download files to a new folder.

    Args:
        target: the folder, which appears once everything is there and checked.
        mirrors: addresses that have all the files, with a slash at the end.
        files: what to download. From an archive, the folder gets the members.
        check: is given the folder before it appears; raises ValueError if something is wrong.
        tell: called with the progress.

    Raises:
        DownloadError: if no mirror has them.
        OSError: if the folder cannot be written.
    """
    answers = ask([mirror + files[0].name for mirror in mirrors])
    failures = []
    for mirror, failure in zip(mirrors, answers.values(), strict=True):
        if not failure:
            failure = _try_mirror(target, mirror, files, check, tell)
            if not failure:
                return
        failures.append(f"{urlsplit(mirror).netloc}: {failure}")
    raise DownloadError("; ".join(failures))


def ask(urls: Sequence[str]) -> Mapping[str, str]:
    """Why each address cannot be reached; nothing for those that answer.

    All are asked at once, in threads that may be abandoned, because a name lookup has no time
    limit: so a machine without a network finds out quickly.
    """
    answers = dict.fromkeys(urls, f"no answer within {ANSWER_SECONDS:g} s")

    def ask_one(url: str) -> None:
        try:
            request = urllib.request.Request(url, method="HEAD")
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS):
                answers[url] = ""
        except NETWORK_ERRORS as error:
            answers[url] = _reason(error)

    threads = [Thread(target=ask_one, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + ANSWER_SECONDS
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return dict(answers)  # a copy: later answers are ignored


def _try_mirror(
    target: Path,
    mirror: str,
    files: Sequence[RemoteFile],
    check: Callable[[Path], object],
    tell: Callable[[str], None],
) -> str:
    """Download all files from one mirror; return what went wrong."""
    # The mode is that of compiled code's folders, which may come to be next to it.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    with tempfile.TemporaryDirectory(prefix=LEFTOVER, dir=target.parent) as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        try:
            for file in files:
                fetch(mirror + file.name, file, folder / file.name, tell)
                if file.members:
                    unpack(folder / file.name, file.members)
            check(folder)
        except (DownloadError, tarfile.TarError, EOFError, ValueError) as error:
            return str(error)
        _put(folder, target)
    return ""


def _put(folder: Path, target: Path) -> None:
    """Move a folder to its place in one step, or into an existing one file by file."""
    try:
        folder.rename(target)
    except OSError:
        target.mkdir(exist_ok=True)
        for path in sorted(folder.iterdir()):
            path.replace(target / path.name)


def fetch(url: str, file: RemoteFile, path: Path, tell: Callable[[str], None]) -> None:
    """Download one file and compare size and checksum.

    Raises:
        DownloadError: if the network or the server fails, or the content is not the file's.
    """
    tell(f"Downloading {url} ({file.size / 1e6:.1f} MB)")
    digest, received, told = hashlib.sha256(), 0, time.monotonic()
    with path.open("wb") as output:
        try:
            with urllib.request.urlopen(url, timeout=STALL_SECONDS) as response:
                # One extra byte shows that it is another file.
                while received <= file.size and (chunk := response.read(CHUNK)):
                    digest.update(chunk)
                    received += len(chunk)
                    output.write(chunk)
                    if time.monotonic() - told > TELL_SECONDS:
                        told = time.monotonic()
                        tell(f"{received / file.size:.0%} of {file.name}")
        except NETWORK_ERRORS as error:
            raise DownloadError(f"{file.name}: {_reason(error)}") from error
    if received != file.size:
        raise DownloadError(f"{file.name} had {received:,} bytes instead of {file.size:,}")
    if digest.hexdigest() != file.sha256:
        raise DownloadError(f"{file.name} has the wrong SHA-256 checksum")


def unpack(archive: Path, members: Collection[str]) -> None:
    """Unpack members of an archive next to it, and delete it.

    Only these, only plain files, and under our own names: an archive may contain anything.
    """
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() and member.name in members else None
            if source is not None:
                with source, (archive.parent / Path(member.name).name).open("wb") as output:
                    shutil.copyfileobj(source, output)
    archive.unlink()


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(reason).__name__


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed download left behind long ago; one under way is left alone."""
    for path in folder.glob(f"{LEFTOVER}*"):
        if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
