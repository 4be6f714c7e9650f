"""Errors: the rule, the value received, the fix; before anything is computed where possible."""

import math
import re

import numpy as np
import pytest
import torch

from ortholand import minimize
from ortholand.geometry import polar_projection
from ortholand.solve import METHODS

METHOD_NAMES = tuple(METHODS)


@pytest.fixture
def cost(brockett):
    return brockett((6, 2))


def fails(error, *words):
    """A context in which this error must be raised, with all of the words in its message."""
    pattern = "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(error, match=re.compile(pattern, re.DOTALL))


class TestStart:
    @pytest.mark.parametrize(
        ("shape", "shown"), [((6,), "(6,)"), ((0, 2), "(0, 2)"), ((3, 0, 2), "(3, 0, 2)")]
    )
    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_must_be_one_matrix(self, shape, shown, kind, cost):
        x0 = np.zeros(shape) if kind == "numpy" else torch.zeros(shape)
        with fails(ValueError, "x0", "one matrix (n, p)", shown):
            minimize(cost.both, x0, jac=True)

    def test_must_not_be_a_scalar(self, cost):
        with fails(ValueError, "x0", "one matrix (n, p)", "()"):
            minimize(cost.both, np.float64(1.0), jac=True)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
    def test_precision_of_a_tensor(self, dtype, cost):
        with fails(TypeError, "x0", "single or double precision", str(dtype), "float64"):
            minimize(cost.fun, cost.start.to(dtype))

    @pytest.mark.parametrize("dtype", [np.float16, np.longdouble, np.clongdouble, object, "U5"])
    def test_precision_of_an_array(self, dtype, cost):
        x0 = cost.start.numpy().astype(dtype)
        with fails(TypeError, "x0", "precision", str(x0.dtype).replace("torch.", "")):
            minimize(cost.fun, x0, jac=cost.jac)

    @pytest.mark.parametrize("x0", [None, "abc", {"x": 1}])
    def test_must_be_numbers(self, x0, cost):
        with fails(TypeError, "x0"):
            minimize(cost.fun, x0, jac=cost.jac)

    def test_rows_of_different_length(self, cost):
        with pytest.raises((TypeError, ValueError)):
            minimize(cost.fun, [[1.0, 0.0], [0.0]], jac=cost.jac)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_must_be_finite(self, value, cost):
        x0 = cost.start
        x0[1, 1] = value
        with fails(ValueError, "x0 must be finite"):
            minimize(cost.fun, x0)

    @pytest.mark.parametrize("method", METHOD_NAMES)
    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_far_from_the_manifold(self, method, kind, cost, numpy_version):
        """How far it is, what was allowed, and a projection that works."""
        x0 = 1.5 * cost.start  # X^T X - I = 1.25 I
        both, x = cost.both, x0
        if kind == "numpy":
            both, x = numpy_version(cost.both), x0.numpy()
        projection = "svd" if kind == "numpy" else "ortholand.geometry.polar_projection(x0)"
        with fails(ValueError, "x0", "columns", "1.8 away", "0.5", projection):
            minimize(both, x, jac=True, method=method)
        assert minimize(cost.fun, polar_projection(x0), method=method, maxiter=1).nit == 1
        U, _, Vh = np.linalg.svd(x0.numpy(), full_matrices=False)
        assert minimize(numpy_version(cost.both), U @ Vh, jac=True, maxiter=1).nit == 1

    def test_wide_matrices_have_rows(self, brockett):
        cost = brockett((2, 6))
        with fails(ValueError, "rows"):
            minimize(cost.fun, 1.5 * cost.start)

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_the_edge_of_what_is_allowed(self, method, cost, verified):
        for d in (0.499, -0.499):
            x0 = cost.start * math.sqrt(1 + d / math.sqrt(2))
            result = minimize(cost.fun, x0, method=method)
            assert verified(result, cost.fun, cost.jac)
        with fails(ValueError, "away"):
            minimize(cost.fun, cost.start * math.sqrt(1 + 0.51 / math.sqrt(2)), method=method)

    def test_nothing_was_evaluated_before(self, cost, counted):
        fun = counted(cost.fun)
        with pytest.raises(ValueError, match="away"):
            minimize(fun, 2 * cost.start)
        with pytest.raises(ValueError, match="method"):
            minimize(fun, cost.start, method="BFGS")
        with pytest.raises(ValueError, match="memry"):
            minimize(fun, cost.start, options={"memry": 3})
        with pytest.raises(ValueError, match="ortholand_lab"):
            minimize(fun, cost.start, method="retraction-gd")
        with pytest.raises(TypeError, match="callback"):
            minimize(fun, cost.start, callback=3)
        assert fun.calls == 0


class TestFunctions:
    def test_numpy_needs_a_gradient(self, cost, numpy_version):
        with fails(ValueError, "NumPy", "jac=True", "torch"):
            minimize(numpy_version(cost.fun), cost.start.numpy())

    @pytest.mark.parametrize("fun", [3, None, "f"])
    def test_fun_must_be_callable(self, fun, cost):
        with fails(TypeError, "fun must be callable", repr(fun)):
            minimize(fun, cost.start)

    @pytest.mark.parametrize("jac", ["4-point", 3, [1]])
    def test_jac_must_be_a_function_or_true(self, jac, cost):
        with fails(TypeError, "jac must be a function, True, '2-point'", repr(jac)):
            minimize(cost.fun, cost.start, jac=jac)

    def test_hessp_must_be_a_function(self, cost):
        with fails(TypeError, "hessp", "3"):
            minimize(cost.fun, cost.start, hessp=3)

    def test_callback_must_be_a_function(self, cost):
        with fails(TypeError, "callback", "3"):
            minimize(cost.fun, cost.start, callback=3)

    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    @pytest.mark.parametrize(
        ("change", "shown"),
        [
            (lambda G: G.T, "(2, 6)"),
            (lambda G: G[:, 0], "(6,)"),
            (lambda G: G.sum(), "()"),
            (lambda G: G[None], "(1, 6, 2)"),
        ],
        ids=["transposed", "vector", "scalar", "batch"],
    )
    def test_shape_of_jac(self, kind, change, shown, cost, numpy_version):
        fun, jac, x0 = cost.fun, cost.jac, cost.start
        if kind == "numpy":
            fun, jac, x0 = numpy_version(fun), numpy_version(jac), x0.numpy()
        with fails(ValueError, "jac must return", "(6, 2)", shown):
            minimize(fun, x0, jac=lambda X: change(jac(X)))

    @pytest.mark.parametrize("dtype", ["complex64", "complex128"])
    def test_type_of_jac(self, dtype, cost, numpy_version):
        with fails(ValueError, "jac must return", "float64", dtype):
            minimize(cost.fun, cost.start, jac=lambda X: cost.jac(X).to(getattr(torch, dtype)))
        jac = numpy_version(cost.jac)
        with fails(ValueError, "jac must return", "float64", dtype):
            minimize(
                numpy_version(cost.fun), cost.start.numpy(), jac=lambda X: jac(X).astype(dtype)
            )

    def test_jac_of_another_library(self, cost):
        with fails(TypeError, "jac", "tensor", "ndarray"):
            minimize(cost.fun, cost.start, jac=lambda X: cost.jac(X).numpy())

    @pytest.mark.parametrize("value", [None, "a", {}])
    def test_jac_of_no_numbers(self, value, cost, numpy_version):
        with fails(TypeError, "jac must return"):
            minimize(numpy_version(cost.fun), cost.start.numpy(), jac=lambda X: value)
        with fails(TypeError, "jac must return a tensor", type(value).__name__):
            minimize(cost.fun, cost.start, jac=lambda X: value)

    @pytest.mark.parametrize("method", ["newton"])
    def test_shape_and_type_of_hessp(self, method, cost):
        with fails(ValueError, "hessp must return", "(6, 2)", "(2, 6)"):
            minimize(cost.fun, cost.start, hessp=lambda X, V: V.mT, method=method)
        with fails(ValueError, "hessp must return", "float64", "complex64"):
            minimize(cost.fun, cost.start, hessp=lambda X, V: V.cfloat(), method=method)

    @pytest.mark.parametrize("method", ["bb", "newton"])
    def test_shape_of_the_preconditioner(self, method, cost):
        with fails(ValueError, "preconditioner must return", "(6, 2)", "(2, 6)"):
            minimize(
                cost.fun, cost.start, method=method, options={"preconditioner": lambda X, V: V.mT}
            )

    @pytest.mark.parametrize(
        "value",
        [torch.ones(3), torch.ones(0), np.ones(2), None, "a", 1j, torch.tensor(1j), [1.0, 2.0], {}],
        ids=["ones", "empty", "array", "None", "str", "complex", "complex tensor", "list", "dict"],
    )
    def test_fun_must_return_one_real_number(self, value, cost):
        with fails((ValueError, TypeError), "fun must return one real number", "real part"):
            minimize(lambda X: value, cost.start, jac=cost.jac)

    def test_fun_of_a_vector_by_autograd(self, cost):
        with fails(ValueError, "one real number", "(2,)"):
            minimize(lambda X: (X * X).sum(0), cost.start)
        with fails(ValueError, "one real number", "complex"):
            minimize(lambda X: X.sum() + 0j, cost.start)

    @pytest.mark.parametrize("value", [1.0, (1.0,), (1.0, 2.0, 3.0)])
    def test_pairs(self, value, cost):
        with fails(ValueError, "jac=True", "pair (value, gradient)"):
            minimize(lambda X: value, cost.start, jac=True)

    @pytest.mark.parametrize("method", ["lbfgs", "newton"])
    def test_fun_that_autograd_cannot_follow(self, method, cost):
        message = ("Without jac", "autograd", "torch operations")
        parameter = torch.ones((), dtype=torch.float64, requires_grad=True)
        for fun in (
            lambda X: cost.fun(X.detach()),
            lambda X: cost.fun(X).item(),
            lambda X: torch.tensor(1.0),
            lambda X: 2 * parameter,  # has a graph, but X is not in it
        ):
            with fails(ValueError, *message):
                minimize(fun, cost.start, method=method)

    def test_errors_of_the_users_functions_are_theirs(self, cost):
        def fun(X):
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            minimize(fun, cost.start)


class TestOptions:
    @pytest.mark.parametrize("method", ["BFGS", "LBFGS", "", 3, ["lbfgs"]])
    def test_methods(self, method, cost):
        with fails((ValueError, TypeError), "method must be one of", "'lbfgs'", repr(method)):
            minimize(cost.fun, cost.start, method=method)

    @pytest.mark.parametrize("gtol", [-1.0, math.nan, math.inf, 1.0, "a", True, 1j, [1]])
    def test_gtol(self, gtol, cost):
        with fails((ValueError, TypeError), "gtol", repr(gtol)):
            minimize(cost.fun, cost.start, gtol=gtol)

    @pytest.mark.parametrize("maxiter", [-1, 2.5, math.nan, "a", True, -math.inf, 1j])
    def test_maxiter(self, maxiter, cost):
        with fails((ValueError, TypeError), "maxiter", "whole number", repr(maxiter)):
            minimize(cost.fun, cost.start, maxiter=maxiter)

    @pytest.mark.parametrize("method", METHOD_NAMES)
    @pytest.mark.parametrize("lam", [-1.0, math.nan, math.inf, "a", True])
    def test_lam(self, method, lam, cost):
        with fails((ValueError, TypeError), "lam must be", repr(lam)):
            minimize(cost.fun, cost.start, lam=lam, method=method)

    def test_landing_needs_attraction(self, cost):
        with fails(ValueError, "lam must be > 0"):
            minimize(cost.fun, cost.start, lam=0, method="landing")

    @pytest.mark.parametrize("options", [5, "abc", [("memory", 3)]])
    def test_options_are_a_dict(self, options, cost):
        with fails(TypeError, "options must be a dict", repr(options)):
            minimize(cost.fun, cost.start, options=options)

    @pytest.mark.parametrize("method", METHOD_NAMES)
    def test_unknown_options(self, method, cost):
        with fails(ValueError, repr(method), "'maxtime'", "got 'nonsense'"):
            minimize(cost.fun, cost.start, method=method, options={"nonsense": 1})

    def test_options_of_other_methods(self, cost):
        for method, options in [
            ("lbfgs", {"step": 0.1}),
            ("landing", {"memory": 5}),
            ("lbfgs", {"preconditioner": lambda X, V: V}),
            ("bb", {"step": 0.1}),
            ("lbfgs", {"ftol": 1e-3}),
        ]:
            with fails(ValueError, "has the options", repr(next(iter(options)))):
                minimize(cost.fun, cost.start, method=method, options=options)

    BAD = (
        ("lbfgs", "memory", [0, -1, 2.5, "a", True]),
        ("newton", "inner_maxiter", [0, -1, 2.5, "a", True]),
        ("newton", "preconditioner", [3, "full"]),
        ("bb", "preconditioner", [3, "auto"]),
        ("landing", "step", [0, -0.1, math.inf, math.nan, "a", True]),
        ("landing", "momentum", [1, -0.1, math.nan, None, "a"]),
        ("landing", "eps", [0, 1, -0.1, math.nan, None, "a"]),
        ("landing", "safe_step", ["x", None, 3]),
        ("lbfgs", "atol", [-1, math.nan, "a", None]),
        ("lbfgs", "maxtime", [-1, math.nan, "a", None]),
        ("lbfgs", "noise", [-1, math.nan, "a", None]),
        ("lbfgs", "gtol", [-1, math.nan, 1.0, "a", True]),
        ("lbfgs", "maxiter", [-1, 2.5, "a", True]),
        ("lbfgs", "disp", ["a", 0.5]),
    )

    @pytest.mark.parametrize(
        ("method", "name", "value"), [(m, name, v) for m, name, values in BAD for v in values]
    )
    def test_values(self, method, name, value, cost):
        with fails((ValueError, TypeError), name, "must be"):
            minimize(cost.fun, cost.start, method=method, options={name: value})

    @pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None, "a", 1j], ids=repr)
    @pytest.mark.parametrize("k", [1, 3])
    @pytest.mark.parametrize("lam", [None, 1.0])
    def test_step_sequences(self, value, k, lam, cost):
        """Named with the iteration, when it comes to it."""
        steps = lambda i: value if i == k else 0.01  # noqa: E731
        with fails((ValueError, TypeError), "options['step']", repr(value), f"iteration {k}"):
            minimize(cost.fun, cost.start, method="landing", lam=lam, options={"step": steps})

    GOOD = (
        dict(gtol=np.float32(1e-3)),
        dict(gtol=np.float64(1e-3)),
        dict(gtol=0),
        dict(maxiter=np.int64(3)),
        dict(maxiter=math.inf),
        dict(lam=np.float32(1)),
        dict(lam=2),
        dict(options={"memory": np.int32(4)}),
        dict(options={"memory": 1}),
        dict(options={"maxtime": math.inf, "atol": np.float32(1e-3)}),
        dict(options={}),
        dict(method="newton", options={"preconditioner": "auto", "inner_maxiter": 5}),
        dict(method="newton", options={"preconditioner": None, "inner_maxiter": None}),
        dict(method="landing", options={"step": np.float32(0.01), "momentum": 0}),
        dict(method="landing", options={"step": lambda k: np.float32(0.05)}),
        dict(method="landing", options={"step": lambda k: 0.01 * (k - 1)}),
        dict(method="landing", options={"eps": 0.1, "safe_step": "frobenius", "momentum": 0.5}),
    )

    @pytest.mark.parametrize("case", range(len(GOOD)))
    def test_good_values(self, case, cost, verified):
        """What looks odd and is right: numbers of NumPy, limits that are none, a warm-up from 0."""
        arguments = self.GOOD[case]
        options = {"maxiter": 20, **arguments}
        result = minimize(cost.fun, cost.start, **options)
        assert result.nit > 0
        verified(result, cost.fun, cost.jac, gtol=arguments.get("gtol"), atol=2e-3)

    def test_the_callers_options_are_left_alone(self, cost):
        options = {"maxtime": 100, "memory": 3}
        minimize(cost.fun, cost.start, method="lbfgs", options=options, maxiter=2)
        assert options == {"maxtime": 100, "memory": 3}
