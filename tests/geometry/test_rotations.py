import math

import pytest
import scipy.linalg
import torch
from torch.autograd import gradcheck, gradgradcheck

from ortholand.geometry import skew, skew_cayley, skew_exponential
from ortholand.geometry.rotations import (
    has_closed_form,
    skew_cayley_minus_identity,
    skew_exponential_minus_identity,
)
from tests.optim.peers import gaussian

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
ANGLES = [0.0, 1e-30, 1e-12, 1e-6, 1e-3, 0.04, 0.3, 0.99, 1.0, 1.01, 2.0, math.pi, 6.28, 20.0, 1e4]
BOTH = pytest.mark.parametrize("map", [skew_exponential, skew_cayley])
SIZES = [(1, F64), (2, F64), (3, F64), (5, F64), (1, C128), (2, C128), (3, C128), (4, C128)]
REAL_AND_COMPLEX = pytest.mark.parametrize(("n", "dtype"), SIZES)


def skew_of_norm(n, size, dtype=F64, batch=(6,)):
    """Skew matrices whose largest angle is the size."""
    A = skew(gaussian(*batch, n, n, seed=n, dtype=dtype))
    norms = torch.linalg.matrix_norm(A, 2, keepdim=True)
    return A / norms.clamp(min=torch.finfo(norms.dtype).tiny) * size


def defined(A, map):
    """By SciPy's exponential or NumPy's solve, in double precision."""
    A = A.detach().to(torch.promote_types(A.dtype, F64))
    if map is skew_exponential:
        return torch.from_numpy(scipy.linalg.expm(A.numpy()))
    identity = torch.eye(A.shape[-1], dtype=A.dtype)
    return torch.linalg.solve(identity - A / 2, identity + A / 2)


def from_unitary(Q):
    """In double precision: the type's own would add its rounding."""
    Q = Q.to(torch.promote_types(Q.dtype, F64))
    return (Q.mH @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).abs().max()


@BOTH
@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize("dtype", [F32, F64, C64, C128])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_it_is_what_the_definition_says_and_orthogonal_at_every_angle(n, dtype, angle, map):
    """An angle that is rounded moves the result by as much; but it stays orthogonal.

    But for a solve, whose condition is the angle.
    """
    A, unit = skew_of_norm(n, angle, dtype), torch.finfo(dtype).eps
    Q = map(A)
    assert Q.dtype == dtype
    is_solve = map is skew_cayley and not has_closed_form(A)
    assert from_unitary(Q) < 8 * unit * (1 + (angle if is_solve else 0))
    assert (Q - defined(A, map)).abs().max() < (6 + 8 * angle) * unit


@BOTH
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_single_matrix_is_as_accurate_as_one_of_a_batch(n, dtype, map):
    """torch's exponential is not: 4e4 units at norm 0.04 in float64 (pytorch 196592)."""
    for angle in [0.005, 0.01, 0.04, 0.1, 0.3, 0.5]:
        A = skew_of_norm(n, angle, dtype)
        error = (torch.stack([map(a) for a in A]) - defined(A, map)).abs().max()
        assert error < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "minus_identity", [skew_exponential_minus_identity, skew_cayley_minus_identity]
)
@pytest.mark.parametrize("n", [2, 3])
def test_without_the_identity_small_ones_keep_all_digits(n, minus_identity):
    A = skew_of_norm(n, 1e-5, F32)
    expected = A.double() + A.double() @ A.double() / 2
    relative = (minus_identity(A) - expected).abs().amax((-2, -1)) / A.abs().amax((-2, -1))
    assert relative.max() < 2e-7


# Derivatives.


@BOTH
@REAL_AND_COMPLEX
@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-3, 0.5, 0.999, 3.0])
def test_derivatives_of_first_and_second_order(n, dtype, angle, map):
    A = skew_of_norm(n, angle, dtype, batch=(2,)).requires_grad_()
    assert gradcheck(map, [A])
    assert gradgradcheck(map, [A], atol=1e-4)


@BOTH
@REAL_AND_COMPLEX
def test_only_the_skew_part_counts(n, dtype, map):
    A = gaussian(2, n, n, dtype=dtype).requires_grad_()
    assert torch.equal(map(A), map(skew(A)))
    (gradient,) = torch.autograd.grad(map(A), A, gaussian(2, n, n, seed=5, dtype=dtype))
    torch.testing.assert_close(gradient, skew(gradient))


def line_derivatives(A, angle, C):
    """Value, first and second derivative of ``<C, exp(angle A)>`` by autograd."""
    t = torch.tensor(angle, dtype=A.dtype, requires_grad=True)
    value = (C * skew_exponential(t * A)).sum()
    (first,) = torch.autograd.grad(value, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    return torch.stack([value, first, second]).detach()


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    "angle", [0.0, 1e-20, 1e-7, 1e-3, 0.03, 0.3, 0.9, 0.9999, 1.0001, 1.5, 3.0]
)
def test_derivatives_to_the_last_digits(n, dtype, angle):
    """``exp(tA)`` has derivatives ``A exp(tA)`` and ``A^2 exp(tA)``."""
    A = skew_of_norm(n, 1.0, F64, batch=())
    A, C = A.to(dtype), gaussian(n, n, seed=9).to(dtype)
    wide, angle = A.double(), torch.tensor(angle, dtype=dtype).item()
    Q = torch.from_numpy(scipy.linalg.expm((angle * wide).numpy()))
    exact = torch.stack([(C.double() * D).sum() for D in (Q, wide @ Q, wide @ wide @ Q)])
    found = line_derivatives(A, angle, C).double()
    assert (found - exact).abs().max() < 12 * n * torch.finfo(dtype).eps


@BOTH
@pytest.mark.parametrize("dtype", [F32, F64])
def test_gradients_are_finite_wherever_the_result_is(dtype, map):
    A = torch.stack(
        [skew_of_norm(3, size, dtype, batch=()) for size in [0.0, 1e-25, 1.0, 1e4, 1e8]]
    )
    A.requires_grad_()
    (gradient,) = torch.autograd.grad(map(A).sum(), A, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), A)
    assert gradient.isfinite().all()
    assert second.isfinite().all()


# Batches, and what torch does to functions.


@BOTH
@REAL_AND_COMPLEX
def test_shapes_of_batches(n, dtype, map):
    A = skew_of_norm(n, 0.7, dtype, batch=(2, 3))
    assert map(A).shape == (2, 3, n, n)
    torch.testing.assert_close(map(A)[1, 2], map(A[1, 2]))
    assert map(A[:0]).shape == (0, 3, n, n)
    strided = A.mT.contiguous().mT
    assert torch.equal(map(strided), map(A))


@pytest.mark.parametrize(
    ("n", "map"),
    [(2, skew_cayley), (3, skew_cayley), *((n, skew_exponential) for n in (2, 3, 5))],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_spoils_no_other(n, bad, map):
    A = skew_of_norm(n, 3.0, F32)
    expected = map(A)
    A[1, 1, 0], A[1, 0, 1] = bad, -bad
    found = map(A)
    assert found[1].isnan().any()
    others = torch.arange(len(A)) != 1
    assert torch.equal(found[others], expected[others])


def test_matrices_of_a_batch_do_not_see_each_other():
    sizes = torch.tensor([1e-6, 1e-2, 0.5, 3.0, 40.0, 1e3], dtype=F64)[:, None, None]
    A = skew_of_norm(6, 1.0) * sizes
    together = skew_exponential(A)
    alone = torch.stack([skew_exponential(a) for a in A])
    assert ((together - alone).abs() < 2e-15 * (1 + sizes)).all()
    A[5] = 0
    assert torch.equal(skew_exponential(A)[:5], together[:5])


@BOTH
@REAL_AND_COMPLEX
@pytest.mark.parametrize("angle", [0.0, 0.02, 0.4, 5.0])
def test_vmap(n, dtype, angle, map):
    A, C = skew_of_norm(n, angle, dtype), gaussian(6, n, n, seed=2, dtype=dtype)
    torch.testing.assert_close(torch.vmap(map)(A), map(A), rtol=0, atol=1e-13)

    def cost(a, c):
        return (c * map(a)).sum().real

    gradients = torch.vmap(torch.func.grad(cost))(A, C)
    expected = torch.stack([torch.func.grad(cost)(a, c) for a, c in zip(A, C, strict=True)])
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-13)


@BOTH
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.thorough
def test_compiled_in_one_graph(n, map):
    compiled = torch.compile(map, fullgraph=True, backend="aot_eager")
    for angle in [0.0, 0.04, 0.5, 4.0]:
        A = skew_of_norm(n, angle, batch=()).requires_grad_()
        C = gaussian(n, n, seed=4)
        found, expected = (
            (f(A), *torch.autograd.grad((f(A) * C).sum(), A)) for f in (compiled, map)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode():
    A, direction = skew_of_norm(3, 0.8), skew_of_norm(3, 1.0).flip(0)
    for map in (skew_exponential, skew_cayley):
        value, derivative = torch.func.jvp(map, (A,), (direction,))
        step = 1e-6
        difference = (map(A + step * direction) - map(A - step * direction)) / (2 * step)
        assert torch.equal(value, map(A))
        torch.testing.assert_close(derivative, difference, rtol=0, atol=1e-8)


def test_a_million_numbers_take_no_linear_algebra():
    """Batched products, solves and torch's exponential are what takes the time."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    A = skew_of_norm(3, 0.5).requires_grad_()
    with Watch():
        for map in (skew_exponential, skew_cayley):
            torch.autograd.grad(map(A).sum(), A)
    assert "sin" in seen
    assert not [name for name in seen if "mm" in name or "linalg" in name or "item" in name]
