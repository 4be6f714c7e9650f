"""The examples that need transformers or PEFT, at their smallest."""

import io
from dataclasses import replace

import pytest
import torch

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("peft", reason="needs peft: pip install 'ortholand[ecosystem]'")
pytest.importorskip("transformers", reason="needs transformers: pip install 'ortholand[ecosystem]'")
pytest.importorskip("matplotlib")
Console = pytest.importorskip("rich.console").Console

quantization = load_example("quantization_rotations", "showing", "small_llama")
adapters = load_example("peft_adapters", "showing", "small_llama")

pytestmark = pytest.mark.ecosystem


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


def test_rotations_are_learnt_and_fold_away(console, tmp_path):
    text, settings = quantization.documentation(), quantization.QUICK
    whole, outcomes = quantization.compete_all(text, settings, range(2), console)
    assert outcomes.keys() == quantization.CONTESTANTS.keys()
    for name, runs in outcomes.items():
        assert len(runs) == len(whole) == 2
        for run in runs:
            assert run.folding < 1e-5, name
            assert run.error < 1e-5, name
            assert len(run.losses) in (0, settings.learning)
    quantization.show(whole, outcomes, settings, console)
    assert "LandingMuon" in console.file.getvalue()
    quantization.draw(whole, outcomes, settings, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_cayley_sgd_is_a_descent_on_the_manifold():
    """The rival must be as good as it can be: on Procrustes it gets as far as landing does."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    target = ol.random_orthogonal(12, 12, seed=1, dtype=torch.float64, special=True)
    ends = {}
    for name, make in {
        "Cayley": lambda R: quantization.CayleySGD(R, lr=0.02, iterations=5),
        "landing": lambda R: ol.LandingSGD(R, lr=0.02, momentum=0.9),
    }.items():
        X = torch.nn.Parameter(torch.eye(12, dtype=torch.float64))
        optimizer = make([X])
        for _ in range(400):
            optimizer.zero_grad()
            loss = ((X - target) @ A).square().sum() / 12
            loss.backward()
            optimizer.step()
        ends[name] = loss.item()
        assert ol.distance(X.detach()) < 1e-2
    start = ((torch.eye(12, dtype=torch.float64) - target) @ A).square().sum().item() / 12
    assert ends["Cayley"] < 0.05 * start
    assert ends["landing"] < 0.05 * start


def test_adapters_are_trained_and_merge(console, tmp_path, monkeypatch):
    settings = adapters.QUICK
    for name, contestant in adapters.CONTESTANTS.items():  # few steps: at small rates
        small = replace(contestant, rates=contestant.tried[0])
        monkeypatch.setitem(adapters.CONTESTANTS, name, small)
    outcomes = adapters.adapt_all(settings, range(1), console)
    assert outcomes.keys() == adapters.CONTESTANTS.keys()
    for name, (run,) in outcomes.items():
        assert run.merged < 1e-5, name
        assert run.curve[-1] < run.curve[0], name
    for name in ("LoRA, A orthonormal", "LoRA, A and B", "OFT, orthogonal"):
        assert outcomes[name][0].error < 1e-5
    adapters.show(outcomes, console)
    adapters.draw(outcomes, settings, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_rates_are_compared(console, monkeypatch):
    for name, contestant in adapters.CONTESTANTS.items():
        assert contestant.rates in contestant.tried, name
        few = replace(contestant, tried=contestant.tried[-1:])
        monkeypatch.setitem(adapters.CONTESTANTS, name, few)
    adapters.search(adapters.QUICK, 100, console)
    shown = console.file.getvalue()
    assert "LoRA, A and B" in shown
    assert "0.1, 1" in shown


def test_times_are_shown(console):
    quantization.time_steps([8, 16], 1, console)
    adapters.time_all(1, console)
    shown = console.file.getvalue()
    assert "Cayley SGD, 5 iterations" in shown
    assert "orthogonal blocks, entries of 0.2" in shown
