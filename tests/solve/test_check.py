"""Right derivatives pass in every type and shape; each usual mistake is found, and named."""

import math
import re

import numpy as np
import pytest
import torch

import ortholand as ol
from ortholand.geometry import riemannian_gradient, riemannian_hessian, skew
from ortholand.solve.check import check_gradient, check_hessian
from ortholand_lab.problems import PCA

DTYPES = [torch.float64, torch.complex128, torch.float32, torch.complex64]
SHAPES = [(5, 5), (7, 3), (3, 7), (6, 1)]


def real(value):
    return value.real if value.is_complex() else value


class Quartic:
    """``Re Tr(X^H C X D) + mean |W X|^4``, with derivatives by hand for tall X."""

    def __init__(self, n, p, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        C, W = torch.randn(2, n, n, generator=generator, dtype=dtype)
        self.C, self.W = C @ C.mH / n, W
        self.D = torch.arange(1, p + 1).to(dtype)

    def fun(self, X):
        quadratic = real((X.conj() * (self.C @ X * self.D)).sum())
        return quadratic + (self.W @ X).abs().pow(4).mean()

    def jac(self, X):
        Y = self.W @ X
        return 2 * self.C @ X * self.D + self.W.mH @ (Y * Y.abs().square()) * (4 / Y.numel())

    def hessp(self, X, V):
        Y, Z = self.W @ X, self.W @ V
        slope = 2 * Y * real(Y.conj() * Z) + Z * Y.abs().square()
        return 2 * self.C @ V * self.D + self.W.mH @ slope * (4 / Y.numel())


def start(*shape, dtype=torch.float64, seed=0):
    return ol.random_orthogonal(*shape, seed=seed, dtype=dtype)


def transposed(function):
    return lambda X, *V: function(X.mT, *(v.mT for v in V)).mT


def oriented(shape, dtype):
    """fun, jac, hessp for this shape; the wide problem is the tall one, transposed."""
    n, p = max(shape), min(shape)
    problem = Quartic(n, p, dtype)
    if shape[0] >= shape[1]:
        return problem.fun, problem.jac, problem.hessp
    return lambda X: problem.fun(X.mT), transposed(problem.jac), transposed(problem.hessp)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_derivatives_are_right(shape, dtype):
    fun, jac, hessp = oriented(shape, dtype)
    x0 = start(*shape, dtype=dtype)
    tolerance = 0.1 if torch.finfo(dtype).eps < 1e-10 else 0.4
    gradient = check_gradient(fun, jac, x0)
    assert gradient.ok, gradient
    assert abs(gradient.slope - 2) < tolerance
    assert abs(gradient.normal_slope - 2) < tolerance
    hessian = check_hessian(fun, x0, jac=jac, hessp=hessp)
    assert hessian.ok, hessian
    assert hessian.slope > 3 - tolerance


@pytest.mark.parametrize("seed", range(4))
def test_autograd_and_other_seeds(seed):
    problem, x0 = Quartic(6, 2, seed=seed), start(6, 2, seed=seed)
    assert check_gradient(problem.fun, None, x0, seed=seed)
    assert check_hessian(problem.fun, x0, seed=seed)
    assert check_hessian(problem.fun, x0, jac=problem.jac, seed=seed)  # differences of jac


def test_numpy_pairs_and_arguments():
    C = np.diag(np.arange(6.0))
    x0 = start(6, 3).numpy()

    def pair(X, scale):
        return scale * np.sum(X * (C @ X)), 2 * scale * C @ X

    assert check_gradient(pair, True, x0, args=(3.0,))
    assert check_hessian(pair, x0, jac=True, hessp=lambda X, V, s: 2 * s * C @ V, args=(3.0,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_missing_factor_is_found_and_named(shape, dtype):
    fun, jac, hessp = oriented(shape, dtype)
    x0 = start(*shape, dtype=dtype)
    result = check_gradient(fun, lambda X: jac(X) / 2, x0)
    assert not result.ok
    assert "is wrong" in result.message
    factor = re.search(r"jac must be multiplied by ([\d.]+)", result.message)
    assert float(factor[1]) == pytest.approx(2, rel=1e-2)
    result = check_hessian(fun, x0, jac=jac, hessp=lambda X, V: 2 * hessp(X, V))
    assert not result.ok
    factor = re.search(r"hessp must be multiplied by ([\d.]+)", result.message)
    assert float(factor[1]) == pytest.approx(0.5, rel=3e-2)


def test_sign_conjugate_and_transpose_are_named():
    fun, jac, _ = oriented((5, 5), torch.complex128)
    x0 = start(5, 5, dtype=torch.complex128)
    assert "jac must be multiplied by -1" in check_gradient(fun, lambda X: -jac(X), x0).message
    wirtinger = check_gradient(fun, lambda X: jac(X).conj() / 2, x0)
    assert "return the conjugate of jac multiplied by 2" in wirtinger.message
    result = check_gradient(fun, lambda X: jac(X).mT, x0)
    assert "return the transpose of jac:" in result.message
    assert not result.ok


def test_other_mistakes_get_the_usual_suspects():
    problem, other, x0 = Quartic(6, 3), Quartic(6, 3, seed=1), start(6, 3)
    result = check_gradient(problem.fun, other.jac, x0)
    assert result.slope == pytest.approx(1, abs=0.1)
    assert "Typical reasons" in result.message
    result = check_hessian(problem.fun, x0, jac=problem.jac, hessp=other.hessp)
    assert result.slope == pytest.approx(2, abs=0.1)
    assert "hessp is to blame" in result.message
    result = check_hessian(problem.fun, x0, jac=other.jac, hessp=problem.hessp)
    assert "The gradient is wrong already" in result.message


@pytest.mark.parametrize("error", [1e-2, 1e-4, 1e-5])
def test_small_errors_of_the_gradient_show_in_small_steps(error):
    problem, x0 = Quartic(6, 3), start(6, 3)
    result = check_gradient(problem.fun, lambda X: (1 + error) * problem.jac(X), x0)
    assert not result.ok, result


def test_a_riemannian_gradient_is_right_along_the_manifold_only():
    problem, x0 = Quartic(6, 3), start(6, 3)
    result = check_gradient(problem.fun, lambda X: riemannian_gradient(X, problem.jac(X)), x0)
    assert not result.ok
    assert result.slope == pytest.approx(2, abs=0.1)
    assert result.normal_slope == pytest.approx(1, abs=0.1)
    assert "projected, like a Riemannian gradient" in result.message


def test_a_riemannian_hessian_is_not_what_is_asked_for():
    problem, x0 = Quartic(6, 3), start(6, 3)

    def hessp(X, V):
        return riemannian_hessian(
            X, V, gradient=problem.jac(X), hessian_product=problem.hessp(X, V)
        )

    result = check_hessian(problem.fun, x0, jac=problem.jac, hessp=hessp)
    assert not result.ok
    assert "looks like a Riemannian Hessian" in result.message


def test_symmetry_and_linearity():
    problem, x0 = Quartic(6, 3), start(6, 3)
    M = skew(torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    result = check_hessian(problem.fun, x0, hessp=lambda X, V: problem.hessp(X, V) + M @ V)
    assert not result.ok  # though <xi, M xi> = 0: the slope cannot see it
    assert result.slope == pytest.approx(3, abs=0.1)
    assert "is wrong" in result.message
    assert "not symmetric" in result.message
    result = check_hessian(problem.fun, x0, hessp=lambda X, V: problem.hessp(X, V) + 0.1 * V.abs())
    assert "not linear" in result.message
    assert result.linearity_error > 1e-3
    assert check_hessian(problem.fun, x0).symmetry_error < 1e-12


def test_exact_expansions():
    """Constant and linear costs leave nothing to measure, and nothing is wrong."""
    M, x0 = start(6, 3, seed=5), start(6, 3)
    constant = check_gradient(lambda X: 1 + 0 * X.sum(), None, x0)
    assert constant.ok
    assert math.isnan(constant.slope)
    assert "exact" in constant.message
    assert "says little" in constant.message
    linear = check_gradient(lambda X: (M * X).sum(), None, x0)
    assert linear.ok  # curved along the manifold, straight across it
    assert linear.slope == pytest.approx(2, abs=0.1)
    assert math.isnan(linear.normal_slope)
    sphere = check_gradient(lambda X: X.square().sum(), None, x0)
    assert sphere.ok  # constant along the manifold
    assert math.isnan(sphere.slope)
    assert check_hessian(lambda X: X.square().sum(), x0)  # zero, and what is left is rounding
    assert not check_gradient(lambda X: X.square().sum(), lambda X: 0 * X, x0)


def test_a_matrix_that_cannot_move():
    result = check_gradient(lambda X: 3 * X.sum(), None, torch.ones(1, 1, dtype=torch.float64))
    assert result.ok
    assert "says little" in result.message


def test_a_critical_point_says_little():
    problem = PCA.with_gap(8, 2, seed=0)
    result = check_gradient(problem.fun, problem.grad, problem.solution())
    assert result.ok
    assert "says little" in result.message
    assert "says little" not in check_gradient(problem.fun, problem.grad, start(8, 2)).message


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite(bad):
    problem, x0 = Quartic(6, 3), start(6, 3)
    at_start = check_gradient(lambda X: bad * X.sum(), lambda X: bad * X, x0)
    assert not at_start.ok
    assert "not finite" in at_start.message

    def far_away(X):
        return problem.fun(X) + (bad if (X - x0).abs().max() > 0.1 else 0.0)

    assert "not finite" in check_gradient(far_away, problem.jac, x0).message
    assert not check_hessian(far_away, x0, jac=problem.jac, hessp=problem.hessp)
    assert not check_hessian(problem.fun, x0, hessp=lambda X, V: bad * V)


@pytest.mark.parametrize("constant", [1e7, 1e9])
def test_noise_is_told_from_a_mistake(constant):
    problem, x0 = Quartic(6, 3, torch.float32), start(6, 3, dtype=torch.float32)
    result = check_gradient(lambda X: problem.fun(X) + constant, problem.jac, x0)
    assert not result.ok
    assert "cannot be judged" in result.message
    assert "double precision" in result.message


def test_x0_is_made_feasible_first_and_not_changed():
    problem, x0 = Quartic(6, 3), 1.3 * start(6, 3) + 0.01
    before = x0.clone()
    seen = []

    def fun(X):
        seen.append(ol.distance(X.detach()))
        return problem.fun(X)

    assert check_gradient(fun, None, x0)
    assert seen[0] < 1e-14
    assert max(seen) < 0.5  # normal steps stay in the ball
    assert torch.equal(x0, before)


def test_directions_do_not_depend_on_x0_drawn_with_the_same_seed():
    """Otherwise, with one column, the first direction would be x0 itself, without tangent part."""
    x0, seen = start(6, 1), []

    def fun(X):
        seen.append(float((X.detach() - x0).norm()))
        return X.sum()

    check_gradient(fun, None, x0)
    assert sum(distance > 0.7 for distance in seen) == 2  # t = 1 in both directions


def test_results_are_reproducible_and_readable():
    problem, x0 = Quartic(6, 3), start(6, 3)
    result = check_gradient(problem.fun, problem.jac, x0)
    assert result.errors == check_gradient(problem.fun, problem.jac, x0).errors
    assert result.errors != check_gradient(problem.fun, problem.jac, x0, seed=1).errors
    lines = str(result).splitlines()
    assert lines[0].startswith("The gradient is right.")
    assert lines[1].split() == ["t", "tangent", "normal"]
    assert [line.split()[0] for line in lines[2:]] == [f"1.0e{k:+03d}" for k in range(-8, 1)]
    assert repr(result) == str(result)
    with pytest.raises(AttributeError):
        result.ok = False


@pytest.mark.parametrize(
    ("x0", "error", "message"),
    [
        (torch.zeros(6, 3, dtype=torch.float64), ValueError, "full rank"),
        (torch.full((6, 3), math.nan, dtype=torch.float64), ValueError, "finite"),
        (torch.ones(6, 3, dtype=torch.int64), TypeError, "precision"),
        (torch.ones(2, 6, 3, dtype=torch.float64), ValueError, "one matrix"),
    ],
    ids=["singular", "nan", "integer", "batch"],
)
def test_bad_starts(x0, error, message):
    with pytest.raises(error, match=message):
        check_gradient(lambda X: X.sum(), None, x0)


def test_bad_functions():
    x0 = start(6, 3)
    with pytest.raises(ValueError, match="needs its gradient"):
        check_gradient(lambda X: X.sum(), None, x0.numpy())
    with pytest.raises(ValueError, match=re.escape("shape (6, 3)")):
        check_gradient(lambda X: X.sum(), lambda X: X.mT, x0)
    with pytest.raises(TypeError, match="callable"):
        check_hessian(3, x0)
