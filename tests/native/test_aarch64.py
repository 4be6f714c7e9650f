"""Code for another machine, by a cross compiler, steps as that for this one does."""

import platform
import shutil

import pytest

from ortholand.native import recipe
from ortholand.native.recipe import Unit

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
UNIT = Unit("steps", "float", 3)

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)

# Three steps of 30,000 matrices by two threads: what python does, where there is no python.
PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
#include <vector>
#include "landing.cpp"

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::puts(dlerror()), 1;
    auto step = (void (*)(const Options*, Parameter*, int))dlsym(library, "ortholand_landing");
    const int count = 30000, entries = 9;
    std::vector<float> X(count * entries, 0.0f), G(count * entries);
    for (int e = 0; e < count * entries; ++e) {
        if (e % entries % 4 == 0) X[e] = 1;
        G[e] = (e * 7 % 11 - 5) / 10.0f;
    }
    Options o = {0.1, 1, 0.5, 0.5, 0.4, 0.25, 0, 0, 0, 0.9, 0.99, 1e-8,
                 COUPLED, FROBENIUS, 0, NONE, 0, 0, 2};
    Parameter parameter = {X.data(), G.data(), nullptr, nullptr, nullptr, count, 3, 1,
                           count, entries, int64_t(count) * entries, 0, 0, 3, 3, 0, 0};
    for (int i = 0; i < 3; ++i) step(&o, &parameter, 1);
    for (int e = 0; e < 5 * entries; ++e) std::printf("%.9g ", X[e]);
    double sum = 0;
    for (float x : X) sum += x;
    std::printf("%.9g %d", sum, int(parameter.skipped));
}
"""


def stepped(hook, machine, folder, monkeypatch):
    """What the library of a machine makes of some matrices."""
    compiler, runner = {
        "x86_64": ("g++", []),
        "aarch64": (CROSS, [EMULATOR, "-L", "/usr/aarch64-linux-gnu"]),
    }[machine]
    monkeypatch.setattr(recipe, "units", lambda: iter([UNIT]))
    monkeypatch.setitem(recipe.VECTORS, machine, recipe.VECTORS[machine][:1])
    made = hook.build_all(recipe, machine, folder)
    assert hook.platform_tag(machine, made) == f"manylinux_2_28_{machine}"
    source, program = folder / "program.cpp", folder / "program"
    source.write_text(PROGRAM)
    options = ["-std=c++17", "-pthread", f"-I{recipe.FOLDER}", "-DSCALAR=float", "-DSIZE=3"]
    hook.run([compiler, str(source), *options, "-ldl", "-o", str(program)])
    library = folder / recipe.VECTORS[machine][0] / f"{UNIT.name}.so"
    return [float(word) for word in hook.run([*runner, str(program), str(library)]).split()]


def test_it_steps_as_here(hook, tmp_path, monkeypatch):
    folders = [tmp_path / "there", tmp_path / "here"]
    for folder in folders:
        folder.mkdir()
    there = stepped(hook, "aarch64", folders[0], monkeypatch)
    here = stepped(hook, "x86_64", folders[1], monkeypatch)
    assert there == pytest.approx(here, rel=1e-5, abs=1e-6)
    assert here[0] != 1  # something has moved
    assert here[-1] == 0  # and nothing was skipped
