"""LandingCCA: the closed form, scikit-learn's CCA, streams, and what is refused."""

import numpy as np
import pytest

pytest.importorskip("sklearn", minversion="1.6")

from sklearn.cross_decomposition import CCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression

from ortholand_lab.estimators import LandingCCA


def pairs(samples: int = 800, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """8 features and 5 targets that share three numbers, in different units."""
    random = np.random.default_rng(seed)
    common = random.normal(size=(samples, 3)) * [3, 2, 1]
    X, Y = (common @ random.normal(size=(3, n)) + random.normal(size=(samples, n)) for n in (8, 5))
    return X * 10.0 ** random.uniform(-2, 2, 8) + 5, Y * 10.0 ** random.uniform(-2, 2, 5)


def closed_form(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    Qx, Qy = (np.linalg.qr(Z - Z.mean(0))[0] for Z in (X, Y))
    return np.linalg.svd(Qx.T @ Qy, compute_uv=False)


def correlations(scores: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    x, y = scores
    return np.array([np.corrcoef(x[:, k], y[:, k])[0, 1] for k in range(x.shape[1])])


def test_the_closed_form_and_scikit_learns():
    X, Y = pairs()
    ours = LandingCCA(3, ridge=1e-12, random_state=0).fit(X, Y)
    assert np.allclose(ours.correlations_, closed_form(X, Y)[:3], atol=1e-8)
    x, y = ours.transform(X, Y)
    assert np.allclose(correlations((x, y)), ours.correlations_)
    for scores in (x, y):
        assert np.allclose(scores.T @ scores / len(X), np.eye(3), atol=1e-6)
    theirs = CCA(3, max_iter=10_000, tol=1e-12).fit(X, Y)
    assert np.allclose(correlations(theirs.transform(X, Y)), ours.correlations_, atol=1e-4)
    assert np.array_equal(ours.transform(X), x)
    assert np.allclose(ours.fit_transform(X, Y), x)
    assert np.allclose(ours.x_weights_, ours.x_rotations_ * X.std(0)[:, None])
    assert np.allclose(ours.x_loadings_, (X - X.mean(0)).T @ x / len(X))
    assert np.allclose(ours.y_loadings_, (Y - Y.mean(0)).T @ y / len(X))
    assert list(ours.get_feature_names_out()) == [f"landingcca{i}" for i in range(3)]


def test_predictions_are_those_of_least_squares_when_all_components_are_kept():
    X, Y = pairs()
    ours, theirs = LandingCCA(ridge=1e-12, random_state=0).fit(X, Y), LinearRegression().fit(X, Y)
    assert np.allclose(ours.predict(X), theirs.predict(X), rtol=1e-5, atol=1e-5 * Y.std())
    assert ours.score(X, Y) == pytest.approx(theirs.score(X, Y), abs=1e-6)
    one = LandingCCA(random_state=0).fit(X, Y[:, 0])
    assert one.predict(X).shape == (len(X),)
    best = LinearRegression().fit(X, Y[:, 0]).score(X, Y[:, 0])
    assert one.score(X, Y[:, 0]) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("size", [1, 7, 300])
def test_a_stream_gives_what_all_of_it_gives(size):
    X, Y = pairs(samples=500)
    options = dict(n_components=2, ridge=1e-4, random_state=0, tol=1e-9)
    whole, stream = LandingCCA(**options).fit(X, Y), LandingCCA(**options)
    first = max(20, size)
    stream.partial_fit(X[:first], Y[:first])
    for k in range(first, len(X), size):
        stream.partial_fit(X[k : k + size], Y[k : k + size])
    assert stream.n_samples_seen_ == len(X)
    assert np.allclose(stream.correlations_, whole.correlations_, atol=1e-9)
    assert np.allclose(stream.transform(X), whole.transform(X), atol=1e-5)
    assert np.allclose(stream.coef_, whole.coef_, rtol=1e-4, atol=1e-4 * abs(whole.coef_).max())


def test_units_do_not_matter():
    X, Y = pairs()
    one = LandingCCA(3, random_state=0).fit(X, Y)
    other = LandingCCA(3, random_state=0).fit(X * 1e-6, Y * 1e6)
    assert np.allclose(one.correlations_, other.correlations_)
    plain = [LandingCCA(2, scale=False, random_state=0, ridge=1e-3) for _ in range(2)]
    assert np.allclose(plain[0].fit(X, Y).correlations_, plain[1].fit(1e6 * X, Y).correlations_)


def test_constant_and_dependent_columns():
    X, Y = pairs()
    wide = np.c_[X, np.full(len(X), 1e6), X[:, 0] + X[:, 1]]
    ours = LandingCCA(3, random_state=0).fit(wide, np.c_[Y, np.zeros(len(Y))])
    assert np.allclose(ours.correlations_, closed_form(X, Y)[:3], atol=1e-4)
    nothing = LandingCCA(2, random_state=0).fit(X, np.ones((len(X), 2)))
    assert np.allclose(nothing.correlations_, 0)
    assert np.allclose(nothing.predict(X), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_other_types(dtype):
    random = np.random.default_rng(0)
    X = (100 * random.normal(size=(300, 4))).astype(dtype)
    Y = (X[:, :2] + 30 * random.normal(size=(300, 2))).astype(dtype)
    ours = LandingCCA(2, random_state=0).fit(X, Y)
    assert np.allclose(ours.correlations_, closed_form(X * 1.0, Y * 1.0), atol=1e-5)


def test_what_a_stream_refuses_leaves_it_as_it_was():
    X, Y = pairs()
    ours = LandingCCA(2, random_state=0).partial_fit(X[:50], Y[:50])
    before = ours.x_rotations_.copy()
    with pytest.raises(ValueError, match="X has 7 features, but LandingCCA is expecting 8"):
        ours.partial_fit(X[:, :7], Y)
    with pytest.raises(ValueError, match="y must have the 5 columns that it was fitted with"):
        ours.partial_fit(X, Y[:, :4])
    with pytest.raises(ValueError, match="y must have the 5 columns"):
        ours.transform(X, Y[:, :4])
    bad = X[:10].copy()
    bad[0, 0] = np.nan
    with pytest.raises(ValueError, match="contains NaN"):
        ours.partial_fit(bad, Y[:10])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        ours.partial_fit(X, Y[:-1])
    with pytest.raises(TypeError, match="sample_weight"):
        ours.fit(X, Y, sample_weight=np.ones(len(X)))
    assert np.array_equal(ours.x_rotations_, before)
    assert ours.n_samples_seen_ == 50


def test_no_convergence_is_said_with_numbers_and_advice():
    X, Y = pairs()
    with pytest.warns(ConvergenceWarning, match=r"in 1 iterations: the norm .* tol=1.0e-12. Raise"):
        LandingCCA(2, max_iter=1, tol=1e-12, random_state=0).fit(X, Y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 6}, "from 1 to 5, the smaller of 8 features and 5 targets, got 6"),
        ({"n_components": "all"}, "n_components must be a whole number"),
        ({"ridge": 0.0}, "ridge must be a number > 0"),
        ({"tol": float("nan")}, "tol must be a number > 0"),
        ({"max_iter": True}, "max_iter must be a whole number"),
    ],
)
def test_parameters_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        LandingCCA(**options).fit(*pairs())
