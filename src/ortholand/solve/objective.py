"""The user's functions as functions of a solver's own arrays, with calls counted."""

import contextvars
import math
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ortholand.solve.arrays import copy_of, from_real_vector, norm, precision, real_vector
from ortholand.solve.variables import Variables
from ortholand.solve.watch import Watch

HessianProduct = Callable[[Any], Any]
AROUND = {"gradient": 1e-5, "product": 4e-5}  # seconds that a solver takes around a call
MOST_DIFFERENCES = 1_000  # numbers of X for which finite differences make sense


class Objective:
    """Cost, Euclidean gradient and Hessian, with the number of evaluations of each."""

    def __init__(
        self,
        fun: Callable[..., Any],
        variables: Variables,
        *,
        jac: Callable[..., Any] | bool | None = None,
        hessp: Callable[..., Any] | None = None,
        args: Any = (),
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _check_functions(fun, jac, hessp, variables)
        if variables.jax is not None and jac is None:
            fun, jac, hessp = _by_jax(variables.jax, fun, hessp, variables)
        self.fun, self.jac, self.hessp = fun, jac, hessp
        self.variables = variables
        self.args = args if isinstance(args, tuple) else (args,)
        self.clock = clock
        self.quickest = {"gradient": math.inf, "product": math.inf}  # seconds
        self.nfev = self.njev = self.nhev = 0
        self.earlier = 0.0  # what was spent before these counts began
        self.unit: float | None = None
        self.watch: Watch | None = None  # sees all evaluations
        self.distrusted = ""  # what is wrong with hessp, in words
        self.keeps_graph = False  # whether Hessian products will be needed
        self._graph: tuple[Any, tuple[Tensor, ...], list[Tensor]] | None = None
        self._as_caller = _settings_of_now()  # under which the user's functions run

    def value_and_gradient(self, X: Any) -> tuple[float, Any]:
        """``f(X)`` and the Euclidean gradient: ``f(X + E) = f(X) + Re <G, E> + o(E)``.

        In units of the first gradient if that is very large or small, so that squares neither
        over- nor underflow: a cost times 1e-30 is minimised by the same iterates.
        """
        if self.watch is not None:
            self.watch.before(self.nfev)
        began = self.clock()
        value, G = self._value_and_gradient(X)
        self._timed("gradient", began)
        if self.unit is None:
            self.unit = power_of_two_near(G)
        # A copy: functions that fill the same buffer at each call are common.
        value, G = (value, copy_of(G)) if self.unit == 1 else (value / self.unit, G / self.unit)
        if self.watch is not None:
            self.watch.saw(X, value, G)
        return value, G

    def evaluator(self, X: np.ndarray, out: np.ndarray) -> Callable[[], float]:
        """A function that returns ``f(X)`` at a copy of X and writes the gradient to ``out``.

        In the same units. For small X most of an evaluation is overhead around fun: there is little
        of it here if nothing has to be converted.
        """
        if not (self.variables.plain and self.unit == 1) or isinstance(self.jac, str):
            return partial(self._write_gradient, X, out)
        fun, jac, args, call = self.fun, self.jac, self.args, self._as_caller
        dtype, shape, watch = out.dtype, out.shape, self.watch

        def evaluate() -> float:
            if watch is not None:
                watch.before(self.nfev)
            self.nfev += 1
            self.njev += 1
            x = X.copy()  # fun may keep it
            x.setflags(write=False)
            if jac is True:
                value, G = _pair(call(fun, x, *args))
            else:
                value, G = call(fun, x, *args), call(jac, x, *args)
            if type(G) is not np.ndarray or G.dtype != dtype or G.shape != shape:
                G = self.variables.inward(G, "jac")
            out[...] = G
            value = value if type(value) is float else _real_number(value)
            if watch is not None:
                watch.saw(x, value, G, owned=False)
            return value

        return evaluate

    def _write_gradient(self, X: np.ndarray, out: np.ndarray) -> float:
        value, out[...] = self.value_and_gradient(X.copy())
        return value

    def _value_and_gradient(self, X: Any) -> tuple[float, Any]:
        """Cost and gradient in the user's units; the gradient may be in the user's memory."""
        self.nfev += 1
        self.njev += 1
        if not self.jac:
            return self._by_autograd(X)
        x = self.variables.outward(X)
        if self.jac is True:
            value, G = _pair(self._call("fun", self.fun, x))
        elif isinstance(self.jac, str):
            return self._by_differences(X)
        else:
            value, G = self._call("fun", self.fun, x), self._call("jac", self.jac, x)
        return _real_number(value), self.variables.inward(G, "jac")

    def _timed(self, name: str, began: float) -> None:
        self.quickest[name] = min(self.quickest[name], self.clock() - began)

    @property
    def relative_cost(self) -> float:
        """How many evaluations take as long as a Hessian product; a power of two, against noise."""
        gradient, product = self.quickest["gradient"], self.quickest["product"]
        if not (0 < gradient < math.inf and 0 < product < math.inf):
            return 1.0
        ratio = (product + AROUND["product"]) / (gradient + AROUND["gradient"])
        return 2.0 ** round(math.log2(min(max(ratio, 0.25), 4.0)))

    @property
    def spent(self) -> float:
        """How long the user's functions took, in evaluations, earlier runs included."""
        return self.earlier + max(self.nfev, self.njev) + self.nhev * self.relative_cost

    def count_from_here(self) -> None:
        self.earlier = self.spent
        self.nfev = self.njev = self.nhev = 0

    def gradient(self, X: Any) -> Any:
        if callable(self.jac):
            self.njev += 1
            G = self._call("jac", self.jac, self.variables.outward(X))
            return self.variables.inward(G, "jac") / self.scale
        return self.value_and_gradient(X)[1]

    @property
    def scale(self) -> float:
        """The factor from costs in the solver's unit to the user's."""
        return self.unit or 1.0

    @property
    def eps(self) -> float:
        """The relative precision of the gradient, as far as its source shows it."""
        power = {"2-point": 1 / 2, "3-point": 2 / 3}.get(str(self.jac), 1.0)
        return max(precision(self.variables.start) ** power, self.variables.coarsest)

    @property
    def has_products(self) -> bool:
        """Whether Hessian products are exact: the user's, or autograd's."""
        return (self.hessp is not None or not self.jac) and not self.distrusted

    def distrust(self, X: Any, G: Any, V: Any) -> bool:
        """Whether Hessian products along V are wrong, as a difference of gradients shows.

        From then on they are differences of gradients.
        """
        if not self.has_products:
            return False
        H, there = self.hessian(X, G)(V), self._hessian_by_differences(X, G, V)
        size, error = max(norm(H), norm(there)), norm(H - there)
        blur = 20 * precision(X) ** 0.5 * norm(G) * norm(V) / max(norm(X), 1.0)
        if math.isfinite(error) and error <= 0.05 * size + blur:
            return False
        name = "fun's second derivative" if self.hessp is None else "hessp"
        wrong = f"misses it by {error / size:.0%}" if math.isfinite(error) else "is not finite"
        self.distrusted = (
            f"{name} {wrong} where differences of gradients show the Hessian, so it was not used "
            "further: try ortholand.check_hessian"
        )
        return True

    def hessian(self, X: Any, G: Any) -> HessianProduct:
        """``V -> Hess f(X)[V]``, by the user's ``hessp``, autograd, or differences of gradients."""
        if self.hessp is not None and not self.distrusted:
            x, variables = self.variables.outward(X), self.variables

            def product(V: Any) -> Any:
                H = self._call("hessp", self.hessp, x, variables.outward(V))
                return variables.inward(H, "hessp")

            return self._counted(product)
        if not self.jac and not self.distrusted:
            by_autograd = self._hessian_by_autograd(X)
            if by_autograd is not None:
                return self._counted(by_autograd)
        return self._counted(lambda V: self._hessian_by_differences(X, G, V) * self.scale)

    def _counted(self, product: HessianProduct) -> HessianProduct:
        scale = self.scale

        def counted(V: Any) -> Any:
            self.nhev += 1
            began = self.clock()
            H = product(V)
            self._timed("product", began)
            return H if scale == 1 else H / scale

        return counted

    def _call(self, name: str, function: Any, *points: Any) -> Any:
        """Call a user's function, which may use autograd but must not modify X."""
        if self.variables.numpy:
            return self._as_caller(function, *points, *self.args)
        leaves = self.variables.structure.leaves
        tensors = [x for point in points for x in leaves(point, "x0")]
        versions = [x._version for x in tensors]
        with torch.enable_grad():
            value = self._as_caller(function, *points, *self.args)
        if versions != [x._version for x in tensors]:
            raise ValueError(f"{name} must not modify X, but it did. Work on a copy: X.clone().")
        return value

    def _hessian_by_autograd(self, X: Any) -> HessianProduct | None:
        """Hessian products by differentiating the gradient's graph, which serves all directions.

        None if there is no graph: f is linear, or its backward pass cannot be differentiated.
        """
        self.keeps_graph = True
        if self._graph is None or self._graph[0] is not X:
            self._value_and_gradient(X)
        assert self._graph is not None
        _, gradients, leaves = self._graph
        if not all(G.requires_grad for G in gradients):
            return None
        variables = self.variables

        def product(V: Any) -> Any:
            products = torch.autograd.grad(
                gradients,
                leaves,
                variables.outward_blocks(V),
                retain_graph=True,
                materialize_grads=True,
            )
            return variables.inward(variables.structure.build(products), "fun's second derivative")

        return product

    def _by_differences(self, X: Any) -> tuple[float, Any]:
        """Forward or central differences, one number of X after the other."""

        def value_at(Y: Any) -> float:
            self.nfev += 1
            return _real_number(self._call("fun", self.fun, self.variables.outward(Y)))

        self.nfev -= 1  # which was counted already
        value, flat = value_at(X), real_vector(X)
        G, central = 0 * flat, self.jac == "3-point"
        for i in range(len(flat)):
            h = precision(X) ** (1 / 3 if central else 1 / 2) * max(1.0, abs(float(flat[i])))
            there = flat + 0
            there[i] += h
            after = value_at(from_real_vector(there, X))
            there = flat + 0
            there[i] -= h
            before = value_at(from_real_vector(there, X)) if central else value
            G[i] = (after - before) / (2 * h if central else h)
        return value, from_real_vector(G, X)

    def _hessian_by_differences(self, X: Any, G: Any, V: Any) -> Any:
        length = norm(V)
        if length == 0:
            return 0 * V
        h = precision(X) ** 0.5 * max(norm(X), 1.0) / length
        return (self.gradient(X + h * V) - G) / h

    def _by_autograd(self, X: Any) -> tuple[float, Any]:
        variables = self.variables
        leaves = [x.detach().requires_grad_() for x in variables.outward_blocks(X)]
        with torch.enable_grad():
            value = self._call("fun", self.fun, variables.structure.build(leaves))
            number = _real_number(value)
            found: Any = [None]
            if isinstance(value, Tensor) and value.requires_grad:
                found = torch.autograd.grad(
                    value.sum(), leaves, create_graph=self.keeps_graph, allow_unused=True
                )
        if any(G is None for G in found):
            raise ValueError(
                "Without jac, fun must return a tensor that autograd can differentiate with "
                f"respect to all of x0, got {_describe(value)}. Compute it from X by torch "
                "operations, or pass jac."
            )
        self._graph = (X, tuple(found), leaves) if self.keeps_graph else None
        G = variables.inward(
            variables.structure.build([g.detach() for g in found]), "fun's derivative"
        )
        return number, G


def product_from(hess: Callable[..., Any]) -> Callable[..., Any]:
    """``hessp`` from a function that returns the Hessian as an array (..., ...) of x0's numbers."""
    last: list[Any] = [None, None]  # X and its Hessian, which serves all directions

    def hessp(X: Any, V: Any, *args: Any) -> Any:
        if not hasattr(V, "reshape"):
            raise ValueError(f"hess is for one array as x0, got {type(X).__name__}. Use hessp.")
        if last[0] is not X:
            last[:] = X, hess(X, *args)
        size = math.prod(V.shape)
        return (last[1].reshape(size, size) @ V.reshape(size)).reshape(V.shape)

    return hessp


def _by_jax(jax: Any, fun: Any, hessp: Any, variables: Variables) -> tuple[Any, bool, Any]:
    """What JAX derives of a cost; its gradients are conjugates of torch's."""
    is_complex = any(np.dtype(block.dtype).kind == "c" for block in variables.blocks)
    gradient = jax.grad(fun)

    def both(x: Any, *args: Any) -> tuple[Any, Any]:
        value, G = jax.value_and_grad(fun)(x, *args)
        return value, jax.tree_util.tree_map(lambda g: g.conj(), G) if is_complex else G

    def product(x: Any, v: Any, *args: Any) -> Any:
        return jax.jvp(lambda y: gradient(y, *args), (x,), (v,))[1]

    return both, True, product if hessp is None and not is_complex else hessp


def _settings_of_now() -> Callable[..., Any]:
    """A function that calls others under NumPy's current error settings, even later."""
    if not np.__version__.startswith("1."):
        return contextvars.copy_context().run  # the settings are a variable of the context
    errors = np.geterr()

    def call(function: Callable[..., Any], *args: Any) -> Any:
        with np.errstate(**errors):
            return function(*args)

    return call


def power_of_two_near(G: Any) -> float:
    """1, or a power of two near the largest entry if that is far from 1."""
    if 2**-20 * math.sqrt(math.prod(G.shape)) <= norm(G) <= 2**20:
        return 1.0  # so is the largest entry
    largest = float(abs(G).max())
    if not 0 < largest < math.inf or 2**-20 <= largest <= 2**20:
        return 1.0
    limit = 100 if precision(G) > 1e-10 else 900
    return 2.0 ** max(-limit, min(limit, math.frexp(largest)[1]))


def _real_number(value: Any) -> float:
    if isinstance(value, (float, np.floating)):
        return float(value)
    number = value if isinstance(value, Tensor) else np.asarray(value)
    is_real = not number.is_complex() if isinstance(number, Tensor) else number.dtype.kind in "fiub"
    if math.prod(number.shape) != 1 or not is_real:
        raise ValueError(
            f"fun must return one real number, got {_describe(value)}. Sum over the entries, "
            "and take the real part of a complex cost."
        )
    return float(number.item())


def _pair(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(
            f"With jac=True fun must return the pair (value, gradient), got {_describe(value)}."
        )
    return value[0], value[1]


def _describe(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
    return f"{value!r:.60}"


def _check_functions(fun: Any, jac: Any, hessp: Any, variables: Variables) -> None:
    if not callable(fun):
        raise TypeError(f"fun must be callable, got {_describe(fun)}.")
    by_differences = isinstance(jac, str) and jac in ("2-point", "3-point")
    if not (jac is None or isinstance(jac, bool) or callable(jac) or by_differences):
        raise TypeError(
            f"jac must be a function, True, '2-point', '3-point' or None, got {_describe(jac)}."
        )
    numbers = sum(math.prod(block.shape) for block in variables.blocks)
    if by_differences and numbers > MOST_DIFFERENCES:
        raise ValueError(
            f"jac={jac!r} is for at most {MOST_DIFFERENCES} numbers, because each gradient takes "
            f"an evaluation for every one, got {numbers}. Pass a gradient, or a tensor as x0."
        )
    if hessp is not None and not callable(hessp):
        raise TypeError(f"hessp must be a function or None, got {_describe(hessp)}.")
    if variables.numpy and not jac and variables.jax is None:
        raise ValueError(
            "A NumPy fun needs its gradient: pass jac=gradient, or jac=True if fun returns "
            "(value, gradient). Or write fun with torch and pass a tensor x0: then autograd "
            "differentiates it."
        )
