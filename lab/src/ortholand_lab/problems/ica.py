"""Orthogonal independent component analysis: the rotation that makes signals independent."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ortholand.geometry.manifold import polar_projection
from ortholand.solve import minimize
from ortholand_lab.problems.base import (
    AtLastPoint,
    Problem,
    as_generator,
    check_tensor,
)

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

LOG_COSH_OF_NORMAL = 0.374567207491438  # mean of log cosh over a standard normal
RESTARTS = 50  # changes of signs in a run before they are left alone
WHITE = 1e-3  # how far the covariance of white signals may be from the identity, entry by entry


@dataclass(frozen=True, eq=False)
class ICA(Problem):
    """``f(X) = sum_i s_i mean_t log cosh(x_i^T z_t)`` over square X with orthonormal rows x_i.

    ``Z = (z_1, z_2, ...)`` are white signals, as :func:`whiten` makes them, X is the unmixing
    matrix (often called W), and ``X Z`` are the sources.

    With all signs ``s_i = +1`` this is the negative log-likelihood of super-Gaussian sources:
    spiky ones, like speech or heartbeats. A sub-Gaussian source, flat like uniform noise or a sine,
    has a *larger* mean of log cosh than a Gaussian, so its row needs ``s_i = -1``; with the wrong
    sign it is mixed with others. Signs are rarely known beforehand: :meth:`signs_at` says
    which suit an X, by the rule of Picard-O (Ablin et al., 2018), and :meth:`adapted` returns the
    problem with these. Adapt them during the first iterations, not only at the end: a minimum for
    the wrong signs is also stationary for the right ones, as a maximum. :func:`separate` does all
    this.

    The fixed points of symmetric FastICA with the nonlinearity tanh are stationary here, with the
    signs that suit them. A stationary X is such a fixed point if
    ``diag(s) (diag(E[tanh'(y)]) - E[tanh(y) y^T])`` is positive definite, not only positive on its
    diagonal. Real data may have several stationary points; :meth:`contrast` compares them, so try
    a few starts.

    X is determined up to the order of its rows (among those of one sign) and their signs. The
    number of samples limits how close it comes to the true unmixing matrix: the error of each
    entry is about ``samples ** -0.5``.

    Attributes:
        Z: white signals, ``(n, samples)``, real.
        signs: ``(n,)``, 1 for a super-Gaussian and -1 for a sub-Gaussian source; all 1 if None.
        truth: the orthogonal X that the data were made with, if any: stationary only up to the
            sampling error. ``amari_distance(X, truth.mT)`` compares another X with it.
        check: whether to raise an error if Z is not white.

    >>> problem = ICA.planted(4, 1024, seed=0)
    >>> bool(problem.fun(problem.truth) < problem.fun(problem.start(seed=1)))
    True
    """

    Z: Tensor
    signs: Tensor | None = None
    truth: Tensor | None = None
    check: InitVar[bool] = True
    _last: AtLastPoint = field(default_factory=AtLastPoint, init=False, repr=False)

    def __post_init__(self, check: bool) -> None:
        check_tensor("Z", self.Z, 2, allow_complex=False)
        _check_signs(self.signs, self.Z)
        if check:
            _check_white(self.Z)

    @classmethod
    def planted(
        cls,
        n: int,
        samples: int,
        *,
        sub_gaussian: int = 0,
        seed: int | torch.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> ICA:
        """Independent Laplace sources, mixed by a Gaussian matrix and whitened.

        Args:
            n: number of sources, and of signals.
            samples: length of the signals.
            sub_gaussian: how many of the sources, the last ones, are uniform, with sign -1.
            seed: seed of the sources and the mixing.
            dtype: type of Z.
        """
        if not 0 <= sub_gaussian <= n:
            raise ValueError(f"sub_gaussian must be from 0 to n={n}, got {sub_gaussian}.")
        generator = as_generator(seed)
        super_gaussian = torch.arange(n) < n - sub_gaussian
        uniform = torch.rand(n, samples, generator=generator, dtype=torch.float64) - 0.5
        laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs())
        S = torch.where(super_gaussian[:, None], laplace, uniform)
        S = S / S.square().mean(-1, keepdim=True).sqrt()
        signs = torch.where(super_gaussian, 1.0, -1.0).to(torch.float64)
        mixing = torch.randn(n, n, generator=generator, dtype=torch.float64)
        Z, whitening = whiten(mixing @ S)
        truth = polar_projection(torch.linalg.inv(whitening @ mixing))
        return cls(Z.to(dtype), signs.to(dtype) if sub_gaussian else None, truth.to(dtype))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.Z.shape[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of X."""
        return len(self.Z), len(self.Z)

    @property
    def data(self) -> Tensor:
        """Z: X has its type and lives on its device."""
        return self.Z

    def fun(self, X: Tensor) -> Tensor:
        """Cost of X."""
        Y = X @ self.Z
        if Y.requires_grad:
            return self._signed(log_cosh(Y).mean(-1)).sum(-1)
        return self._signed(mean_log_cosh(Y, fast_tanh(Y))).sum(-1)

    def grad(self, X: Tensor) -> Tensor:
        """Euclidean gradient at X: ``diag(s) tanh(X Z) Z^T / samples``."""
        return self._times_signals(fast_tanh(X @ self.Z))

    def fun_and_grad(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`fun` and :meth:`grad` from one product ``X Z`` and one hyperbolic tangent."""
        Y = X @ self.Z
        T = fast_tanh(Y)
        return self._signed(mean_log_cosh(Y, T)).sum(-1), self._times_signals(T)

    def hessp(self, X: Tensor, V: Tensor) -> Tensor:
        """Euclidean Hessian at X applied to V.

        ``diag(s) ((1 - tanh^2(X Z)) * (V Z)) Z^T / samples``, the factors of * entry by entry.
        """
        (slopes,) = self._last.get(X, self._slopes)
        return self._times_signals(slopes * (V @ self.Z))

    def signs_at(self, X: Tensor) -> Tensor:
        """The sign for each row of X: that of ``E[tanh'(y)] E[y^2] - E[tanh(y) y]``, y = x^T z.

        For a Gaussian y this is 0 (Stein's identity).
        """
        Y = X @ self.Z
        T = fast_tanh(Y)
        slope = (1 - T * T).mean(-1) * Y.square().mean(-1)
        return torch.where(slope >= (T * Y).mean(-1), 1, -1).to(Y.dtype)

    def adapted(self, X: Tensor) -> ICA:
        """The problem with the signs that suit X; itself if it already has them."""
        signs = self.signs_at(X)
        current = torch.ones_like(signs) if self.signs is None else self.signs
        if torch.equal(signs, current):
            return self
        return replace(self, signs=signs, check=False)

    def contrast(self, X: Tensor) -> Tensor:
        """``sum_i |E log cosh(y_i) - E log cosh(g)|``, g standard normal: how far from Gaussian.

        This is what FastICA maximises. It does not depend on the signs of the problem, so it can
        compare points found with different signs: the best stationary point has the largest value.
        """
        Y = X @ self.Z
        return (mean_log_cosh(Y, fast_tanh(Y)) - LOG_COSH_OF_NORMAL).abs().sum(-1)

    def _slopes(self, X: Tensor) -> tuple[Tensor]:
        T = fast_tanh(X @ self.Z)
        return ((T * T).neg_().add_(1),)

    def _times_signals(self, F: Tensor) -> Tensor:
        """``diag(s) F Z^T / samples``."""
        G = F @ self.Z.mT / self.samples
        return G if self.signs is None else self.signs[:, None] * G

    def _signed(self, rows: Tensor) -> Tensor:
        return rows if self.signs is None else self.signs * rows


def log_cosh(Y: Tensor) -> Tensor:
    """``log cosh`` of each entry, without overflow, and smooth for autograd everywhere.

    >>> log_cosh(torch.tensor([0.0, 1000.0])).tolist()
    [0.0, 999.3068237304688]
    """
    return Y - torch.nn.functional.logsigmoid(2 * Y) - math.log(2)


def fast_tanh(Y: Tensor) -> Tensor:
    """``tanh`` to the absolute rounding error of 1, in a third of torch.tanh's time."""
    if Y.requires_grad:
        return torch.tanh(Y)
    return (2 * Y).sigmoid_().mul_(2).sub_(1)  # in place: memory costs as much as arithmetic here


BLOCK = 32  # factors from 1 to 2: even float32 could hold the product of 127


def mean_log_cosh(Y: Tensor, T: Tensor) -> Tensor:
    """Mean of ``log cosh`` over the last axis, given ``T = tanh Y``.

    ``log cosh y = |y| - log(1 + |tanh y|)``, and a sum of logarithms is the logarithm of a
    product: one logarithm serves a block of samples.
    """
    samples = Y.shape[-1]
    factors = T.abs().add_(1)
    blocks = samples // BLOCK
    head, tail = factors.split([blocks * BLOCK, samples - blocks * BLOCK], dim=-1)
    logarithms = head.unflatten(-1, (blocks, BLOCK)).prod(-1).log().sum(-1) + tail.prod(-1).log()
    return (Y.abs().sum(-1) - logarithms) / samples


def separate(
    problem: ICA, X: Tensor, *, atol: float = 1e-10, maxiter: int = 10_000
) -> OptimizeResult:
    """Unmix from a start X, each source with the sign of the likelihood that suits it.

    Which sources are super-Gaussian becomes clear only while they are being found. So the solver
    stops when a sign no longer suits, and continues from there with the right one.

    Args:
        problem: the white signals; its signs are replaced by those that suit X.
        X: an orthogonal matrix.
        atol: the Riemannian gradient norm to reach. The cost is about 1.
        maxiter: largest number of iterations, over all runs.

    Returns:
        The :func:`ortholand.minimize` result of the last run, with ``nit`` summed over all runs,
        and the ``signs`` of the sources. It is a success only if these suit the sources found.

    >>> problem = ICA.planted(3, 2048, sub_gaussian=1, seed=0)
    >>> result = separate(problem, problem.start(seed=1))
    >>> result.success, sorted(result.signs.tolist())
    (True, [-1.0, 1.0, 1.0])
    """
    nit = 0
    for left in reversed(range(RESTARTS)):
        problem = problem.adapted(X)
        result = minimize(
            problem.fun_and_grad,
            X,
            jac=True,
            gtol=0,
            maxiter=maxiter - nit,
            options={"atol": atol},
            # The last run keeps its signs: those of nearly Gaussian sources may flicker.
            callback=(lambda X, p=problem: p.adapted(X) is not p) if left else None,
        )
        X, nit = result.x, nit + result.nit
        suits = problem.adapted(X) is problem
        if suits or nit >= maxiter:
            break
    signs = torch.ones_like(X[0]) if problem.signs is None else problem.signs
    result.update(nit=nit, signs=signs, success=result.success and suits)
    return result


def whiten(
    signals: Tensor, components: int | Literal["rank"] | None = None
) -> tuple[Tensor, Tensor]:
    """Centred, uncorrelated signals of variance 1, by principal components.

    Args:
        signals: ``(channels, samples)``.
        components: how many principal components to keep; all channels by default, or ``"rank"``
            for as many as are independent.

    Returns:
        Z, ``(components, samples)`` with ``Z Z^T / samples = I``, and the whitening matrix K,
        ``(components, channels)``, such that ``Z = K (signals - mean)``.

    >>> signals = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    >>> Z, K = whiten(signals)
    >>> torch.allclose(Z @ Z.mT / 100, torch.eye(3), atol=1e-5)
    True
    """
    check_tensor("signals", signals, 2, allow_complex=False)
    channels, samples = signals.shape
    count = channels if components in (None, "rank") else components
    if not 0 < count <= channels:
        raise ValueError(f"components must be from 1 to {channels} channels, got {components}.")
    centred = signals - signals.mean(-1, keepdim=True)
    U, sizes, Vh = torch.linalg.svd(centred, full_matrices=False)
    rank = int((sizes > sizes[0] * max(signals.shape) * torch.finfo(signals.dtype).eps).sum())
    if components == "rank" and rank:
        count = rank
    if count > rank:
        raise ValueError(
            f"{channels} channels with {samples} samples have only {rank} independent signals "
            f"after centring, fewer than the {count} components requested. "
            f"whiten(signals, components={rank}) keeps these."
        )
    # Signs are arbitrary: a positive largest weight in each row of K makes them reproducible.
    U, sizes, Vh = U[:, :count], sizes[:count], Vh[:count]
    signs = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()
    return math.sqrt(samples) * signs.mT * Vh, math.sqrt(samples) * (U * signs / sizes).mT


def amari_distance(W: Tensor, mixing: Tensor) -> Tensor:
    """How far ``P = W mixing`` is from a scaled permutation: 0 there, 1 at worst.

    ``[sum_i (sum_j |P_ij| / max_j |P_ij| - 1) + sum_j (sum_i |P_ij| / max_i |P_ij| - 1)]
    / (2 n (n - 1))`` (Amari et al., 1996). To compare two orthogonal unmixing matrices, give the
    transpose of one as ``mixing``.

    >>> amari_distance(torch.tensor([[0.0, -2.0], [1.0, 0.0]]), torch.eye(2)).item()
    0.0
    """
    P = (W @ mixing).abs()
    n = P.shape[-1]
    if P.shape[-2] != n or n < 2:
        raise ValueError(
            "amari_distance needs W mixing to be square with 2 rows or more, got shapes "
            f"{tuple(W.shape)} and {tuple(mixing.shape)}."
        )
    rows = (P.sum(-1) / P.amax(-1) - 1).sum(-1)
    columns = (P.sum(-2) / P.amax(-2) - 1).sum(-1)
    return (rows + columns) / (2 * n * (n - 1))


def _check_signs(signs: Tensor | None, Z: Tensor) -> None:
    if signs is None:
        return
    check_tensor("signs", signs, 1, allow_complex=False)
    if len(signs) != len(Z) or bool((signs.abs() != 1).any()) or signs.dtype != Z.dtype:
        raise ValueError(
            f"signs must be {len(Z)} numbers 1 or -1 of type {Z.dtype}, one for each source, got "
            f"{signs.tolist()} of type {signs.dtype}."
        )


def _check_white(Z: Tensor) -> None:
    covariance = Z @ Z.mT / Z.shape[-1]
    covariance.diagonal().sub_(1)
    error = float(covariance.abs().max())
    if error > WHITE:
        raise ValueError(
            "Z must be white, Z Z^T / samples = I, but an entry of its covariance is off by "
            f"{error:.3g}. ortholand_lab.problems.whiten(signals) whitens it; "
            "check=False accepts it as it is."
        )
