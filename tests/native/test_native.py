"""Compiled code is never needed, says why where there is none, and agrees with torch's."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand import native
from ortholand.native import build, recipe
from ortholand.optim.engines import compiled
from tests.native.conftest import needs_compiler


def step_once(**options):
    X = nn.Parameter(ol.random_orthogonal(5, 2, 2, seed=0))
    X.grad = torch.ones_like(X)
    ol.LandingSGD([X], lr=0.1, view="kernel", **options).step()
    return X.detach()


REASONS = {
    "no compiler": "no C++ compiler found (CXX, c++, g++, clang++)",
    "failing compiler": "the compiler failed: ",
    "no cache": "cannot be used",
    "switched off": "switched off by ORTHOLAND_NATIVE=0",
}


@pytest.mark.parametrize("why", REASONS)
def test_without_compiled_code_torch_steps(fresh, monkeypatch, caplog, why):
    caplog.set_level(logging.INFO, logger="ortholand.native")
    if why == "no compiler":
        monkeypatch.setattr(build.shutil, "which", lambda _: None)
    elif why == "failing compiler":
        monkeypatch.setenv("CXX", "false")
    elif why == "no cache":
        fresh.parent.joinpath("file").write_text("")
        monkeypatch.setenv("ORTHOLAND_CACHE", str(fresh.parent / "file"))
    else:
        monkeypatch.setenv("ORTHOLAND_NATIVE", "0")
    assert native.operations() is None
    assert torch.equal(step_once(), step_once(fused=False))
    assert ("torch's operations are used" in caplog.text) == (why != "switched off")
    assert REASONS[why] in str(native.why_no_code(torch.float32, 2))


@needs_compiler
@pytest.mark.parametrize(("n", "p"), [(0, None), (2, None), (128, None), (1000, 100)])
def test_no_reason_where_there_is_code(n, p):
    assert native.why_no_code(torch.float64, n, p) is None


@needs_compiler
@pytest.mark.parametrize("shape", [(40, 40), (64, 20), (12, 12)])
def test_compiled_steps_are_rounded_no_more_than_products(shape):
    """Under noise what is left of the distance is the rounding of the last step."""

    def error(**options):
        generator = torch.Generator().manual_seed(0)
        X = nn.Parameter(ol.random_orthogonal(*shape, seed=0))
        optimizer = ol.LandingAdam([X], lr=0.01, **options)
        for _ in range(200):
            X.grad = torch.randn(shape, generator=generator)
            optimizer.step()
        return float(ol.distance(X.detach().double()))

    assert error() <= 1.5 * error(fused=False)


@pytest.mark.parametrize(("n", "p"), [(129, None), (1000, 129)])
def test_no_code_for_many_columns(n, p):
    assert "more than 128 columns" in native.why_no_code(torch.float64, n, p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_types_that_are_not_compiled(dtype):
    name = str(dtype).removeprefix("torch.")
    assert native.why_no_code(dtype) == f"{name} is not compiled: float32 and float64 are"


def test_a_reason_is_remembered_until_the_cache_is_cleared(fresh, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "false")
        reason = native.why_no_code(torch.float32)
        assert reason is not None
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
        assert native.why_no_code(torch.float32) == reason
    native.forget()
    monkeypatch.setenv("ORTHOLAND_NATIVE", "0")
    assert native.why_no_code(torch.float32) == native.SWITCHED_OFF


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


@needs_compiler
def test_all_below_compares_what_else_belongs_to_tensors():
    x, y = torch.zeros(4, 3), torch.zeros(5)
    alike = [torch.full((4, 3), 9.0), torch.ones(5), torch.ones(4, 3), torch.ones(5)]
    assert native.all_below(1.0, [x, y], alike)
    for odd in (torch.ones(3, 4).mT, torch.ones(4, 2), torch.ones(4, 3).double(), y, x.to("meta")):
        assert not native.all_below(1.0, [x, y], [*alike[:2], odd, alike[3]])
    assert not native.all_below(1.0, [x.half()], [x.half()])


@needs_compiler
def test_all_below_of_nothing():
    assert native.all_below(1.0, [])
    assert native.all_below(1.0, [torch.zeros(0), torch.zeros(3, 0, dtype=torch.float64)])


def test_all_below_does_not_vouch_for_what_it_cannot_read():
    for x in (
        torch.zeros(6)[::2],
        torch.zeros(1).expand(3),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(1).to("meta"),
        torch.zeros(3, 3).to_sparse(),
    ):
        assert not native.all_below(1.0, [x])


def test_the_settings_are_the_options_of_the_c_structure():
    """Numbers, choices, threads: as many as are sent, in that order."""
    text = (recipe.FOLDER / "steps.h").read_text()
    fields = text.split("struct Options {")[1].split("};")[0]
    names = [n.strip() for line in fields.split(";") for n in line.split(" ", 1)[-1].split(",")]
    flat = [name.split()[-1] for name in names if name]
    numbers = "lr scale lam eps aim farthest omega momentum dampening beta1 beta2 adam_eps"
    choices = "attraction rule maximize moments nesterov threads"
    assert flat == [*numbers.split(), *choices.split()]
    optimizer = ol.LandingSGD([nn.Parameter(torch.eye(3))], lr=0.25, lam=3.0, maximize=True)
    sent = compiled._settings(optimizer.plan(optimizer.param_groups[0])).tolist()
    assert len(sent) == len(flat) - 1 + 3  # torch says how many threads there are; then the view
    assert sent[-3:] == [0, 1, 1]
    assert (sent[0], sent[2], sent[14]) == (0.25, 3.0, 1.0)


WITHOUT_THREADS = """
import resource, threading
import torch
from torch import nn
import ortholand as ol

def started():
    X = nn.Parameter(ol.random_orthogonal(30_000, 3, 3, seed=0))
    X.grad = torch.ones_like(X)
    optimizer = ol.LandingSGD([X], lr=0.1, view="kernel", fused=True)
    optimizer.step()
    return X, optimizer

torch.set_num_threads(1)
(X, optimizer), (Y, reference) = started(), started()
reference.step()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + STACK // 2
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    threading.Thread(target=print).start()
except RuntimeError:
    torch.set_num_threads(2)
    optimizer.step()
    torch.set_num_threads(1)
    print("the same" if torch.equal(X, Y) else "not the same")
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's here")
@pytest.mark.thorough
def test_without_a_second_thread_the_first_does_it_all():
    stack = 1 << 30  # of every new thread: too much for what memory is left
    script = WITHOUT_THREADS.replace("STACK", str(stack))
    command = f"ulimit -S -s {stack // 1024} && exec {sys.executable} -"
    done = subprocess.run(["sh", "-c", command], input=script, capture_output=True, text=True)
    assert done.stdout.strip() == "the same", done.stderr
