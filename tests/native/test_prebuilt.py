"""Code that came with the package is taken first, if it is whole and the processor can run it."""

import json
import logging
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand import about, native
from ortholand.native import build, prebuilt, recipe
from ortholand.native.recipe import Unit
from tests.native.conftest import QUICK, answers, needs_compiler

ROOT = Path(__file__).parents[2]
SOURCE = QUICK
UNITS = [SOURCE, Unit("ops")]

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        (platform.system(), platform.machine()) != ("Linux", "x86_64"),
        reason="made on Linux, x86-64",
    ),
]


@pytest.fixture(autouse=True)
def _a_quick_source(quick_source):
    """All libraries are looked for alike: the quickest to compile stands for them."""


@pytest.fixture(scope="module")
def made(hook, tmp_path_factory):
    """What a wheel brings, of two sources."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipe.SOURCES, SOURCE.source, (recipe.PROCESSOR,))
        patch.setattr(recipe, "units", lambda: iter(UNITS))
        hook.build_all(recipe, "x86_64", folder)
    return folder


@pytest.fixture
def package(made, fresh, monkeypatch):
    """A package that came with libraries; one without compiler, unless a test gives it back."""
    folder = fresh.parent / "package"
    shutil.copytree(made, folder)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    return folder


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)


def works():
    """Whether compiled code can be had and works, by a new look."""
    native.forget()
    return answers(native.library(SOURCE))


def origin():
    return Path(native.library(SOURCE)._name)


def library(package):
    return prebuilt.library_path(SOURCE)


def change_manifest(package, **changes):
    path = package / recipe.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reseal(package, path):
    seals = json.loads((package / recipe.MANIFEST).read_text())["seals"]
    name = path.relative_to(package).as_posix()
    change_manifest(package, seals={**seals, name: recipe.seal_of(path.read_bytes())})


# The order ----------------------------------------------------------------------------------------


def test_it_is_taken_without_a_compiler_and_nothing_is_written(package, fresh, no_compiler):
    assert works()
    assert origin() == library(package)
    assert not fresh.exists()


@pytest.mark.thorough
def test_its_operations_work(package, fresh, no_compiler):
    assert works()
    assert native.all_below(1.0, [torch.zeros(3)])
    assert not native.all_below(0.0, [torch.zeros(3)])
    assert native.library(Unit("ops"))._name.startswith(str(package))
    assert not fresh.exists()


def test_it_is_taken_where_there_is_a_compiler(package, fresh, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled"))
    assert works()
    assert origin().is_relative_to(package)
    assert not fresh.exists()


def test_it_can_be_switched_off(package, monkeypatch):
    monkeypatch.setenv("ORTHOLAND_NATIVE", "0")
    assert not works()
    assert native.library(SOURCE) == native.SWITCHED_OFF


def test_a_source_tree_has_none(fresh):
    assert not prebuilt.FOLDER.exists()
    assert works()
    assert build.library_path(SOURCE).exists()
    assert build.prebuilt_library(SOURCE) is None


def test_sanitizers_get_their_own(package, monkeypatch):
    monkeypatch.setenv("ORTHOLAND_SANITIZE", "1")
    assert build.prebuilt_library(SOURCE) is None


def test_compiling_is_announced_once(fresh, caplog):
    caplog.set_level(logging.INFO, logger="ortholand.native")
    build._announce.cache_clear()
    assert works()
    assert answers(native.library(SOURCE._replace(scalar="double")))  # another library
    assert len([r for r in caplog.records if "Compiling for this processor" in r.message]) == 1
    assert str(fresh) in caplog.text
    caplog.clear()
    assert works()
    assert not caplog.records


# Damage -------------------------------------------------------------------------------------------


def truncated(package):
    path = library(package)
    content = path.read_bytes()[:-5000]
    path.unlink()
    path.write_bytes(content)  # SIGBUS, if it were loaded


def flipped(package):
    path = library(package)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def missing(package):
    library(package).unlink()


def a_folder(package):
    path = library(package)
    path.unlink()
    path.mkdir()


def no_library_with_its_seal(package):
    path = library(package)
    path.unlink()
    path.write_bytes(b"not a library")
    reseal(package, path)


def another_library_with_its_seal(package):
    path = library(package)
    path.unlink()
    shutil.copy(path.with_name("ops.so"), path)
    reseal(package, path)


def without_its_seal(package):
    change_manifest(package, seals={})


def odd_seals(package):
    change_manifest(package, seals=3)


def no_manifest(package):
    (package / recipe.MANIFEST).unlink()


def broken_manifest(package):
    (package / recipe.MANIFEST).write_bytes(b"\xff{")


def a_manifest_of_something_else(package):
    (package / recipe.MANIFEST).write_text("[1, 2]")


def a_manifest_of_another_kind(package):
    change_manifest(package, levels=4)


def from_other_sources(package):
    change_manifest(package, sources=recipe.seal_of(b"other sources"))


def for_another_machine(package):
    change_manifest(package, machine="aarch64")


def no_answer_from_the_processor(package):
    (package / "processor.so").unlink()


def a_wrong_answer_from_the_processor(package):
    path = package / "processor.so"
    path.unlink()
    shutil.copy(package / "x86-64" / "ops.so", path)


def no_question_to_the_processor(package):
    a_wrong_answer_from_the_processor(package)
    reseal(package, package / "processor.so")


DAMAGE = {
    truncated: "is damaged: install again",
    flipped: "is damaged: install again",
    missing: "No such file",
    a_folder: "Is a directory",
    no_library_with_its_seal: "cannot be loaded",
    another_library_with_its_seal: "cannot be loaded",
    without_its_seal: "is damaged: install again",
    odd_seals: "the manifest of prebuilt code cannot be read",
    no_manifest: "the manifest of prebuilt code cannot be read",
    broken_manifest: "the manifest of prebuilt code cannot be read",
    a_manifest_of_something_else: "the manifest of prebuilt code cannot be read",
    a_manifest_of_another_kind: "the manifest of prebuilt code cannot be read",
    from_other_sources: "made from other sources",
    for_another_machine: "is for aarch64, not for x86_64",
    no_answer_from_the_processor: "No such file",
    a_wrong_answer_from_the_processor: "is damaged",
    no_question_to_the_processor: "cannot be loaded",
}
each_damage = pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)


@each_damage
def test_what_is_damaged_is_compiled_instead(package, fresh, damage, caplog):
    caplog.set_level(logging.INFO, logger="ortholand.native")
    damage(package)
    assert works()
    assert build.library_path(SOURCE).exists()
    assert DAMAGE[damage] in caplog.text


@each_damage
def test_what_is_damaged_and_cannot_be_compiled_is_told(package, damage, no_compiler):
    damage(package)
    assert not works()
    reason = native.library(SOURCE)
    assert DAMAGE[damage] in reason
    assert "no C++ compiler found" in reason


def test_explain_tells_what_is_missing(package, no_compiler):
    X = nn.Parameter(torch.eye(3))
    X.grad = torch.ones(3, 3).triu()
    optimizer = ol.LandingSGD([X], lr=0.1)
    told = str(ol.explain(optimizer))
    assert "steps-float-0.so" in told  # this package has no code of steps
    assert "no C++ compiler found" in told
    optimizer.step()
    assert not torch.equal(X, torch.eye(3))


# The processor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", recipe.VECTORS["x86_64"])
def test_the_processor_s_vectors_are_picked(package, monkeypatch, vectors):
    monkeypatch.setattr(prebuilt, "widest", lambda _: vectors)
    for unit in UNITS:
        assert prebuilt.library_path(unit) == package / vectors / f"{unit.name}.so"


def test_every_library_is_another_one(made):
    libraries = sorted(made.rglob("*.so"))
    assert len(libraries) == 1 + len(UNITS) * len(recipe.VECTORS["x86_64"])
    borders = [path.read_bytes() for path in libraries if path.stem == "ops"]
    assert len(set(borders)) == len(borders)


def disassembly(path):
    return subprocess.run(
        ["objdump", "-d", str(path)], capture_output=True, text=True, check=True
    ).stdout


def test_libraries_use_the_vectors_they_are_for_and_no_wider_ones(made):
    oldest, middle, newest = (
        disassembly(made / vectors / "ops.so") for vectors in recipe.VECTORS["x86_64"]
    )
    assert "%xmm" in oldest
    assert "%ymm" not in oldest
    assert "%ymm" in middle
    assert "%zmm" not in middle
    assert "%k1" not in middle
    assert "%k1" in newest
    question = disassembly(made / "processor.so")
    assert "xgetbv" in question
    assert "%ymm" not in question


# What is told about it ----------------------------------------------------------------------------


class TestAbout:
    @pytest.fixture
    def steps(self, package, monkeypatch):
        """The unit that stands for all; this package has another one in its place."""
        unit = Unit("steps", "float")
        for vectors in recipe.VECTORS["x86_64"]:
            path = package / vectors / f"{unit.name}.so"
            shutil.copy(package / vectors / f"{SOURCE.name}.so", path)
            reseal(package, path)
        monkeypatch.setitem(native.SIGNATURES, "steps", native.SIGNATURES[SOURCE.source])
        return package

    def test_prebuilt_code(self, steps, no_compiler):
        told = about.facts()["compiled code"]
        assert told.startswith(f"prebuilt for {library(steps).parent.name}, by ")
        assert json.loads((steps / recipe.MANIFEST).read_text())["compiler"] in told

    @pytest.mark.thorough
    def test_code_that_is_made_here(self, fresh):
        assert about.facts()["compiled code"].startswith(f"made here by {build.compiler()}")

    @pytest.mark.thorough
    def test_code_that_is_made_here_because_of_damage(self, package):
        told = about.facts()["compiled code"]
        assert told.startswith(f"made here by {build.compiler()}")
        assert "steps-float-0.so" in told

    def test_none(self, fresh, no_compiler):
        told = about.facts()["compiled code"]
        assert told.startswith("none, torch's operations step: no C++ compiler found")


# The wheel ----------------------------------------------------------------------------------------


class TestTheRecipe:
    def test_it_has_every_source_type_and_size(self):
        sizes = {"steps": recipe.SIZES, "search": (0,)}
        wanted = {Unit("ops")} | {
            Unit(source, scalar, size)
            for source in sizes
            for scalar in native.SCALARS.values()
            for size in sizes[source]
        }
        assert set(recipe.units()) == wanted
        assert all(path.exists() for unit in wanted for path in unit.paths)

    def test_it_is_known_without_torch(self, hook):
        loaded = hook.load_recipe(ROOT / hook.NATIVE / "recipe.py")
        assert [tuple(unit) for unit in loaded.units()] == [tuple(u) for u in recipe.units()]
        assert loaded.sources_seal() == recipe.sources_seal()
        code = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
        path = ROOT / hook.NATIVE / "recipe.py"
        command = [sys.executable, "-c", code, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.strip() == "False"


class TestTheHook:
    @pytest.fixture
    def wheel(self, hook, monkeypatch):
        """The hook of a wheel's build, with one source."""
        loaded = hook.load_recipe(ROOT / hook.NATIVE / "recipe.py")
        monkeypatch.setitem(loaded.SOURCES, SOURCE.source, (recipe.PROCESSOR,))
        monkeypatch.setattr(loaded, "units", lambda: iter([loaded.Unit(*SOURCE)]))
        monkeypatch.setattr(hook, "load_recipe", lambda _: loaded)
        self_made = hook.PrebuiltHook()
        self_made.root, self_made.target_name = str(ROOT), "wheel"
        return self_made

    def initialized(self, wheel, version="standard"):
        data = {"force_include": {}}
        wheel.initialize(version, data)
        return data

    def test_a_wheel_with_code(self, wheel, monkeypatch):
        monkeypatch.setenv("ORTHOLAND_PREBUILT", "1")
        data = self.initialized(wheel)
        assert data["tag"] == "py3-none-manylinux_2_28_x86_64"
        assert data["pure_python"] is False
        inside = {Path(place) for place in data["force_include"].values()}
        folder = Path("ortholand/native/libraries")
        assert folder / recipe.MANIFEST in inside
        assert folder / "x86-64-v3" / f"{SOURCE.name}.so" in inside
        assert all(Path(path).exists() for path in data["force_include"])
        wheel.finalize("standard", data, "")
        assert not any(Path(path).exists() for path in data["force_include"])

    @pytest.mark.parametrize("unit", [Unit("steps", "double"), Unit("search", "double")])
    @pytest.mark.thorough
    def test_every_source_keeps_the_promise_of_its_tag(self, unit, hook, tmp_path):
        """One library of each: what it asks of the system is the same for all types and sizes."""
        made = tmp_path / f"{unit.name}.so"
        flags = *recipe.FLAGS, *recipe.portable_flags("x86-64-v3")
        arguments = unit.arguments(tmp_path, tmp_path)
        subprocess.run(["c++", *flags, *arguments, "-o", str(made)], check=True)
        assert hook.platform_tag("x86_64", [made]) == "manylinux_2_28_x86_64"

    @pytest.mark.parametrize("wanted", [None, "", "0"])
    def test_a_pure_wheel(self, wheel, monkeypatch, wanted):
        monkeypatch.delenv("ORTHOLAND_PREBUILT", raising=False)
        if wanted is not None:
            monkeypatch.setenv("ORTHOLAND_PREBUILT", wanted)
        assert self.initialized(wheel) == {"force_include": {}}

    def test_an_editable_installation_compiles_nothing(self, wheel, monkeypatch):
        monkeypatch.setenv("ORTHOLAND_PREBUILT", "1")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled"))
        assert self.initialized(wheel, "editable") == {"force_include": {}}

    def test_nor_does_a_source_distribution(self, wheel, monkeypatch):
        monkeypatch.setenv("ORTHOLAND_PREBUILT", "1")
        wheel.target_name = "sdist"
        assert self.initialized(wheel) == {"force_include": {}}

    def test_a_compiler_that_fails_is_quoted(self, wheel, monkeypatch):
        monkeypatch.setenv("ORTHOLAND_PREBUILT", "1")
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(RuntimeError, match="gave 1"):
            self.initialized(wheel)

    def test_without_torch(self, wheel, hook, monkeypatch, tmp_path):
        monkeypatch.setenv("ORTHOLAND_PREBUILT", "1")
        monkeypatch.setenv("ORTHOLAND_TORCH", str(tmp_path))
        with pytest.raises(RuntimeError, match=r"headers of torch 2\.10 .*found none in"):
            self.initialized(wheel)
        monkeypatch.delenv("ORTHOLAND_TORCH")
        monkeypatch.setattr(hook.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(RuntimeError, match="name the folder of an installed torch"):
            hook.find_headers()

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_without_a_compiler(self, hook, monkeypatch, machine):
        monkeypatch.setattr(hook.shutil, "which", lambda _: None)
        with pytest.raises(RuntimeError, match=f"compiler for {machine}.*leave ORTHOLAND_PREBUILT"):
            hook.find_compiler(machine)

    def test_machines(self, hook):
        assert hook.machine_for("1", "Linux", "x86_64") == "x86_64"
        assert hook.machine_for("1", "Linux", "aarch64") == "aarch64"
        assert hook.machine_for("aarch64", "Linux", "x86_64") == "aarch64"

    @pytest.mark.parametrize(
        ("wanted", "system", "here"),
        [
            ("1", "Darwin", "arm64"),
            ("1", "Windows", "AMD64"),
            ("1", "Linux", "riscv64"),
            ("yes", "Linux", "x86_64"),
            ("aarch64", "Darwin", "x86_64"),
        ],
    )
    def test_machines_that_there_is_no_code_for(self, hook, wanted, system, here):
        with pytest.raises(RuntimeError, match=f"got '{wanted}' on {system} {here}. Leave it out"):
            hook.machine_for(wanted, system, here)


HEADERS = """
Dynamic Section:
  NEEDED               libstdc++.so.6
  NEEDED               {library}

Version References:
  required from libm.so.6:
    0x09691a75 0x00 12 GLIBC_2.2.5
    0x06969189 0x00 07 {symbol}
"""


class TestThePromiseOfManylinux:
    @pytest.mark.parametrize(
        "symbol",
        ["GLIBC_2.28", "GLIBC_2.3", "GLIBCXX_3.4.24", "GLIBCXX_3.4", "CXXABI_1.3.9", "GCC_3.0"],
    )
    def test_kept(self, hook, symbol):
        for library in ("libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"):
            assert hook.is_portable(HEADERS.format(symbol=symbol, library=library))

    @pytest.mark.parametrize(
        "symbol",
        [
            "GLIBC_2.29",
            "GLIBC_2.34",
            "GLIBC_PRIVATE",
            "GLIBC_ABI_DT_RELR",
            "GLIBCXX_3.4.29",
            "CXXABI_1.3.13",
            "OPENSSL_3.0.0",
        ],
    )
    def test_broken_by_a_symbol(self, hook, symbol):
        assert not hook.is_portable(HEADERS.format(symbol=symbol, library="libc.so.6"))

    def test_broken_by_a_library(self, hook):
        assert not hook.is_portable(HEADERS.format(symbol="GLIBC_2.3", library="libgomp.so.1"))

    def test_not_kept_by_what_cannot_be_read(self, hook):
        assert not hook.is_portable("a.so: file format not recognized")

    def test_then_the_tag_promises_nothing(self, hook, monkeypatch):
        broken = HEADERS.format(symbol="GLIBC_2.36", library="libc.so.6")
        monkeypatch.setattr(hook, "run", lambda _: broken)
        assert hook.platform_tag("x86_64", [Path("a.so")]) == "linux_x86_64"

    def test_of_our_libraries(self, hook, made):
        libraries = list(made.rglob("*.so"))
        assert hook.platform_tag("x86_64", libraries) == "manylinux_2_28_x86_64"
