"""LandingICA: sources found, FastICA's conventions, picard's solution, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", minversion="1.6")

from sklearn.decomposition import FastICA
from sklearn.exceptions import ConvergenceWarning

from ortholand_lab.estimators import LandingICA
from ortholand_lab.problems import amari_distance


def mixtures(samples: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two super-Gaussian and two sub-Gaussian sources, mixed; and the mixing matrix."""
    random = np.random.default_rng(seed)
    S = np.c_[random.laplace(size=(samples, 2)), random.uniform(-1, 1, size=(samples, 2))]
    A = random.normal(size=(4, 4))
    return S @ A.T + random.normal(size=4), A


def apart(unmixing: np.ndarray, mixing: np.ndarray) -> float:
    W, A = (torch.from_numpy(np.asarray(M, dtype=np.float64)) for M in (unmixing, mixing))
    return float(amari_distance(W, A))


def test_sources_of_both_kinds_are_found():
    X, A = mixtures()
    ica = LandingICA(random_state=0).fit(X)
    assert apart(ica.components_, A) < 0.03
    assert sorted(ica.signs_) == [-1, -1, 1, 1]
    S = ica.transform(X)
    assert np.allclose(S.mean(0), 0, atol=1e-12)
    assert np.allclose(S.T @ S / len(S), np.eye(4), atol=1e-10)
    assert np.allclose(ica.inverse_transform(S), X)
    assert np.allclose(ica.components_ @ ica.mixing_, np.eye(4))
    assert np.array_equal(ica.fit_transform(X), S)
    assert list(ica.get_feature_names_out()) == [f"landingica{i}" for i in range(4)]


@pytest.mark.parametrize("whiten", ["unit-variance", "arbitrary-variance"])
def test_where_fastica_ends_it_ends_and_in_the_same_units(whiten):
    X, _ = mixtures()
    options = dict(n_components=4, whiten=whiten, random_state=0)
    ours = LandingICA(**options).fit(X)
    theirs = FastICA(**options, tol=1e-12, max_iter=5000).fit(X)
    assert apart(ours.components_, theirs.mixing_) < 1e-5
    assert np.allclose(ours.transform(X).std(0), theirs.transform(X).std(0), rtol=1e-6)


def test_agrees_with_picard_on_the_recording():
    picard = pytest.importorskip("picard").picard
    path = Path(os.environ.get("ORTHOLAND_DATA", "")) / "foetal_ecg.dat"
    if not path.is_file():
        pytest.skip("needs foetal_ecg.dat in the folder ORTHOLAND_DATA")
    X = np.loadtxt(path)[:, 1:]
    ours = LandingICA(random_state=0, n_init=10).fit(X)
    K = picard(X.T, ortho=True, extended=True, tol=1.0)[0]
    near = np.eye(8) + 0.02 * np.random.default_rng(0).normal(size=(8, 8))
    start = np.linalg.qr(near)[0] @ ours.components_ @ np.linalg.inv(K)
    K, W, _ = picard(X.T, ortho=True, extended=True, w_init=start, tol=1e-10, max_iter=1000)
    mixing = np.linalg.inv(ours.components_)
    assert apart(start @ K, mixing) > 1e-3
    assert apart(W @ K, mixing) < 1e-6


def test_white_data_without_whitening():
    X, _ = mixtures()
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    Z = LandingICA(random_state=0).fit_transform(X) @ turn
    ica = LandingICA(whiten=False, random_state=0).fit(Z)
    assert np.allclose(ica.components_ @ ica.components_.T, np.eye(4))
    assert apart(ica.components_, turn.T) < 1e-6
    assert not hasattr(ica, "mean_")
    assert np.allclose(ica.inverse_transform(ica.transform(Z)), Z)
    with pytest.raises(ValueError, match="Z must be white"):
        LandingICA(whiten=False).fit(X)
    with pytest.raises(ValueError, match="whiten=False keeps all 4 features"):
        LandingICA(2, whiten=False).fit(Z)


def test_no_convergence_is_said_with_numbers_and_advice():
    X, _ = mixtures()
    with pytest.warns(
        ConvergenceWarning,
        match=r"LandingICA did not converge in 2 iterations: the norm of the gradient is .*e-.*, "
        r"above tol=1.0e-08. Raise max_iter",
    ):
        ica = LandingICA(max_iter=2, random_state=0).fit(X)
    assert ica.n_iter_ == 2


def test_dependent_and_constant_features_leave_fewer_components():
    X, _ = mixtures()
    wide = np.c_[X, X[:, :2].sum(1), np.full(len(X), 3.0)]
    ica = LandingICA(random_state=0).fit(wide)
    assert ica.components_.shape == (4, 6)
    assert np.allclose(ica.inverse_transform(ica.transform(wide)), wide)
    with pytest.raises(ValueError, match=r"only 4 independent signals"):
        LandingICA(5).fit(wide)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_other_types(dtype):
    X, A = mixtures()
    ica = LandingICA(random_state=0).fit((100 * X).astype(dtype))
    assert apart(ica.components_, A) < 0.03
    assert ica.components_.dtype == (np.float32 if dtype is np.float32 else np.float64)


def test_starts():
    X, _ = mixtures()
    one, other = (LandingICA(random_state=7).fit(X).components_ for _ in range(2))
    assert np.array_equal(one, other)
    given = LandingICA(w_init=np.random.RandomState(7).normal(size=(4, 4))).fit(X)
    assert np.array_equal(given.components_, one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fun": "cube"}, "fun must be 'logcosh', got 'cube'"),
        ({"whiten": True}, "whiten must be one of"),
        ({"whiten": "zca"}, "whiten must be one of"),
        ({"n_components": 0}, "n_components must be a whole number >= 1, got 0"),
        ({"n_components": 9}, "n_components must be from 1 to 4, .*got 9"),
        ({"max_iter": 0}, "max_iter must be a whole number >= 1"),
        ({"tol": 0}, "tol must be a number > 0"),
        ({"n_init": 1.5}, "n_init must be a whole number"),
        ({"w_init": np.ones((4, 4))}, "w_init must be an invertible 4 x 4 .* without full rank"),
        ({"w_init": np.ones((3, 3))}, r"w_init must be an invertible 4 x 4 .* shape \(3, 3\)"),
    ],
)
def test_parameters_that_make_no_sense(options, message):
    X, _ = mixtures()
    with pytest.raises(ValueError, match=message):
        LandingICA(**options).fit(X)
