"""The comparison of estimators, on signals made up here and on the digits of scikit-learn."""

import numpy as np
import pytest

from tests.examples.loading import load_example

for package in ("matplotlib", "rich", "picard"):
    pytest.importorskip(package)
pytest.importorskip("sklearn", minversion="1.6")

example = load_example("estimators", "showing")


@pytest.fixture(autouse=True)
def _no_other_digits(monkeypatch, tmp_path):
    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)
    monkeypatch.setenv("ORTHOLAND_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_all_is_compared_told_and_drawn(tmp_path, capsys):
    random = np.random.default_rng(0)
    signals = random.laplace(size=(2000, 8)) @ random.normal(size=(8, 8))
    recording, figure = tmp_path / "signals.dat", tmp_path / "figure.png"
    np.savetxt(recording, np.c_[np.arange(2000), signals])
    arguments = ["--ecg", str(recording), "--out", str(figure), "--seeds", "1", "--batch", "300"]
    assert example.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "digits of scikit-learn" in text
    for name in ("LandingICA", "FastICA", "picard", "IncrementalPCA, stream", "LandingCCA, stream"):
        assert name in text
    assert figure.stat().st_size > 10_000


def test_errors_are_those_of_the_estimators():
    X = np.random.default_rng(0).normal(size=(500, 30)) * 0.9 ** np.arange(30)
    outcomes = example.compare_pca(X, 3, 100, [0])
    assert outcomes["LandingPCA"][0].error < 1e-12
    assert 1e-9 < outcomes["LandingPCA, stream"][0].error < 1e-2
    assert outcomes["IncrementalPCA, stream"][0].error > outcomes["LandingPCA, stream"][0].error
    both = example.compare_cca(X, X[:, :6] + 0.1, 5, 100, [0])
    assert abs(both["LandingCCA"][0].error) < 1e-9
    assert abs(both["LandingCCA, stream"][0].error) < 1e-9


def test_a_file_that_is_not_there(capsys):
    assert example.main(["--ecg", "nowhere.dat"]) == 1
    assert "error: nowhere.dat" in capsys.readouterr().err
