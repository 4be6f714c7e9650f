"""The door: NumPy and torch, layouts and types, gradients and Hessians however they come."""

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from ortholand import minimize, random_orthogonal
from ortholand.solve import METHODS
from ortholand.solve.manifolds import variables_on

METHOD_NAMES = tuple(METHODS)
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
SHAPES = [(3, 3), (4, 2), (2, 4), (4, 1)]

methods = pytest.mark.parametrize("method", METHOD_NAMES)


def iterates(fun, x0, **options):
    """The run's iterates as arrays, and its result."""
    seen = []

    def callback(X):
        seen.append(X.copy() if isinstance(X, np.ndarray) else X.numpy().copy())

    result = minimize(fun, x0, callback=callback, **options)
    return seen, result


class TestNumpyAndTorch:
    @methods
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_same_arithmetic_gives_the_same_iterates_to_the_last_bit(
        self, method, shape, dtype, brockett, numpy_version
    ):
        cost = brockett(shape, dtype)
        options = dict(method=method, gtol=1e-6, maxiter=8)
        torch_seen, torch_result = iterates(cost.fun, cost.start, jac=cost.jac, **options)
        numpy_seen, numpy_result = iterates(
            numpy_version(cost.fun),
            cost.start.numpy(),
            jac=numpy_version(cost.jac),
            **options,
        )
        assert len(torch_seen) == len(numpy_seen) > 2
        for X, Y in zip(torch_seen, numpy_seen, strict=True):
            assert X.dtype == Y.dtype
            assert np.array_equal(X, Y)
        assert np.array_equal(torch_result.x.numpy(), numpy_result.x)
        assert torch_result.fun == numpy_result.fun
        assert torch_result.nfev == numpy_result.nfev

    @methods
    def test_independent_arithmetic_gives_close_iterates(self, method, brockett):
        """NumPy's products and torch's autograd differ in rounding, which grows with each step."""
        cost = brockett((6, 3))
        A, mu = cost.A.numpy(), cost.mu.numpy()
        torch_seen, _ = iterates(cost.fun, cost.start, method=method, maxiter=5)
        numpy_seen, _ = iterates(
            lambda X: float(np.einsum("ij,ik,kj,j->", X, A, X, mu)),
            cost.start.numpy(),
            jac=lambda X: 2 * (A @ X) * mu,
            hessp=lambda X, V: 2 * (A @ V) * mu,
            method=method,
            maxiter=5,
        )
        for X, Y in zip(torch_seen, numpy_seen, strict=True):
            np.testing.assert_allclose(X, Y, rtol=0, atol=1e-12)

    @methods
    @pytest.mark.parametrize("shape", [(6, 2), (2, 6)])
    def test_numpy_in_numpy_out(self, method, shape, brockett, numpy_version):
        cost = brockett(shape, torch.complex128)
        result = minimize(numpy_version(cost.both), cost.start.numpy(), jac=True, method=method)
        assert result.success
        for array in (result.x, result.jac):
            assert type(array) is np.ndarray
            assert (array.shape, array.dtype) == (shape, np.complex128)
            assert array.flags.writeable
            assert array.flags.owndata

    def test_result_is_the_users_own(self, brockett):
        """Nothing of the run hangs on it: not x0, not what fun and callback were given."""
        cost, seen = brockett(), []

        def both(X):
            seen.append(X)
            return cost.both(X)

        x0 = cost.solution()  # stationary already: x could be x0 itself
        before = x0.clone()
        result = minimize(both, x0, jac=True)
        assert result.nit == 0
        others = [x0, *seen]
        snapshots = [X.clone() for X in others]
        result.x.zero_()
        result.jac.zero_()
        for X, snapshot in zip(others, snapshots, strict=True):
            assert torch.equal(X, snapshot)
        assert torch.equal(x0, before)


class TestWhatFunctionsReceive:
    @methods
    @pytest.mark.parametrize("shape", [(6, 2), (2, 6)])
    def test_numpy_x_cannot_be_written_to(self, method, shape, brockett):
        cost = brockett(shape)

        def both(X):
            assert type(X) is np.ndarray
            assert X.shape == shape
            assert not X.flags.writeable
            X[0, 0] = 3.0

        with pytest.raises(ValueError, match="read-only"):
            minimize(both, cost.start.numpy(), jac=True, method=method)

    def test_hessp_and_preconditioner_cannot_write_either(self, brockett, numpy_version):
        cost = brockett()
        given = []

        def hessp(X, V):
            given.extend([X, V])
            return numpy_version(cost.hessp)(X, V)

        def preconditioner(X, V):
            given.extend([X, V])
            return V

        minimize(
            numpy_version(cost.fun),
            cost.start.numpy(),
            jac=numpy_version(cost.jac),
            hessp=hessp,
            method="newton",
            options={"preconditioner": preconditioner},
        )
        assert len(given) > 8
        assert not any(array.flags.writeable for array in given)

    def test_fun_and_jac_see_the_same_memory(self, brockett):
        """No copy is made between the calls of one evaluation, and the next one has its own."""
        cost, seen = brockett(), []
        A, mu = cost.A.numpy(), cost.mu.numpy()

        def fun(X):
            seen.append(X)
            return float((X * (A @ X) * mu).sum())

        def jac(X):
            assert np.shares_memory(X, seen[-1])
            return 2 * A @ X * mu

        minimize(fun, cost.start.numpy(), jac=jac)
        assert len(seen) > 3
        assert not any(np.shares_memory(X, Y) for X, Y in pairwise(seen))

    @pytest.mark.parametrize("shape", [(6, 2), (4, 4)])
    def test_no_copies_are_made_on_the_way(self, shape):
        X = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        array = X.numpy()
        assert np.shares_memory(variables_on(np.eye(*shape)).outward(array), array)
        assert np.shares_memory(variables_on(np.eye(*shape), torch_inside=True).outward(X), array)
        assert variables_on(X, torch_inside=True).outward(X).data_ptr() == X.data_ptr()
        assert variables_on(X).outward(X.numpy()).data_ptr() == X.data_ptr()

    def test_torch_x_that_is_written_to_is_noticed_or_harmless(self, brockett):
        """Torch has no read-only tensors; the run must not go wrong in silence."""
        cost = brockett()

        def both(X):
            value, G = cost.both(X)
            X.mul_(0.5)
            return value, G

        with pytest.raises((ValueError, RuntimeError), match=r"modif|in.?place|written"):
            minimize(both, cost.start, jac=True, maxiter=50)

    def test_what_they_keep_does_not_change(self, brockett):
        cost, kept, copies = brockett((5, 3)), [], []

        def keep(*matrices):
            kept.extend(matrices)
            copies.extend(M.clone() for M in matrices)

        def hessp(X, V):
            keep(X, V)
            return cost.hessp(X, V)

        def both(X):
            keep(X)
            return cost.both(X)

        minimize(both, cost.start, jac=True, hessp=hessp, method="newton")
        assert len(kept) > 20
        assert all(torch.equal(M, copy) for M, copy in zip(kept, copies, strict=True))

    @methods
    @pytest.mark.parametrize("shape", [(6, 2), (2, 6)])
    def test_contiguous_as_x0(self, method, shape, brockett):
        """``X.view(-1)`` works for tall x0, so it has to for wide ones."""
        cost = brockett(shape)
        weights = torch.linspace(1, 2, 12, dtype=torch.float64)
        result = minimize(
            lambda X: (weights * X.view(-1) ** 4).sum(), cost.start, method=method, gtol=1e-2
        )
        assert result.success


LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "reversed": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "list": lambda x: x.tolist(),
}


class TestStarts:
    """x0 in whatever memory it comes."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("shape", [(6, 2), (2, 6), (4, 4)])
    def test_layouts_do_not_matter(self, layout, shape, brockett, numpy_version):
        cost = brockett(shape)
        x0 = cost.start.numpy()
        expected = minimize(numpy_version(cost.both), x0, jac=True)
        result = minimize(numpy_version(cost.both), LAYOUTS[layout](x0), jac=True)
        assert result.success
        assert np.array_equal(result.x, expected.x)

    def test_field_of_a_record_array(self, brockett, numpy_version):
        cost = brockett()
        records = np.zeros(4, dtype=[("x", "f8", 2), ("flag", "i1")])
        records["x"] = cost.start.numpy()
        result = minimize(numpy_version(cost.both), records["x"], jac=True)
        assert result.success

    def test_read_only_and_untouched(self, brockett, numpy_version):
        cost = brockett()
        x0 = cost.start.numpy().copy()
        x0.flags.writeable = False
        before = x0.copy()
        result = minimize(numpy_version(cost.both), x0, jac=True)
        assert result.success
        assert np.array_equal(x0, before)
        assert result.x.flags.writeable

    @methods
    def test_x0_is_never_modified(self, method, brockett):
        cost = brockett()
        x0 = cost.start
        before, version = x0.clone(), x0._version
        minimize(cost.fun, x0, method=method)
        assert torch.equal(x0, before)
        assert x0._version == version

    def test_integers_are_taken_for_float64(self, brockett, numpy_version):
        cost = brockett()
        result = minimize(numpy_version(cost.both), np.eye(4, 2, dtype=int)[::-1], jac=True)
        assert result.x.dtype == np.float64
        assert result.fun == pytest.approx(cost.optimum)

    @pytest.mark.parametrize("layout", ["transposed", "strided", "expanded grad"])
    def test_tensors_of_any_layout(self, layout, brockett):
        cost = brockett()
        x0 = cost.start
        x = {
            "transposed": lambda: x0.mT.contiguous().mT,
            "strided": lambda: x0.repeat_interleave(2, 0)[::2],
            "expanded grad": lambda: torch.nn.Parameter(x0.clone()),
        }[layout]()
        result = minimize(cost.fun, x)
        assert torch.equal(result.x, minimize(cost.fun, x0).x)
        assert type(result.x) is torch.Tensor
        assert not result.x.requires_grad

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
    @pytest.mark.parametrize("method", ["lbfgs", "newton"])
    def test_the_callers_grad_mode_does_not_matter(self, mode, method, brockett):
        cost = brockett()
        expected = minimize(cost.fun, cost.start, method=method)
        with mode():
            enabled = torch.is_grad_enabled()
            result = minimize(cost.fun, cost.start, method=method)
            assert torch.is_grad_enabled() is enabled
        assert torch.equal(result.x, expected.x)

    def test_x0_made_in_inference_mode(self, brockett):
        cost = brockett()
        with torch.inference_mode():
            x0 = cost.start
        assert minimize(cost.fun, x0).success

    @methods
    @pytest.mark.parametrize("shape", [(4, 4), (6, 3)])
    def test_any_default_device(self, method, shape, brockett):
        """Nothing is made on torch's default device rather than on x0's: a stand-in for a GPU."""
        cost = brockett(shape)
        x0 = cost.start
        expected = minimize(cost.fun, x0, method=method, maxiter=25)
        with torch.device("meta"):
            result = minimize(cost.fun, x0, method=method, maxiter=25)
        assert torch.equal(result.x, expected.x)

    def test_any_default_dtype(self, brockett):
        cost = brockett((6, 2), torch.float32)
        expected = minimize(cost.fun, cost.start)
        torch.set_default_dtype(torch.float64)
        try:
            result = minimize(cost.fun, cost.start)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(result.x, expected.x)


class TestGradients:
    @methods
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
    @pytest.mark.parametrize("shape", [(4, 4), (6, 2), (2, 6)])
    def test_callable_pair_and_autograd_agree(self, method, shape, dtype, brockett):
        """Df = Re <jac, dX>, as autograd has it."""
        cost = brockett(shape, dtype)
        options = dict(method=method, maxiter=3, hessp=cost.hessp)
        results = [
            minimize(cost.fun, cost.start, jac=cost.jac, **options),
            minimize(cost.both, cost.start, jac=True, **options),
            minimize(cost.fun, cost.start, **options),
            minimize(cost.fun, cost.start, jac=False, **options),
        ]
        for result in results:
            assert result.nit == 3
            np.testing.assert_allclose(result.history["fun"], results[0].history["fun"], rtol=1e-9)

    @methods
    @pytest.mark.parametrize("way", ["callable", "pair"])
    @pytest.mark.parametrize("kind", ["numpy", "torch"])
    def test_a_gradient_in_one_buffer(self, method, way, kind, brockett, numpy_version):
        """A jac that overwrites what it returned before gives what one that allocates gives."""
        cost = brockett((5, 3))
        fun, jac, x0 = cost.fun, cost.jac, cost.start
        if kind == "numpy":
            fun, jac, x0 = numpy_version(fun), numpy_version(jac), x0.numpy()
        buffer = np.empty((5, 3)) if kind == "numpy" else torch.empty_like(x0)

        def reusing(X):
            buffer[...] = jac(X)
            return buffer

        both = lambda X: (fun(X), reusing(X))  # noqa: E731
        expected = minimize(fun, x0, jac=jac, method=method, maxiter=15)
        if way == "callable":
            result = minimize(fun, x0, jac=reusing, method=method, maxiter=15)
        else:
            result = minimize(both, x0, jac=True, method=method, maxiter=15)
        assert np.array_equal(result.history["grad_norm"], expected.history["grad_norm"])
        assert np.array_equal(result.x, expected.x)
        assert np.array_equal(result.jac, expected.jac)
        buffer[...] = 0
        assert np.array_equal(result.jac, expected.jac)

    @pytest.mark.parametrize("layout", ["fortran", "read-only", "reversed", "list", "tensor"])
    def test_numpy_gradients_of_any_layout(self, layout, brockett, numpy_version):
        cost = brockett()
        jac = numpy_version(cost.jac)

        def read_only(G):
            G.flags.writeable = False
            return G

        change = {
            "fortran": np.asfortranarray,
            "read-only": read_only,
            "reversed": lambda G: G[::-1].copy()[::-1],
            "list": lambda G: G.tolist(),
            "tensor": torch.from_numpy,
        }[layout]
        x0 = cost.start.numpy()
        expected = minimize(numpy_version(cost.fun), x0, jac=jac)
        result = minimize(numpy_version(cost.fun), x0, jac=lambda X: change(jac(X)))
        assert np.array_equal(result.x, expected.x)

    def test_lazily_conjugated_gradients(self, brockett):
        cost = brockett((6, 2), torch.complex128)
        result = minimize(
            cost.fun, cost.start, jac=lambda X: cost.jac(X).conj().resolve_conj().conj()
        )
        assert result.success
        result.jac.numpy()

    @pytest.mark.parametrize("value", ["tensor", "float", "numpy", "(1,)", "(1, 1)", "with graph"])
    def test_costs_of_any_kind(self, value, brockett):
        cost = brockett()
        change = {
            "tensor": lambda v: v,
            "float": float,
            "numpy": lambda v: np.float64(v.item()),
            "(1,)": lambda v: v.reshape(1),
            "(1, 1)": lambda v: v.reshape(1, 1),
            "with graph": lambda v: v.clone().requires_grad_(),
        }[value]
        result = minimize(lambda X: change(cost.fun(X)), cost.start, jac=cost.jac)
        assert result.success
        assert type(result.fun) is float

    @pytest.mark.parametrize("name", ["jac", "hessp"])
    def test_functions_may_use_autograd_themselves(self, name, brockett):
        """As the user would outside of minimize, where gradients are enabled."""
        cost = brockett()

        def jac(X):
            Y = X.detach().requires_grad_()
            return torch.autograd.grad(cost.fun(Y), Y)[0]

        def hessp(X, V):
            return torch.autograd.functional.hvp(cost.fun, X, V)[1]

        own = {"jac": jac} if name == "jac" else {"jac": cost.jac, "hessp": hessp}
        result = minimize(cost.fun, cost.start, method="newton", **own)
        assert result.success

    def test_x_marked_by_the_users_jac_stays_the_users(self, brockett):
        cost = brockett()

        def jac(X):
            X.requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(cost.fun(X), X)[0]

        result = minimize(cost.fun, cost.start, jac=jac)
        assert result.success
        assert not result.x.requires_grad

    def test_no_graph_outlives_the_run(self, brockett):
        """Autograd's graphs are let go: fun's intermediates do not pile up."""
        cost, alive = brockett(), []

        def fun(X):
            Y = X * 1
            alive.append(weakref.ref(Y))
            return cost.fun(Y)

        result = minimize(fun, cost.start, method="newton")
        gc.collect()
        assert result.success
        assert not any(reference() is not None for reference in alive)


class TestHessians:
    """For ``"newton"``: the user's product, autograd's, or differences of gradients."""

    @pytest.mark.parametrize("way", ["hessp", "hessp and autograd", "autograd", "differences"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
    @pytest.mark.parametrize("shape", [(4, 4), (6, 2), (2, 6), (5, 1)])
    def test_all_reach_1e_10(self, way, shape, dtype, brockett, counted, verified):
        cost = brockett(shape, dtype)
        jac, hessp = counted(cost.jac), counted(cost.hessp)
        given = {
            "hessp": dict(jac=jac, hessp=hessp),
            "hessp and autograd": dict(hessp=hessp),
            "autograd": {},
            "differences": dict(jac=jac),
        }[way]
        result = minimize(cost.fun, cost.start, method="newton", gtol=1e-10, **given)
        assert verified(result, cost.fun, cost.jac, gtol=1e-10)
        assert result.fun == pytest.approx(cost.optimum, rel=1e-13)
        assert result.nit < 30
        if "hessp" in way:
            assert result.nhev == hessp.calls
        if way == "differences":
            assert result.njev == jac.calls > result.nhev > 0

    def test_products_are_with_matrices_like_x(self, brockett):
        cost = brockett((2, 6), torch.complex64)

        def hessp(X, V):
            assert (X.shape, X.dtype) == (V.shape, V.dtype) == ((2, 6), torch.complex64)
            return cost.hessp(X, V)

        assert minimize(cost.fun, cost.start, hessp=hessp, method="newton").success

    def test_a_linear_cost_has_no_hessian(self):
        """Its graph of second derivatives does not exist; autograd would raise."""
        C = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x0 = random_orthogonal(5, 3, seed=1, dtype=torch.float64)
        result = minimize(lambda X: (C * X).sum(), x0, method="newton")
        assert result.success
        assert result.fun == pytest.approx(-float(torch.linalg.svdvals(C).sum()))

    def test_a_cost_that_can_be_differentiated_only_once(self, brockett):
        """Differences of its gradients then, not a Hessian of zero."""
        cost = brockett((6, 3))

        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, X):
                ctx.save_for_backward(X)
                return cost.fun(X)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, gradient):
                return gradient * cost.jac(*ctx.saved_tensors)

        result = minimize(Once.apply, cost.start, method="newton", gtol=1e-8)
        assert result.success
        assert result.nit < 40

    def test_a_product_that_is_its_argument(self):
        """Hess f = I, returned as V itself: nothing of CG's may be overwritten through it."""
        target = random_orthogonal(5, 3, seed=0, dtype=torch.float64)
        C = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        x0 = random_orthogonal(5, 3, seed=1, dtype=torch.float64)
        fun = lambda X: (X**2).sum() / 2 - (X * (target @ C)).sum()  # noqa: E731
        jac = lambda X: X - target @ C  # noqa: E731
        same, copy = (
            minimize(fun, x0, jac=jac, hessp=hessp, method="newton", gtol=1e-10)
            for hessp in (lambda X, V: V, lambda X, V: V.clone())
        )
        assert same.success
        assert torch.equal(same.x, copy.x)
