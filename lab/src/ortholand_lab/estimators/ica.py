"""Independent component analysis with FastICA's interface."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from ortholand.geometry.manifold import polar_projection
from ortholand_lab.estimators.checks import (
    check_count,
    check_number,
    chosen_components,
    warn_unless_converged,
)
from ortholand_lab.problems import ICA, separate, whiten

WHITENINGS = ("unit-variance", "arbitrary-variance", False)
Array = NDArray[Any]


class LandingICA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Independent components: FastICA's interface, solved to a small gradient.

    Minimises the cost of :class:`ortholand_lab.problems.ICA` over orthogonal matrices, with a
    sign for each source determined along the way, so that sub-Gaussian sources are separated too
    (as in Picard-O; Ablin, Cardoso and Gramfort, 2018).

    Args:
        n_components: number of sources; None: as many as there are independent signals.
        fun: the contrast: ``"logcosh"``.
        whiten: ``"unit-variance"``, ``"arbitrary-variance"`` (sources of norm 1) or False (X is
            white already, and not centred here), as in FastICA.
        max_iter: largest number of iterations for each start.
        tol: the Riemannian gradient norm to reach; the cost is of order 1.
        w_init: unmixing matrix of white signals to start from, ``(n_components, n_components)``;
            the nearest orthogonal matrix is used. None: drawn as in FastICA.
        n_init: number of random starts; the least Gaussian sources win. Real data may have several
            stationary points.
        random_state: seed or state for the starts.

    Attributes:
        components_: unmixing matrix of centred data, ``(n_components, n_features)``.
        mixing_: its pseudo-inverse, ``(n_features, n_components)``.
        mean_: of the features; absent if ``whiten=False``.
        whitening_: ``(n_components, n_features)``; absent if ``whiten=False``.
        signs_: 1 for a super-Gaussian and -1 for a sub-Gaussian source.
        n_iter_: iterations of the winning start.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> S = random.laplace(size=(2000, 3))
    >>> ica = LandingICA(random_state=0).fit(S @ random.normal(size=(3, 3)))
    >>> ica.transform(S).shape
    (2000, 3)
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        fun: str = "logcosh",
        whiten: str | bool = "unit-variance",
        max_iter: int = 500,
        tol: float = 1e-8,
        w_init: Any = None,
        n_init: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.fun = fun
        self.whiten = whiten
        self.max_iter = max_iter
        self.tol = tol
        self.w_init = w_init
        self.n_init = n_init
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "LandingICA":  # noqa: ARG002
        """Find the sources of X, ``(n_samples, n_features)``; y is not used."""
        self._fit(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Array:  # noqa: ARG002
        """Find and return the sources of X, ``(n_samples, n_components)``; y is not used."""
        return self._sources(self._fit(X))

    def transform(self, X: Any) -> Array:
        """The sources of X, ``(n_samples, n_components)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self._sources(X)

    def inverse_transform(self, X: Any) -> Array:
        """Mix sources ``(n_samples, n_components)``."""
        check_is_fitted(self)
        X = check_array(X, dtype=[np.float64, np.float32])
        mixed = X @ self.mixing_.T
        return mixed + self.mean_ if self.whiten else mixed

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _sources(self, X: Array) -> Array:
        return (X - self.mean_ if self.whiten else X) @ self.components_.T

    def _fit(self, X: Any) -> Array:
        self._check_parameters()
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        Z, K = self._whitened(torch.from_numpy(X.T.astype(np.float64)))
        result = self._separate(ICA(Z, check=not self.whiten))
        warn_unless_converged(self, result, result.grad_norm, self.tol, ADVICE)
        W = result.x if K is None else result.x @ K
        if self.whiten == "arbitrary-variance":
            W, K = W / len(X) ** 0.5, K / len(X) ** 0.5
        self.components_ = W.numpy().astype(X.dtype)
        self.mixing_ = torch.linalg.pinv(W).numpy().astype(X.dtype)
        self.signs_, self.n_iter_ = result.signs.numpy(), max(1, result.nit)
        if K is not None:
            self.whitening_ = K.numpy().astype(X.dtype)
            self.mean_ = X.mean(0, dtype=np.float64).astype(X.dtype)
        return X

    def _whitened(self, signals: Tensor) -> tuple[Tensor, Tensor | None]:
        n, samples = signals.shape
        if not self.whiten:
            chosen = chosen_components(self.n_components, n, "the number of features")
            if chosen != n:
                raise ValueError(
                    f"whiten=False keeps all {n} features, got n_components={chosen}. Leave "
                    "n_components out, or whiten."
                )
            return signals, None
        if self.n_components is None:
            return whiten(signals, "rank")
        most = min(n, samples)
        return whiten(signals, chosen_components(self.n_components, most, f"{samples} x {n} data"))

    def _separate(self, problem: ICA) -> OptimizeResult:
        """The best result of all starts."""
        n = len(problem.Z)
        random = check_random_state(self.random_state)
        results = []
        for k in range(self.n_init):
            given = self.w_init if k == 0 else None
            W = random.normal(size=(n, n)) if given is None else _checked_start(given, n)
            start = polar_projection(torch.from_numpy(W))
            results.append(separate(problem, start, atol=self.tol, maxiter=self.max_iter))
        return max(results, key=lambda r: (r.success, float(problem.contrast(r.x))))

    def _check_parameters(self) -> None:
        check_count("max_iter", self.max_iter)
        check_count("n_init", self.n_init)
        check_number("tol", self.tol, positive=True)
        if self.fun != "logcosh":
            raise ValueError(
                f"fun must be 'logcosh', got {self.fun!r}. It finds both super- and "
                "sub-Gaussian sources."
            )
        if self.whiten is not False and self.whiten not in WHITENINGS[:2]:
            raise ValueError(f"whiten must be one of {WHITENINGS}, got {self.whiten!r}.")


ADVICE = (
    "Raise max_iter or tol, or start elsewhere (random_state, n_init); sources that are nearly "
    "Gaussian cannot be told apart: try fewer n_components."
)


def _checked_start(w_init: Any, n: int) -> Array:
    W = np.array(w_init, dtype=np.float64)
    if W.shape != (n, n) or not np.isfinite(W).all() or np.linalg.matrix_rank(W) < n:
        raise ValueError(
            f"w_init must be an invertible {n} x {n} matrix, one row for each component, got "
            f"shape {W.shape}{'' if W.shape != (n, n) else ' without full rank'}."
        )
    return W
