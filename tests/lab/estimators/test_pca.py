"""LandingPCA: what PCA gives; streams in batches of any size; and what is refused."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.6")

from sklearn.decomposition import PCA, IncrementalPCA
from sklearn.exceptions import ConvergenceWarning

from ortholand_lab.estimators import LandingPCA


def data(samples: int = 300, features: int = 20, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    turn = np.linalg.qr(random.normal(size=(features, features)))[0]
    sizes = 3 * 0.8 ** np.arange(features)
    return random.normal(size=(samples, features)) * sizes @ turn + random.normal(size=features)


def batches(X: np.ndarray, size: int) -> list[np.ndarray]:
    return [X[k : k + size] for k in range(0, len(X), size)]


def outside(found: LandingPCA, true: PCA) -> float:
    """Sine of the largest angle between the subspaces."""
    V = found.components_
    return float(np.linalg.norm(V - V @ true.components_.T @ true.components_, 2))


@pytest.mark.parametrize("shape", [(300, 20), (15, 40), (20, 20)])
@pytest.mark.parametrize("whiten", [False, True])
def test_all_that_pca_gives(shape, whiten):
    X = data(*shape)
    ours = LandingPCA(4, whiten=whiten, random_state=0).fit(X)
    theirs = PCA(4, whiten=whiten, svd_solver="full").fit(X)
    for name in (
        "components_",
        "explained_variance_",
        "explained_variance_ratio_",
        "singular_values_",
        "mean_",
        "noise_variance_",
    ):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-7), name
    scores = ours.transform(X)
    assert np.allclose(scores, theirs.transform(X), atol=1e-6)
    assert np.allclose(ours.inverse_transform(scores), theirs.inverse_transform(scores), atol=1e-6)
    assert np.allclose(ours.components_ @ ours.components_.T, np.eye(4), atol=1e-12)
    assert list(ours.get_feature_names_out()) == [f"landingpca{i}" for i in range(4)]


def test_all_components():
    X = data()
    ours, theirs = LandingPCA().fit(X), PCA().fit(X)
    assert np.allclose(ours.explained_variance_, theirs.explained_variance_)
    assert np.allclose(ours.inverse_transform(ours.transform(X)), X)


@pytest.mark.parametrize("size", [1, 3, 17, 100, 1000])
def test_streams_in_batches_of_any_size(size):
    X = data(samples=600)
    true = PCA(5).fit(X)
    ours = LandingPCA(5, random_state=0).partial_fit(X[:2])
    for batch in batches(X[2:], size):
        ours.partial_fit(batch)
    assert ours.n_samples_seen_ == 600
    assert np.allclose(ours.mean_, true.mean_)
    assert np.allclose(ours.var_, X.var(0))
    assert ours.components_.shape == (5, 20)
    assert np.allclose(ours.components_ @ ours.components_.T, np.eye(5), atol=1e-12)
    assert outside(ours, true) < 0.02
    assert np.allclose(ours.explained_variance_, true.explained_variance_, rtol=0.01)
    if size == 17:
        theirs = IncrementalPCA(5)
        for batch in batches(X, size)[:-1]:
            theirs.partial_fit(batch)
        assert outside(ours, true) < outside(theirs, true) / 2


def test_more_memory_is_more_accurate_and_all_of_it_exact():
    X = data(samples=600)
    true = PCA(3).fit(X)
    errors = []
    for oversamples in (0, 5, 17):
        ours = LandingPCA(3, n_oversamples=oversamples, random_state=0)
        for batch in batches(X, 10):
            ours.partial_fit(batch)
        errors.append(outside(ours, true))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-6


def test_a_stream_that_turns_is_followed():
    """A new direction that is orthogonal to all before it is no trap."""
    random = np.random.default_rng(0)
    first, second = np.zeros((50, 6)), np.zeros((500, 6))
    first[:, :2], second[:, 4] = random.normal(size=(50, 2)), 5 * random.normal(size=500)
    ours = LandingPCA(2, n_oversamples=0, random_state=0).partial_fit(first)
    for batch in batches(second, 50):
        ours.partial_fit(batch)
    assert abs(ours.components_[0, 4]) > 1 - 1e-6


def test_fewer_rows_than_components_are_completed():
    X = data()
    ours = LandingPCA(8, random_state=0).partial_fit(X[:3])
    assert ours.components_.shape == (8, 20)
    assert np.allclose(ours.components_ @ ours.components_.T, np.eye(8), atol=1e-12)
    assert np.allclose(ours.explained_variance_[2:], 0, atol=1e-12)
    assert np.allclose(ours.inverse_transform(ours.transform(X[:3])), X[:3])
    assert np.isfinite(LandingPCA(8, whiten=True, random_state=0).fit(X[:3]).transform(X)).all()


def test_constant_features_and_constant_data():
    X = np.c_[data(), np.full(300, 7.0)]
    ours = LandingPCA(3, random_state=0).fit(X)
    assert np.allclose(ours.components_[:, -1], 0)
    assert np.allclose(ours.mean_[-1], 7)
    still = LandingPCA(2, random_state=0).fit(np.ones((5, 3)))
    assert np.allclose(still.explained_variance_, 0)
    assert np.allclose(still.explained_variance_ratio_, 0)
    assert np.allclose(still.components_ @ still.components_.T, np.eye(2))


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_other_types(dtype):
    X = (100 * data()).astype(dtype)
    ours = LandingPCA(3, random_state=0).fit(X)
    assert outside(ours, PCA(3).fit(X.astype(np.float64))) < 1e-5
    expected = np.float32 if dtype is np.float32 else np.float64
    assert ours.components_.dtype == ours.transform(X).dtype == expected


def test_what_a_stream_refuses_leaves_it_as_it_was():
    X = data()
    ours = LandingPCA(3, random_state=0).partial_fit(X[:50])
    before = ours.components_.copy()
    with pytest.raises(ValueError, match="X has 19 features, but LandingPCA is expecting 20"):
        ours.partial_fit(X[:, :19])
    bad = X[:10].copy()
    bad[3, 4] = np.nan
    with pytest.raises(ValueError, match="contains NaN"):
        ours.partial_fit(bad)
    with pytest.raises(TypeError, match="sample_weight"):
        ours.partial_fit(X, sample_weight=np.ones(len(X)))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        LandingPCA(3).partial_fit(X[:1])
    assert np.array_equal(ours.components_, before)
    assert ours.n_samples_seen_ == 50


def test_no_convergence_is_said_with_numbers_and_advice():
    with pytest.warns(ConvergenceWarning, match=r"in 1 iterations: the norm .* tol=1.0e-12. Raise"):
        LandingPCA(3, max_iter=1, tol=1e-12, random_state=0).fit(data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0.9}, "n_components must be a whole number >= 1, got 0.9"),
        ({"n_components": 21}, "n_components must be from 1 to 20, the number of features"),
        ({"n_oversamples": -1}, "n_oversamples must be a whole number >= 0"),
        ({"tol": -1.0}, "tol must be a number > 0"),
        ({"max_iter": 0}, "max_iter must be a whole number >= 1"),
    ],
)
def test_parameters_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        LandingPCA(**options).fit(data())
