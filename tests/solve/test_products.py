"""Several blocks, stacks, and manifolds other than one matrix with orthonormal columns."""

import math
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import ortholand as ol
from ortholand.solve import METHODS
from ortholand.solve.curvature import BlockUnits, units_for
from ortholand.solve.manifolds.geometry import Geometry
from ortholand.solve.manifolds.product import Product
from ortholand.solve.variables import Packing

F64 = torch.float64
METHOD_NAMES = (None, *METHODS)
FOR_PRODUCTS = tuple(name for name in METHOD_NAMES if name != "landing")

any_method = pytest.mark.parametrize("method", METHOD_NAMES)
product_method = pytest.mark.parametrize("method", FOR_PRODUCTS)


def orthogonal(*shape, seed=0, dtype=F64):
    return ol.random_orthogonal(*shape, seed=seed, dtype=dtype)


def rotations(N, n=3, seed=0):
    X = np.linalg.qr(np.random.default_rng(seed).standard_normal((N, n, n)))[0]
    return X * np.sign(np.linalg.det(X))[:, None, None] if n % 2 else X


class LowRank:
    """``||U diag(s) V^T - M||^2 / 2`` for M of rank 3: what a user of a product would write."""

    def __init__(self, m=8, n=6, rank=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        U, V = orthogonal(m, rank, seed=1), orthogonal(n, rank, seed=2)
        self.s = torch.tensor([3.0, 2.0, 1.0], dtype=F64)[:rank]
        self.M = (U * self.s) @ V.mT
        noise = lambda *shape: 0.3 * torch.randn(*shape, generator=generator, dtype=F64)  # noqa: E731
        self.start = {
            "U": torch.linalg.qr(U + noise(m, rank))[0],
            "s": self.s + noise(rank),
            "V": torch.linalg.qr(V + noise(n, rank))[0],
        }
        signs = torch.diagonal(U.mT @ self.start["U"]).sign()
        self.start["U"] = self.start["U"] * signs
        self.start["V"] = self.start["V"] * torch.diagonal(V.mT @ self.start["V"]).sign()

    def fun(self, x):
        return ((x["U"] * x["s"]) @ x["V"].mT - self.M).square().sum() / 2

    def numpy_both(self, x):
        U, s, V = x["U"], x["s"], x["V"]
        E = (U * s) @ V.T - self.M.numpy()
        # Another order of the keys than x0 has.
        return np.vdot(E, E) / 2, {
            "V": E.T @ (U * s),
            "s": np.einsum("ij,ik,jk->k", E, U, V),
            "U": E @ (V * s),
        }


def is_feasible(X):
    X = torch.as_tensor(X)
    X = X.mT if X.shape[-2] < X.shape[-1] else X
    far = torch.linalg.matrix_norm(X.mH @ X - torch.eye(X.shape[-1], dtype=X.dtype)).max()
    return far < 100 * torch.finfo(X.dtype).eps * math.sqrt(X.shape[-1])


class TestProducts:
    @product_method
    def test_a_low_rank_model_is_as_easy_as_one_matrix(self, method):
        problem = LowRank()
        result = ol.minimize(problem.fun, problem.start, method=method, gtol=1e-7)
        assert result.success, result.message
        assert result.fun < 1e-10
        assert set(result.x) == {"U", "s", "V"}
        assert is_feasible(result.x["U"])
        assert is_feasible(result.x["V"])
        torch.testing.assert_close(result.x["s"].abs().sort().values, problem.s.flip(0))

    @product_method
    def test_numpy_with_a_gradient_of_the_same_structure(self, method):
        problem = LowRank()
        x0 = {name: x.numpy() for name, x in problem.start.items()}
        result = ol.minimize(problem.numpy_both, x0, jac=True, method=method, gtol=1e-7)
        assert result.success, result.message
        assert result.fun < 1e-10
        assert all(type(x) is np.ndarray and x.flags.writeable for x in result.x.values())
        assert set(result.jac) == set(x0)

    def test_numpy_and_torch_take_the_same_way(self):
        problem = LowRank()
        x0 = {name: x.numpy() for name, x in problem.start.items()}
        first = ol.minimize(problem.fun, problem.start, method="bb", maxiter=10)
        second = ol.minimize(problem.numpy_both, x0, jac=True, method="bb", maxiter=10)
        np.testing.assert_allclose(first.history["fun"], second.history["fun"], rtol=1e-8)

    def test_success_is_of_all_blocks(self):
        """Verified block by block, independently."""
        problem = LowRank()
        result = ol.minimize(problem.fun, problem.start, gtol=1e-9)
        assert result.success
        x = {name: v.clone().requires_grad_() for name, v in result.x.items()}
        grads = dict(zip(x, torch.autograd.grad(problem.fun(x), list(x.values())), strict=True))
        from ortholand.geometry import riemannian_gradient

        norm = math.hypot(
            float(riemannian_gradient(result.x["U"], grads["U"]).norm()),
            float(riemannian_gradient(result.x["V"], grads["V"]).norm()),
            float(grads["s"].norm()),
        )
        assert norm <= 1.01e-9 * result.history["grad_norm"][0]
        assert result.grad_norm == pytest.approx(norm, abs=1e-13)

    @pytest.mark.parametrize("kind", ["list", "tuple", "namedtuple", "ordered", "nested"])
    def test_any_structure(self, kind):
        A, B = orthogonal(5, 2, seed=0), orthogonal(4, 4, seed=1)
        pair = namedtuple("pair", "first second")
        x0 = {
            "list": [A, B],
            "tuple": (A, B),
            "namedtuple": pair(A, B),
            "ordered": OrderedDict(b=B, a=A),
            "nested": {"a": [A, (B,)]},
        }[kind]
        D = torch.arange(1.0, 6, dtype=F64)

        def fun(x):
            assert type(x) is type(x0)
            leaves = torch.utils._pytree.tree_leaves(x)
            return sum((X * D[: len(X), None] * X * D[: X.shape[1]]).sum() for X in leaves)

        result = ol.minimize(fun, x0)
        assert result.success
        assert type(result.x) is type(x0)
        expected = (2 + 2) + (4 + 2 * 3 + 3 * 2 + 4)
        assert result.fun == pytest.approx(expected, abs=1e-6)

    def test_complex_and_real_blocks_together(self):
        z0, x0 = orthogonal(4, 2, dtype=torch.complex128), orthogonal(3, 3)
        H = torch.diag(torch.arange(1.0, 5, dtype=F64)).to(torch.complex128)
        target = orthogonal(3, 3, seed=5)
        target = target * torch.linalg.det(target) * torch.linalg.det(x0)
        fun = lambda x: (x[0].conj() * (H @ x[0])).sum().real - (x[1] * target).sum()  # noqa: E731
        for method in ("newton", "lbfgs", "bb"):
            result = ol.minimize(fun, [z0, x0], method=method)
            assert result.success
            assert result.fun == pytest.approx(3 - 3)
            assert result.x[0].dtype == torch.complex128

    def test_callbacks_see_the_structure(self):
        problem, seen = LowRank(), []
        ol.minimize(problem.fun, problem.start, maxiter=3, callback=lambda x: seen.append(x))
        assert len(seen) == 3
        assert all(set(x) == {"U", "s", "V"} for x in seen)

    def test_wide_blocks(self):
        problem = LowRank()
        x0 = {**problem.start, "V": problem.start["V"].mT.contiguous()}
        fun = lambda x: problem.fun({**x, "V": x["V"].mT})  # noqa: E731
        result = ol.minimize(fun, x0, gtol=1e-7)
        assert result.success
        assert result.x["V"].shape == (3, 6)
        assert result.fun < 1e-10

    @product_method
    def test_broken_functions_are_a_status(self, method):
        problem, calls = LowRank(), []

        def fun(x):
            calls.append(1)
            return problem.fun(x) * (math.nan if len(calls) > 6 else 1.0)

        result = ol.minimize(fun, problem.start, method=method)
        assert not result.success
        assert result.status == 4
        assert is_feasible(result.x["U"])
        assert bool(result.x["s"].isfinite().all())

    @product_method
    def test_the_wrong_sign_is_noticed(self, method):
        problem = LowRank()
        x0 = {name: x.numpy() for name, x in problem.start.items()}

        def both(x):
            value, G = problem.numpy_both(x)
            return value, {name: -g for name, g in G.items()}

        result = ol.minimize(both, x0, jac=True, method=method)
        assert not result.success
        assert result.fun <= problem.numpy_both(x0)[0] + 1e-10
        assert result.nfev < 2000


class TestManifolds:
    @any_method
    def test_the_sphere(self, method):
        """The smallest eigenvalue, as a vector."""
        d = np.arange(1.0, 7)
        x0 = np.ones(6) / math.sqrt(6)
        both = lambda x: (np.vdot(x, d * x), 2 * d * x)  # noqa: E731
        result = ol.minimize(both, x0, jac=True, manifold=ol.Sphere(), method=method)
        assert result.success
        assert result.x.shape == (6,)
        assert result.fun == pytest.approx(1)
        assert np.linalg.norm(result.x) == pytest.approx(1, abs=1e-14)

    @pytest.mark.parametrize("method", [None, "lbfgs", "bb", "newton"])
    def test_no_constraint_at_all(self, method):
        """Rosenbrock's valley: nothing limits a step."""

        def fun(x):
            return (1 - x[:-1]).square().sum() + 100 * (x[1:] - x[:-1] ** 2).square().sum()

        x0 = torch.tensor([-1.2, 1.0, 1.0], dtype=F64)
        # The gradient at x0 is 233, the smallest curvature at the solution 0.48: with the default
        # gtol, x may be off by 7e-6.
        result = ol.minimize(fun, x0, manifold=ol.Euclidean, method=method, gtol=1e-10)
        assert result.success, result.message
        torch.testing.assert_close(result.x, torch.ones(3, dtype=F64), rtol=1e-6, atol=1e-6)

    @product_method
    def test_subspaces(self, method):
        A = torch.diag(torch.arange(1.0, 13, dtype=F64))
        x0 = orthogonal(12, 4)
        fun = lambda X: (X * (A @ X)).sum()  # noqa: E731
        result = ol.minimize(fun, x0, manifold=ol.Grassmann(), method=method)
        assert result.success
        assert result.fun == pytest.approx(10)

    def test_newton_leaves_out_the_flat_directions(self):
        """No step rotates columns: X^T X' stays symmetric for the first step."""
        A = torch.diag(torch.arange(1.0, 13, dtype=F64))
        x0, seen = orthogonal(12, 4), []
        fun = lambda X: (X * (A @ X)).sum()  # noqa: E731
        ol.minimize(
            fun, x0, manifold=ol.Grassmann(), method="newton", callback=seen.append, maxiter=1
        )
        turn = x0.mT @ seen[0]
        assert (turn - turn.mT).norm() < 1e-12
        assert (seen[0] - x0).norm() > 1e-2

    def test_a_cost_that_is_not_of_the_span(self):
        A = torch.diag(torch.arange(1.0, 13, dtype=F64))
        mu = torch.arange(4.0, 0, -1, dtype=F64)
        with pytest.raises(ValueError, match=r"span.*ol\.Stiefel"):
            ol.minimize(
                lambda X: (X * (A @ X) * mu).sum(), orthogonal(12, 4), manifold=ol.Grassmann()
            )

    @any_method
    def test_rotations_keep_their_determinant(self, method):
        """The best reflection would be better."""
        target = np.diag([1.0, 1, 1, -1])
        x0 = rotations(1, 4, seed=1)[0]
        x0[:, 0] *= np.sign(np.linalg.det(x0))
        weights = np.array([4.0, 3, 2, 1])
        both = lambda X: (-np.sum(X * target * weights), -target * weights)  # noqa: E731
        result = ol.minimize(both, x0, jac=True, manifold=ol.Rotations(), method=method)
        assert result.success
        assert np.linalg.det(result.x) == pytest.approx(1)
        assert result.fun == pytest.approx(-8)

    def test_rules_of_manifolds(self):
        fun = lambda X: (X * X).sum()  # noqa: E731
        reflection = torch.diag(torch.tensor([1.0, -1.0], dtype=F64))
        for x0, manifold, words in [
            (reflection, ol.Rotations(), "determinant 1"),
            (orthogonal(4, 2), ol.Rotations(), "square"),
            (torch.ones(3, dtype=F64), ol.Sphere(), "length 1"),
            (torch.ones(3, dtype=F64), None, "Sphere"),
            ({"a": torch.ones(4, 2, dtype=F64)}, None, r"x0\['a'\]"),
            ({}, None, "at least one block"),
        ]:
            with pytest.raises(ValueError, match=words):
                ol.minimize(fun, x0, manifold=manifold)

    def test_manifolds_have_the_structure_of_x0(self):
        x0 = {"a": orthogonal(4, 2), "b": torch.ones(3, dtype=F64)}
        fun = lambda x: (x["a"] ** 2).sum() + (x["b"] ** 2).sum()  # noqa: E731
        result = ol.minimize(fun, x0, manifold={"b": ol.Euclidean()})
        assert result.fun == pytest.approx(2)
        with pytest.raises(ValueError, match="keys"):
            ol.minimize(fun, x0, manifold={"c": ol.Euclidean()})
        with pytest.raises(ValueError, match="2 parts"):
            ol.minimize(lambda x: (x[0] ** 2).sum(), list(x0.values()), manifold=[ol.Stiefel()])
        with pytest.raises(TypeError, match="manifold"):
            ol.minimize(fun, x0, manifold="stiefel")
        with pytest.raises(TypeError, match="manifold"):
            ol.minimize(fun, x0["a"], manifold=[ol.Stiefel()])

    def test_blocks_must_be_alike(self):
        fun = lambda x: (x[0] ** 2).sum()  # noqa: E731
        for second in (orthogonal(3, 2, dtype=torch.float32), np.eye(3, 2)):
            with pytest.raises(TypeError, match=r"one library, precision and device.*x0\[1\]"):
                ol.minimize(fun, [orthogonal(4, 2), second])

    def test_gradients_of_another_structure(self):
        problem = LowRank()
        x0 = {name: x.numpy() for name, x in problem.start.items()}
        for wrong in (
            lambda G: G["U"],
            lambda G: {"U": G["U"]},
            lambda G: list(G.values()),
            lambda G: {**G, "t": 0},
        ):
            both = lambda x, wrong=wrong: (0.0, wrong(problem.numpy_both(x)[1]))  # noqa: E731
            with pytest.raises(ValueError, match="jac must return the structure of x0"):
                ol.minimize(both, x0, jac=True)

    def test_landing_is_for_matrices(self):
        problem = LowRank()
        with pytest.raises(ValueError, match="one matrix"):
            ol.minimize(problem.fun, problem.start, method="landing")


class TestStacks:
    @any_method
    @pytest.mark.parametrize("shape", [(5, 3, 3), (4, 6, 2), (4, 2, 6), (2, 3, 5, 2)])
    def test_are_solved_together(self, method, shape):
        """Each matrix its own Procrustes problem; each is solved."""
        generator = torch.Generator().manual_seed(0)
        C = torch.randn(*shape, generator=generator, dtype=F64)
        x0 = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=F64), False)
        x0 = x0[0] @ x0[2]
        if shape[-1] == shape[-2]:  # in the component of its solution
            x0[..., 0] *= (torch.linalg.det(x0) * torch.linalg.det(-C)).sign()[..., None]
        result = ol.minimize(lambda X: (C * X).sum(), x0, method=method)
        assert result.success, result.message
        assert result.x.shape == shape
        assert is_feasible(result.x)
        assert result.fun == pytest.approx(-float(torch.linalg.svdvals(C).sum()), rel=1e-9)

    def test_a_stack_of_one_is_the_matrix(self):
        A = np.diag(np.arange(1.0, 8))
        x0 = np.linalg.qr(np.random.default_rng(0).standard_normal((7, 2)))[0]
        both = lambda X: (np.sum(X * (A @ X)), 2 * A @ X)  # noqa: E731
        for method in ("lbfgs", "bb"):
            one = ol.minimize(both, x0, jac=True, method=method, maxiter=8)
            stack = ol.minimize(both, x0[None], jac=True, method=method, maxiter=8)
            np.testing.assert_allclose(stack.history["fun"], one.history["fun"], rtol=1e-10)

    def test_a_long_stack_takes_long_steps(self):
        """What limits a step is the matrix that moves most, not the sum over all."""
        rng = np.random.default_rng(0)
        C = rotations(200, seed=1)
        x0 = C @ rotations(1, seed=2)[0]
        del rng
        both = lambda X: (-np.sum(C * X), -C)  # noqa: E731
        few = ol.minimize(lambda X: (-np.sum(C[:2] * X), -C[:2]), x0[:2], jac=True, method="bb")
        many = ol.minimize(both, x0, jac=True, method="bb")
        assert few.success
        assert many.success
        assert many.nit <= few.nit + 3

    def test_a_start_far_from_the_manifold(self):
        x0 = rotations(3)
        x0[1] *= 2
        with pytest.raises(ValueError, match="away"):
            ol.minimize(lambda X: (0.0, X), x0, jac=True)


# Units of the blocks.


@pytest.mark.parametrize("method", ["bb", "lbfgs", "newton", None])
def test_the_unit_of_a_free_block_costs_few_iterations(method):
    """Data times 100 make s so large: U's curvature is s^2 then, and that of s is 1."""
    problem, evaluations = LowRank(m=20, n=15), []
    for scale in (1.0, 100.0):
        x0 = {**problem.start, "s": scale * problem.start["s"]}

        def fun(x, scale=scale):
            return ((x["U"] * x["s"]) @ x["V"].mT - scale * problem.M).square().sum() / 2

        result = ol.minimize(fun, x0, method=method, gtol=1e-8)
        assert result.success
        torch.testing.assert_close(result.x["s"], scale * problem.s, rtol=1e-6, atol=0)
        evaluations.append(result.njev + result.nhev)
    assert evaluations[1] < 3 * evaluations[0]


def test_units_of_blocks_follow_their_curvature():
    product = Product([Geometry(), Geometry()], Packing([np.zeros(2), np.zeros(3)]))
    units = BlockUnits(product, np.zeros(5))
    assert not units.froze()
    step = np.ones(5)
    units.learn(step, np.array([16.0, 16, 1, 1, 1]))
    np.testing.assert_allclose(units.scaled(step), [1, 1, 16, 16, 16])
    units.learn(step, np.array([1.0, 1, 0, 0, np.nan]))  # nothing is seen of the second
    assert units.scaled(step)[2] < 16
    assert units.froze()
    assert not units.froze()
    assert units_for(Geometry(), step) is None
