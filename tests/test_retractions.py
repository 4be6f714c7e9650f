import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ortholand as ol
from ortholand import retractions
from ortholand.geometry import relative_gradient, relative_gradient_times_x, skew, sym
from ortholand.geometry.derivatives import remove_normal
from ortholand.retractions import RETRACTIONS, find_retraction
from tests import needs
from tests.grids import examples
from tests.optim.peers import METHODS, each_method, gaussian, geoopt
from tests.optim.recorder import Recorder


def norm(M):
    return torch.linalg.matrix_norm(M)


def spectral(M):
    return torch.linalg.matrix_norm(M, 2)


def tall(M):
    return M.mT if M.shape[-2] < M.shape[-1] else M


def skew_of(X, A):
    """The skew matrix that A is or stands for; it acts on tall(X)."""
    return A if A.shape[-2] == A.shape[-1] else relative_gradient(tall(X), tall(A))


def step_of(X, tangent):
    """What moves X along a tangent vector: A itself if square, else the B of a A that maps nothing
    outside X's span to anything outside it."""
    if X.shape[-2] == X.shape[-1]:
        return skew(tangent @ X.mH)
    return 2 * tangent - X @ (X.mH @ tangent)


def definition(X, A, method):
    """The definitions, from NumPy and SciPy, for one tall X and its skew A."""
    X, A = X.numpy(), A.numpy()
    identity = np.eye(len(X))
    if method == "exponential":
        Z = scipy.linalg.expm(A) @ X
    elif method == "cayley":
        Z = np.linalg.solve(identity - A / 2, (identity + A / 2) @ X)
    elif method == "polar":
        Z = scipy.linalg.polar(X + A @ X)[0]
    else:
        Q, R = np.linalg.qr(X + A @ X)
        Z = Q * (np.diag(R) / abs(np.diag(R)))
    return torch.from_numpy(Z)


EXPONENTS = st.floats(-8, 2)


@st.composite
def scenes(draw, scales=EXPONENTS, methods=METHODS, only=None):
    """(X, A, method): every shape, both kinds of A, real and complex, one matrix or several."""
    p = draw(st.integers(1, 6))
    n = p + (0 if only == "square" else draw(st.sampled_from([1, p, p + 1, 20])))
    if only is None and draw(st.booleans()):
        n = p
    shape = (n, p) if draw(st.booleans()) else (p, n)
    batch = draw(st.sampled_from([(), (), (3,), (2, 2)]))
    dtype = draw(st.sampled_from([torch.float64, torch.complex128]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    X = ol.random_orthogonal(*batch, *shape, seed=generator, dtype=dtype)
    stands_for = only == "generator" or (n > p and draw(st.booleans()))
    size = shape if stands_for else (n, n)
    A = torch.randn(*batch, *size, generator=generator, dtype=dtype)
    A = A if stands_for else skew(A)
    length = spectral(skew_of(X, A))[..., None, None]
    assume(bool((length > 0).all()))
    return X, A / length * 10 ** draw(scales), draw(st.sampled_from(methods))


# The axioms.


@examples(200)
@given(scenes())
def test_it_is_what_the_definition_says_and_on_the_manifold(scene):
    X, A, method = scene
    Z = ol.retract(X, A, method)
    full = skew_of(X, A)
    unit, length = 2e-15 * (5 + full.shape[-1]), spectral(full).max().item()
    assert ol.distance(Z).max() < unit * (1 + (length if method == "exponential" else 1))
    members = zip(
        tall(X).flatten(0, -3) if X.ndim > 2 else tall(X)[None],
        full.flatten(0, -3) if full.ndim > 2 else full[None],
        strict=True,
    )
    expected = torch.stack([definition(Y, a, method) for Y, a in members])
    torch.testing.assert_close(
        tall(Z).reshape(expected.shape), expected, rtol=0, atol=20 * unit * (1 + length)
    )


@examples(60)
@given(scenes())
def test_a_step_of_zero_stays(scene):
    X, A, method = scene
    Z = ol.retract(X, 0 * A, method)
    torch.testing.assert_close(Z, X, rtol=0, atol=1e-14)
    assert torch.equal(Z, X) or method in ("polar", "qr")


@examples(120)
@given(scenes(scales=st.just(-2.0)))
def test_first_order_the_error_falls_by_4_when_the_step_halves(scene):
    X, A, method = scene
    tangent = skew_of(X, A) @ tall(X)
    assume(bool((spectral(tangent) > 1e-3).all()))  # else the step is too small to be measured

    def error(t):
        return norm(tall(ol.retract(X, t * A, method)) - tall(X) - t * tangent)

    assert torch.all((error(1.0) / error(0.5) - 4).abs() < 0.1)


def order_against_exponential(X, A, method):
    """How much nearer to ``exp(A) X`` when the step halves: 8 for second order, 4 for first."""
    full = skew_of(X, A)

    def error(t):
        exact = torch.linalg.matrix_exp(torch.stack(2 * [t * full]))[0] @ tall(X)
        return norm(tall(ol.retract(X, t * A, method)) - exact)

    return error(1.0) / error(0.5)


@examples(120)
@given(
    scenes(scales=st.just(-1.5), methods=["cayley"])
    | scenes(scales=st.just(-1.5), methods=["polar"], only="square")
)
def test_second_order_cayley_always_and_polar_for_square_matrices(scene):
    X, A, method = scene
    full = skew_of(X, A)
    assume(bool((spectral(full @ full @ full @ tall(X)) > 1e-6).all()))
    assert torch.all((order_against_exponential(X, A, method) - 8).abs() < 0.5)


def test_qr_is_of_first_order_only():
    X = ol.random_orthogonal(4, 4, seed=0, dtype=torch.float64)
    ratio = order_against_exponential(X, 0.01 * skew(gaussian(4, 4)), "qr")
    assert ratio == pytest.approx(4, rel=0.05)


@needs.pymanopts_groups
def test_polar_of_a_tall_matrix_is_of_second_order_for_the_other_geodesic():
    """Not for ``exp(A) X``, the geodesic of the canonical metric, but for the Euclidean one's."""
    X = ol.random_orthogonal(9, 4, seed=0, dtype=torch.float64)
    tangent = remove_normal(X, gaussian(9, 4, seed=1))
    tangent = 0.01 * tangent / spectral(tangent)
    euclidean = pymanopt.manifolds.Stiefel(9, 4).exp

    def errors(t):
        Z = ol.retract(X, step_of(X, t * tangent), "polar")
        canonical = ol.retract(X, step_of(X, t * tangent), "exponential")
        geodesic = torch.from_numpy(euclidean(X.numpy(), (t * tangent).numpy()))
        return norm(Z - geodesic), norm(Z - canonical)

    (far, far_canonical), (near, near_canonical) = errors(1.0), errors(0.5)
    assert far / near == pytest.approx(8, rel=0.02)
    assert far_canonical / near_canonical == pytest.approx(4, rel=0.02)


def test_without_positive_diagonal_qr_is_no_retraction():
    X = ol.random_orthogonal(5, 5, seed=1, dtype=torch.float64)
    A = 1e-3 * skew(gaussian(5, 5))
    Q, _ = torch.linalg.qr(X + A @ X)
    assert norm(Q - X) > 1  # some columns have turned round
    assert norm(ol.retract(X, A, "qr") - X) < 2 * norm(A)


@examples(120)
@given(scenes(scales=st.floats(-6, 1), only="generator"))
def test_a_generator_moves_as_the_skew_matrix_that_it_stands_for(scene):
    X, A, method = scene
    torch.testing.assert_close(
        ol.retract(X, A, method), ol.retract(X, skew_of(X, A), method), rtol=0, atol=1e-12
    )


# Every way of computing: batches of short and long steps, precision, memory.


@each_method
@pytest.mark.parametrize("shape", [(4, 4), (9, 4), (80, 70)])
def test_the_matrices_of_a_batch_do_not_see_each_other(method, shape):
    X = ol.random_orthogonal(6, *shape, seed=0, dtype=torch.float64)
    A = gaussian(6, *shape, seed=1)
    A = skew(A) if shape[0] == shape[1] else A
    lengths = torch.tensor([1e-9, 1e-5, 1e-2, 1.0, 50.0, 1e4], dtype=torch.float64)
    A = A * (lengths / spectral(A))[:, None, None]
    together = ol.retract(X, A, method)
    for i in range(6):
        alone = ol.retract(X[i], A[i], method)
        torch.testing.assert_close(together[i], alone, rtol=0, atol=1e-14 + 1e-13 * lengths[i])
    A[2] *= 1e3
    changed = ol.retract(X, A, method)
    others = torch.arange(6) != 2
    assert torch.equal(together[others], changed[others])


@each_method
def test_one_step_for_many_points_and_many_steps_for_one(method):
    X = ol.random_orthogonal(3, 9, 2, seed=0, dtype=torch.float64)
    A = torch.stack([gaussian(9, 2, seed=1) * s for s in (1e-4, 1.0, 1e3)])
    first = ol.retract(X[0], A, method)
    torch.testing.assert_close(first, ol.retract(X[:1].expand(3, 9, 2), A, method))
    second = ol.retract(X, A[0], method)
    torch.testing.assert_close(second, ol.retract(X, A[:1].expand(3, 9, 2), method))
    assert ol.retract(X[:0], A[:0], method).shape == (0, 9, 2)


@each_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(30, 30), (100, 10), (10, 100), (100, 70)])
@pytest.mark.parametrize("length", [1e-2, 1.0, 3.0, 6.0, 30.0, 1e3, 1e6])
def test_long_steps_stay_on_the_manifold(shape, length, dtype, method):
    """Rounding grows with the step for the exponential, as no angle of 1e6 has 7 digits left."""
    X = ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    A = gaussian(*shape, seed=1).to(dtype)
    A = skew(A) if shape[0] == shape[1] else A
    A = A * length / spectral(A)
    growth = {"exponential": 1 + length, "cayley": 10}.get(method, 1)
    unit = 30 * torch.finfo(dtype).eps * max(shape) ** 0.5
    assert ol.distance(ol.retract(X, A, method).double()) < unit * growth


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "size", [1e-9, 3e-4, 1e-3, 0.01, 0.04, 0.08, 0.1, 0.3, 0.5, 0.57, 0.8, 2.0]
)
def test_the_exponential_keeps_its_digits_at_every_norm(size, dtype):
    """torch's does not, for one matrix: 4e4 units at norm 0.04 in float64 (pytorch 196592)."""
    A = skew(gaussian(6, 6, dtype=dtype))
    A = A * size / torch.linalg.matrix_norm(A, 1)
    wide_type = torch.promote_types(dtype, torch.float64)
    exact = torch.from_numpy(scipy.linalg.expm(A.to(wide_type).numpy()))
    found = ol.retract(torch.eye(6, dtype=dtype), A, "exponential")
    assert (found - exact).abs().max() < 4 * (1 + size) * torch.finfo(dtype).eps


@pytest.mark.parametrize("way", ["_polar_by_series", "_polar_by_eigh", "_qr_by_cholesky"])
def test_the_fast_ways_are_as_accurate_as_lapack_up_to_their_limit(way, monkeypatch):
    """And are the ones taken there, as the monkeypatch shows."""
    method = "qr" if "qr" in way else "polar"
    dtype = torch.float64
    largest = (4e-16**0.2 if "series" in way else retractions.WELL_CONDITIONED) * 0.99
    X = ol.random_orthogonal(200, 80, seed=0, dtype=dtype)
    A = remove_normal(X, gaussian(200, 80, seed=1))
    tangent = relative_gradient_times_x(X, A)
    A = A * (largest / norm(tangent.mT @ tangent)).sqrt()
    expected = definition(X, skew_of(X, A), method)
    fast = ol.retract(X, A, method)
    assert ol.distance(fast) < 2 * ol.distance(expected)
    torch.testing.assert_close(fast, expected, rtol=0, atol=1e-14)
    monkeypatch.setattr(retractions, way, lambda Y, _: torch.zeros_like(Y))
    assert norm(ol.retract(X, A, method)) == 0
    assert norm(ol.retract(X, 1.1 * A, method)) > 0


@pytest.mark.parametrize("method", ["exponential", "cayley"])
@pytest.mark.parametrize("shape", [(20, 20), (60, 6)])
def test_drift_in_float32(method, shape):
    """Written as ``X + (...) X`` with a small bracket, thousands of steps lose next to nothing."""
    X, usual = torch.eye(*shape), torch.eye(shape[0])
    identity = torch.eye(shape[0])
    for k in range(1000):
        A = 1e-3 * gaussian(*shape, seed=k % 50, dtype=torch.float32)
        A = skew(A) if shape[0] == shape[1] else A
        X = ol.retract(X, A, method)
        if shape == (20, 20) and method == "cayley":
            usual = torch.linalg.solve(identity - A / 2, usual + A @ usual / 2)
    assert ol.distance(X.double()) < 1e-5
    if shape == (20, 20) and method == "cayley":
        assert ol.distance(usual.double()) > 10 * ol.distance(X.double())


@each_method
@pytest.mark.parametrize("length", [0.3, 8.0])
def test_the_normal_part_of_a_generator_neither_moves_nor_blows_up(method, length):
    """B = X H stands for zero. A formula that takes X^H X = I for granted explodes within 100."""
    start = ol.random_orthogonal(60, 6, seed=0)
    H = sym(gaussian(6, 6, dtype=torch.float32))
    H = H * length / spectral(H)
    X = start
    for _ in range(300):
        X = ol.retract(X, X @ H, method)
    assert ol.distance(X.double()) < 1e-3
    assert norm(X - start) < 1e-2


@each_method
@pytest.mark.parametrize("shape", [(500, 4), (4, 500)])
@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3])
def test_nothing_of_size_n_by_n_for_a_generator(method, shape, length):
    X = ol.random_orthogonal(*shape, seed=0)
    with Recorder() as recorder:
        ol.retract(X, torch.full(shape, length / 44), method)
    assert 500 * 4 <= recorder.largest <= 2 * 500 * 4


@each_method
@pytest.mark.parametrize("shape", [(4, 4), (9, 3), (3, 9)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_rounded(method, shape, dtype):
    X = ol.random_orthogonal(*shape, seed=0, dtype=dtype)
    A = (0.1 * skew(gaussian(max(shape), max(shape)))).to(dtype)
    Z = ol.retract(X, A, method)
    assert Z.dtype == dtype
    assert torch.equal(Z, ol.retract(X.float(), A.float(), method).to(dtype))


@each_method
@pytest.mark.parametrize("shape", [(2, 5, 5), (2, 9, 2)])
def test_a_step_that_overflows_is_nan_and_spoils_no_other(method, shape):
    X = ol.random_orthogonal(*shape, seed=0)
    A = gaussian(*shape, seed=1, dtype=torch.float32)
    A = skew(A) if shape[-1] == shape[-2] else A
    A[1] *= 1e38
    Z = ol.retract(X, A, method)
    torch.testing.assert_close(Z[0], ol.retract(X[0], A[0], method))
    assert Z[1].isnan().any() or ol.distance(Z[1]) < 1e-3


# Names, functions, errors.


def test_a_function_may_stand_for_a_name_and_sees_wide_matrices_transposed():
    seen = []

    def euler(X, A):
        seen.append((X.shape, A.shape, X.dtype))
        return X + A @ X if A.shape[-1] == A.shape[-2] else X + A

    X = ol.random_orthogonal(2, 3, 7, seed=0, dtype=torch.bfloat16)
    Z = ol.retract(X, torch.ones_like(X), euler)
    torch.testing.assert_close(Z, X + 1)
    ol.retract(X, torch.zeros(2, 7, 7), euler)
    assert seen == [((2, 7, 3), (2, 7, 3), torch.float32), ((2, 7, 3), (2, 7, 7), torch.float32)]
    assert find_retraction(euler) is euler


def test_names_and_default():
    assert tuple(RETRACTIONS)[:4] == METHODS
    X, A = torch.eye(3), 0.1 * skew(gaussian(3, 3)).float()
    assert torch.equal(ol.retract(X, A), ol.retract(X, A, "cayley"))


@pytest.mark.parametrize("method", ["euler", "Cayley", None, 3, ["qr"]])
def test_an_unknown_name_is_refused_with_the_known_ones(method):
    with pytest.raises(ValueError, match=r"one of \('exponential', .*or a function.*got "):
        ol.retract(torch.eye(3), torch.zeros(3, 3), method)


@pytest.mark.parametrize(
    ("shape", "step", "message"),
    [
        ((5, 2), (2, 2), r"X of shape \(\.\.\., 5, 2\), A must be.*5, 5\), or B.*5, 2\).*\(2, 2\)"),
        ((2, 5), (5, 2), r"X of shape \(\.\.\., 2, 5\), A must be.*5, 5\), or B.*2, 5\).*\(5, 2\)"),
        ((3, 3), (3,), r"A must be a skew matrix of shape \(\.\.\., 3, 3\).*got \(3,\)"),
        ((3,), (3, 3), r"X must be of shape \(\.\.\., n, p\), got \(3,\). Reshape it first"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape, step, message):
    with pytest.raises(ValueError, match=message):
        ol.retract(torch.zeros(shape), torch.zeros(step), "qr")


# Independent code.


def points_and_tangents(n, p, dtype=torch.float64):
    for seed, length in enumerate([1e-3, 0.1, 1.0, 5.0]):
        X = ol.random_orthogonal(n, p, seed=seed, dtype=dtype)
        tangent = remove_normal(X, gaussian(n, p, seed=seed + 10, dtype=dtype))
        yield X, tangent * length / spectral(tangent)


def assert_same(found, expected):
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-14 * found.shape[-1])


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (5, 4), (90, 70)])
@pytest.mark.parametrize("method", ["qr", "polar"])
def test_pymanopts_retractions_of_the_stiefel_manifold(method, shape):
    """Both are functions of the tangent vector, so they coincide for every one."""
    manifold = pymanopt.manifolds.Stiefel(*shape, retraction=method)
    for X, tangent in points_and_tangents(*shape):
        expected = manifold.retraction(X.numpy(), tangent.numpy())
        assert_same(ol.retract(X, step_of(X, tangent), method), expected)


@needs.pymanopts_groups
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("method", ["qr", "polar", "exponential"])
def test_pymanopts_groups_rotate_from_the_right(method, dtype):
    """They write tangent vectors as X Omega, so Omega = X^H A X."""
    n = 6
    group = pymanopt.manifolds.UnitaryGroup if dtype.is_complex else None
    group = group or pymanopt.manifolds.SpecialOrthogonalGroup
    manifold = group(n, retraction="qr" if method == "exponential" else method)
    theirs = manifold.exp if method == "exponential" else manifold.retraction
    for X, tangent in points_and_tangents(n, n, dtype):
        A = skew(tangent @ X.mH)
        expected = theirs(X.numpy(), skew(X.mH @ tangent).numpy())
        assert_same(ol.retract(X, A, method), expected)


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (90, 70)])
def test_geoopts_qr(shape):
    manifold = geoopt.EuclideanStiefel()
    for X, tangent in points_and_tangents(*shape):
        found = ol.retract(X, step_of(X, tangent), "qr")
        assert_same(found, manifold.retr(X, tangent))


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (5, 4)])
def test_geoopts_projection_is_polars(shape):
    manifold = geoopt.EuclideanStiefel()
    for X, tangent in points_and_tangents(*shape):
        found = ol.retract(X, step_of(X, tangent), "polar")
        assert_same(found, manifold.projx(X + tangent))


@pytest.mark.parametrize(
    "theirs", ["geoopt", pytest.param("pymanopt", marks=needs.pymanopts_groups)]
)
def test_exponentials_of_the_euclidean_metric(theirs):
    """Theirs are geodesics of the Euclidean metric, ours (tall) of the canonical one.

    They coincide for square X, and for tall X on tangent vectors with X^H tangent = 0.
    """
    for n, p in ((6, 6), (12, 4)):
        for X, tangent in points_and_tangents(n, p):
            across = tangent if n == p else tangent - X @ (X.mH @ tangent)
            if theirs == "geoopt":
                expected = geoopt.EuclideanStiefel().expmap(X, across)
            else:
                expected = pymanopt.manifolds.Stiefel(n, p).exp(X.numpy(), across.numpy())
            # Their block matrix is not skew and loses digits where ours does not.
            loss = 20 * (1 + spectral(across) ** 2) if n > p else 10
            found = ol.retract(X, step_of(X, across), "exponential")
            torch.testing.assert_close(
                found, torch.as_tensor(expected), rtol=0, atol=1e-14 * float(loss)
            )
    elsewhere = ol.retract(X, step_of(X, tangent), "exponential")
    assert norm(elsewhere - geoopt.EuclideanStiefel().expmap(X, tangent)) > 0.1


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (5, 4)])
def test_geoopts_canonical_retraction_is_cayley_with_twice_the_generator(shape):
    """geoopt: Cayley's transform of ``u X^T - X u^T``, which is our generator 2 u for any u.

    It moves by ``u + X X^T u`` to first order: along u where X^T u = 0, twice as far for square X.
    """
    manifold = geoopt.CanonicalStiefel()
    for X, tangent in points_and_tangents(*shape):
        doubled = 2 * relative_gradient(X, tangent)
        assert_same(ol.retract(X, doubled, "cayley"), manifold.retr(X, tangent))
        if shape[0] > shape[1]:
            assert_same(ol.retract(X, 2 * tangent, "cayley"), manifold.retr(X, tangent))
        else:
            assert_same(ol.retract(X, 2 * tangent @ X.mT, "cayley"), manifold.retr(X, tangent))
