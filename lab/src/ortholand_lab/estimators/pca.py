"""Principal component analysis with scikit-learn's interface, of all data or of a stream."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data
from torch import Tensor

from ortholand.geometry.manifold import orthonormal_factor
from ortholand.solve import Grassmann, minimize
from ortholand_lab.estimators.checks import (
    check_count,
    check_number,
    chosen_components,
    warn_unless_converged,
)
from ortholand_lab.estimators.moments import Moments
from ortholand_lab.problems import PCA

Array = NDArray[Any]

JITTER = 1e-2  # size of the random directions added when starting from the last ones
EPSILON = 1e-9  # size of a random matrix that gives a start full rank, whatever the data
ADVICE = (
    "Raise max_iter or tol. If variances beyond n_components are hardly smaller, another "
    "n_components has a clearer answer."
)


class LandingPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Principal components, of all data (:meth:`fit`) or batch by batch (:meth:`partial_fit`).

    Minimises :class:`ortholand_lab.problems.PCA` over subspaces, then rotates the basis so that
    components are ordered by variance.

    A stream is summarised by the ``n_components + n_oversamples`` leading directions seen so far,
    with their variances; each batch is merged into these, as in IncrementalPCA. Batches
    may have any size, even below ``n_components``.

    Args:
        n_components: number of components; None: the smaller of the numbers of samples and features
            in the (first) data.
        whiten: whether transformed data have variance 1.
        n_oversamples: extra directions kept for a stream. More make it more accurate.
        tol: the gradient norm to reach, for data of total variance 1.
        max_iter: largest number of iterations for each batch.
        random_state: seed or state for the start.

    Attributes:
        components_: ``(n_components, n_features)``, orthonormal rows.
        explained_variance_: of each component, with ``n_samples - 1`` in the denominator.
        explained_variance_ratio_: the same, relative to the total variance.
        singular_values_: of the centred data.
        mean_, var_: of each feature, exact even in a stream.
        noise_variance_: mean of the variances left out.
        n_components_, n_samples_seen_, n_iter_: as in scikit-learn.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(size=(200, 4)) * [1, 4, 2, 3]
    >>> pca = LandingPCA(n_components=2, random_state=0).fit(X)
    >>> abs(pca.components_).argmax(1)
    array([1, 3])
    """

    def __init__(
        self,
        n_components: int | None = None,
        *,
        whiten: bool = False,
        n_oversamples: int = 10,
        tol: float = 1e-9,
        max_iter: int = 1000,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.whiten = whiten
        self.n_oversamples = n_oversamples
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "LandingPCA":  # noqa: ARG002
        """Find the components of X, ``(n_samples, n_features)``; y is not used."""
        return self._learn(X, first=True, oversamples=0)

    def partial_fit(self, X: Any, y: Any = None) -> "LandingPCA":  # noqa: ARG002
        """Find the components of all batches so far; y is not used."""
        first = not hasattr(self, "components_")
        return self._learn(X, first=first, oversamples=self.n_oversamples)

    def transform(self, X: Any) -> Array:
        """Coordinates along the components, ``(n_samples, n_components)``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores = (X - self.mean_) @ self.components_.T
        return scores / self._scales() if self.whiten else scores

    def inverse_transform(self, X: Any) -> Array:
        """The data with these coordinates."""
        check_is_fitted(self)
        X = check_array(X, dtype=[np.float64, np.float32])
        scores = X * self._scales() if self.whiten else X
        return scores @ self.components_ + self.mean_

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _scales(self) -> Array:
        """Standard deviations of the components; tiny ones are not divided by."""
        deviations = np.sqrt(self.explained_variance_)
        tiny = np.finfo(deviations.dtype).eps * deviations.max(initial=0)
        return np.where(deviations > tiny, deviations, 1).astype(deviations.dtype)

    def _learn(self, X: Any, *, first: bool, oversamples: int) -> "LandingPCA":
        self._check_parameters()
        least = 2 if first else 1
        types = [np.float64, np.float32]
        X = validate_data(self, X, dtype=types, reset=first, ensure_min_samples=least)
        n = X.shape[1]
        if first:
            why = f"the number of features of these {len(X)} x {n} data"
            self.n_components_ = chosen_components(self.n_components, n, why, default=min(X.shape))
            self._moments = Moments.of_nothing(n, matrix=False)
            self._memory = torch.zeros(0, n, dtype=torch.float64)
            self._directions = self._memory.mT
        blocks, moments = self._merged(torch.from_numpy(X.astype(np.float64)))
        p = min(self.n_components_ + oversamples, n)
        found = leading_directions(blocks, self._start(n, p), self.tol, self.max_iter)
        if found.result is not None:
            warn_unless_converged(self, found.result, found.result.grad_norm, self.tol, ADVICE)
        self._moments = moments
        self._directions = found.directions
        self._memory = found.singular_values[:, None] * found.directions.mT
        self.n_iter_ = max(1, 0 if found.result is None else found.result.nit)
        self._publish(found, X.dtype)
        return self

    def _merged(self, batch: Tensor) -> tuple[list[Tensor], Moments]:
        """Rows whose scatter matrix is that of all data so far; the batch is overwritten."""
        before, mean = self._moments, batch.mean(0)
        deviations = batch.sub_(mean)
        after = before.merged(deviations, mean)
        if not before.count:
            return [deviations], after
        shift = (before.count * len(batch) / after.count) ** 0.5 * (before.mean - mean)
        return [self._memory, deviations, shift[None]], after

    def _start(self, n: int, p: int) -> Tensor:
        """Where to start, and how to complete a basis if the data's rank is too low.

        In a stream this is near the last directions, but not at them: a batch may differ.
        """
        random = check_random_state(self.random_state).normal(size=(n, p))
        start = torch.from_numpy(random) / math.sqrt(n)
        if self._directions.shape[1] == p:
            start = self._directions + JITTER * start
        return start

    def _publish(self, found: "Leading", dtype: Any) -> None:
        p, count = self.n_components_, self._moments.count
        variances = found.singular_values[:p].square() / (count - 1)
        feature_variances = self._moments.scatter / (count - 1)
        total, n = float(feature_variances.sum()), len(feature_variances)
        left = min(n, count) - p
        self.components_ = found.directions[:, :p].mT.contiguous().numpy().astype(dtype)
        self.explained_variance_ = variances.numpy().astype(dtype)
        ratios = variances / total if total else torch.zeros_like(variances)
        self.explained_variance_ratio_ = ratios.numpy().astype(dtype)
        self.singular_values_ = found.singular_values[:p].numpy().astype(dtype)
        self.noise_variance_ = max(0.0, total - float(variances.sum())) / left if left > 0 else 0.0
        self.mean_ = self._moments.mean.numpy().astype(dtype)
        self.var_ = (self._moments.scatter / count).numpy().astype(dtype)
        self.n_samples_seen_ = count

    def _check_parameters(self) -> None:
        check_count("max_iter", self.max_iter)
        check_count("n_oversamples", self.n_oversamples, least=0)
        check_number("tol", self.tol, positive=True)


class Leading(NamedTuple):
    """Leading directions of some rows, in order, and how they were found."""

    directions: Tensor  # (n, p), orthonormal columns
    singular_values: Tensor
    result: OptimizeResult | None  # None where the rows have no more directions than asked for


def leading_directions(
    blocks: Sequence[Tensor], start: Tensor, tol: float, max_iter: int
) -> Leading:
    """The leading right singular vectors of blocks of rows, as many as ``start`` has columns.

    With fewer rows than columns all the work is done in the span of the rows, found by QR.
    """
    n, p = start.shape
    size = math.sqrt(sum(float(block.square().sum()) for block in blocks)) or 1.0
    frame: Tensor | None = None
    if sum(map(len, blocks)) < n:
        frame, R = torch.linalg.qr(torch.cat(list(blocks)).mT)
        blocks = [R.mT]
    C = torch.stack([block.mT @ block for block in blocks]).sum(0) / size**2
    q, result = min(p, len(C)), None
    V = torch.eye(len(C), dtype=C.dtype)
    if q < len(C):
        inside = start[:, :q] if frame is None else frame.mT @ start[:, :q]
        result = _leading_subspace(PCA(C, q), inside, tol, max_iter)
        V = result.x
    values, turn = torch.linalg.eigh(V.mT @ C @ V)
    V = V @ turn.flip(-1)
    V = V if frame is None else frame @ V
    if q < p:  # no row determines the others: any directions work
        V = orthonormal_factor(torch.cat([V, start[:, q:]], dim=1))
    singular_values = size * values.flip(-1).clamp(min=0).sqrt()
    return Leading(_with_signs(V), torch.nn.functional.pad(singular_values, (0, p - q)), result)


def _leading_subspace(problem: PCA, start: Tensor, tol: float, max_iter: int) -> OptimizeResult:
    return minimize(
        problem.fun_and_grad,
        orthonormal_factor(problem.times(start) + EPSILON * start),
        jac=True,
        hessp=problem.hessp,
        manifold=Grassmann(),
        gtol=0,
        maxiter=max_iter,
        options={"atol": tol},
    )


def _with_signs(V: Tensor) -> Tensor:
    """The columns with signs that make the largest entry positive, as in scikit-learn."""
    return V * V.gather(0, V.abs().argmax(0, keepdim=True)).sign()
