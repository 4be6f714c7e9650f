"""Canonical correlation without the covariances: as good as the closed form, and it says so."""

import numpy as np
import pytest
import torch

from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("rich")

example = load_example("canonical_correlation", "showing")


@pytest.fixture(autouse=True)
def _no_other_digits(monkeypatch, tmp_path):
    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)
    monkeypatch.setenv("ORTHOLAND_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def halves(seed=0, n_images=4000):
    """Images whose halves share three numbers."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(n_images, 3, generator=generator)
    mixing = torch.randn(3, 8 * 8, generator=generator)
    noise = torch.randn(n_images, 8 * 8, generator=generator)
    pixels = (shared @ mixing + noise).reshape(-1, 1, 8, 8)
    low, high = pixels.min(), pixels.max()
    return example.split((255 * (pixels - low) / (high - low)).byte())


@pytest.mark.parametrize("seed", [0, 1])
def test_most_of_the_correlation_is_found(seed):
    made = halves(seed)
    best = example.closed_form(made, 3, 1e-3)
    assert np.all(best[:-1] >= best[1:])
    assert 0.5 < best[0] < 1
    result = example.analyse(made, 3, 1e-3, epochs=5, seed=seed)
    assert 0.99 * best.sum() < -result.fun <= best.sum() * (1 + 1e-5)
    assert result.distance < 1e-4


def test_pairs_of_the_optimum_are_those_of_the_closed_form():
    made = halves()
    best = example.closed_form(made, 3, 1e-3)
    result = example.analyse(made, 3, 1e-3, epochs=5, seed=0)
    correlations, scores = example.canonical_pairs(made, result.x, 1e-3)
    assert np.all(correlations <= best + 1e-12)
    assert np.all(correlations > 0.98 * best)
    np.testing.assert_allclose(
        scores[0].T @ scores[1] / len(scores[0]), np.diag(correlations), atol=1e-12
    )


def test_the_cost_has_the_gradient_it_returns():
    made = halves(n_images=50)
    X = torch.randn(64, 2, generator=torch.Generator().manual_seed(1)).requires_grad_()
    value, gradient = made.cost(X, torch.arange(50))
    value.backward()
    torch.testing.assert_close(X.grad, gradient)


def test_digits_stand_in_and_that_is_said(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert example.main(["--out", str(figure), "--epochs", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "digits of scikit-learn" in text
    assert "share" in text
    assert figure.stat().st_size > 10_000
