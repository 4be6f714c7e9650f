"""Compiled code is made once, kept where nobody else can write, and loaded only if it is whole."""

import errno
import os
import pwd
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand import native
from ortholand.cache import cache_folder
from ortholand.native import build, recipe
from ortholand.native.safekeeping import is_sealed, seal_of, seal_path
from tests.native.conftest import QUICK, answers, needs_compiler

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
SOMEBODY_ELSE = 54321
SOURCE = QUICK


@pytest.fixture(autouse=True)
def _a_quick_source(quick_source):
    """All libraries are looked for, made and kept alike: one stands for them."""


def is_there():
    """Whether compiled code can be had and works, by a new look at the cache."""
    native.forget()
    return answers(native.library(SOURCE))


def why_not():
    """The reason of a new look at the cache that finds nothing."""
    assert not is_there()
    reason = native.library(SOURCE)
    assert isinstance(reason, str)
    return reason


def is_running(pid):
    """Whether a process is there and not a zombie; one that was killed may need a moment."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.02)
    return True


def put(path, content):
    """Another file under that name. (Not written into: the old one may be mapped.)"""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o700)


@pytest.fixture
def library(fresh):
    """A cached library."""
    assert is_there()
    return build.library_path(SOURCE)


@pytest.fixture
def no_compiling(monkeypatch):
    monkeypatch.setattr(build, "_compile", lambda *_, **__: pytest.fail("compiled again"))


@needs_compiler
def test_it_is_compiled_once_and_kept(fresh, monkeypatch, request):
    assert is_there()
    library = build.library_path(SOURCE)
    kept = {library, seal_path(library)}
    assert set(fresh.iterdir()) == kept  # nothing else is left behind
    request.getfixturevalue("no_compiling")
    assert is_there()
    assert set(fresh.iterdir()) == kept


@needs_compiler
def test_nobody_else_can_read_or_write_it_whatever_the_umask(fresh):
    old = os.umask(0o002)
    try:
        assert is_there()
    finally:
        os.umask(old)
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in fresh.iterdir())
    assert is_sealed(build.library_path(SOURCE))


@needs_compiler
def test_many_at_once_leave_one_library(fresh):
    wanted = SOURCE, native.SIGNATURES[SOURCE.source]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(build.load, *wanted) for _ in range(3)]
    assert all(answers(future.result()) for future in found)
    library = build.library_path(SOURCE)
    assert set(fresh.iterdir()) == {library, seal_path(library)}
    assert is_sealed(library)


def truncated(library):
    put(library, library.read_bytes()[:-5000])  # SIGBUS, if it were loaded


def flipped(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    put(library, bytes(content))


def garbage(library):
    put(library, b"not a library")


def sealed_garbage(library):
    put(library, b"not a library")
    put(seal_path(library), seal_of(b"not a library").encode())


def foreign(library):
    """Whole, and loadable, and something else."""
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(library)]
    library.unlink()
    subprocess.run(command, check=True)
    library.chmod(0o700)
    put(seal_path(library), seal_of(library.read_bytes()).encode())


def without_seal(library):
    put(library, b"not a library")
    seal_path(library).unlink()


def broken_seal(library):
    put(seal_path(library), b"\xff\x00")


def seal_alone(library):
    library.unlink()


DAMAGE = [
    truncated,
    flipped,
    garbage,
    sealed_garbage,
    foreign,
    without_seal,
    broken_seal,
    seal_alone,
]


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_is_damaged_is_made_again(library, damage):
    damage(library)
    assert is_there()
    assert is_sealed(library)
    assert set(library.parent.iterdir()) == {library, seal_path(library)}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_is_damaged_and_cannot_be_made_again_is_not_loaded(library, damage, monkeypatch):
    damage(library)
    monkeypatch.setenv("CXX", "false")
    # Where the damage is looked for: another compiler's library has another name.
    monkeypatch.setattr(build, "library_path", lambda *_: library)
    assert "the compiler failed" in why_not()


@needs_compiler
def test_a_source_without_its_function_is_tried_once(fresh, monkeypatch):
    made = []
    compiled = build._compile
    monkeypatch.setattr(build, "_compile", lambda *to: made.append(to) or compiled(*to))
    monkeypatch.setitem(native.SIGNATURES[SOURCE.source], "ortholand_missing", (None,))
    assert "lacks a function" in why_not()
    assert len(made) == 1


class TestTheFolderMustBeOurs:
    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
    def test_not_writable_by_others(self, fresh, no_compiling, mode):
        fresh.mkdir()
        fresh.chmod(mode)
        reason = why_not()
        assert f"the cache folder {fresh} can be written to by others (mode {mode:o})" in reason
        assert f"chmod go-w {fresh}" in reason

    def test_readable_by_others_is_fine(self, library, no_compiling):
        library.parent.chmod(0o755)
        assert is_there()

    @needs_root
    def test_not_another_user_s(self, fresh, no_compiling):
        fresh.mkdir(mode=0o700)
        os.chown(fresh, SOMEBODY_ELSE, -1)
        assert f"{fresh} belongs to another user (uid {SOMEBODY_ELSE}, not 0)" in why_not()

    def test_not_that_of_who_started_us(self, fresh, no_compiling, monkeypatch):
        fresh.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY_ELSE)
        assert "belongs to another user" in why_not()
        assert "set ORTHOLAND_CACHE" in why_not()

    def test_not_a_link(self, fresh, no_compiling, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        fresh.symlink_to(elsewhere)
        assert f"{fresh} is a link" in why_not()

    @pytest.mark.parametrize("way", ["straight", "by a link inside", "by a link from outside"])
    def test_not_inside_what_everybody_can_write_to(
        self, fresh, no_compiling, tmp_path, monkeypatch, way
    ):
        public = tmp_path / "public"
        (public / "cache").mkdir(parents=True)
        public.chmod(0o777)
        private = tmp_path / "private"
        private.mkdir()
        (public / "link").symlink_to(private)
        (private / "link").symlink_to(public / "cache")
        cache = {
            "straight": public / "cache",
            "by a link inside": public / "link",
            "by a link from outside": private / "link",
        }[way]
        monkeypatch.setenv("ORTHOLAND_CACHE", str(cache))
        reason = why_not()
        assert f"inside {public}, which others can write to (mode 777)" in reason
        assert f"chmod go-w {public}" in reason

    @pytest.mark.parametrize("mode", [0o770, 0o775, 0o2775, 0o707, 0o722])
    @pytest.mark.parametrize("depth", [0, 1, 3])
    def test_not_inside_what_a_group_or_others_can_write_to(
        self, fresh, no_compiling, tmp_path, monkeypatch, mode, depth
    ):
        shared = tmp_path / "shared"
        cache = shared.joinpath(*"abc"[:depth])
        cache.mkdir(parents=True)
        shared.chmod(mode)
        monkeypatch.setenv("ORTHOLAND_CACHE", str(cache))
        assert f"inside {shared}, which others can write to (mode {mode:o})" in why_not()

    @needs_root
    @pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
    def test_not_inside_another_user_s(self, fresh, no_compiling, tmp_path, monkeypatch, mode):
        theirs = tmp_path / "theirs"
        cache = theirs / "ours"
        cache.mkdir(parents=True, mode=0o700)
        theirs.chmod(mode)
        os.chown(theirs, SOMEBODY_ELSE, -1)
        monkeypatch.setenv("ORTHOLAND_CACHE", str(cache))
        reason = why_not()
        assert f"{theirs}, which belongs to another user (uid {SOMEBODY_ELSE}, not 0)" in reason
        assert "set ORTHOLAND_CACHE" in reason

    @needs_root
    @pytest.mark.parametrize("relative", [True, False])
    @pytest.mark.parametrize("chain", [True, False])
    def test_not_by_another_user_s_link(
        self, fresh, no_compiling, tmp_path, monkeypatch, relative, chain
    ):
        """It leads to a folder of ours now, and elsewhere tomorrow."""
        public, private = tmp_path / "public", tmp_path / "private"
        public.mkdir()
        public.chmod(0o1777)
        private.mkdir(mode=0o700)
        link = public / "link"
        link.symlink_to("../private" if relative else private)
        os.chown(link, SOMEBODY_ELSE, -1, follow_symlinks=False)
        cache = link
        if chain:
            cache = tmp_path / "ours"
            cache.symlink_to(link)
        monkeypatch.setenv("ORTHOLAND_CACHE", str(cache))
        reason = why_not()
        assert f"{link}, which belongs to another user (uid {SOMEBODY_ELSE}, not 0)" in reason

    @pytest.mark.parametrize("ending", ["..", "link/.."])
    def test_not_through_what_others_can_write_to(
        self, fresh, no_compiling, tmp_path, monkeypatch, ending
    ):
        """The folder above "link/.." depends on where the link leads."""
        public, private = tmp_path / "public", tmp_path / "private"
        (public / "sub").mkdir(parents=True)
        private.mkdir()
        (private / "link").symlink_to(public / "sub")
        public.chmod(0o777)
        cache = {"..": public / "sub" / "..", "link/..": private / "link" / ".."}[ending]
        monkeypatch.setenv("ORTHOLAND_CACHE", str(cache / "cache"))
        assert f"inside {public}, which others can write to" in why_not()

    def test_not_by_links_that_lead_nowhere(self, fresh, no_compiling, tmp_path, monkeypatch):
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path / "a"))
        assert "cannot be used" in why_not()

    @needs_compiler
    @pytest.mark.parametrize("mode", [0o1777, 0o1770])
    def test_the_sticky_bit_will_do(self, fresh, tmp_path, monkeypatch, mode):
        public = tmp_path / "public"
        public.mkdir()
        public.chmod(mode)
        monkeypatch.setenv("ORTHOLAND_CACHE", str(public))
        assert is_there()

    @needs_compiler
    def test_our_own_links_will_do(self, fresh, tmp_path, monkeypatch):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path / "link" / "deeper"))
        assert is_there()
        assert (tmp_path / "real" / "deeper" / "native").is_dir()

    @needs_compiler
    @pytest.mark.parametrize("umask", [0o002, 0o000])
    def test_folders_that_are_made_pass_whatever_the_umask(
        self, fresh, tmp_path, monkeypatch, umask
    ):
        monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path / "home" / ".cache"))
        old = os.umask(umask)
        try:
            assert is_there()
        finally:
            os.umask(old)
        for made in (tmp_path / "home", tmp_path / "home" / ".cache"):
            assert made.stat().st_mode & 0o777 == 0o700

    @needs_compiler
    def test_a_relative_folder(self, fresh, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ORTHOLAND_CACHE", "relative")
        assert is_there()
        assert build.library_path(SOURCE).parent == tmp_path / "relative" / "native"

    @needs_compiler
    def test_where_nobody_owns_files_that_is_not_asked(self, fresh, monkeypatch):
        fresh.mkdir()
        fresh.chmod(0o777)
        monkeypatch.delattr(os, "geteuid")
        assert is_there()


@needs_compiler
@pytest.mark.parametrize("which", ["library", "seal"])
class TestFilesMustBeOurs:
    def path(self, library, which):
        return library if which == "library" else seal_path(library)

    def test_not_writable_by_others(self, library, no_compiling, which):
        path = self.path(library, which)
        path.chmod(0o720)
        reason = why_not()
        assert f"the cached file {path} can be written to by others (mode 720)" in reason
        assert f"chmod go-w {path}" in reason

    @needs_root
    def test_not_another_user_s(self, library, no_compiling, which):
        path = self.path(library, which)
        os.chown(path, SOMEBODY_ELSE, -1)
        assert f"{path} belongs to another user" in why_not()

    def test_not_a_link(self, library, no_compiling, tmp_path, which):
        path = self.path(library, which)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert f"{path} in the cache is not a plain file" in why_not()

    def test_not_a_link_to_nothing(self, library, no_compiling, tmp_path, which):
        path = self.path(library, which)
        path.unlink()
        path.symlink_to(tmp_path / "nothing")
        assert f"{path} in the cache is not a plain file" in why_not()


class TestWhatCannotBeMade:
    def test_without_a_home(self, fresh, monkeypatch):
        def unknown(_):
            raise KeyError("no such user")

        for name in ("HOME", "XDG_CACHE_HOME", "ORTHOLAND_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
        assert "set HOME, XDG_CACHE_HOME or ORTHOLAND_CACHE" in why_not()
        assert "no home folder" in str(native.why_no_code(torch.float64, 3))
        with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME to a folder"):
            cache_folder()

    @needs_compiler
    def test_in_a_folder_for_reading_only(self, fresh, monkeypatch):
        def refuse(*_, **__):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(build.tempfile, "TemporaryDirectory", refuse)
        reason = why_not()
        assert f"no library can be made in {fresh}" in reason
        assert "Read-only file system" in reason
        assert "set ORTHOLAND_CACHE" in reason

    @needs_compiler
    def test_on_a_full_disk(self, fresh, monkeypatch):
        def refuse(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(build, "write_seal", refuse)
        assert "No space left on device" in why_not()
        assert list(fresh.iterdir()) == []

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("echo 'in f: 1' >&2; echo 'x.cpp:1: error: No space left' >&2; exit 3", "No space"),
            ("exit 3", "gave 3"),
            ("yes 'an error' | head -n 1000 >&2; exit 3", "an error"),
            ("exit 0", "No such file"),  # and nothing written
            (r"printf '\377\376 error' >&2; exit 1", "error"),
            ('for last; do :; done; echo rubbish > "$last"', "no library can be made"),
        ],
    )
    def test_by_an_odd_compiler(self, fresh, tmp_path, monkeypatch, script, reason):
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        assert reason in why_not()
        assert len(why_not()) < 1000
        assert list(fresh.iterdir()) == []

    def test_by_a_compiler_that_is_none(self, fresh, tmp_path, monkeypatch):
        compiler = tmp_path / "compiler"
        compiler.write_bytes(b"\x7fELF rubbish")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        assert "the compiler cannot be run" in why_not()

    def test_by_a_compiler_that_does_not_end(self, fresh, tmp_path, monkeypatch):
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\nexec sleep 60\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(build, "COMPILE_SECONDS", 0.05)
        assert "the compiler took more than 0.05 s" in why_not()

    def test_a_compiler_that_does_not_end_is_tried_once_and_its_children_end(
        self, fresh, tmp_path, monkeypatch
    ):
        compiler, pids, calls = tmp_path / "compiler", tmp_path / "pids", tmp_path / "calls"
        compiler.write_text(
            f"#!/bin/sh\necho x >> {calls}\n"
            f"(sleep 61 & echo $! >> {pids}; wait) &\n"  # a grandchild that holds the pipes
            f"echo $! >> {pids}\ntrap '' TERM\nsleep 62 &\necho $! >> {pids}\nwait; wait\n"
        )
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(build, "COMPILE_SECONDS", 0.5)
        for unit in recipe.units():
            assert "the compiler took more than 0.5 s" in native.library(unit)
        assert calls.read_text() == "x\n"
        assert len(pids.read_text().split()) == 3
        for pid in map(int, pids.read_text().split()):
            assert not is_running(pid)
        assert list(fresh.iterdir()) == []

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    def test_a_compiler_that_is_interrupted_ends(self, fresh, tmp_path, monkeypatch, error):
        compiler, pids = tmp_path / "compiler", tmp_path / "pids"
        compiler.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pids}\nwait\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))

        def interrupted(self, *_, **__):
            while not (pids.exists() and pids.read_text()):
                time.sleep(0.01)
            monkeypatch.undo()
            raise error

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(error):
            build._compile([str(compiler)], tmp_path / "out")
        assert not is_running(int(pids.read_text()))

    @needs_compiler
    def test_another_compiler_is_tried_after_one_that_hung(self, fresh, tmp_path, monkeypatch):
        compiler = tmp_path / "compiler"
        compiler.write_text("#!/bin/sh\nexec sleep 60\n")
        compiler.chmod(0o700)
        with monkeypatch.context() as patch:
            patch.setenv("CXX", str(compiler))
            patch.setattr(build, "COMPILE_SECONDS", 0.05)
            assert "took more than" in why_not()
        assert is_there()

    def test_what_a_compiler_leaves_running_is_not_waited_for(self, fresh, tmp_path, monkeypatch):
        """A compiler's cache may start a server, which inherits all that is open."""
        compiler, pid = tmp_path / "compiler", tmp_path / "pid"
        compiler.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pid}\necho 'an error' >&2; exit 3\n")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(build, "COMPILE_SECONDS", 10)
        try:
            assert "gave 3, an error" in why_not()
        finally:
            os.kill(int(pid.read_text()), signal.SIGKILL)

    def test_from_sources_that_are_not_there(self, fresh, tmp_path, monkeypatch):
        monkeypatch.setattr(recipe, "FOLDER", tmp_path)
        assert "the sources cannot be read" in why_not()

    @needs_compiler
    def test_with_a_sanitizer_that_is_not_loaded(self, fresh, monkeypatch):
        if "libasan" in os.environ.get("LD_PRELOAD", ""):
            pytest.skip("it is loaded")
        monkeypatch.setenv("ORTHOLAND_SANITIZE", "1")
        assert "make sanitize" in why_not()

    @pytest.mark.parametrize("version", ["2.6.0", "2.9.1+cpu"])
    @pytest.mark.thorough
    def test_for_a_torch_that_is_too_old(self, fresh, monkeypatch, version):
        monkeypatch.setattr(build, "version", lambda _: version)
        reason = native.why_no_code(torch.float32)
        assert reason == f"compiled steps need torch 2.10 or newer, and this is {version}"
        X = nn.Parameter(torch.eye(3))
        (row,) = ol.explain(ol.LandingSGD([X]))
        assert (row.engine, row.reason) == ("reference", reason)


@needs_compiler
@pytest.mark.thorough
def test_the_first_step_compiles_two_libraries_and_no_more(fresh, monkeypatch):
    """The border, and the steps of one type; matrices side by side have code of their own."""
    X = nn.Parameter(ol.random_orthogonal(12, 12, seed=0))
    X.grad = torch.ones(12, 12)
    ol.LandingSGD([X], lr=0.1, fused=True).step()
    made = sorted(path.name.rpartition("-")[0] for path in fresh.glob("*.so"))
    assert made == ["ops", "steps-float-0"]
