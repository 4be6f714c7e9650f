"""The few array operations of a solver, for NumPy's arrays and torch's tensors alike.

Operations that both libraries spell alike (``+``, ``@``, ``reshape``) are used directly. Matrices
are the last two dimensions; inner products and norms run over all entries, and are Python floats.
"""

from collections.abc import Callable
from functools import cache
from math import inf, isfinite, sqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy import ndarray, vdot
from torch import Tensor

Array: TypeAlias = "np.ndarray | Tensor"


def inner(A: Any, B: Any) -> float:
    """``Re <A, B>``."""
    if isinstance(A, ndarray):
        return float(vdot(A, B).real)
    return torch.dot(real_vector(A), real_vector(B)).item()


def norm(A: Any) -> float:
    """Frobenius norm over all entries."""
    if isinstance(A, ndarray):
        return sqrt(vdot(A, A).real)
    return sqrt(inner(A, A))


def product(A: Any, B: Any) -> Any:
    """``A B``; for small matrices NumPy's ``dot`` takes half the time of its ``@``."""
    return A.dot(B) if isinstance(A, ndarray) and A.ndim == 2 >= B.ndim else A @ B


def gram_product(A: Any, B: Any) -> Any:
    if isinstance(A, ndarray) and A.ndim == 2 and A.dtype.kind == "f":
        return A.T.dot(B)
    return adjoint(A) @ B


def largest_norm(A: Any) -> float:
    """The largest Frobenius norm of the matrices of a stack."""
    if A.ndim == 2:
        return sqrt(vdot(A, A).real) if isinstance(A, ndarray) else norm(A)
    if isinstance(A, ndarray):
        return float(np.linalg.norm(A, axis=(-2, -1)).max())
    return torch.linalg.matrix_norm(A).max().item()


def real_vector(A: Any) -> Any:
    """All numbers as one real vector; a complex number becomes two."""
    if isinstance(A, np.ndarray):
        flat = A.reshape(-1)
        return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
    return torch.view_as_real(A.resolve_conj()).reshape(-1) if A.is_complex() else A.reshape(-1)


def from_real_vector(flat: Any, like: Any) -> Any:
    """The matrices with these numbers, in the shape and type of ``like``."""
    if isinstance(flat, np.ndarray):
        return flat.view(like.dtype).reshape(like.shape)
    if like.is_complex():
        return torch.view_as_complex(flat.reshape(*like.shape, 2))
    return flat.reshape(like.shape)


def adjoint(A: Any) -> Any:
    if isinstance(A, ndarray):
        transposed = A.T if A.ndim == 2 else A.swapaxes(-1, -2)
        return transposed.conj() if A.dtype.kind == "c" else transposed
    return A.mH


def turned(A: Any) -> Any:
    """Conjugate transpose, contiguous because NumPy adds such arrays faster."""
    if isinstance(A, ndarray) and A.ndim == 2:
        return A.T.copy() if A.dtype.kind == "f" else A.T.conj()
    return adjoint(A)


def sym(A: Any) -> Any:
    return (A + turned(A)) * 0.5


def skew(A: Any) -> Any:
    return (A - turned(A)) * 0.5


def minus_product(C: Any, A: Any, B: Any) -> Any:
    if isinstance(C, ndarray):
        return C - (A.dot(B) if C.ndim == 2 else A @ B)
    add = torch.addmm if C.ndim == 2 else torch.baddbmm
    return add(C, A, B, alpha=-1)


def combine(A: Any, t: float, B: Any) -> Any:
    if t == 1:
        return A + B
    return A + t * B if isinstance(A, ndarray) else torch.add(A, B, alpha=t)


def identity(A: Any) -> Any:
    """The p x p identity for matrices of p columns."""
    p = A.shape[-1]
    if isinstance(A, np.ndarray):
        return _numpy_identity(p, A.dtype)
    return torch.eye(p, dtype=A.dtype, device=A.device)


@cache
def _numpy_identity(p: int, dtype: np.dtype) -> np.ndarray:
    eye = np.eye(p, dtype=dtype)
    eye.setflags(write=False)
    return eye


def precision(A: Any) -> float:
    """The unit in the last place of 1."""
    return _precision(A.dtype)


@cache
def _precision(dtype: Any) -> float:
    library = torch if isinstance(dtype, torch.dtype) else np
    return float(library.finfo(dtype).eps)


def all_finite(A: Any) -> bool:
    return bool((np.isfinite(A) if isinstance(A, ndarray) else A.isfinite()).all())


def zeros(shape: tuple[int, ...], like: Any) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def copy_of(A: Any) -> Any:
    if isinstance(A, np.ndarray):
        return A.copy(order="C")
    return A.clone(memory_format=torch.contiguous_format)


def as_tensor(A: Any) -> Tensor:
    """A as a tensor, which shares memory with an array that is writeable."""
    if isinstance(A, Tensor):
        return A
    return torch.from_numpy(A if A.flags.writeable else A.copy())


def back_from_tensor(A: Tensor, like: Any) -> Any:
    """A tensor in the library of ``like``."""
    return A if isinstance(like, Tensor) else A.resolve_conj().numpy()


def to_numpy(A: Any) -> np.ndarray:
    """A small matrix in NumPy."""
    return A if isinstance(A, np.ndarray) else A.detach().cpu().resolve_conj().numpy()


def from_numpy(A: np.ndarray, like: Any) -> Any:
    """A small NumPy matrix in the library, on the device and of the type of ``like``."""
    if isinstance(like, np.ndarray):
        return A.astype(like.dtype, copy=False)
    return torch.from_numpy(A).to(like)


def lanczos(
    apply: Callable[[Any], Any], v: Any, steps: int, rest: float, clear: float = inf
) -> tuple[np.ndarray, Any] | None:
    """Lanczos' method from v: the Ritz values, and the vector of the least; None if it fails.

    It ends early once what is left is ``rest`` of the largest value, or the least value is
    ``-clear`` of it.
    """
    size, basis = norm(v), []
    diagonal: list[float] = []
    beside: list[float] = []
    values = vectors = np.zeros((0, 1))
    while size and len(basis) < steps:
        v = v / size
        basis.append(v)
        w = apply(v)
        diagonal.append(inner(v, w))
        if not isfinite(diagonal[-1]):
            return None
        for _ in range(2):  # once more: rounding would show the same values again
            for u in basis:
                w = combine(w, -inner(u, w), u)
        T = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(T)
        size, v, largest = norm(w), w, float(abs(values).max())
        if values[0] < -clear * largest or size <= rest * largest:
            break
        beside.append(size)
    pairs = zip(vectors[:, 0], basis, strict=True)
    return (values, sum(float(c) * u for c, u in pairs)) if basis else None
