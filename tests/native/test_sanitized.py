"""Compiled code under AddressSanitizer and UndefinedBehaviorSanitizer (``make sanitize``).

A wrong access ends the whole process, with a report. The examples are always the same ones, so
``make sanitize ARGS=--hypothesis-verbosity=verbose`` shows which one it was.
"""

import copy
import ctypes
import itertools
import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ortholand as ol
from ortholand import native
from ortholand.native import build, recipe
from ortholand.native.recipe import Unit
from ortholand.native.safekeeping import seal_path

pytestmark = [
    pytest.mark.skipif(os.environ.get("ORTHOLAND_SANITIZE") != "1", reason="by make sanitize"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # no locks are held here
]

# What is compiled by size is compiled for some sizes only: it takes seconds each.
LANES = {torch.float32: (1, 8), torch.float64: (3,)}
DTYPES = st.sampled_from(list(LANES))
LARGEST = 140  # beyond native.LARGEST_SIZE
GUARD = 12345.0  # what lies around weights in memory, and must stay


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All libraries, compiled two at a time.

    By another process: what this one loads is then where it stays, and reports can name lines.
    """
    child = os.fork()
    if child == 0:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(is_compiled, LIBRARIES))
        os._exit(0)
    os.waitpid(child, 0)
    assert all(map(is_compiled, LIBRARIES))
    for dtype, lanes in LANES.items():
        for size in recipe.SIZES:  # of the others, none are asked for
            if size in (0, 16, *lanes):
                native.add_kernels(dtype, size)
            else:
                native.library(Unit("ops")).ortholand_add_kernels(
                    dtype is torch.float64, size, None, None
                )


def is_compiled(unit):
    return not isinstance(native.library(unit), str)


LIBRARIES = [
    Unit("ops"),
    *(
        Unit("steps", native.SCALARS[dtype], size)
        for dtype, lanes in LANES.items()
        for size in (0, 16, *lanes)
    ),
    *(Unit("search", scalar) for scalar in native.SCALARS.values()),
]


# A wrong access is found ---------------------------------------------------------------------

BROKEN = """
extern "C" float read_beyond(const float* x, int n) { return x[n]; }
extern "C" void write_beyond(float* x, int n) { x[n] = 1; }
extern "C" int add(int x, int y) { return x + y; }
extern "C" int index(int i) {
    static int row[4] = {};
    return row[i];
}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    source, library = folder / "broken.cpp", folder / "broken.so"
    source.write_text(BROKEN)
    command = [build.compiler(), *recipe.FLAGS, *build._sanitize_flags(), str(source)]
    build._compile(command, library)
    return ctypes.CDLL(str(library))


def report_of(action, path):
    """What the sanitizer writes about an action, which ends the process that does it."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
        action()
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0, "nothing was found"
    return path.read_text(errors="replace")


class TestWrongAccessesAreFound:
    def test_outside_of_tensors(self, broken, tmp_path):
        x = torch.zeros(5)
        for function in (broken.read_beyond, broken.write_beyond):
            function(ctypes.c_void_p(x.data_ptr()), 4)
            report = report_of(
                lambda f=function: f(ctypes.c_void_p(x.data_ptr()), 5), tmp_path / "r"
            )
            assert "AddressSanitizer: heap-buffer-overflow" in report

    def test_outside_of_what_python_packs(self, broken, tmp_path):
        packed = array("q", [1, 2, 3])
        start = ctypes.c_void_p(packed.buffer_info()[0])
        report = report_of(lambda: broken.read_beyond(start, 6), tmp_path / "report")
        assert "AddressSanitizer: heap-buffer-overflow" in report

    def test_overflow_of_integers(self, broken, tmp_path):
        report = report_of(lambda: broken.add(2**31 - 1, 1), tmp_path / "report")
        assert "runtime error: signed integer overflow" in report

    def test_outside_of_arrays(self, broken, tmp_path):
        report = report_of(lambda: broken.index(4), tmp_path / "report")
        assert "runtime error: index 4 out of bounds" in report

    def test_in_kernels_whose_parameter_is_too_short(self, tmp_path):
        """Called past the border, which would have refused it."""
        for n, p in ((20, 20), (20, 9)):
            X, G = torch.eye(20)[:, :p].contiguous(), torch.zeros(19, p)
            row = [X.data_ptr(), G.data_ptr(), 0, 0, 0, 1, p, 1, 1, 0, 0, 0, 0, n, p, 0, 0]
            packed, options = array("q", row), array("d", [0.1] * 12 + [0.0] * 4)
            places = [ctypes.c_void_p(x.buffer_info()[0]) for x in (options, packed)]
            library = native.library(Unit("steps", "float"))
            address = ctypes.cast(library.ortholand_landing, ctypes.c_void_p).value
            step = ctypes.CFUNCTYPE(None)(address)
            step.argtypes = None
            report = report_of(lambda f=step, a=places: f(*a, 1), tmp_path / "report")
            # A vector that is partly inside has another name than a number that is outside.
            kinds = ("heap-buffer-overflow", "unknown-crash")
            assert any(f"AddressSanitizer: {kind}" in report for kind in kinds)
            # As a compiler inlines it; a library that was moved is named as a file.
            names = ("tiles.h", "rows.h", "landing.cpp", "/steps-float-0")
            assert any(name in report for name in names)


def test_libraries_are_kept_apart_from_others():
    library = build.library_path(Unit("ops"))
    assert b"__asan_report_load" in library.read_bytes()
    assert seal_path(library).exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ORTHOLAND_SANITIZE")
        assert build.library_path(Unit("ops")) != library


# The border ---------------------------------------------------------------------------------------


@st.composite
def strided(draw):
    """A tensor of some numbers in memory that may be too short, or overlap, or have gaps."""
    dtype = draw(st.sampled_from([*LANES, torch.float16, torch.int64]))
    shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=4))
    strides = [draw(st.integers(0, 40)) for _ in shape]
    if draw(st.booleans()):
        strides = torch.empty(shape).stride()
    offset = draw(st.integers(0, 3))
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(max(offset + reach + 1, 1), dtype=dtype)
    x = memory.as_strided(shape, strides, offset)
    if draw(st.sampled_from([False, False, True])):
        memory.untyped_storage().resize_(draw(st.integers(0, 40)))
    return x


@settings(max_examples=300, derandomize=True)
@given(
    tensors=st.lists(strided(), min_size=1, max_size=6),
    same=st.sampled_from(["all", "first", "none"]),
    moments=st.integers(0, 2),
    kind=st.integers(0, 3),
    blocks=st.tuples(st.integers(-1, 5), st.integers(-1, 5)),
)
def test_whatever_the_border_is_given(tensors, same, moments, kind, blocks):
    """It steps, or refuses, or torch does; and never touches other memory."""
    states = (0, 1, 3)[moments]
    if same == "all":
        tensors = [tensors[0]] * (2 + states)
    if same == "first":
        tensors = [*[tensors[0]] * 3, *tensors[1:]]
    options = 0.1, 1, 1, 0.5, 0.5, 0.6, 0.5, 0.9, 0, 0.9, 0.99, 1e-8, 0, 1, 0, moments, 0
    settings = torch.tensor([*options, kind, *blocks], dtype=torch.float64)
    moved, gradients = tensors[: 1 + states], tensors[1 + states : 2 + states]
    with suppress(RuntimeError):  # lists that do not fit
        native.operations().landing_step(moved, gradients, settings, False)
    native.all_below(1.0, tensors)


# Steps --------------------------------------------------------------------------------------------


def sizes(dtype, largest=LARGEST):
    return st.sampled_from(LANES[dtype]) | st.integers(9, largest)


@st.composite
def weights(draw, dtype):
    """A shape of weights with its view: matrices, stacks, convolutions."""
    kinds = ["square", "tall", "wide", "stack", "kernels", "convolution", "grid", "sphere"]
    kind = draw(st.sampled_from(kinds))
    if kind == "grid":
        blocks, size = draw(st.tuples(st.integers(1, 9), st.integers(2, 9))), draw(sizes(dtype, 20))
        across = draw(st.integers(1 if size > 1 else 2, 20))
        return (blocks[0] * size, blocks[1] * across), blocks
    if kind == "sphere":
        shape = draw(st.integers(2, 60)), draw(st.integers(2, 60))
        return shape, draw(st.sampled_from(["rows", "columns", "vector"]))
    if kind == "square":
        return (draw(sizes(dtype)),) * 2, "matrix"
    if kind == "stack":
        size, more = draw(sizes(dtype, 40)), draw(st.integers(0, 9))
        sides = draw(st.permutations((size, size + more)))
        return (draw(st.integers(1, 40)), *sides), "kernel"
    if kind == "kernels":
        size = LANES[dtype][-1]  # not 1: kernels of 1 x 1 are refused
        return (draw(st.integers(1, 6)), draw(st.integers(1, 6)), size, size), "kernel"
    if kind == "convolution":
        rows = draw(st.integers(9, 40))  # also square, where the rest comes to that
        return (
            rows,
            *draw(st.sampled_from([(1, 3, 3), (4, 3, 3), (2, 1, 5), (rows, 1, 1)])),
        ), "matrix"
    short, more = draw(st.integers(1, 60)), draw(st.integers(1, 80))
    return ((short + more, short) if kind == "tall" else (short, short + more)), "matrix"


LANDING = {
    "lr": st.sampled_from([0.0, 1e-3, 0.1, 10.0]),
    "lam": st.sampled_from([0.0, 1.0]),
    "attraction": st.sampled_from(["coupled", "decoupled", "after"]),
    "safe_step": st.sampled_from(["frobenius", "spectral", None]),
    "maximize": st.booleans(),
    "scale": st.sampled_from([1.0, 1.0, 0.1, 3.7, "fan"]),
}
DIRECTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3},
]
BETAS = st.sampled_from([{}, {"betas": (0.0, 0.0)}, {"betas": (0.5, 0.9)}])
LAYOUTS = ["plain", "transposed", "sliced", "expanded", "offset"]


def gradient(shape, dtype, layout, seed):
    """A gradient of that layout in memory."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    if layout == "transposed":
        return noise(*shape[:-2], shape[-1], shape[-2]).mT
    if layout == "sliced":
        return noise(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded":
        return noise(1).expand(shape)
    if layout == "offset":
        return noise(torch.Size(shape).numel() + 1)[1:].view(shape)
    return noise(*shape)


def option(view):
    return {"view": view} if isinstance(view, str) else {"blocks": view}


def guarded(shape, view, dtype, seed, offset, scale=1.0):
    """A weight somewhere in memory that has more in it, and that memory."""
    rows, columns = shape[-2:] if view == "kernel" else (shape[0], torch.Size(shape[1:]).numel())
    stack = shape[:-2] if view == "kernel" else ()
    X = ol.random_orthogonal(*stack, rows, columns, seed=seed, scale=scale)
    if view not in ("matrix", "kernel"):
        ol.orthogonalize_(X, scale=scale, **option(view))
    memory = torch.full((X.numel() + 2 * offset,), GUARD, dtype=dtype)
    inner = memory[offset : offset + X.numel()]
    inner.copy_(X.flatten())
    return nn.Parameter(inner.view(shape)), memory


def assert_guards_stay(X, memory):
    offset = X.storage_offset()
    assert (memory[:offset] == GUARD).all()
    assert (memory[offset + X.numel() :] == GUARD).all()


@st.composite
def runs(draw):
    """Some weights of one type, and what happens to them."""
    dtype = draw(DTYPES)
    shapes = draw(st.lists(weights(dtype), min_size=1, max_size=4))
    if draw(st.booleans()):
        shapes = [draw(weights(dtype))]
    return {
        "dtype": dtype,
        "shapes": shapes,
        "options": draw(st.fixed_dictionaries(LANDING)),
        "layouts": draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3)),
        "bad": draw(st.sampled_from([None, None, float("nan"), float("inf"), 1e38])),
        "offset": draw(st.sampled_from([0, 1, 16])),
        "threads": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 1000)),
    }


@contextmanager
def threads(number):
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def step_all(make, run, **options):
    """Steps with every layout of gradients, each after a reload of the state."""
    dtype, scale = run["dtype"], run["options"]["scale"]
    held = [
        (guarded(shape, view, dtype, run["seed"] + i, run["offset"], scale), view)
        for i, (shape, view) in enumerate(run["shapes"])
    ]
    groups = [{"params": [X], **option(view)} for (X, _), view in held]
    if len({view for _, view in run["shapes"]}) == 1:  # all in one
        groups = [{"params": [X for (X, _), _ in held], **option(held[0][1])}]
    optimizer = make(groups, fused=True, **run["options"], **options)
    for number, layout in enumerate([*run["layouts"], "plain"]):
        for (X, _), _ in held:
            X.grad = gradient(X.shape, dtype, layout, run["seed"] + number)
        if run["bad"] is not None and number == 0:
            X.grad = X.grad.clone()
            X.grad[np.unravel_index(run["seed"] % X.numel(), X.shape)] = run["bad"]
        with threads(run["threads"]):
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for (X, memory), _ in held:
        assert_guards_stay(X, memory)
        assert X.isfinite().all()


@settings(max_examples=50, derandomize=True)
@given(run=runs(), options=st.sampled_from(DIRECTIONS))
def test_sgd(run, options):
    step_all(ol.LandingSGD, run, **options)


@settings(max_examples=30, derandomize=True)
@given(run=runs(), options=BETAS)
def test_adam(run, options):
    step_all(ol.LandingAdam, run, **options)


@pytest.mark.parametrize("dtype", LANES, ids=str)
@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
@pytest.mark.parametrize("safe_step", ["frobenius", "spectral", None])
def test_every_kind_of_step(dtype, attraction, safe_step):
    makers = [partial(ol.LandingSGD, **options) for options in DIRECTIONS]
    for make, size, more in itertools.product(
        [*makers, ol.LandingAdam], (*LANES[dtype], 20), (0, 3)
    ):
        scale = 0.1 if size % 2 else 1.0
        held = [guarded((17, size, size + more), "kernel", dtype, i, i, scale) for i in range(3)]
        optimizer = make(
            [X for X, _ in held],
            lr=0.1,
            attraction=attraction,
            safe_step=safe_step,
            view="kernel",
            scale=scale,
            fused=True,
        )
        for _ in range(2):
            step_once(optimizer, held)


@pytest.mark.parametrize("dtype", LANES, ids=str)
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"attraction": "after"}], ids=str)
def test_every_kind_of_size(dtype, options):
    # Every rest of rows and columns that blocks of a product leave, and the largest.
    sizes = [*range(9, 58), 127, 128, 129, LARGEST]
    held = [guarded((size, size), "matrix", dtype, size, 1) for size in sizes]
    optimizer = ol.LandingSGD([X for X, _ in held], lr=0.1, fused=True, **options)
    step_once(optimizer, held)


@pytest.mark.parametrize("dtype", LANES, ids=str)
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"attraction": "after"}], ids=str)
def test_every_kind_of_tall_shape(dtype, options):
    # Every rest of rows and columns that blocks and panels leave, rows in memory or columns.
    shapes = [(p + more, p) for p in (*range(9, 34), 100, 127, 128) for more in (1, 13)]
    shapes += [(rows, 17) for rows in range(238, 254)]
    for column_major in (False, True):
        held = [guarded(shape, "matrix", dtype, k, 1) for k, shape in enumerate(shapes)]
        if column_major:
            held = [(nn.Parameter(X.detach().view(X.shape[::-1]).mT), m) for X, m in held]
            for X, _ in held:
                ol.orthogonalize_(X)
        optimizer = ol.LandingSGD([X for X, _ in held], lr=0.1, fused=True, **options)
        step_once(optimizer, held)


@pytest.mark.parametrize("dtype", LANES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"maximize": True}, {"attraction": "after", "momentum": 0.9}, "adam"],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", [(300, 140), (129, 129), (160, 160), (193, 193), (150, 9), (7, 200), (2, 130, 130)]
)
def test_large_matrices(shape, options, dtype):
    view = "matrix" if len(shape) == 2 else "kernel"
    X, memory = guarded(shape, view, dtype, 0, 1)
    if options == "adam":
        optimizer = ol.LandingAdam([X], lr=1e-3, fused=True, view=view)
    else:
        optimizer = ol.LandingSGD([X], lr=0.1, fused=True, view=view, **options)
    for _ in range(2):
        step_once(optimizer, [(X, memory)])


def step_once(optimizer, held):
    for i, (X, _) in enumerate(held):
        X.grad = gradient(X.shape, X.dtype, LAYOUTS[i % len(LAYOUTS)], i)
    optimizer.step()
    for X, memory in held:
        assert_guards_stay(X, memory)
        assert X.isfinite().all()


@pytest.mark.parametrize("dtype", LANES, ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_work_is_shared_by_threads(dtype, momentum):
    small = LANES[dtype][-1]
    shapes = [(40_000 // small, small, small), (150, 20, 20), (5, 100, 100)]
    tall = [(40_000 // small, small + 1, small), (60, 50, 20), (1, 5001, 64), (1, 64, 5001)]
    for shape in (*shapes, *tall):
        one, two, three = (stepped_by(n, shape, dtype, momentum) for n in (1, 2, 3))
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def stepped_by(n, shape, dtype, momentum):
    """The first of three equal weights that are stepped by so many threads."""
    held = [guarded(shape, "kernel", dtype, 0, 3) for _ in range(3)]
    optimizer = ol.LandingSGD(
        [X for X, _ in held], lr=0.1, momentum=momentum, view="kernel", fused=True
    )
    for X, _ in held:
        X.grad = gradient(shape, dtype, "plain", 0)
    with threads(n):
        optimizer.step()
    for X, memory in held:
        assert_guards_stay(X, memory)
        assert torch.equal(X, held[0][0])
    return held[0][0].detach()


def test_many_parameters_of_one_group():
    held = [guarded((3, 3), "matrix", torch.float64, i, 1) for i in range(300)]
    optimizer = ol.LandingAdam([X for X, _ in held], lr=0.1, fused=True)
    for _ in range(3):
        for i, (X, _) in enumerate(held):
            X.grad = gradient(X.shape, X.dtype, LAYOUTS[i % len(LAYOUTS)], i) if i % 7 else None
        with threads(2):
            optimizer.step()
    for X, memory in held:
        assert_guards_stay(X, memory)


# all_below ----------------------------------------------------------------------------------------


@st.composite
def arrays(draw):
    """A tensor that begins anywhere, and ends where its memory does."""
    dtype = draw(DTYPES)
    memory = torch.zeros(draw(st.integers(0, 300)), dtype=dtype)
    return memory[draw(st.integers(0, 20)) :]


@settings(max_examples=100, derandomize=True)
@given(
    tensors=st.lists(arrays(), max_size=5),
    place=st.integers(0, 300),
    value=st.sampled_from([1.0, -1.0, float("nan"), float("inf"), 1e38]),
)
def test_all_below(tensors, place, value):
    assert native.all_below(1.0, tensors, [torch.ones_like(x) for x in tensors])
    for x in tensors:
        if x.numel():
            x[place % x.numel()] = value
            assert not native.all_below(1.0, tensors)
            x.zero_()


# Searches on small matrices -----------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from([np.float32, np.float64]),
    n=st.integers(1, 30),
    p=st.integers(1, 32),
    memory=st.sampled_from([None, 1, 2, 60]),
    damage=st.sampled_from(["none", "nan", "inf", "sign", "noise"]),
    manifold=st.sampled_from([ol.Stiefel(), ol.Grassmann()]),
)
def test_searches(dtype, n, p, memory, damage, manifold):
    """Through all that a line search, a full ring of pairs and a restart do."""
    random = np.random.default_rng(n * p)
    n = max(n, p)
    A = random.standard_normal((n, n)).astype(dtype)
    A, calls = A + A.T, []

    def fun(X):
        calls.append(0)
        G = A @ X
        value = float(np.vdot(X, G)) / 2
        if len(calls) > 1 and len(calls) % 4 == 0:
            value = {"nan": np.nan, "inf": np.inf}.get(damage, value)
            G = -G if damage == "sign" else G
            G = G + random.standard_normal(G.shape).astype(dtype) if damage == "noise" else G
        return value, G

    x0 = np.linalg.qr(random.standard_normal((n, p)))[0].astype(dtype)
    result = ol.minimize(
        fun,
        x0,
        jac=True,
        method="lbfgs",
        manifold=manifold,
        maxiter=120,
        options={"memory": memory},
    )
    assert result.nfev == len(calls)
    assert np.isfinite(result.x).all()
