"""Compiled code is made once, kept, made again where it is damaged, and never needed."""

import logging
import subprocess

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand import native

needs_compiler = pytest.mark.skipif(
    native.kernel(torch.float32, 2) is None, reason="no C++ compiler"
)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder, and no kernel in memory."""
    monkeypatch.setenv("ORTHOLAND_CACHE", str(tmp_path))
    monkeypatch.delenv("ORTHOLAND_NATIVE", raising=False)
    native._library.cache_clear()
    yield tmp_path / "native"
    native._library.cache_clear()


def step_once(**options):
    X = nn.Parameter(ol.random_orthogonal(5, 2, 2, seed=0))
    X.grad = torch.ones_like(X)
    ol.LandingSGD([X], lr=0.1, view="kernel", **options).step()
    return X.detach()


@needs_compiler
def test_it_is_compiled_once_and_kept(fresh, monkeypatch):
    assert native.kernel(torch.float32, 2) is not None
    (library,) = fresh.iterdir()  # nothing else is left behind
    native._library.cache_clear()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native.kernel(torch.float32, 2) is not None
    assert list(fresh.iterdir()) == [library]


@needs_compiler
def test_a_damaged_file_is_made_again(fresh):
    native._built("landing", "float", 2).write_bytes(b"not a library")
    assert native.kernel(torch.float32, 2) is not None
    assert torch.allclose(step_once(), step_once(fused=False), atol=1e-6)


@pytest.mark.parametrize("why", ["no compiler", "failing compiler", "no cache", "switched off"])
def test_without_compiled_code_torch_steps(fresh, monkeypatch, caplog, why):
    caplog.set_level(logging.INFO, logger="ortholand.native")
    if why == "no compiler":
        monkeypatch.setattr(native.shutil, "which", lambda _: None)
    elif why == "failing compiler":
        monkeypatch.setenv("CXX", "false")
    elif why == "no cache":
        fresh.parent.joinpath("file").write_text("")
        monkeypatch.setenv("ORTHOLAND_CACHE", str(fresh.parent / "file"))
    else:
        monkeypatch.setenv("ORTHOLAND_NATIVE", "0")
    assert native.kernel(torch.float32, 2) is None
    assert torch.equal(step_once(fused=True), step_once(fused=False))
    assert ("torch's operations are used" in caplog.text) == (why != "switched off")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_below_sees_every_entry(dtype):
    for place in (0, 7, 1000):
        x = torch.zeros(1001, dtype=dtype)
        assert native.all_below(1.0, [x, x])
        for bad in (1.0, -2.0, float("nan"), float("inf")):
            x[place] = bad
            assert not native.all_below(1.0, [torch.zeros(3, dtype=dtype), x])
        x[place] = -0.99
        assert native.all_below(1.0, [x, torch.zeros(2)])


def test_all_below_does_not_vouch_for_what_it_cannot_read():
    for x in (
        torch.zeros(2, 3).mT,
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(1).to("meta"),
    ):
        assert not native.all_below(1.0, [x])


def test_the_options_have_the_layout_of_the_c_structure():
    fields = (native.FOLDER / "steps.h").read_text().split("struct Options {")[1].split("};")[0]
    names = [n.strip() for line in fields.split(";") for n in line.split(" ", 1)[-1].split(",")]
    flat = [name.split()[-1] for name in names if name]
    assert tuple(flat) == native.Options._fields
