"""Canonical correlation analysis with scikit-learn's interface, of all data or of a stream."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import (
    BaseEstimator,
    ClassNamePrefixFeaturesOutMixin,
    MultiOutputMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from ortholand.solve import GeneralizedStiefel, minimize
from ortholand_lab.estimators.checks import (
    check_count,
    check_number,
    chosen_components,
    warn_unless_converged,
)
from ortholand_lab.estimators.moments import Moments
from ortholand_lab.problems import PCA

Array = NDArray[Any]

ADVICE = (
    "Raise max_iter, tol, or ridge: directions with hardly any variance make the problem "
    "ill-conditioned."
)


class LandingCCA(
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
    MultiOutputMixin,
    RegressorMixin,
    BaseEstimator,
):
    """Canonical correlations of X and y, of all data (:meth:`fit`) or of a stream.

    Finds directions U of X and V of y whose scores correlate most, all of variance 1 and
    uncorrelated among themselves: ``[U; V] / 2^(1/2)`` minimises a quadratic cost on the
    generalised Stiefel manifold of the two covariances.

    A stream is summarised by its means and covariances, ``(n_features + n_targets)^2`` numbers, so
    :meth:`partial_fit` on batches gives what :meth:`fit` gives on all the data.

    Args:
        n_components: number of pairs; None: the smaller of the numbers of features and targets.
        scale: whether all columns are first scaled to variance 1; constant ones stay 0.
        ridge: added to the diagonal of each covariance, relative to its mean. More than 0, so that
            columns may be dependent or constant.
        tol: the Riemannian gradient norm to reach; the cost is minus the sum of correlations.
        max_iter: largest number of iterations for each batch.
        random_state: seed or state for the start.

    Attributes:
        correlations_: of the pairs of scores, in decreasing order; a little below the empirical
            ones if ``ridge`` matters.
        x_rotations_, y_rotations_: ``(n_features, n_components)``, ``(n_targets, n_components)``:
            scores are ``(X - mean) @ x_rotations_``.
        x_weights_, y_weights_: the same for columns scaled to variance 1, if ``scale``.
        x_loadings_, y_loadings_: covariances of columns with scores.
        coef_, intercept_: least-squares prediction of y from the scores of X:
            ``X @ coef_.T + intercept_``.
        n_iter_, n_samples_seen_, n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> common = random.normal(size=(1000, 1))
    >>> X, y = (common @ random.normal(size=(1, n)) + random.normal(size=(1000, n)) for n in (4, 3))
    >>> cca = LandingCCA(n_components=1, random_state=0).fit(X, y)
    >>> x_scores, y_scores = cca.transform(X, y)
    >>> bool(np.isclose(np.corrcoef(x_scores.T, y_scores.T)[0, 1], cca.correlations_[0], atol=1e-4))
    True
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        scale: bool = True,
        ridge: float = 1e-6,
        tol: float = 1e-7,
        max_iter: int = 1000,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.scale = scale
        self.ridge = ridge
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "LandingCCA":
        """Find directions of X, ``(n_samples, n_features)``, and y, ``(n_samples, n_targets)``."""
        return self._learn(X, y, first=True)

    def partial_fit(self, X: Any, y: Any) -> "LandingCCA":
        """Find the directions of all batches so far."""
        return self._learn(X, y, first=not hasattr(self, "x_rotations_"))

    def transform(self, X: Any, y: Any = None) -> Array | tuple[Array, Array]:
        """Scores of X; with y, the scores of both."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        x_scores = (X - self._x_mean) @ self.x_rotations_
        if y is None:
            return x_scores
        y = self._checked_targets(y)
        check_consistent_length(X, y)
        return x_scores, (y - self._y_mean) @ self.y_rotations_

    def predict(self, X: Any) -> Array:
        """Predict y from the scores of X, by least squares."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        y = X @ self.coef_.T + self.intercept_
        return y.ravel() if self._one_target else y

    @property
    def _n_features_out(self) -> int:
        return self.x_rotations_.shape[1]

    @property
    def _x_mean(self) -> Array:
        return self._moments.mean[: self.n_features_in_].numpy()

    @property
    def _y_mean(self) -> Array:
        return self._moments.mean[self.n_features_in_ :].numpy()

    def _checked_targets(self, y: Any) -> Array:
        y = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y", estimator=self)
        y = y[:, None] if y.ndim == 1 else y
        targets = len(self._moments.mean) - self.n_features_in_
        if y.shape[1] != targets:
            raise ValueError(
                f"y must have the {targets} columns that it was fitted with, got {y.shape[1]}. "
                "For other targets fit a new estimator."
            )
        return y

    def _learn(self, X: Any, y: Any, *, first: bool) -> "LandingCCA":
        self._check_parameters()
        X, y = validate_data(
            self,
            X,
            y,
            dtype=np.float64,
            multi_output=True,
            y_numeric=True,
            reset=first,
            ensure_min_samples=2 if first else 1,
        )
        one_target, y = y.ndim == 1, y.reshape(len(y), -1).astype(np.float64)
        if first:
            n = X.shape[1]
            self._moments = Moments.of_nothing(n + y.shape[1], matrix=True)
            self._start: Tensor | None = None
            self.n_components_ = chosen_components(
                self.n_components,
                min(n, y.shape[1]),
                f"the smaller of {n} features and {y.shape[1]} targets",
            )
        y = self._checked_targets(y)
        batch = torch.from_numpy(np.hstack([X, y]))
        mean = batch.mean(0)
        moments = self._moments.merged(batch.sub_(mean), mean)
        self._solve(moments)
        self._one_target = one_target
        return self

    def _solve(self, moments: Moments) -> None:
        """Solve, starting from the last solution, if there is one."""
        n, p = self.n_features_in_, self.n_components_
        units = self._units(moments)
        C = moments.scatter / moments.count / torch.outer(units, units)
        within = torch.block_diag(C[:n, :n], C[n:, n:])
        B = within + self.ridge * torch.eye(len(C), dtype=C.dtype)
        M = C - within
        problem, manifold = PCA(M, p), GeneralizedStiefel(B)
        start = self._start
        if start is None:
            random = check_random_state(self.random_state)
            start = torch.from_numpy(random.normal(size=(len(C), p)))
        result = minimize(
            problem.fun_and_grad,
            manifold.project(start),
            jac=True,
            hessp=problem.hessp,
            manifold=manifold,
            gtol=0,
            maxiter=self.max_iter,
            options={"atol": self.tol},
        )
        warn_unless_converged(self, result, result.grad_norm, self.tol, ADVICE)
        self._moments, self._start, self.n_iter_ = moments, result.x, result.nit
        self._publish(C, B, result.x, units)

    def _units(self, moments: Moments) -> Tensor:
        """Divisors of the columns: their deviations, or without ``scale`` that of their block."""
        count, mean = moments.count, moments.mean
        variances = moments.scatter.diagonal() / count
        rounding = count * torch.finfo(mean.dtype).eps
        varies = variances > rounding * variances + (rounding * mean).square()
        variances = variances.where(varies, torch.zeros_like(variances))
        if not self.scale:
            halves = variances.split([self.n_features_in_, len(mean) - self.n_features_in_])
            variances = torch.cat([half.mean().expand(len(half)) for half in halves])
        return variances.sqrt().where(variances > 0, torch.ones_like(variances))

    def _publish(self, C: Tensor, B: Tensor, X: Tensor, units: Tensor) -> None:
        """Set the attributes: pairs of directions of variance 1, ordered by correlation."""
        n, count = self.n_features_in_, self._moments.count
        x, y = slice(None, n), slice(n, None)
        U, V = _normalized(X[x], B[x, x]), _normalized(X[y], B[y, y])
        P, correlations, Qh = torch.linalg.svd(U.mT @ C[x, y] @ V)
        U, V = U @ P, V @ Qh.mT
        signs = U.gather(0, U.abs().argmax(0, keepdim=True)).sign()
        U, V = U * signs, V * signs
        coef = U @ torch.linalg.pinv(U.mT @ C[x, x] @ U, hermitian=True) @ (U.mT @ C[x, y])
        coef = coef.mT * units[y, None] / units[x]
        self.correlations_ = correlations.numpy()
        self.x_rotations_, self.y_rotations_ = (
            (U / units[x, None]).numpy(),
            (V / units[y, None]).numpy(),
        )
        self.x_weights_ = U.numpy() if self.scale else self.x_rotations_
        self.y_weights_ = V.numpy() if self.scale else self.y_rotations_
        self.x_loadings_ = (units[x, None] * (C[x, x] @ U)).numpy()
        self.y_loadings_ = (units[y, None] * (C[y, y] @ V)).numpy()
        self.coef_ = coef.contiguous().numpy()
        self.intercept_ = self._y_mean - self.coef_ @ self._x_mean
        self.n_samples_seen_ = count

    def _check_parameters(self) -> None:
        check_count("max_iter", self.max_iter)
        check_number("tol", self.tol, positive=True)
        check_number("ridge", self.ridge, positive=True)


def _normalized(U: Tensor, B: Tensor) -> Tensor:
    """U times a p x p matrix, so that ``U^T B U = I``; zero in directions where U vanishes."""
    values, vectors = torch.linalg.eigh(U.mT @ B @ U)
    known = values > len(values) * torch.finfo(values.dtype).eps * values[-1]
    factors = values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt()
    return U @ (vectors * factors.where(known, torch.zeros_like(factors)))
