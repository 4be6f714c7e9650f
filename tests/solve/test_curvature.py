"""The preconditioner that Newton's method learns from random probes."""

import numpy as np
import pytest
import torch

import ortholand as ol
from ortholand import minimize, random_orthogonal
from ortholand.geometry import riemannian_hessian
from ortholand.solve.arrays import inner
from ortholand.solve.curvature import Columns, Curvatures, SquareRotations
from ortholand.solve.manifold_cost import ManifoldCost
from ortholand.solve.manifolds import geometry_of, variables_on
from ortholand.solve.methods.newton import Model
from ortholand.solve.objective import Objective
from ortholand_lab.problems import PCA, Brockett


def model_at(fun, X):
    """In torch: there are no other arrays in these tests."""
    variables = variables_on(X, torch_inside=True)
    cost = ManifoldCost(Objective(fun, variables), geometry_of(variables))
    return Model(cost, cost.at(variables.start))


def eigenvector_problem(n, p):
    """Brockett's cost and its minimiser, where the Hessian is diagonal in the frame of X."""
    problem = Brockett.linear(n, p, seed=0)
    return problem, problem.solution()


def curvature_along(problem, X, V):
    H = riemannian_hessian(X, V, gradient=problem.grad(X), hessian_product=problem.hessp(X, V))
    return float((V * H).sum() / (V * V).sum())


class TestProbesOfTallMatrices:
    def test_estimate_the_curvature_of_every_rotation(self):
        problem, X = eigenvector_problem(12, 4)
        frame = Columns()
        model = model_at(problem.fun, X)
        frame.learn(model.point, model.hessian, np.random.default_rng(0))
        rows, columns = torch.triu_indices(4, 4, offset=1)
        for k, (i, j) in enumerate(zip(rows, columns, strict=True)):
            Z = torch.zeros(4, 4, dtype=X.dtype)
            Z[i, j], Z[j, i] = 1, -1
            expected = curvature_along(problem, X, X @ Z)
            assert frame.rotations.squares[k] ** 0.5 == pytest.approx(expected, rel=1e-8)

    def test_estimate_the_mean_curvature_of_every_columns_moves(self):
        n, p = 400, 3
        problem, X = eigenvector_problem(n, p)
        frame = Columns()
        model = model_at(problem.fun, X)
        frame.learn(model.point, model.hessian, np.random.default_rng(0))
        values = torch.linalg.eigvalsh(problem.A)
        for j in range(p):
            weight = curvature_along(problem, X, _move(X, problem, j, p)) / (values[p] - values[j])
            mean = float(weight * (values[p:].mean() - values[j]))
            assert frame.moves.squares[j] ** 0.5 == pytest.approx(mean, rel=0.2)

    def test_agree_at_a_solution_of_brocketts_and_not_on_pca(self):
        random = np.random.default_rng(0)
        problem, X = eigenvector_problem(60, 10)
        frame = Columns()
        model = model_at(problem.fun, X)
        for _ in range(2):
            frame.learn(model.point, model.hessian, random)
        assert frame.agreement > 0.9
        pca = PCA.with_gap(60, 10, seed=0)
        X = pca.solution() @ random_orthogonal(10, 10, seed=1, dtype=torch.float64)
        frame = Columns()
        model = model_at(pca.fun, X)
        for _ in range(2):
            frame.learn(model.point, model.hessian, random)
        assert frame.agreement <= 0.5

    def test_the_preconditioner_is_symmetric_and_positive(self):
        problem, X = eigenvector_problem(30, 5)
        model = model_at(problem.fun, X)
        curvatures = Curvatures(model.geometry, X)
        for _ in range(2):
            curvatures.learn(model.point, model.hessian)
        precondition = curvatures.preconditioner()
        assert precondition is not None
        U, V = (model.geometry.tangent(X, torch.randn_like(X)) for _ in range(2))
        PU, PV = precondition(U), precondition(V)
        assert inner(U, PV) == pytest.approx(inner(V, PU), rel=1e-10)
        assert inner(U, PU) > 0
        torch.testing.assert_close(model.geometry.tangent(X, PU), PU)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
    def test_nothing_is_known_of_one_column(self, dtype):
        X = random_orthogonal(5, 1, seed=0, dtype=dtype)
        model = model_at(lambda X: (X.conj() * X).sum().real, X)
        curvatures = Curvatures(model.geometry, X)
        curvatures.learn(model.point, lambda V: V)
        assert curvatures.preconditioner() is None


def _move(X, problem, column, eigenvector):
    V = torch.zeros_like(X)
    V[:, column] = torch.linalg.eigh(problem.A).eigenvectors[:, eigenvector]
    return V


class TestProbesOfSquareMatrices:
    def test_find_the_side_on_which_the_cost_is_separable(self):
        problem, X = eigenvector_problem(8, 8)
        for fun, at, side in [
            (problem.fun, X, "columns"),
            (lambda X: problem.fun(X.mT), X.mT.contiguous(), "rows"),
        ]:
            model = model_at(fun, at)
            curvatures = Curvatures(model.geometry, at)
            for _ in range(2):
                curvatures.learn(model.point, model.hessian)
            assert isinstance(curvatures.best, SquareRotations)
            assert curvatures.best.of_columns == (side == "columns")

    def test_complex_rotations(self):
        Q = random_orthogonal(5, 5, seed=0, dtype=torch.complex128)
        values = torch.arange(1.0, 6, dtype=torch.float64)
        A = (Q * values) @ Q.mH
        weights = values.flip(0).to(torch.complex128)
        fun = lambda X: (X.conj() * (A @ X * weights)).sum().real  # noqa: E731
        frame = SquareRotations(of_columns=True)
        model = model_at(fun, Q)
        frame.learn(model.point, model.hessian, np.random.default_rng(0))
        # (a_i - a_j)(w_j - w_i) per unit of rotation, counted for both entries
        first = frame.rotations.squares[0] ** 0.5
        fourth = frame.rotations.squares[3] ** 0.5
        assert fourth / first == pytest.approx(16, rel=1e-8)


def products(problem, gtol, manifold=None):
    """Hessian products that Newton needs with the automatic preconditioner, and without."""
    for preconditioner in ("auto", None):
        result = minimize(
            problem.fun_and_grad,
            problem.start(seed=1),
            jac=True,
            hessp=problem.hessp,
            method="newton",
            manifold=manifold,
            gtol=gtol,
            options={"preconditioner": preconditioner},
        )
        assert result.success
        assert result.fun == pytest.approx(float(problem.optimum()), rel=1e-9)
        yield result.nhev


class TestNewton:
    def test_takes_far_fewer_products_where_the_cost_is_separable(self):
        automatic, without = products(Brockett.linear(150, 30, seed=0), gtol=1e-6)
        assert automatic < 0.5 * without

    def test_costs_little_where_it_is_not(self):
        automatic, without = products(PCA.with_gap(150, 30, seed=0), gtol=1e-8)
        assert automatic < 1.3 * without

    @pytest.mark.parametrize("manifold", [ol.Stiefel(), ol.Grassmann()])
    def test_takes_far_fewer_in_the_basis_of_ritz_vectors(self, manifold):
        """Eigenvalues 1 / i^2: what each column needs differs by factors of 400."""
        values = torch.arange(1, 201, dtype=torch.float64) ** -2.0
        automatic, without = products(PCA.with_spectrum(values, 20, seed=0), 1e-6, manifold)
        assert automatic < 0.5 * without

    def test_takes_the_users(self):
        problem = Brockett.linear(60, 8, seed=0)
        x0 = problem.start(seed=1)
        calls = []

        def preconditioner(X, V):
            calls.append(V.shape)
            return V / 7

        result = minimize(
            problem.fun, x0, method="newton", options={"preconditioner": preconditioner}
        )
        assert result.success
        assert len(calls) > 10
