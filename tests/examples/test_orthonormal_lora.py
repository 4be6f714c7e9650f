"""Adapters with orthonormal factors: what they are, and that the quick run learns with them."""

import io

import pytest
import torch
from torch import nn

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
Console = pytest.importorskip("rich.console").Console

example = load_example("orthonormal_lora", "showing")


@pytest.fixture(autouse=True)
def _no_other_digits(monkeypatch):
    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)


@pytest.fixture(scope="module")
def digits():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ORTHOLAND_DATA", raising=False)
        images, labels, _ = example.read_images()
    return example.split_images(images, labels, example.QUICK, seed=0)


@pytest.fixture(scope="module")
def outcome(digits):
    """The trained network, and what became of it."""
    return example.learn_all(digits, example.QUICK, 0, Console(file=io.StringIO()))


def test_it_learns_to_read_turned_digits(outcome, digits):
    network, runs = outcome
    assert example.accuracy(network, digits.upright_test) > 0.85
    assert example.accuracy(network, digits.turned_test) < 0.3
    run = runs["orthonormal LoRA"]
    assert run.curve[-1] > 0.7
    assert run.error < 1e-5


def test_the_twin_learns_too_with_factors_that_are_not_orthonormal(outcome):
    run, twin = outcome[1]["orthonormal LoRA"], outcome[1]["plain LoRA"]
    assert twin.curve[-1] > 0.7
    assert twin.error > 1
    assert run.weights == twin.weights + 2 * example.QUICK.rank  # s, in each of two layers
    assert run.rank_used > twin.rank_used


@pytest.mark.parametrize("name", example.CONTESTANTS)
def test_adapters_change_nothing_before_they_learn(name, digits):
    torch.manual_seed(0)
    network = example.make_network(64, 16).requires_grad_(False)
    images = digits.turned[0]
    before = network(images)
    example.CONTESTANTS[name](network, 4)
    assert torch.equal(network(images), before)


@pytest.mark.parametrize("name", ["orthonormal LoRA", "plain LoRA"])
def test_the_network_stays_frozen(name, digits):
    torch.manual_seed(0)
    network = example.make_network(64, 16).requires_grad_(False)
    before = [p.clone() for p in network.parameters()]
    optimizer = example.CONTESTANTS[name](network, 4)
    for _ in range(2):
        example.train_epoch(network, optimizer, digits.turned, batch=100)
    frozen = [p for p in network.parameters() if not p.requires_grad]
    assert all(torch.equal(p, q) for p, q in zip(frozen, before, strict=True))
    assert network[1].update().norm() > 0


def test_the_scale_holds_the_singular_values():
    torch.manual_seed(0)
    adapter = example.OrthonormalLoRA(nn.Linear(12, 9), rank=3)
    adapter.s.data = torch.tensor([0.5, -2.0, 1.0])
    values = torch.linalg.svdvals(adapter.update())
    torch.testing.assert_close(values[:3], torch.tensor([2.0, 1.0, 0.5]))
    assert ol.orthogonality_error([adapter.A, adapter.B]) < 1e-5
    x = torch.randn(5, 12)
    torch.testing.assert_close(adapter(x), adapter.layer(x) + x @ adapter.update().T)


def test_no_image_is_in_two_parts():
    settings = example.Settings(upright=6, turned=3)
    images = torch.arange(20.0)[:, None, None].expand(20, 8, 8)
    parts = example.split_images(images, torch.arange(20), settings, seed=0)
    labels = [labels for _, labels in (parts.upright, parts.turned, parts.upright_test)]
    assert torch.cat(labels).sort().values.tolist() == list(range(20))
    assert torch.equal(parts.upright_test[1], parts.turned_test[1])


def test_turned_is_turned_and_nothing_else():
    images = torch.rand(8, 8, 8)
    settings = example.Settings(upright=2, turned=2)
    parts = example.split_images(images, torch.arange(8), settings, seed=0)
    upright, turned = parts.upright_test[0], parts.turned_test[0]
    assert torch.equal(torch.rot90(turned, -1, (1, 2)), upright)


def test_table_and_figure(outcome, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "learn_all", lambda *_: outcome)
    out = tmp_path / "figure.png"
    assert example.main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name, run in outcome[1].items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        assert f"{100 * run.curve[-1]:.1f} %" in row
        assert f"{100 * run.kept:.1f} %" in row
    assert "scikit-learn's digits" in printed
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_mnist_is_an_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ORTHOLAND_DATA", str(tmp_path))
    assert example.main(["--quick", "--out", str(tmp_path / "figure.png")]) == 1
    assert "error: " in capsys.readouterr().err
