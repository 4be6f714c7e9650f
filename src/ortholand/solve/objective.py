"""The user's functions as a solver sees them: torch, tall matrices, counted.

NumPy crosses here without copies, and wide matrices are transposed here; everything beyond this
door is written once.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = "np.ndarray | Tensor"
HessianProduct = Callable[[Tensor], Tensor]

REAL_OR_COMPLEX = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class Door:
    """Between the user's matrices, NumPy or torch, tall or wide, and tall tensors."""

    def __init__(self, x0: Array) -> None:
        self.numpy = not isinstance(x0, Tensor)
        X = _tensor(x0).detach()
        if X.ndim != 2 or 0 in X.shape:
            raise ValueError(
                f"x0 must be one matrix (n, p), got shape {tuple(X.shape)}. Minimise over several "
                "matrices one after the other, or train them with ortholand.LandingSGD."
            )
        if X.dtype not in REAL_OR_COMPLEX:
            raise TypeError(
                f"x0 must be of single or double precision, real or complex, got {X.dtype}. "
                "Example: x0.to(torch.float64)."
            )
        self.dtype, self.shape = X.dtype, tuple(X.shape)
        self.wide = X.shape[0] < X.shape[1]
        # A copy: the solver's points must not change with the caller's array.
        self.start = (X.mT if self.wide else X).clone(memory_format=torch.contiguous_format)

    def outward(self, X: Tensor) -> Array:
        """The user's view of X; a NumPy view cannot be written to, for X is the solver's."""
        # Contiguous as x0 most likely was: not every function likes a transposed view.
        X = X.mT.contiguous() if self.wide else X.detach()
        if not self.numpy:
            return X
        array = X.numpy()
        array.flags.writeable = False
        return array

    def inward(self, G: Array, name: str) -> Tensor:
        """A gradient or a Hessian product that a function of the user's returned."""
        if self.numpy:
            G = _tensor(G, f"{name} must return an array", like=self.dtype)
        elif not isinstance(G, Tensor):
            raise TypeError(f"{name} must return a tensor, as x0 is one, got {type(G).__name__}.")
        if tuple(G.shape) != self.shape or G.dtype != self.dtype:
            raise ValueError(
                f"{name} must return a matrix like x0, of shape {self.shape} and {self.dtype}, "
                f"got {tuple(G.shape)} and {G.dtype}. It is the Euclidean gradient (or Hessian "
                "product), without any projection."
            )
        return (G.mT if self.wide else G).detach()


class Objective:
    """Cost, Euclidean gradient and Hessian of tall X, with the number of times each was asked."""

    def __init__(
        self,
        fun: Callable[..., Any],
        door: Door,
        *,
        jac: Callable[..., Any] | bool | None = None,
        hessp: Callable[..., Any] | None = None,
        args: Any = (),
    ) -> None:
        _check_functions(fun, jac, hessp, door)
        self.fun, self.jac, self.hessp = fun, jac, hessp
        self.door = door
        self.args = args if isinstance(args, tuple) else (args,)
        self.nfev = self.njev = self.nhev = 0
        self.unit: float | None = None
        self.keeps_graph = False  # whether Hessian products will be asked for
        self._graph: tuple[Tensor, Tensor, Tensor] | None = None  # X, gradient, leaf

    def value_and_gradient(self, X: Tensor) -> tuple[float, Tensor]:
        """``f(X)`` and the Euclidean gradient: ``f(X + E) = f(X) + Re <G, E> + o(E)``.

        In units of the first gradient if that is very large or small, so that squares neither
        over- nor underflow: a cost times 1e-30 is minimised by the same iterates.
        """
        value, G = self._value_and_gradient(X)
        if self.unit is None:
            self.unit = power_of_two_near(G)
        return (value, G) if self.unit == 1 else (value / self.unit, G / self.unit)

    def _value_and_gradient(self, X: Tensor) -> tuple[float, Tensor]:
        self.nfev += 1
        self.njev += 1
        if not self.jac:
            return self._by_autograd(X)
        x = self.door.outward(X)
        if self.jac is True:
            value, G = _pair(self._call("fun", self.fun, x))
        else:
            value, G = self._call("fun", self.fun, x), self._call("jac", self.jac, x)
        # A copy: functions that fill the same buffer at each call are common.
        return _real_number(value), self.door.inward(G, "jac").clone()

    def gradient(self, X: Tensor) -> Tensor:
        """The Euclidean gradient alone."""
        if callable(self.jac):
            self.njev += 1
            G = self._call("jac", self.jac, self.door.outward(X))
            return self.door.inward(G, "jac") / self.scale
        return self.value_and_gradient(X)[1]

    @property
    def scale(self) -> float:
        """What a number in here is to be multiplied with to get the user's."""
        return self.unit or 1.0

    def hessian(self, X: Tensor, G: Tensor) -> HessianProduct:
        """``V -> Hess f(X)[V]``, by the user's ``hessp``, autograd, or differences of gradients."""
        if self.hessp is not None:
            return self._counted(lambda V: self._hessian_product(X, V))
        if not self.jac:
            by_autograd = self._hessian_by_autograd(X)
            if by_autograd is not None:
                return self._counted(by_autograd)
        return self._counted(lambda V: self._hessian_by_differences(X, G, V) * self.scale)

    def _counted(self, product: HessianProduct) -> HessianProduct:
        def counted(V: Tensor) -> Tensor:
            self.nhev += 1
            return product(V) if self.scale == 1 else product(V) / self.scale

        return counted

    def _call(self, name: str, function: Callable[..., Any] | bool | None, *matrices: Array) -> Any:
        """Call a function of the user's, which may use autograd, and must leave X as it is."""
        assert callable(function)
        versions = [x._version for x in matrices if isinstance(x, Tensor)]
        with torch.enable_grad():
            value = function(*matrices, *self.args)
        if versions != [x._version for x in matrices if isinstance(x, Tensor)]:
            raise ValueError(f"{name} must not modify X, but it did. Work on a copy: X.clone().")
        return value

    def _hessian_product(self, X: Tensor, V: Tensor) -> Tensor:
        H = self._call("hessp", self.hessp, self.door.outward(X), self.door.outward(V))
        return self.door.inward(H, "hessp")

    def _hessian_by_autograd(self, X: Tensor) -> HessianProduct | None:
        """By differentiating the gradient's graph, which serves all directions.

        None if it has none: f is linear, or its backward pass cannot be differentiated.
        """
        self.keeps_graph = True
        if self._graph is None or self._graph[0] is not X:
            self._value_and_gradient(X)
        assert self._graph is not None
        _, G, leaf = self._graph
        wide = self.door.wide
        if not G.requires_grad:
            return None

        def product(V: Tensor) -> Tensor:
            (H,) = torch.autograd.grad(
                G, leaf, V.mT if wide else V, retain_graph=True, materialize_grads=True
            )
            return H.mT if wide else H

        return product

    def _hessian_by_differences(self, X: Tensor, G: Tensor, V: Tensor) -> Tensor:
        norm = float(torch.linalg.vector_norm(V))
        if norm == 0:
            return torch.zeros_like(V)
        # X has orthonormal columns: its norm is the root of their number.
        h = torch.finfo(X.dtype).eps ** 0.5 * X.shape[-1] ** 0.5 / norm
        return (self.gradient(X + h * V) - G) / h

    def _by_autograd(self, X: Tensor) -> tuple[float, Tensor]:
        x = self.door.outward(X)
        assert isinstance(x, Tensor)
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self._call("fun", self.fun, leaf)
            number = _real_number(value)
            G = None
            if isinstance(value, Tensor) and value.requires_grad:
                (G,) = torch.autograd.grad(
                    value.sum(), leaf, create_graph=self.keeps_graph, allow_unused=True
                )
        if G is None:
            raise ValueError(
                "Without jac, fun must return a tensor that autograd can differentiate, got "
                f"{_describe(value)}. Compute it from X by torch operations, or pass jac."
            )
        self._graph = (X, G, leaf) if self.keeps_graph else None
        return number, self.door.inward(G, "fun's derivative")


def power_of_two_near(G: Tensor) -> float:
    """1, or the power of two next to the largest entry if that is far from 1."""
    largest = float(G.abs().max())
    if not 0 < largest < math.inf or 2**-20 <= largest <= 2**20:
        return 1.0
    limit = 100 if torch.finfo(G.dtype).bits == 32 else 900
    return 2.0 ** max(-limit, min(limit, math.frexp(largest)[1]))


def _tensor(
    array: Any,
    rule: str = "x0 must be a NumPy array or a tensor",
    like: torch.dtype = torch.float64,
) -> Tensor:
    """A tensor that shares memory with the array where torch has one for it; integers: floats."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    if array.dtype.kind in "iub":
        return torch.from_numpy(array.astype(np.float64)).to(like)
    if array.dtype.newbyteorder("=") not in _NUMPY_TYPES:
        raise TypeError(f"{rule} of single or double precision, got {array.dtype}.")
    odd = any(step < 0 or step % array.itemsize for step in array.strides)
    if odd or not array.flags.writeable or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")  # a copy
    return torch.from_numpy(array)


_NUMPY_TYPES = tuple(np.dtype(name) for name in ("f2", "f4", "f8", "c8", "c16"))


def _real_number(value: Any) -> float:
    is_tensor = isinstance(value, Tensor)
    kind = "c" if is_tensor and value.is_complex() else "f" if is_tensor else _kind(value)
    size = value.numel() if is_tensor else np.size(value)
    if size != 1 or kind not in "fiub":
        raise ValueError(
            f"fun must return one real number, got {_describe(value)}. Sum over the entries, "
            "and take the real part of a complex cost."
        )
    return value.item() if is_tensor else float(np.asarray(value).reshape(()))


def _kind(value: Any) -> str:
    return np.asarray(value).dtype.kind


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(
            f"With jac=True fun must return the pair (value, gradient), got {_describe(value)}."
        )
    return value


def _describe(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    return f"{value!r:.60}"


def _check_functions(fun: Any, jac: Any, hessp: Any, door: Door) -> None:
    if not callable(fun):
        raise TypeError(f"fun must be callable, got {_describe(fun)}.")
    if jac is not None and not isinstance(jac, bool) and not callable(jac):
        raise TypeError(f"jac must be a function, True or None, got {_describe(jac)}.")
    if hessp is not None and not callable(hessp):
        raise TypeError(f"hessp must be a function or None, got {_describe(hessp)}.")
    if door.numpy and not jac:
        raise ValueError(
            "A NumPy fun needs its gradient: pass jac=gradient, or jac=True if fun returns "
            "(value, gradient). Or write fun with torch and pass a tensor x0: then autograd "
            "differentiates it."
        )
