"""A preconditioner that needs nothing from the user: curvatures along rotations, by random probes.

Many costs are nearly separable in a frame that X itself gives: the Hessian hardly mixes the
rotations of pairs of columns with each other (Brockett's cost, joint diagonalisation) or, for
square X, those of pairs of rows (ICA), nor the columns' moves out of their span. Costs of the span
alone are separable in the basis of Ritz vectors, where ``X^H grad f`` is diagonal. There the
Hessian's diagonal is a good preconditioner, and one Hessian product with random signs estimates all
of it (Hutchinson; Bekas, Kokiopoulou and Saad, 2007). Comparing probes shows whether a frame suits
the cost: if two independent ones disagree, nothing is scaled; and a frame that does not shorten CG
is given up. The blocks of a product have units, so that one step length suits all of them.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ortholand.solve.arrays import (
    adjoint,
    from_numpy,
    gram_product,
    minus_product,
    norm,
    product,
    skew,
    to_numpy,
    zeros,
)
from ortholand.solve.manifold_cost import Point
from ortholand.solve.manifolds import Product
from ortholand.solve.manifolds.geometry import SquareStiefel, Subspaces, TallStiefel

AGREEMENT = 0.5  # correlation of two probes above which the diagonal is believed
SPREAD = 0.4  # standard deviation relative to the mean below which scaling gains nothing
FLOOR = 1e-3  # smallest curvature, relative to the mean
MEMORY = 0.5  # weight of the past probes
LONG = 8  # Hessian products after which CG's pace is meaningful
STRIKES = 2  # slow steps after which a frame is given up

Hessian = Callable[[Any], Any]


class Block:
    """The diagonal of one block of the Hessian, from several probes; in NumPy."""

    def __init__(self) -> None:
        self.squares: np.ndarray | None = None
        self.agreement = 0.0

    def learn(self, probe: np.ndarray) -> None:
        probe = np.abs(probe.astype(float, copy=False))
        if self.squares is None:
            self.squares = probe * probe
            return
        known = np.sqrt(self.squares)
        # Numbers that hardly differ are not worth scaling by.
        uneven = len(known) > 1 and known.std(ddof=1) > SPREAD * known.mean()
        self.agreement = _correlation(known, probe) if uneven else 0.0
        self.squares = MEMORY * self.squares + (1 - MEMORY) * probe * probe

    @property
    def believed(self) -> bool:
        """Whether the last probe agrees with those before it, and curvatures are not all equal."""
        return self.agreement > AGREEMENT

    def mean(self) -> float:
        if self.squares is None:
            return 0.0
        return float(np.sqrt(self.squares).sum()) / max(1, len(self.squares))

    def inverse(self, scale: float) -> np.ndarray:
        assert self.squares is not None
        return scale / np.maximum(np.sqrt(self.squares), FLOOR * scale)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.sqrt(a), np.sqrt(b)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(a.dot(a) * b.dot(b))
    return float(a.dot(b)) / scale if scale > 0 else 0.0


class Curvatures:
    """What is known about the Hessian's diagonal, in each frame that may suit it."""

    def __init__(self, geometry: Any, X: Any) -> None:
        self.frames: list[Columns | SquareRotations] = []
        if X.ndim != 2 or X.shape[1] == 1:
            pass
        elif isinstance(geometry, SquareStiefel):
            self.frames = [SquareRotations(of_columns=False), SquareRotations(of_columns=True)]
        elif isinstance(geometry, Subspaces):
            self.frames = [Columns(ritz=True, rotate=False)]
        elif isinstance(geometry, TallStiefel):
            self.frames = [Columns(ritz=True), Columns()]
        self.random = np.random.default_rng(0)
        self.best: Columns | SquareRotations | None = None
        self.plain_pace = 0.0  # of CG without a preconditioner: digits per product
        self.strikes = 0

    def learn(self, point: Point, hessian: Hessian) -> None:
        """One Hessian product for each frame, or for the chosen one only."""
        if not self.frames:
            return
        for frame in self.frames if self.best is None else [self.best]:
            frame.learn(point, hessian, self.random)
        best = max(self.frames, key=lambda frame: frame.agreement)
        self.best = best if best.agreement > AGREEMENT else None
        if self.best is not None:
            self.best.prepare()

    def preconditioner(self) -> Callable[[Any], Any] | None:
        """An approximation of the inverse Hessian, up to a factor; None if nothing is known."""
        return None if self.best is None else self.best.precondition

    def judge(self, products: int, before: float, after: float) -> None:
        """Give up a frame in which CG is slower than without it."""
        if products < LONG or not 0 < after < before:
            return
        pace = math.log10(before / after) / products
        if self.best is None:
            self.plain_pace = pace
            return
        self.strikes = self.strikes + 1 if pace < 0.8 * self.plain_pace else 0
        if self.strikes >= STRIKES:
            self.frames = [frame for frame in self.frames if frame is not self.best]
            self.best, self.strikes = None, 0


class Columns:
    """``V = X Omega + W``: rotations of pairs of columns, and moves out of their span.

    Args:
        ritz: whether columns are the Ritz vectors, in whose basis the multiplier is diagonal; if
            not, those of X.
        rotate: whether to include rotations.
    """

    def __init__(self, ritz: bool = False, rotate: bool = True) -> None:
        self.ritz, self.rotate = ritz, rotate
        self.rotations, self.moves = Block(), Block()

    def learn(self, point: Point, hessian: Hessian, random: np.random.Generator) -> None:
        """One Hessian product along random rotations and moves at once."""
        self.Q, self.X = None, point.X
        if self.ritz:
            self.Q = from_numpy(np.linalg.eigh(to_numpy(point.multiplier))[1], point.X)
            self.X = point.X @ self.Q
        X = self.X
        W = from_numpy(random.standard_normal(tuple(X.shape)), X)
        W = minus_product(W, X, gram_product(X, W))
        Z = _random_signs(X, random)
        HV = self._from_frame(hessian, product(X, Z) + W if self.rotate else W)
        HZ = gram_product(X, HV)
        if self.rotate:
            self.rotations.learn(to_numpy((Z.conj() * skew(HZ)).real)[_above_diagonal(len(Z))])
        moved = to_numpy((W.conj() * minus_product(HV, X, HZ)).real).sum(-2)
        self.moves.learn(moved / to_numpy((W.conj() * W).real).sum(-2))

    def _from_frame(self, hessian: Hessian, V: Any) -> Any:
        if self.Q is None:
            return hessian(V)
        return hessian(V @ adjoint(self.Q)) @ self.Q

    @property
    def agreement(self) -> float:
        return max(self.rotations.agreement, self.moves.agreement)

    def prepare(self) -> None:
        """Compute factors relative to the mean curvature; blocks not believed are not scaled."""
        scale, p = self.moves.mean(), self.X.shape[-1]
        of_moves = self.moves.inverse(scale) if self.moves.believed else np.ones(p)
        if self.rotations.believed:
            of_rotations = _as_matrix(self.rotations.inverse(scale), p)
        else:
            of_rotations = (of_moves[:, None] + of_moves) / 2
        self.of_moves = from_numpy(of_moves, self.X)
        self.more = from_numpy(of_rotations - of_moves, self.X)

    def precondition(self, V: Any) -> Any:
        V = V if self.Q is None else product(V, self.Q)
        V = V * self.of_moves + product(self.X, gram_product(self.X, V) * self.more)
        return V if self.Q is None else product(V, adjoint(self.Q))


class SquareRotations:
    """Square X: rotations of pairs of rows (coordinates A) or of columns (``X^H A X``)."""

    def __init__(self, of_columns: bool) -> None:
        self.of_columns = of_columns
        self.rotations = Block()

    def learn(self, point: Point, hessian: Hessian, random: np.random.Generator) -> None:
        """One Hessian product along random rotations."""
        self.X = point.X
        Z = _random_signs(self.X, random)
        HZ = self._to_frame(hessian(self._from_frame(Z)))
        self.rotations.learn(to_numpy((Z.conj() * HZ).real)[_above_diagonal(len(Z))])

    @property
    def agreement(self) -> float:
        return self.rotations.agreement

    def prepare(self) -> None:
        """Compute factors relative to the mean curvature."""
        inverse = self.rotations.inverse(self.rotations.mean())
        self.factors = from_numpy(_as_matrix(inverse, self.X.shape[-1]), self.X)

    def precondition(self, A: Any) -> Any:
        return self._from_frame(self._to_frame(A) * self.factors)

    def _to_frame(self, A: Any) -> Any:
        return adjoint(self.X) @ A @ self.X if self.of_columns else A

    def _from_frame(self, Z: Any) -> Any:
        return self.X @ Z @ adjoint(self.X) if self.of_columns else Z


def _random_signs(X: Any, random: np.random.Generator) -> Any:
    """A skew matrix of entries +-1 (complex: of modulus 1) with a zero diagonal."""
    p = X.shape[-1]
    angles = random.random((p, p))
    is_complex = to_numpy(X[:1]).dtype.kind == "c"
    signs = np.exp(2j * math.pi * angles) if is_complex else np.where(angles < 0.5, -1.0, 1.0)
    Z = np.zeros((p, p), signs.dtype)
    above = _above_diagonal(p)
    Z[above] = signs[above]
    return from_numpy(Z - Z.conj().T, X)


@lru_cache(maxsize=8)
def _above_diagonal(p: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(p, 1)


def _as_matrix(entries: np.ndarray, p: int) -> np.ndarray:
    """The symmetric matrix with these entries off the diagonal, and ones on it."""
    M = np.ones((p, p))
    rows, columns = _above_diagonal(p)
    M[rows, columns] = M[columns, rows] = entries
    return M


SLOW = 0.99  # weight of the past: a quickly changing metric would make past steps misleading
DRIFT = 4.0  # how many times a factor may change before the frozen one is replaced


class BlockUnits:
    """How much the gradient of each block changes per step of that block, and scaling by it.

    The numbers s of a model ``U diag(s) V^T`` may be in the hundreds where the columns of U have
    length 1: curvatures then differ by the square of that, whatever the cost.
    """

    def __init__(self, product: Product, like: Any) -> None:
        self.parts = [part for part, _, _ in product.packing.parts]
        self.logarithms: list[float | None] = [None] * len(self.parts)  # of the curvatures
        self.factors = zeros(tuple(like.shape), like) + 1
        self.roots = self.factors + 0  # of the factors when they were frozen

    def learn(self, step: Any, change: Any) -> None:
        for i, part in enumerate(self.parts):
            length, changed = norm(step[part]), norm(change[part])
            if not (length > 0 and 0 < changed / length < math.inf):
                continue
            seen, past = math.log(changed / length), self.logarithms[i]
            self.logarithms[i] = seen if past is None else SLOW * past + (1 - SLOW) * seen
        known = [one for one in self.logarithms if one is not None]
        for part, one in zip(self.parts, self.logarithms, strict=True):
            self.factors[part] = 1.0 if one is None else math.exp(min(max(known) - one, 100.0))

    def scaled(self, vector: Any) -> Any:
        """Each block divided by its curvature, relative to the largest."""
        return vector * self.factors

    def froze(self) -> bool:
        """Renew the roots if the factors have drifted away from them; whether they had."""
        drift = self.factors / (self.roots * self.roots)
        if float(drift.min()) > 1 / DRIFT and float(drift.max()) < DRIFT:
            return False
        self.roots = self.factors**0.5
        return True


def units_for(geometry: Any, like: Any) -> BlockUnits | None:
    """Units for a product; None for a single matrix, which needs none."""
    return BlockUnits(geometry, like) if isinstance(geometry, Product) else None
