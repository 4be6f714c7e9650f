"""Elementary operations on batches of matrices ``(..., n, p)``, real or complex."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

SMALL = 128  # up to this many columns a matrix fits a cache, and calls cost more than passes


def skew(M: Tensor) -> Tensor:
    """Skew-Hermitian part ``(M - M^H) / 2`` of each square matrix."""
    return (M - adjoint(M)).mul_(0.5)  # torch 2.6 divides complex numbers inexactly


def sym(M: Tensor) -> Tensor:
    """Hermitian part ``(M + M^H) / 2`` of each square matrix."""
    return (M + adjoint(M)).mul_(0.5)


def adjoint(M: Tensor) -> Tensor:
    """``M^H``; a copy of large matrices on the CPU, which is slow to read rows and columns."""
    return M.mH.contiguous() if M.is_cpu and M.shape[-1] > SMALL else M.mH


def identity_like(X: Tensor) -> Tensor:
    """The p x p identity in the type and on the device of X. It must not be written to."""
    p, is_plain = X.shape[-1], type(X) in (Tensor, nn.Parameter)  # a fake tensor's is fake
    if p > SMALL or torch.compiler.is_compiling() or not is_plain:
        return torch.eye(p, dtype=X.dtype, device=X.device)
    key = (p, X.dtype, X.device)
    identity = _identities.get(key)
    if identity is None:
        with torch.inference_mode(False), torch.no_grad():
            identity = torch.eye(p, dtype=X.dtype, device=X.device)
        if type(identity) is Tensor and len(_identities) < 64:
            _identities[key] = identity
    return identity


# For steps of small matrices, where making it costs as much as using it.
_identities: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def add_identity(S: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """``S + factor I`` for each square matrix; a factor for each has the shape ``(..., 1)``."""
    D = S.clone()
    D.diagonal(dim1=-2, dim2=-1).add_(factor)
    return D


HERMITIAN_FROM = 192  # columns from which half of a Gram matrix is computed, the other copied
BLOCKS = 4  # of columns: 5/8 of the products, in 0.7 of the time


def gram_matrix(X: Tensor, out: Tensor | None = None) -> Tensor:
    """``X^H X`` of each matrix; of large ones on the CPU only the upper half is computed."""
    whole = X.shape[-1] < HERMITIAN_FROM or X.dtype in HALF_TYPES
    if whole or not is_plain_cpu(X) or is_tracked(X):
        return torch.matmul(X.mH, X, out=out)
    p, width = X.shape[-1], -(-X.shape[-1] // BLOCKS)
    S = X.new_empty(*X.shape[:-2], p, p) if out is None else out
    for matrix, square in zip(X.reshape(-1, *X.shape[-2:]), S.view(-1, p, p), strict=True):
        for i in range(0, p, width):
            left, right = matrix[:, i : i + width], matrix[:, i:]
            torch.mm(left.mH, right, out=square[i : i + width, i:])
        for i in range(width, p, width):
            square[i:, i - width : i] = square[i - width : i, i:].mH
    return S


def is_plain_cpu(X: Tensor) -> bool:
    """Whether a tensor is in CPU memory, and operations on it run when they are called."""
    plain = not torch.compiler.is_compiling() and type(X) in (Tensor, nn.Parameter) and X.is_cpu
    return plain and not torch._C._functorch.is_functorch_wrapped_tensor(X)


def is_tracked(X: Tensor) -> bool:
    """Whether autograd records operations on a tensor."""
    return X.requires_grad and torch.is_grad_enabled()


def gram_minus_identity(X: Tensor) -> Tensor:
    """``X^H X - I`` of each matrix, in one call where torch has one for it."""
    if X.shape[-1] > SMALL:
        D = gram_matrix(X)
        D.diagonal(dim1=-2, dim2=-1).sub_(1)
        return D
    identity = identity_like(X)
    if X.ndim > 3:
        return X.mH @ X - identity
    return (torch.addmm if X.ndim == 2 else torch.baddbmm)(identity, X.mH, X, beta=-1)


def shared_gram_minus_identity(X: Tensor, share: float) -> Tensor:
    """What some rows of X add to ``X^H X - I``, with their share of the identity."""
    D = gram_matrix(X)
    D.diagonal(dim1=-2, dim2=-1).sub_(share)
    return D


def add_product(C: Tensor, A: Tensor, B: Tensor, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """``beta C + alpha A B`` for each triple, in one call where torch has one for it."""
    if C.ndim > 3:
        return beta * C + alpha * (A @ B)
    return (torch.addmm if C.ndim == 2 else torch.baddbmm)(C, A, B, beta=beta, alpha=alpha)


def add_product_(C: Tensor, A: Tensor, B: Tensor, alpha: float = 1.0) -> Tensor:
    """``C + alpha A B`` for each triple, in C's memory."""
    if C.ndim > 3:
        return C.add_(A @ B, alpha=alpha)
    return (C.addmm_ if C.ndim == 2 else C.baddbmm_)(A, B, alpha=alpha)


def sharp_gram_minus_identity(X: Tensor) -> Tensor:
    """:func:`gram_minus_identity` of nearly orthogonal X, its diagonal summed in float64."""
    D = gram_minus_identity(X)
    if torch.finfo(X.dtype).bits <= 32 and has_float64(X):
        D.diagonal(dim1=-2, dim2=-1).copy_(squared_column_norms(X) - 1)
    return D


def squared_column_norms(X: Tensor) -> Tensor:
    """``sum_i |X_ij|^2`` for each column, summed in float64."""
    if X.numel() <= WIDENED_AT_ONCE or not in_parts(X):
        squares = X.square() if not X.is_complex() else torch.view_as_real(X).square().sum(-1)
        return squares.sum(-2, dtype=sum_dtype(X))
    sums = [squared_column_norms(part) for part in parts(X)]
    return torch.cat(sums) if X.stride(-2) < X.stride(-1) else torch.stack(sums).sum(0)


def newton_schulz(Y: Tensor) -> Tensor:
    """``Y - Y (Y^H Y - I) / 2``: one step towards the polar factor of Y."""
    return add_product(Y, Y, sharp_gram_minus_identity(Y), alpha=-0.5)


def tall(X: Tensor) -> Tensor:
    """The matrices with at least as many rows as columns: wide ones transposed."""
    return X.mT if X.shape[-2] < X.shape[-1] else X


def is_square(X: Tensor) -> bool:
    """Whether the matrices have as many rows as columns."""
    return X.shape[-2] == X.shape[-1]


def max_abs(M: Tensor) -> Tensor:
    """Largest modulus in each matrix; NaN if the matrix contains one."""
    return torch.linalg.vector_norm(M, math.inf, dim=(-2, -1))


def largest_norm(dtype: torch.dtype) -> float:
    """A norm below which a few products do not overflow; its inverse is a normal number, too."""
    return torch.finfo(dtype).max / 4


def moved_along(X: Tensor, L: Tensor, eta: Tensor, out: Tensor | None = None) -> Tensor:
    """``X - eta L``, one number eta for each matrix."""
    return torch.addcmul(X, L, per_matrix(eta, X), value=-1, out=out)


def finite_matrices(M: Tensor) -> Tensor:
    """True for each matrix without NaN or infinite entries."""
    return (M * 0).sum(dim=(-2, -1)) == 0  # a fifth of the time that a maximum takes


def frobenius_norm(M: Tensor) -> Tensor:
    """Frobenius norm of each matrix, never too small; infinite only for float64 beyond 1e154.

    Squares of float32 entries overflow from 1e19, so they are summed in float64.
    """
    if M.device.type in WITHOUT_FLOAT64:
        return bounded_norm(M)
    wide = wide_dtype(M)
    if M.numel() <= WIDENED_AT_ONCE or not in_parts(M):
        return torch.linalg.vector_norm(M, dim=(-2, -1), dtype=wide)
    norms = [torch.linalg.vector_norm(part, dtype=wide) for part in parts(M)]
    return torch.linalg.vector_norm(torch.stack(norms))


# Up to so many entries torch widens a matrix at once, and else parts: it makes a copy for that.
WIDENED_AT_ONCE, PART = 2**18, 2**16


def in_parts(M: Tensor) -> bool:
    """Whether a large matrix is widened in parts, each contiguous: rows, or columns."""
    return M.ndim == 2 and is_plain_cpu(M) and not is_tracked(M)


def parts(M: Tensor) -> tuple[Tensor, ...]:
    """Parts of a large matrix."""
    dim = 0 if M.stride(0) >= M.stride(1) else 1
    return M.split(max(1, PART // M.shape[1 - dim]), dim=dim)


def sum_dtype(M: Tensor) -> torch.dtype | None:
    """The type in which real numbers are summed: float64 if the device has it."""
    return None if M.device.type in WITHOUT_FLOAT64 else torch.float64


WITHOUT_FLOAT64 = {"mps"}  # types of devices


def has_float64(M: Tensor) -> bool:
    """Whether the matrix's device knows float64."""
    return sum_dtype(M) is not None


def wide_dtype(M: Tensor) -> torch.dtype:
    """The double-precision counterpart of the matrix's type."""
    return torch.complex128 if M.is_complex() else torch.float64


def bounded_norm(M: Tensor) -> Tensor:
    """:func:`frobenius_norm` without float64: a bound where squares would over- or underflow."""
    largest = max_abs(M)
    size = math.sqrt(M.shape[-2] * M.shape[-1])
    underflow = size * torch.finfo(largest.dtype).tiny ** 0.4
    norm = torch.linalg.vector_norm(M, dim=(-2, -1)).clamp(min=underflow)
    return torch.minimum(norm, largest * size)


def per_matrix(value: Tensor, X: Tensor) -> Tensor:
    """One number per matrix of X, in X's precision and shaped to multiply X."""
    if value.ndim == 0:
        return value  # a tensor without dimensions never changes the type of the other factor
    return value.to(_REAL_PARTS.get(X.dtype, X.dtype))[..., None, None]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of the real and imaginary parts."""
    return _REAL_PARTS.get(dtype, dtype)


# In place of dtype.to_real(), which torch.compile cannot trace.
_REAL_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which arithmetic on this type is done: float32 for half precision."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def to_working_dtype(X: Tensor) -> Tensor:
    """X in its :func:`working_dtype`."""
    return X.float() if X.dtype in HALF_TYPES else X


HALF_TYPES = (torch.float16, torch.bfloat16)

_NOTHING = nullcontext()
# A quick answer for the common case, where this torch has one.
_is_any_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def without_autocast(
    tensors: Iterable[Tensor] | Callable[[], Iterable[Tensor]],
) -> AbstractContextManager[object]:
    """A context without automatic casts on the devices of some tensors: they are for networks."""
    if not torch.compiler.is_compiling() and not _is_any_enabled():
        return _NOTHING
    found = tensors() if callable(tensors) else tensors
    devices = {tensor.device.type for tensor in found}
    casting = [device for device in devices if torch.is_autocast_enabled(device)]
    if not casting:
        return _NOTHING
    stack = ExitStack()
    for device in casting:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# --- different methods for matrices of different sizes, whatever else is in their batch

Way = Callable[..., Tensor]


def by_size(
    size: Tensor, branches: list[tuple[float, Way]], otherwise: Way, *batches: Tensor
) -> Tensor:
    """Each matrix by the first method whose limit exceeds its size, or by the last; reads sizes."""
    chosen = {next((f for limit, f in branches if s < limit), otherwise) for s in extremes(size)}
    if len(chosen) == 1:
        return chosen.pop()(*batches)
    result = torch.empty_like(batches[0])
    left = torch.ones_like(size, dtype=torch.bool)
    for limit, function in [*branches, (None, otherwise)]:
        now = left if limit is None else left & (size < limit)
        result[now] = function(*(M[now] for M in batches))
        left = left & ~now
    return result


def extremes(size: Tensor) -> list[float]:
    """The smallest and largest size, read on the host."""
    if size.numel() < 2:
        return size.flatten().tolist() or [0.0]
    return torch.stack(torch.aminmax(size)).tolist()
