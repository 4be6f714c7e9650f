"""Matrices with ``X^H B X = I``: every form of B, every method, misuse, and the safe step."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import aslinearoperator

import ortholand as ol
from ortholand.solve.manifolds.generalized import GeneralizedColumns
from ortholand.solve.manifolds.operators import operator_for

FORMS = ("cholesky", "landing")


def hermitian(n, rng, condition, is_complex=False):
    A = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if is_complex else 0)
    Q = np.linalg.qr(A)[0]
    B = (Q * np.geomspace(1, condition, n)) @ Q.conj().T
    return (B + B.conj().T) / 2


def eigenproblem(n=20, p=3, condition=30.0, is_complex=False, seed=0):
    """The sum of the p smallest eigenvalues of ``A x = mu B x``."""
    rng = np.random.default_rng(seed)
    B = hermitian(n, rng, condition, is_complex)
    A = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if is_complex else 0)
    A = A + A.conj().T
    x = rng.standard_normal((n, p)) + (1j * rng.standard_normal((n, p)) if is_complex else 0)
    best = scipy.linalg.eigh(A, B, eigvals_only=True)[:p].sum()
    return A, B, x, best


def cost(A):
    return lambda X: (np.vdot(X, A @ X).real, 2 * A @ X)


def missed(X, B):
    return np.linalg.norm(X.conj().T @ B @ X - np.eye(X.shape[-1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [None, "lbfgs", "bb", "newton"])
@pytest.mark.parametrize("is_complex", [False, True])
def test_methods_find_generalized_eigenvalues(form, method, is_complex):
    A, B, x, best = eigenproblem(is_complex=is_complex)
    manifold = ol.GeneralizedStiefel(B, form)
    result = ol.minimize(cost(A), manifold.project(x), method=method, jac=True, manifold=manifold)
    assert result.success, result.message
    assert result.fun == pytest.approx(best, abs=1e-9)
    assert missed(result.x, B) < 1e-12
    assert result.distance == pytest.approx(missed(result.x, B), abs=1e-13)
    np.testing.assert_allclose(result.jac, 2 * A @ result.x, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_landing_itself_gets_there(form, momentum):
    A, B, x, best = eigenproblem(n=8, p=2, condition=3.0)
    manifold = ol.GeneralizedStiefel(B, form)
    result = ol.minimize(
        cost(A),
        manifold.project(x),
        method="landing",
        jac=True,
        manifold=manifold,
        options={"momentum": momentum},
    )
    assert result.success, result.message
    assert result.fun == pytest.approx(best, abs=1e-9)


FORMS_OF_B = {
    "array": lambda B: B,
    "tensor": torch.from_numpy,
    "sparse": scipy.sparse.csr_matrix,
    "sparse array": scipy.sparse.coo_array,
    "operator": aslinearoperator,
    "torch sparse": lambda B: torch.from_numpy(B).to_sparse(),
    "list": lambda B: B.tolist(),
}


@pytest.mark.parametrize("name", FORMS_OF_B)
@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_every_form_of_b(name, in_torch, dtype):
    A, B, x, best = eigenproblem()
    manifold = ol.GeneralizedStiefel(FORMS_OF_B[name](B))
    x0 = manifold.project(x.astype(dtype))
    A = A.astype(dtype)
    if in_torch:
        T = torch.from_numpy(A)
        result = ol.minimize(lambda X: (X * (T @ X)).sum(), torch.from_numpy(x0), manifold=manifold)
        assert isinstance(result.x, torch.Tensor)
        X = result.x.numpy()
    else:
        result = ol.minimize(cost(A), x0, jac=True, manifold=manifold)
        X = result.x
    assert X.dtype == dtype
    assert result.success, result.message
    small = 1e-9 if dtype == np.float64 else 1e-3
    assert result.fun == pytest.approx(best, abs=small)
    assert missed(X, B) < small


@pytest.mark.parametrize("in_torch", [False, True])
def test_a_function_gets_what_x0_is(in_torch):
    A, B, x, best = eigenproblem()
    kind, seen = (torch.Tensor, set()) if in_torch else (np.ndarray, set())
    matrix = torch.from_numpy(B) if in_torch else B
    A = torch.from_numpy(A) if in_torch else A

    def product(V):
        seen.add(isinstance(V, kind))
        return matrix @ V

    manifold = ol.GeneralizedStiefel(product)
    x0 = manifold.project(torch.from_numpy(x) if in_torch else x)
    fun = (lambda X: (X * (A @ X)).sum()) if in_torch else cost(A)
    result = ol.minimize(fun, x0, jac=None if in_torch else True, manifold=manifold)
    assert seen == {True}
    assert result.success
    assert result.fun == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_stacks_and_products(form):
    A, B, x, best = eigenproblem()
    manifold = ol.GeneralizedStiefel(B, form)
    rng = np.random.default_rng(1)
    stack = manifold.project(rng.standard_normal((2, *x.shape)))
    assert all(missed(X, B) < 1e-12 for X in stack)
    result = ol.minimize(cost_of_stack(A), stack, jac=True, manifold=manifold)
    assert result.success
    assert result.fun == pytest.approx(2 * best, abs=1e-8)
    x0 = {"X": manifold.project(x), "free": np.ones(2)}

    def fun(x):
        value = np.sum(x["X"] * (A @ x["X"])) + np.sum((x["free"] - 3) ** 2)
        return value, {"X": 2 * A @ x["X"], "free": 2 * (x["free"] - 3)}

    result = ol.minimize(fun, x0, jac=True, manifold={"X": manifold, "free": ol.Euclidean()})
    assert result.success
    assert result.fun == pytest.approx(best, abs=1e-8)
    assert missed(result.x["X"], B) < 1e-12


def cost_of_stack(A):
    return lambda X: (np.sum(X * (A @ X)), 2 * A @ X)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["bb", "newton"])
def test_a_preconditioner_gets_gradients_and_gives_directions(form, method):
    A, B, x, best = eigenproblem(condition=1e3)
    manifold = ol.GeneralizedStiefel(B, form)
    result = ol.minimize(
        cost(A),
        manifold.project(x),
        method=method,
        jac=True,
        manifold=manifold,
        options={"preconditioner": lambda X, V: np.linalg.solve(B, V)},
    )
    assert result.success
    assert result.fun == pytest.approx(best, abs=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_b_do_not_matter(form):
    A, B, x, best = eigenproblem()
    for scale in (1e-6, 1e6):
        manifold = ol.GeneralizedStiefel(scale * B, form)
        result = ol.minimize(cost(A), manifold.project(x), jac=True, manifold=manifold)
        assert result.success, result.message
        assert result.fun * scale == pytest.approx(best, rel=1e-9)


def test_honest_where_b_is_ill_conditioned():
    A, B, x, best = eigenproblem(condition=1e10)
    for form in FORMS:
        manifold = ol.GeneralizedStiefel(B, form)
        result = ol.minimize(cost(A), manifold.project(x), jac=True, manifold=manifold, maxiter=200)
        assert result.distance == pytest.approx(missed(result.x, B), rel=0.9, abs=1e-7)
        if result.success:
            assert result.fun == pytest.approx(best, rel=1e-6)


# Misuse.


def no_symmetry(B):
    B = B.copy()
    B[0, 1] += 1
    return B


BAD = {
    "not symmetric": (no_symmetry, "symmetric"),
    "indefinite": (lambda B: B - 5 * np.eye(len(B)), "positive definite"),
    "singular": (lambda B: np.diag(np.r_[0.0, np.ones(len(B) - 1)]), "positive definite"),
    "zero": (lambda B: 0 * B, "positive definite"),
    "wrong size": (lambda B: B[1:, 1:], "n = 20 rows"),
    "complex": (
        lambda B: B + 0j + 1j * np.diag(np.ones(19), 1) - 1j * np.diag(np.ones(19), -1),
        "omplex",
    ),
    "NaN": (lambda B: B * np.nan, "finite"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("given_as", ["cholesky", "landing", "sparse", "operator", "function"])
def test_bad_matrices_are_refused(name, given_as):
    A, B, x, _ = eigenproblem()
    x0 = ol.GeneralizedStiefel(B).project(x)
    spoil, words = BAD[name]
    bad = spoil(B)
    if name == "wrong size" and given_as == "function":
        words = "B must give a product of the shape of V|matmul"

    def run():
        made = {
            "cholesky": lambda: ol.GeneralizedStiefel(bad, "cholesky"),
            "landing": lambda: ol.GeneralizedStiefel(bad, "landing"),
            "sparse": lambda: ol.GeneralizedStiefel(scipy.sparse.csr_matrix(bad)),
            "operator": lambda: ol.GeneralizedStiefel(aslinearoperator(bad)),
            "function": lambda: ol.GeneralizedStiefel(lambda V: bad @ V),
        }[given_as]()
        ol.minimize(cost(A), x0, jac=True, manifold=made)

    with pytest.raises((ValueError, TypeError), match=words):
        run()


@pytest.mark.parametrize("form", FORMS)
def test_starts_that_will_not_do(form):
    A, B, x, _ = eigenproblem()
    manifold = ol.GeneralizedStiefel(B, form)
    with pytest.raises(ValueError, match=r"manifold\.project"):
        ol.minimize(cost(A), x, jac=True, manifold=manifold)
    with pytest.raises(ValueError, match="Transpose"):
        ol.minimize(cost(A), x.T, jac=True, manifold=manifold)
    with pytest.raises(ValueError, match="full rank"):
        manifold.project(np.ones((20, 2)))
    near = manifold.project(x) * 1.1
    result = ol.minimize(cost(A), near, jac=True, manifold=manifold)
    assert result.success
    assert missed(result.x, B) < 1e-12


def test_other_misuse():
    B = np.eye(3)
    with pytest.raises(ValueError, match="form must be"):
        ol.GeneralizedStiefel(B, "qr")
    with pytest.raises(ValueError, match="dense"):
        ol.GeneralizedStiefel(scipy.sparse.csr_matrix(B), "cholesky")
    with pytest.raises(TypeError, match="B must be a matrix"):
        ol.GeneralizedStiefel("B")
    with pytest.raises(ValueError, match="square"):
        ol.GeneralizedStiefel(B[:2])
    with pytest.raises(ValueError, match="ridge"):
        ol.Covariance(B, ridge=-1.0)
    with pytest.raises(ValueError, match="number N"):
        ol.Covariance([B, B[:2]])
    with pytest.raises(TypeError, match="rows"):
        ol.Covariance("rows")
    diagonal = np.array([1.0, 2.0, 3.0])
    manifold = ol.GeneralizedStiefel(lambda v: diagonal * v)  # of vectors, not of matrices
    with pytest.raises(ValueError, match="each of its columns"):
        ol.minimize(cost(B), np.eye(3, 1), jac=True, manifold=manifold)


def test_covariance_is_what_it_says():
    rng = np.random.default_rng(0)
    A = rng.standard_normal((5000, 4))  # more than one chunk
    V = rng.standard_normal((4, 2))
    B = A.T @ A / 5000 + 0.3 * np.eye(4)
    np.testing.assert_allclose(ol.Covariance(A, 0.3)(V), B @ V, atol=1e-12)
    blocks = ol.Covariance([A[:, :1], torch.from_numpy(A[:, 1:])], 0.3)
    np.testing.assert_allclose(
        blocks(V), scipy.linalg.block_diag(B[:1, :1], B[1:, 1:]) @ V, atol=1e-12
    )


# The field and its safe step.


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 12),
    p=st.integers(1, 6),
    condition=st.floats(0, 4),
    scale=st.floats(-3, 3),
    size=st.floats(-6, 8),
    lam=st.floats(-3, 3),
    eps=st.floats(0.05, 0.95),
    distance=st.floats(0, 1),
    is_complex=st.booleans(),
    spectral=st.booleans(),
)
def test_wild_steps_never_leave_the_ball(
    seed, n, p, condition, scale, size, lam, eps, distance, is_complex, spectral
):
    n = max(n, p)
    rng = np.random.default_rng(seed)
    B = 10.0**scale * hermitian(n, rng, 10.0**condition, is_complex)

    def random(*shape):
        return rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if is_complex else 0)

    Q = np.linalg.qr(random(n, p))[0]
    stretch = np.sqrt(
        1 + eps * distance * rng.uniform(-1, 1, p) / (1 if spectral else math.sqrt(p))
    )
    turn = np.linalg.qr(random(p, p))[0]
    L = np.linalg.cholesky(B)
    X = np.linalg.solve(L.conj().T, (Q * stretch) @ turn)
    geometry = GeneralizedColumns(operator_for(B, X, True))
    order = 2 if spectral else "fro"
    for _ in range(5):
        G = 10.0**size * random(n, p)
        X, finite = geometry.landing_step(X, G, 1e9, 10.0**lam, eps, spectral)
        assert finite
        assert np.linalg.norm(X.conj().T @ B @ X - np.eye(p), order) <= eps * (1 + 1e-9)


@pytest.mark.parametrize("is_complex", [False, True])
def test_the_field_is_tangent_down_and_orthogonal_to_its_pull(is_complex):
    _, B, x, _ = eigenproblem(is_complex=is_complex)
    X = 1.1 * ol.GeneralizedStiefel(B).project(x)
    rng = np.random.default_rng(3)
    G = rng.standard_normal(X.shape) + (1j * rng.standard_normal(X.shape) if is_complex else 0)
    geometry = GeneralizedColumns(operator_for(B, X, True))
    R, _ = geometry.safe_field(X, G, 0.0, 0.5, True)
    both, _ = geometry.safe_field(X, G, 2.0, 0.5, True)
    M = X.conj().T @ B @ R
    assert np.linalg.norm(M + M.conj().T) < 1e-10 * np.linalg.norm(M)
    A = G @ (B @ X).conj().T
    A = (A - A.conj().T) / 2
    np.testing.assert_allclose(np.vdot(G, R).real, np.vdot(A, A).real, rtol=1e-12)
    pull = (both - R) / 2
    np.testing.assert_allclose(
        pull, B @ X @ (X.conj().T @ B @ X - np.eye(3)), atol=1e-10 * np.linalg.norm(pull)
    )
    assert abs(np.vdot(R, pull).real) < 1e-11 * np.linalg.norm(R) * np.linalg.norm(pull)


def test_a_line_needs_one_product():
    A, B, x, _ = eigenproblem()
    calls = []

    def product(V):
        calls.append(V.shape)
        return B @ V

    manifold = ol.GeneralizedStiefel(product)
    result = ol.minimize(cost(A), manifold.project(x), method="bb", jac=True, manifold=manifold)
    blocks = sum(shape[-1] > 1 for shape in calls)
    assert result.success
    assert blocks <= result.nfev + result.nit // 20 + 10


# Finite sums.


def sampled(n_terms=1000, n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A, Z, W = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((n_terms, n), (n_terms, n), (n, n))
    )
    weights = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)

    def fun(X, indices):
        squares = ((Z[indices] @ X).square() * weights).sum(1).mean()
        return (weights * X * ((W + W.T) @ X)).sum() - squares

    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return A, fun, x


@pytest.mark.parametrize("method", ["saga", "sgd"])
def test_sums_with_a_dense_constraint(method):
    A, fun, x = sampled()
    matrix = A.T @ A / 1000 + 0.1 * torch.eye(12, dtype=torch.float64)
    manifold = ol.GeneralizedStiefel(matrix)
    x0 = manifold.project(x)
    result = ol.minimize_finite_sum(
        fun, x0, n_terms=1000, batch_size=20, manifold=manifold, method=method, epochs=5
    )
    assert result.fun < fun(x0, slice(None)) - 1
    assert missed(result.x.numpy(), matrix.numpy()) < 1e-12


def test_sums_need_a_constraint_that_can_be_factorised():
    A, fun, x = sampled()
    whole = ol.Covariance(A, 0.1)
    x0 = ol.GeneralizedStiefel(whole).project(x)
    for B in (whole, lambda V, i: V, scipy.sparse.eye(12)):
        with pytest.raises(ValueError, match=r"minimize_sampled of ortholand_lab"):
            ol.minimize_finite_sum(fun, x0, n_terms=1000, manifold=ol.GeneralizedStiefel(B))
    with pytest.raises(ValueError, match=r"ol.Stiefel\(\) or"):
        ol.minimize_finite_sum(fun, x0, n_terms=1000, manifold=ol.Grassmann())
