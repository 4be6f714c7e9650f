"""A preconditioner that asks nothing of the user: curvatures along rotations, by random probes.

Many costs are nearly separable in the frame of X itself: the Hessian hardly mixes the rotations of
pairs of columns with each other (Brockett's cost, joint diagonalisation) or, for square X, those of
pairs of rows (ICA), nor the columns' moves out of their span. Then its diagonal in that frame is a
good preconditioner, and one Hessian product with random signs estimates all of it (Hutchinson;
Bekas, Kokiopoulou and Saad, 2007). Whether there is such a structure is seen by comparing probes:
where two independent ones do not agree, nothing is scaled.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ortholand.geometry.matrices import is_square, skew

AGREEMENT = 0.5  # correlation of two probes from which on the diagonal is believed
SPREAD = 0.4  # standard deviation relative to the mean below which scaling gains nothing
FLOOR = 1e-3  # smallest curvature, relative to the mean
MEMORY = 0.5  # weight of the past probes

Hessian = Callable[[Tensor], Tensor]


class Block:
    """The diagonal of one block of the Hessian, from several probes."""

    def __init__(self) -> None:
        self.squares: Tensor | None = None
        self.agreement = 0.0

    def learn(self, probe: Tensor) -> None:
        """Take in one more estimate."""
        if self.squares is None:
            self.squares = probe.square()
            return
        known = self.squares.sqrt()
        uneven = len(known) > 1 and float(known.std()) > SPREAD * float(known.mean())
        self.agreement = _correlation(known, probe.abs()) if uneven else 0.0
        self.squares = torch.lerp(probe.square(), self.squares, MEMORY)

    @property
    def believed(self) -> bool:
        """Whether the last probe said the same as those before it, and not that all are equal."""
        return self.agreement > AGREEMENT

    def mean(self) -> float:
        """Typical curvature."""
        return 0.0 if self.squares is None else float(self.squares.sqrt().mean())

    def inverse(self, scale: float) -> Tensor:
        """Inverse curvatures relative to a scale."""
        assert self.squares is not None
        return scale / self.squares.sqrt().clamp(min=FLOOR * scale)


def _correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.reshape(-1).sqrt(), b.reshape(-1).sqrt()
    a, b = a - a.mean(), b - b.mean()
    scale = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / scale if scale > 0 else 0.0


class Curvatures:
    """What is known of the Hessian's diagonal, in each frame that may suit it."""

    def __init__(self, X: Tensor) -> None:
        self.frames: list[ColumnRotations | Rotations] = (
            [Rotations(of_columns=False), Rotations(of_columns=True)]
            if is_square(X)
            else [ColumnRotations()]
        )
        self.generator = torch.Generator(device="cpu").manual_seed(0)
        self.best: ColumnRotations | Rotations | None = None

    def learn(self, X: Tensor, hessian: Hessian) -> None:
        """One Hessian product per frame; then the frame in which the probes agree best is used."""
        if X.shape[-1] == 1:
            return
        for frame in self.frames:
            frame.learn(X, hessian, self.generator)
        best = max(self.frames, key=lambda frame: frame.agreement)
        self.best = best if best.agreement > AGREEMENT else None
        if self.best is not None:
            self.best.prepare(X)

    def precondition(self, X: Tensor, A: Tensor) -> Tensor:
        """An approximation of the inverse Hessian, up to a factor; A itself if nothing is known."""
        return A if self.best is None else self.best.precondition(X, A)


class ColumnRotations:
    """``V = X Omega + W``: rotations of pairs of columns, and moves out of their span."""

    def __init__(self) -> None:
        self.rotations, self.moves = Block(), Block()

    def learn(self, X: Tensor, hessian: Hessian, generator: torch.Generator) -> None:
        """One Hessian product along random rotations and moves at once."""
        Z = _random_signs(X, generator)
        W = _normal(X, generator)
        W = W - X @ (X.mH @ W)
        HV = hessian(X @ Z + W)
        HZ = X.mH @ HV
        self.rotations.learn(_off_diagonal((Z.conj() * skew(HZ)).real))
        size = W.abs().square().sum(-2)
        self.moves.learn((W.conj() * (HV - X @ HZ)).real.sum(-2) / size)

    @property
    def agreement(self) -> float:
        """How much the probes agree on the better known block; then the other is used as well."""
        return max(self.rotations.agreement, self.moves.agreement)

    def prepare(self, X: Tensor) -> None:
        """The factors, relative to the mean curvature."""
        scale = self.moves.mean()
        self.of_moves = self.moves.inverse(scale) if self.moves.believed else 1.0
        self.more = _as_matrix(self.rotations.inverse(scale), X) - self.of_moves

    def precondition(self, X: Tensor, V: Tensor) -> Tensor:
        """Divide by the curvatures."""
        return torch.addmm(V * self.of_moves, X, (X.mH @ V) * self.more)


class Rotations:
    """Square X: rotations of pairs of rows (coordinates A) or of columns (``X^H A X``)."""

    def __init__(self, of_columns: bool) -> None:
        self.of_columns = of_columns
        self.rotations = Block()

    def learn(self, X: Tensor, hessian: Hessian, generator: torch.Generator) -> None:
        """One Hessian product along random rotations."""
        Z = _random_signs(X, generator)
        HZ = self._to_frame(X, hessian(self._from_frame(X, Z)))
        self.rotations.learn(_off_diagonal((Z.conj() * HZ).real))

    @property
    def agreement(self) -> float:
        """How much the probes agree."""
        return self.rotations.agreement

    def prepare(self, X: Tensor) -> None:
        """The factors, relative to the mean curvature."""
        self.factors = _as_matrix(self.rotations.inverse(self.rotations.mean()), X)

    def precondition(self, X: Tensor, A: Tensor) -> Tensor:
        """Divide by the curvatures."""
        return self._from_frame(X, self._to_frame(X, A) * self.factors)

    def _to_frame(self, X: Tensor, A: Tensor) -> Tensor:
        return X.mH @ A @ X if self.of_columns else A

    def _from_frame(self, X: Tensor, Z: Tensor) -> Tensor:
        return X @ Z @ X.mH if self.of_columns else Z


def _random_signs(X: Tensor, generator: torch.Generator) -> Tensor:
    """A skew matrix of entries +-1 (complex: of modulus 1) with a zero diagonal."""
    p = X.shape[-1]
    angles = torch.rand(p, p, generator=generator, dtype=torch.float64, device="cpu")
    signs = torch.where(angles < 0.5, -1.0, 1.0)
    if X.is_complex():
        signs = torch.polar(torch.ones_like(angles), 2 * math.pi * angles)
    Z = signs.to(X).triu(1)
    return Z - Z.mH


def _normal(X: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(X.shape, generator=generator, dtype=torch.float64, device="cpu").to(X)


def _off_diagonal(M: Tensor) -> Tensor:
    """The entries above the diagonal."""
    rows, columns = torch.triu_indices(*M.shape, offset=1, device=M.device)
    return M[rows, columns]


def _as_matrix(entries: Tensor, X: Tensor) -> Tensor:
    """The symmetric matrix with these entries off the diagonal, and ones on it."""
    p = X.shape[-1]
    rows, columns = torch.triu_indices(p, p, offset=1, device=X.device)
    M = torch.ones(p, p, dtype=entries.dtype, device=entries.device)
    M[rows, columns] = M[columns, rows] = entries
    return M
