"""The matrix B of a constraint ``X^H B X = I``, in every form in which it may be given.

Dense or sparse, a LinearOperator, a function, or rows of data: only its products with a few vectors
are ever needed. Anything wrong with it is found here, before anything is computed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.solve.arrays import (
    adjoint,
    all_finite,
    from_numpy,
    lanczos,
    norm,
    precision,
    to_numpy,
)
from ortholand.solve.options import is_number

LANCZOS = 30  # products with one vector spent on the ends of the spectrum
FEW = 6  # the same where only the size of B is needed
ASYMMETRY = 100  # roundings by which B may differ from its adjoint
CHUNK = 4096  # rows of data read at a time

Apply = Callable[[Any], Any]


class Covariance:
    """``B = A^H A / N + ridge I`` for N rows of data in A; B is never formed.

    Args:
        rows: A, NumPy or torch, N x n; or several such blocks of columns, (N, n_1), (N, n_2), ...:
            B is then block diagonal, the covariance of each block by itself, as canonical
            correlation needs it. Columns are used as they are: subtract means first.
        ridge: at least 0; positive if columns are dependent, or B would be singular.

    >>> import numpy as np
    >>> A = np.array([[1.0, 0.0], [1.0, 2.0]])
    >>> Covariance(A, ridge=0.5)(np.eye(2))
    array([[1.5, 1. ],
           [1. , 2.5]])
    """

    def __init__(self, rows: Any, ridge: float = 0.0) -> None:
        blocks = list(rows) if isinstance(rows, (list, tuple)) else [rows]
        are_matrices = [isinstance(b, (np.ndarray, Tensor)) and b.ndim == 2 for b in blocks]
        if not blocks or not all(are_matrices):
            raise TypeError(
                "rows must be a matrix (N, n) of NumPy or torch, or a list of such blocks of "
                f"columns, got {[getattr(b, 'shape', type(b).__name__) for b in blocks]}."
            )
        if len({len(block) for block in blocks}) != 1 or 0 in blocks[0].shape:
            raise ValueError(
                "All blocks must have the same number N >= 1 of rows, one for each sample, got "
                f"{[tuple(block.shape) for block in blocks]}."
            )
        if not is_number(ridge) or not 0 <= ridge < math.inf:
            raise ValueError(f"ridge must be a number >= 0, got {ridge!r}.")
        self.blocks, self.ridge, self.n_terms = blocks, float(ridge), len(blocks[0])
        n = sum(block.shape[1] for block in blocks)
        self.shape = (n, n)

    def __call__(self, V: Any) -> Any:
        begins = range(0, self.n_terms, CHUNK)
        total = sum(self._sum(V, slice(begin, begin + CHUNK)) for begin in begins)
        return total / self.n_terms + self.ridge * V

    def _sum(self, V: Any, chosen: slice) -> Any:
        parts, begin = [], 0
        for block in self.blocks:
            A = _as(block[chosen], V)
            end = begin + A.shape[1]
            parts.append(adjoint(A) @ (A @ V[begin:end]))
            begin = end
        library: Any = np if isinstance(V, np.ndarray) else torch
        return library.concatenate(parts)


def _as(A: Any, V: Any) -> Any:
    """A in the library and type of V; complex if A is."""
    if isinstance(V, Tensor):
        A = torch.as_tensor(A)
        return A.to(V.device, torch.promote_types(V.dtype, A.dtype) if A.is_complex() else V.dtype)
    A = to_numpy(A) if isinstance(A, Tensor) else A
    return A.astype(np.result_type(V, A) if A.dtype.kind == "c" else V.dtype, copy=False)


class Operator:
    """B for the solver: ``apply(V)`` for arrays (..., n, p) of its library and type.

    Attributes:
        norm: a close lower bound of the largest eigenvalue; NaN until B is checked.
    """

    def __init__(self, matmat: Apply, n: int) -> None:
        self.matmat, self.n = matmat, n
        self.norm = math.nan

    def apply(self, V: Any) -> Any:
        if V.ndim == 2:
            return self.matmat(V)
        # A stack as one matrix with more columns: operators take no stacks.
        moved = V.swapaxes(0, -2)
        flat = moved.reshape(self.n, -1)
        return self.matmat(flat).reshape(moved.shape).swapaxes(0, -2)

    def check(self, like: Any, definite: bool = False) -> None:
        """Raise unless B is Hermitian and positive definite, as far as products tell.

        :data:`LANCZOS` Lanczos steps with full orthogonalisation, each a product with one vector,
        show the whole spectrum for n up to their number, and its ends for larger n. They are
        skipped if B is known to be ``definite``.
        """
        random = np.random.default_rng(0)
        eps = precision(like)
        noise = random.standard_normal((2, 2, self.n, 1))
        noise = noise[0] + 1j * noise[1] if is_complex(like) else noise[0]
        u, v = (from_numpy(vector, like) for vector in noise)
        Bu, Bv = self.apply(u), self.apply(v)
        scale = norm(Bu) * norm(v) + norm(Bv) * norm(u)
        apart = abs(complex((adjoint(u) @ Bv - adjoint(Bu) @ v)[0, 0]))
        if apart > ASYMMETRY * eps * math.sqrt(self.n) * scale:
            raise ValueError(not_hermitian(apart / scale))
        found = lanczos(self.apply, u, min(FEW if definite else LANCZOS, self.n), 10 * eps)
        if found is None:
            raise ValueError("B must be finite, but its product with a vector is not.")
        lowest, self.norm = float(found[0][0]), float(found[0][-1])
        if not (definite or lowest > eps * self.norm):
            raise ValueError(not_definite(lowest, self.norm))


def not_hermitian(share: float) -> str:
    return (
        f"B must be symmetric (Hermitian, if complex), but B - B^H is {share:.1e} of it. "
        "Take (B + B.conj().T) / 2, if that is what you mean."
    )


def not_definite(lowest: float, largest: float) -> str:
    kind = "singular up to rounding" if lowest > -1e-10 * abs(largest) else "not positive definite"
    return (
        f"B must be positive definite, but it is {kind}: it has eigenvalues from "
        f"{lowest:.2g} or less to {largest:.2g}. Add a multiple of the identity, "
        "B + ridge I, or leave out dependent columns."
    )


def is_dense(B: Any) -> bool:
    return isinstance(B, np.ndarray) or (isinstance(B, Tensor) and B.layout == torch.strided)


def check_form(B: Any) -> Any:
    """B, if it is a square matrix, operator or function; lists become arrays."""
    if isinstance(B, (list, tuple)):
        B = np.asarray(B)
    if isinstance(B, np.ndarray) and B.dtype.kind in "iub":
        B = B.astype(np.float64)
    if isinstance(B, Tensor):
        B = B.detach()
        B = B if B.is_floating_point() or B.is_complex() else B.double()
    shape = getattr(B, "shape", None)
    if shape is None:
        if callable(B):
            return B
        raise TypeError(
            "B must be a matrix (NumPy, torch, SciPy sparse), a LinearOperator, ol.Covariance, or "
            f"a function V -> B V, got {type(B).__name__}."
        )
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"B must be a square matrix, got shape {tuple(shape)}.")
    if not is_dense(B):
        return B
    if isinstance(B, np.ndarray) and B.dtype.kind not in "fc":
        raise TypeError(f"B must be a matrix of numbers, got one of {B.dtype}.")
    if not all_finite(B):
        raise ValueError("B must be finite, but it has infinite or NaN entries.")
    size, apart = norm(B), norm(B - adjoint(B))
    if apart > ASYMMETRY * precision(B) * size:
        raise ValueError(not_hermitian(apart / size))
    return B


def operator_for(B: Any, X: Any, numpy: bool) -> Operator:
    """B for the solver's arrays, like X; ``numpy`` says what the user's functions expect."""
    n = X.shape[-2]
    if is_dense(B):
        check_kinds(B, X)
        matrix = from_numpy(to_numpy(B), X)
        return Operator(lambda V: matrix @ V, n)
    if isinstance(B, Covariance):
        return Operator(B, n)
    if isinstance(B, Tensor):
        matrix = B.to(torch.as_tensor(X[..., :1, :1]).dtype)
        return Operator(_converting(lambda V: matrix @ V, False), n)
    if hasattr(B, "matmat"):
        return Operator(_converting(B.matmat, True), n)
    if hasattr(B, "tocsr"):
        return Operator(_converting(B.tocsr().__matmul__, True), n)
    return Operator(_converting(B, numpy), n)


def check_kinds(B: Any, X: Any) -> None:
    if is_complex(B) and not is_complex(X):
        raise ValueError(
            f"With a complex B, x0 must be complex too, got {X.dtype}. Take x0 + 0j, or B.real."
        )


def is_complex(A: Any) -> bool:
    dtype = getattr(A, "dtype", None)
    return dtype.is_complex if isinstance(dtype, torch.dtype) else np.dtype(dtype).kind == "c"


def _converting(function: Apply, numpy: bool) -> Apply:
    """A checked product, computed in NumPy or torch whatever its argument is."""

    def product(V: Any) -> Any:
        inside = isinstance(V, np.ndarray)
        given = V if inside == numpy else to_numpy(V) if numpy else torch.from_numpy(V.copy())
        W = function(given)
        shape = tuple(getattr(W, "shape", ()))
        if shape != tuple(V.shape):
            raise ValueError(
                f"B must give a product of the shape of V, {tuple(V.shape)}, got "
                f"{shape or type(W).__name__}. V is a matrix: multiply each of its columns."
            )
        if is_complex(W) and not is_complex(V):
            raise ValueError(
                f"B V must be real where V is, got {W.dtype}. With a complex B take x0 + 0j."
            )
        if inside:
            W = to_numpy(W) if isinstance(W, Tensor) else np.asarray(W)
            return W.astype(V.dtype, copy=False)
        W = W if isinstance(W, Tensor) else torch.from_numpy(np.ascontiguousarray(W))
        return W.to(V)

    return product


def check_size(B: Any, shape: Sequence[int], name: str) -> None:
    """Raise unless X^H B X can be computed, and be the identity."""
    if len(shape) < 2 or 0 in shape or shape[-2] < shape[-1]:
        raise ValueError(
            f"{name} on ol.GeneralizedStiefel(B) must be a matrix (n, p), n >= p, or a stack "
            f"(..., n, p) of them, got shape {tuple(shape)}. Transpose a wide one."
        )
    size = getattr(B, "shape", (shape[-2],))[0]
    if size != shape[-2]:
        raise ValueError(
            f"B must be n x n for {name} of n = {shape[-2]} rows, got {size} x {size}."
        )
