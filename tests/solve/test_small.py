"""L-BFGS by compiled code: the same iterates as in Python, and nothing else that a user sees."""

import gc
import math
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ortholand as ol
from ortholand.solve.methods import lbfgs, search

pytestmark = pytest.mark.skipif(
    search.library_for(np.eye(2)) is None, reason="there is no compiled code here"
)


def orthonormal(n, p, seed=0, dtype=np.float64):
    A = np.random.default_rng(seed).standard_normal((n, p))
    return np.linalg.qr(A)[0].astype(dtype)


def symmetric(n, seed=0):
    A = np.random.default_rng(seed).standard_normal((n, n))
    return (A + A.T) / 2


def brockett(n, p, scale=1.0, dtype=np.float64):
    A, weights = scale * symmetric(n).astype(dtype), np.arange(p, 0, -1).astype(dtype)

    def fun(X):
        G = A @ X * weights
        return np.vdot(X, G) / 2, G

    return fun


def quartic(n, p):
    A = symmetric(n, seed=1)
    return lambda X: (np.vdot(X, A @ X) / 2 + np.sum(X**4), A @ X + 4 * X**3)


def of_span(n, p):
    A = symmetric(n, seed=2)
    return lambda X: (np.vdot(X, A @ X) / 2, A @ X)


def long_steps(n, p):
    """So flat at the start that the line search goes as far as it can."""
    T = orthonormal(n, p, seed=5)
    return lambda X: (-1e-3 * np.vdot(T, X), -1e-3 * T)


COSTS = {"brockett": brockett, "quartic": quartic, "span": of_span, "long": long_steps}


@pytest.fixture
def in_python(monkeypatch):
    """``in_python(fun, x0, ...)``: the same without compiled code."""

    def solve(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(lbfgs.LBFGS, "is_compiled", lambda *_: False)
            return ol.minimize(*args, **kwargs)

    return solve


def assert_alike(result, reference, iterations, rtol):
    """The same way: later on rounding may lead elsewhere."""
    count = min(iterations, result.nit, reference.nit)
    assert count > 0
    for key in ("fun", "grad_norm"):
        mine, theirs = result.history[key][: count + 1], reference.history[key][: count + 1]
        rounding = 1e-10 * abs(theirs[0])
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rounding)
    np.testing.assert_array_equal(
        result.history["nfev"][: count + 1], reference.history["nfev"][: count + 1]
    )


class TestSameIterates:
    @pytest.mark.parametrize("memory", [None, 1, 3])
    @pytest.mark.parametrize("shape", [(20, 3), (9, 1), (2, 2), (7, 7), (30, 12), (40, 28)])
    @pytest.mark.parametrize("kind", COSTS)
    def test_as_in_python(self, kind, shape, memory, in_python):
        if kind == "span" and shape[0] == shape[1]:
            shape = shape[0], 1  # else it is constant
        fun, x0 = COSTS[kind](*shape), orthonormal(*shape)
        options = dict(jac=True, method="lbfgs", gtol=1e-7, options={"memory": memory})
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert result.success == reference.success
        assert_alike(result, reference, 12, 1e-6)
        # Later on the ways may part, to minima that differ.
        if result.nit < 30:
            assert result.fun == pytest.approx(reference.fun, rel=1e-9, abs=1e-9)

    @pytest.mark.parametrize("memory", [1, 2, 5, 17, 40])
    def test_when_pairs_are_dropped(self, memory, in_python):
        """Room for pairs grows, and when it is full they move to the front."""
        fun, x0 = brockett(30, 5), orthonormal(30, 5)
        options = dict(jac=True, method="lbfgs", gtol=1e-9, options={"memory": memory})
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert min(result.nit, reference.nit) > 80
        assert_alike(result, reference, 60, 1e-6)

    def test_with_a_gradient_of_its_own(self, in_python):
        both, x0 = brockett(20, 3), orthonormal(20, 3)
        cost, jac = (lambda X, shift: both(X)[0] + shift), (lambda X, shift: both(X)[1])
        options = dict(args=(7.0,), jac=jac, method="lbfgs")
        result, reference = ol.minimize(cost, x0, **options), in_python(cost, x0, **options)
        assert result.success
        assert_alike(result, reference, 12, 1e-6)

    def test_on_grassmann(self, in_python):
        fun, x0 = of_span(20, 4), orthonormal(20, 4)
        options = dict(jac=True, method="lbfgs", manifold=ol.Grassmann())
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert result.success
        assert_alike(result, reference, 15, 1e-6)
        assert result.fun == pytest.approx(reference.fun, rel=1e-12)

    def test_wide(self, in_python):
        tall, x0 = brockett(12, 3), orthonormal(12, 3).T
        fun = lambda X: (lambda f, G: (f, G.T))(*tall(X.T))  # noqa: E731
        options = dict(jac=True, method="lbfgs")
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert result.success
        assert result.x.shape == (3, 12)
        assert_alike(result, reference, 12, 1e-6)

    def test_in_single_precision(self, in_python):
        fun, x0 = brockett(12, 3, dtype=np.float32), orthonormal(12, 3, dtype=np.float32)
        options = dict(jac=True, method="lbfgs")
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert result.x.dtype == np.float32
        assert result.success
        assert_alike(result, reference, 4, 1e-2)

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_in_other_units(self, scale, in_python):
        fun, x0 = brockett(12, 3, scale), orthonormal(12, 3)
        options = dict(jac=True, method="lbfgs")
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert result.success
        assert_alike(result, reference, 12, 1e-6)

    def test_with_a_weight_of_the_users(self, in_python):
        fun, x0 = brockett(12, 3), orthonormal(12, 3)
        options = dict(jac=True, method="lbfgs", lam=30.0)
        result, reference = ol.minimize(fun, x0, **options), in_python(fun, x0, **options)
        assert_alike(result, reference, 12, 1e-6)

    def test_by_autograd(self, in_python):
        A = torch.from_numpy(symmetric(12))
        fun = lambda X: (X * (A @ X)).sum()  # noqa: E731
        x0 = torch.from_numpy(orthonormal(12, 3))
        result = ol.minimize(fun, x0, method="lbfgs")
        assert result.success
        assert_alike(result, in_python(fun, x0, method="lbfgs"), 12, 1e-6)


class TestWhatTheUserSees:
    def test_counts_and_history(self):
        calls = []
        cost = brockett(20, 3)

        def fun(X):
            calls.append(X)
            return cost(X)

        result = ol.minimize(fun, orthonormal(20, 3), jac=True, method="lbfgs")
        assert result.nfev == result.njev == len(calls)
        history = result.history
        assert len(history["fun"]) == result.nit + 1
        assert (np.diff(history["nfev"]) > 0).all()
        assert (np.diff(history["time"]) >= 0).all()
        assert history["nfev"][-1] <= result.nfev

    def test_points_are_the_users_to_keep(self):
        kept, copies, buffer = [], [], np.empty((20, 3))
        cost = brockett(20, 3)

        def fun(X):
            kept.append(X)
            copies.append(X.copy())
            value, buffer[...] = cost(X)
            return value, buffer

        assert ol.minimize(fun, orthonormal(20, 3), jac=True, method="lbfgs").success
        assert all((x == copy).all() for x, copy in zip(kept, copies, strict=True))
        assert not any(x.flags.writeable for x in kept)

    def test_the_solution_is_evaluated_once(self):
        for seed in range(10):
            result = ol.minimize(brockett(20, 3), orthonormal(20, 3, seed), jac=True)
            assert result.success
            assert result.distance < 1e-14
            assert result.nfev == result.history["nfev"][-1]

    def test_a_callback_sees_every_iteration(self):
        seen = []

        def callback(intermediate_result):
            seen.append((intermediate_result.nit, intermediate_result.fun))

        fun, x0 = brockett(20, 3), orthonormal(20, 3)
        quiet = ol.minimize(fun, x0, jac=True, method="lbfgs")
        watched = ol.minimize(fun, x0, jac=True, method="lbfgs", callback=callback)
        assert [nit for nit, _ in seen] == list(range(1, watched.nit + 1))
        np.testing.assert_allclose([f for _, f in seen][:20], quiet.history["fun"][1:21], rtol=1e-9)
        assert watched.nit == quiet.nit

    @pytest.mark.parametrize("maxiter", [0, 1, 2, 17])
    def test_maxiter(self, maxiter):
        fun, x0 = brockett(20, 3), orthonormal(20, 3)
        result = ol.minimize(fun, x0, jac=True, method="lbfgs", maxiter=maxiter)
        assert (result.nit, result.status) == (maxiter, 1)
        assert len(result.history["fun"]) == maxiter + 1

    def test_maxtime(self):
        cost = brockett(20, 3)

        def fun(X):
            time.sleep(0.01)
            return cost(X)

        result = ol.minimize(
            fun, orthonormal(20, 3), jac=True, method="lbfgs", options={"maxtime": 0.1}
        )
        assert result.status == 5
        assert result.history["time"][-1] < 1

    def test_an_error_in_fun_is_the_users(self):
        cost, calls = brockett(20, 3), []

        def fun(X):
            calls.append(0)
            if len(calls) == 9:
                raise ZeroDivisionError("the ninth")
            return cost(X)

        with pytest.raises(ZeroDivisionError, match="the ninth"):
            ol.minimize(fun, orthonormal(20, 3), jac=True, method="lbfgs")
        gc.collect()
        assert ol.minimize(cost, orthonormal(20, 3), jac=True, method="lbfgs").success

    def test_a_gradient_of_another_shape_is_refused_on_the_way(self):
        cost, calls = brockett(20, 3), []

        def fun(X):
            calls.append(0)
            value, G = cost(X)
            return value, G if len(calls) < 6 else G.T

        with pytest.raises(ValueError, match="jac must return a matrix like x0"):
            ol.minimize(fun, orthonormal(20, 3), jac=True, method="lbfgs")

    def test_inside_of_each_other(self):
        inner, outer = brockett(6, 2), brockett(12, 3)
        alone = ol.minimize(outer, orthonormal(12, 3), jac=True, method="lbfgs")

        def fun(X):
            assert ol.minimize(inner, orthonormal(6, 2), jac=True, method="lbfgs").success
            return outer(X)

        nested = ol.minimize(fun, orthonormal(12, 3), jac=True, method="lbfgs")
        np.testing.assert_array_equal(nested.history["fun"], alone.history["fun"])

    def test_side_by_side(self):
        alone = [
            ol.minimize(brockett(10 + k, 3), orthonormal(10 + k, 3), jac=True, method="lbfgs").fun
            for k in range(4)
        ]
        found = [math.nan] * 4

        def solve(k):
            for _ in range(5):
                fun, x0 = brockett(10 + k, 3), orthonormal(10 + k, 3)
                found[k] = ol.minimize(fun, x0, jac=True, method="lbfgs").fun

        threads = [threading.Thread(target=solve, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == alone

    def test_more_memory_than_there_is(self, in_python):
        fun, x0 = brockett(20, 3), orthonormal(20, 3)
        options = dict(jac=True, method="lbfgs", options={"memory": 10**30})
        assert ol.minimize(fun, x0, **options).success
        assert in_python(fun, x0, **options).success


class TestWhoIsServed:
    @pytest.mark.parametrize(
        ("x0", "served"),
        [
            (orthonormal(20, 3), True),
            (orthonormal(20, 3).astype(np.complex128), False),
            (np.stack([orthonormal(4, 2)] * 3), False),
            (orthonormal(40, 33), False),
            (orthonormal(600, 10), False),
        ],
        ids=["small", "complex", "stack", "many columns", "many rows"],
    )
    def test_one_small_real_matrix(self, x0, served, monkeypatch):
        made, original = [], search.Search

        def watched(*args):
            made.append(original(*args))
            return made[-1]

        monkeypatch.setattr(lbfgs.compiled, "Search", watched)
        ol.minimize(lambda X: (0.0, 0 * X), x0, jac=True, method="lbfgs")
        assert [bool(one.handle) for one in made] == [True] * served

    def test_without_compiled_code(self, monkeypatch):
        monkeypatch.setattr(search.native, "library", lambda _: "there is none")
        fun, x0 = brockett(20, 3), orthonormal(20, 3)
        assert ol.minimize(fun, x0, jac=True, method="lbfgs").success
        assert ol.minimize(fun, x0, jac=True).success


HOSTILE = {
    "nan": lambda value, G, k: (math.nan, G) if k % 3 == 2 else (value, G),
    "inf": lambda value, G, k: (value, G / 0 if k % 4 == 3 else G),
    "huge": lambda value, G, k: (1e300 * value, 1e300 * G),
    "noise": lambda value, G, k: (value, G + np.random.default_rng(k).standard_normal(G.shape)),
    "wrong sign": lambda value, G, k: (value, -G),
    "constant": lambda value, G, k: (0.0, G),
}


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 24),
    p=st.integers(1, 8),
    seed=st.integers(0, 99),
    kind=st.sampled_from(list(HOSTILE)),
    memory=st.sampled_from([None, 1, 2, 50]),
)
def test_hostile_costs_end_on_the_manifold(n, p, seed, kind, memory):
    n, cost, calls = max(n, p), brockett(max(n, p), p), []

    def fun(X):
        calls.append(0)
        with np.errstate(all="ignore"):
            return HOSTILE[kind](*cost(X), len(calls))

    result = ol.minimize(
        fun,
        orthonormal(n, p, seed),
        jac=True,
        method="lbfgs",
        maxiter=200,
        options={"memory": memory},
    )
    assert np.linalg.norm(result.x.T @ result.x - np.eye(p)) < 1e-12
    assert result.nfev == len(calls)
    assert len(result.history["fun"]) == result.nit + 1


def test_numbers_are_the_struct_of_the_source():
    """Name by name, in this order: a field more or less would shift all others."""
    source = Path(search.__file__).with_name("search.cpp").read_text()
    struct = re.sub(r"//.*", "", source.split("struct Numbers {")[1].split("};")[0])
    names = re.findall(r"\w+(?=\[\w+\]|,|;)", re.sub(r"\bdouble\b", "", struct))
    assert names == [name for name, *_ in search.Numbers._fields_]
    arrays = set(re.findall(r"(\w+)\[", struct))
    assert arrays == set(search.THREE)
    assert "RECENT = 3;" in source
