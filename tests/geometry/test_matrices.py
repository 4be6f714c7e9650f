import math

import pytest
import torch
from torch import nn

from ortholand.geometry.matrices import (
    HERMITIAN_FROM,
    add_identity,
    bounded_norm,
    frobenius_norm,
    gram_matrix,
    gram_minus_identity,
    per_matrix,
    sharp_gram_minus_identity,
    skew,
    sym,
)


def test_skew_and_sym_split_a_complex_matrix():
    M = torch.randn(3, 4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(skew(M), -skew(M).mH)
    assert torch.equal(sym(M), sym(M).mH)
    torch.testing.assert_close(skew(M) + sym(M), M)


def test_add_identity_leaves_its_argument():
    S = torch.ones(2, 3, 3)
    assert torch.equal(add_identity(S, -1), S - torch.eye(3))
    assert torch.equal(S, torch.ones(2, 3, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 4, 3, 3)])
def test_gram_minus_identity(shape, dtype):
    X = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gram_minus_identity(X), X.mH @ X - torch.eye(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(300, 4), (2, 300, 4), (2, 1, 300, 4)])
def test_the_sharp_gram_matrix_rounds_its_diagonal_less(shape, dtype):
    X = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    X = torch.linalg.qr(X).Q
    wide = X.to(torch.promote_types(dtype, torch.float64))
    exact = (wide.mH @ wide - torch.eye(4)).diagonal(dim1=-2, dim2=-1)
    sharp = sharp_gram_minus_identity(X).diagonal(dim1=-2, dim2=-1)
    # Entries of X^H X near 1 are multiples of 6e-8; the sharp ones are right to 1e-8.
    assert (sharp - exact).abs().max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(300, 191), (300, 192), (250, 201), (20, 259), (2, 3, 210, 200)])
def test_large_gram_matrices_are_the_product_and_copied_below_the_diagonal(shape, dtype):
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    expected = X.to(exact).mH @ X.to(exact)
    for given in (X, X.mT.contiguous().mT, nn.Parameter(X)):
        S = gram_matrix(given)
        torch.testing.assert_close(S.to(exact), expected, rtol=1e-5, atol=1e-4)
        if shape[-1] >= HERMITIAN_FROM and not given.requires_grad:
            above = S[..., :40, 66:]
            assert torch.equal(S[..., 66:, :40], above.mH)  # copied


def test_large_gram_matrices_can_be_differentiated_and_mapped():
    X = torch.randn(230, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X.requires_grad_()
    (G,) = torch.autograd.grad(gram_matrix(X).diagonal().sum(), X)
    torch.testing.assert_close(G, 2 * X)
    stack = X.detach().expand(3, -1, -1)
    mapped = torch.vmap(gram_matrix)(stack)
    torch.testing.assert_close(mapped[2], gram_matrix(X.detach()))


def test_numbers_per_matrix_keep_the_type():
    X = torch.ones(2, 3, 3, dtype=torch.complex64)
    number = torch.ones(2, dtype=torch.float64)
    assert (per_matrix(number, X) * X).dtype == torch.complex64
    assert (per_matrix(number[0], X[0]) * X[0]).dtype == torch.complex64


@pytest.mark.parametrize("frobenius_norm", [frobenius_norm, bounded_norm])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e-3, 1.0, 1e10, 1e18, 1e25, 1e36])
def test_norm_is_never_too_small_and_exact_at_ordinary_scales(scale, frobenius_norm):
    M = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)) * scale
    exact = torch.linalg.matrix_norm(M.double()).item()
    norm = frobenius_norm(M).item()
    assert math.isfinite(norm)
    assert norm >= exact * (1 - 1e-6)
    assert norm <= exact * (1 + 1e-6) * (1 if 1e-3 <= scale <= 1e18 else math.sqrt(35))


@pytest.mark.parametrize("frobenius_norm", [frobenius_norm, bounded_norm])
def test_norm_tells_non_finite_entries_and_zero(frobenius_norm):
    assert frobenius_norm(torch.zeros(3, 3)) == 0
    for bad in (math.nan, math.inf):
        M = torch.zeros(2, 3, 3)
        M[1, 2, 0] = bad
        assert torch.isfinite(frobenius_norm(M)).tolist() == [True, False]
