"""The copying task: what is asked, what the networks are, and that the quick run learns it."""

import io

import pytest
import torch
from torch.nn.functional import one_hot

from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
Console = pytest.importorskip("rich.console").Console

example = load_example("orthogonal_rnn", "showing")


@pytest.fixture(scope="module")
def runs():
    return example.learn_all(example.QUICK, seed=0, console=Console(file=io.StringIO()))


def test_the_orthogonal_network_remembers(runs):
    run = runs["orthogonal"]
    assert run.loss < 0.6 * example.QUICK.memoryless
    assert run.recall > 0.5
    assert run.error < 1e-5


def test_the_twin_starts_equal_and_leaves_the_manifold(runs):
    run, twin = runs["orthogonal"], runs["free, orthogonal start"]
    assert run.losses[0] == pytest.approx(twin.losses[0], rel=1e-5)
    assert run.losses[-1] != twin.losses[-1]
    assert twin.error > 1e-3


def test_without_the_start_nothing_is_remembered(runs):
    """Otherwise the task would not tell the networks apart."""
    assert runs["free, usual start"].recall < 0.3


def test_about_as_many_weights(runs):
    weights = [run.weights for run in runs.values()]
    assert max(weights) < 1.15 * min(weights)


def test_what_is_shown_is_asked():
    settings = example.Settings(length=5, batch=3)
    inputs, answers = example.make_batch(settings, torch.Generator().manual_seed(0))
    shown = inputs.argmax(-1)
    assert torch.equal(shown[:, :10], answers[:, -10:])
    assert (shown[:, :10] < example.ALPHABET).all()
    assert (shown[:, -11] == example.MARK).all()
    blank = torch.cat([shown[:, 10:-11], shown[:, -10:]], 1)
    assert blank.shape == (3, 4 + 10)
    assert (blank == example.BLANK).all()
    assert (answers[:, :-10] == example.BLANK).all()


def test_the_loss_without_a_memory():
    """A network that is sure of the blanks, and finds all symbols equally likely at the end."""
    settings = example.Settings(length=7, batch=4)
    inputs, answers = example.make_batch(settings, torch.Generator().manual_seed(0))
    logits = 100.0 * one_hot(torch.full_like(answers, example.BLANK)).float()
    logits[:, -10:] = 100.0 * (torch.arange(9) < example.ALPHABET)
    loss, _ = example.loss_and_recall(lambda _: logits, inputs, answers)
    assert loss.item() == pytest.approx(settings.memoryless, rel=1e-5)


def test_an_orthogonal_matrix_keeps_the_memory_for_ever():
    """At the start the state is turned by every blank, and neither shrinks nor grows."""
    torch.manual_seed(0)
    model, _ = example.orthogonal(16)
    model.inputs.bias.data.zero_()
    h = torch.randn(1, 16)
    with torch.no_grad():
        z = h
        for _ in range(1000):
            z = model.recurrent(z)
    assert z.norm().item() == pytest.approx(h.norm().item(), rel=1e-3)


def test_equal_seeds_give_equal_runs():
    settings = example.Settings(length=3, steps=3, hidden=8, batch=4)
    contestant = example.CONTESTANTS["orthogonal"]
    first, second, other = (
        example.learn(contestant, settings, seed, lambda _: None).losses for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_table_and_figure(runs, monkeypatch, tmp_path, capsys):
    asked = {}
    monkeypatch.setattr(
        example, "learn_all", lambda settings, seed, _: asked.update(s=settings, seed=seed) or runs
    )
    out = tmp_path / "figure.png"
    assert example.main(["--quick", "--length", "12", "--seed", "5", "--out", str(out)]) == 0
    assert asked["s"] == example.Settings(length=12, steps=120, hidden=48, batch=32)
    assert asked["seed"] == 5
    printed = capsys.readouterr().out
    for name, run in runs.items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        assert f"{run.loss:.4f}" in row
        assert f"{100 * run.recall:.1f} %" in row
    assert out.read_bytes().startswith(b"\x89PNG")
