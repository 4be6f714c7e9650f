"""What all problems share: their interface, random starts, and checks of their data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.manifold import random_orthogonal


class Problem(ABC):
    """A cost on matrices X with orthonormal columns, with its derivatives.

    Every method takes one X of shape :attr:`shape`, or a batch ``(..., n, p)`` of them that share
    the same data; costs then have the shape of the batch. Derivatives are Euclidean and follow
    torch's convention for complex X: ``f(X + E) = f(X) + Re <G, E> + o(E)``.

    A solver takes ``problem.fun_and_grad`` with ``jac=True``, or ``problem.fun`` and
    ``problem.grad``; a second-order one also takes ``problem.hessp``.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""

    @property
    @abstractmethod
    def data(self) -> Tensor:
        """A tensor of the problem's data, whose type and device X shares."""

    @abstractmethod
    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""

    @abstractmethod
    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X."""

    @abstractmethod
    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad`, with shared work done once."""

    @abstractmethod
    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        """Euclidean Hessian at X applied to V."""

    def solution(self) -> Tensor:
        """A minimiser, where one is known."""
        raise NotImplementedError(f"The minimiser of {type(self).__name__} is not known.")

    def optimum(self) -> Tensor:
        """The smallest cost: that of :meth:`solution`."""
        return self.fun(self.solution())

    def start(self, seed: int | torch.Generator) -> Tensor:
        """A Haar-distributed X to start from.

        Args:
            seed: a generator, or an integer. It may be the integer that made the data: other
                numbers are drawn here, so that a planted solution cannot be drawn again.
        """
        dtype, device = self.data.dtype, self.data.device
        if not isinstance(seed, torch.Generator):
            seed = torch.Generator(device=device).manual_seed(seed ^ OTHER_STREAM)
        return random_orthogonal(*self.shape, seed=seed, dtype=dtype, device=device)


OTHER_STREAM = 0x9E3779B9  # any number that nobody would choose


class AtLastPoint:
    """Caches what was computed at the last X, for calls at an equal X.

    A Newton step needs many products with one Hessian, and the part of it that depends on X
    alone is often the most expensive. The price is an entry-by-entry comparison with the last X.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def get(self, X: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """``compute(X)``, or its last result if X is the same."""
        if not _has_plain_values(X):
            return compute(X)
        last = self._last
        if last is None or not _same(last[0], X):
            last = (X.clone(), compute(X))
            self._last = last
        return last[1]


def _has_plain_values(X: Tensor) -> bool:
    """Whether X is plain numbers: no graph, transform or compiler tracks it."""
    return not (
        X.requires_grad
        or X.is_inference()
        or torch.compiler.is_compiling()
        or torch._C._functorch.is_functorch_wrapped_tensor(X)
    )


def _same(X: Tensor, Y: Tensor) -> bool:
    alike = X.dtype == Y.dtype and X.device == Y.device
    return alike and torch.equal(X, Y)


def inner(X: Tensor, Y: Tensor) -> Tensor:
    """``Re <X, Y>`` of each pair of matrices."""
    product = (X.conj() * Y).real if X.is_complex() else X * Y
    return product.sum((-2, -1))


def drawn_in(dtype: torch.dtype) -> torch.dtype:
    """The type in which data are drawn: a seed gives the same problem in every precision."""
    return torch.complex128 if dtype.is_complex else torch.float64


def as_generator(seed: int | torch.Generator) -> torch.Generator:
    """The generator itself, or a new one from an integer."""
    return seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)


def check_tensor(name: str, M: Tensor, ndim: int | tuple[int, ...], allow_complex: bool) -> None:
    """Raise unless M is a finite tensor of real (or complex) numbers with that many axes."""
    if not isinstance(M, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(M).__name__}; torch.as_tensor makes one."
        )
    if not (M.is_floating_point() or (allow_complex and M.is_complex())):
        kind = "real or complex" if allow_complex else "real"
        raise TypeError(f"{name} must hold {kind} floating-point numbers, got {M.dtype}.")
    allowed = ndim if isinstance(ndim, tuple) else (ndim,)
    if M.ndim not in allowed or 0 in M.shape:
        axes = " or ".join(str(n) for n in allowed)
        raise ValueError(f"{name} must have {axes} axes, none empty, got shape {tuple(M.shape)}.")
    if not bool(M.isfinite().all()):
        raise ValueError(
            f"{name} must be finite, but {int((~M.isfinite()).sum())} entries are not."
        )


def check_hermitian(name: str, M: Tensor) -> None:
    """Raise unless M is square and symmetric (Hermitian if complex) up to rounding."""
    if M.shape[-1] != M.shape[-2]:
        raise ValueError(f"{name} must be square, got shape {tuple(M.shape)}.")
    largest = M.abs().max()
    error = (M - M.mH).abs().max()
    if bool(error > torch.finfo(M.dtype).eps ** 0.5 * largest):
        kind = "Hermitian" if M.is_complex() else "symmetric"
        raise ValueError(
            f"{name} must be {kind}, but it and its transpose differ by {float(error):.3g} where "
            f"the largest entry is {float(largest):.3g}. "
            f"ortholand.geometry.sym takes the {kind} part."
        )
