"""The language model: causal, orthogonal, and better than guessing after the quick run."""

import io
from dataclasses import replace

import pytest
import torch

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
Console = pytest.importorskip("rich.console").Console

example = load_example("orthogonal_attention", "showing")

SMALL = example.Settings(steps=4, width=16, layers=1, heads=2, context=8, batch=4, evaluations=2)


@pytest.fixture(scope="module")
def text():
    return example.read_text()


@pytest.fixture(scope="module")
def runs(text):
    return example.learn_all(text, example.QUICK, seed=0, console=Console(file=io.StringIO()))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return example.Transformer(20, SMALL)


def test_it_learns(runs, text):
    """Knowing no more than how frequent each character is would cost 4.4 bits."""
    frequencies = torch.bincount(text.train) / len(text.train)
    entropy = torch.special.entr(frequencies).sum().item() / torch.log(torch.tensor(2.0)).item()
    run = runs["orthogonal"]
    assert run.steps == [0, 20, 40, 60, 80]
    assert run.bits[0] > entropy
    assert run.bits[-1] < entropy - 0.2


def test_projections_stay_orthogonal_and_those_of_the_twin_do_not(runs):
    run, twin = runs["orthogonal"], runs["free, orthogonal start"]
    assert run.error < 1e-5
    assert run.condition == pytest.approx(1, abs=1e-4)
    assert len(run.singular_values) == 2 * 4 * 32
    assert twin.error > 0.1
    assert twin.bits[0] == pytest.approx(run.bits[0], rel=1e-5)


def test_every_head_has_orthonormal_rows(model):
    example.orthogonal(model, SMALL)
    query = model.blocks[0].attention.query.weight
    for head in query.chunk(SMALL.heads):
        assert ol.orthogonality_error(head.detach()) < 1e-5


def test_only_the_projections_are_constrained(model):
    names = ol.orthogonality_error(example.orthogonal(model, SMALL), reduce=None)
    parts = ("query", "key", "value", "output")
    assert set(names) == {f"blocks.0.attention.{part}.weight" for part in parts}


def test_nothing_is_seen_before_it_is_written(model):
    piece = torch.arange(8)[None]
    changed = piece.clone()
    changed[0, 5] = 19
    with torch.no_grad():
        before, after = model(piece), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_the_text_is_that_of_help(text):
    assert "assert" in "".join(text.alphabet[i] for i in text.train[:2000])
    assert len(text.validation) == pytest.approx(len(text.train) / 9, rel=0.01)
    pieces = example.sample(text.validation, SMALL, torch.Generator().manual_seed(0))
    assert pieces.shape == (4, 9)
    whole = text.validation.unfold(0, 9, 1)
    assert all((whole == piece).all(1).any() for piece in pieces)


def test_equal_seeds_give_equal_runs(text):
    contestant = example.CONTESTANTS["orthogonal"]
    first, second, other = (
        example.learn(contestant, text, SMALL, seed, lambda _: None).bits for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_table_and_figure(runs, monkeypatch, tmp_path, capsys):
    asked = {}
    monkeypatch.setattr(
        example, "learn_all", lambda _, settings, seed, __: asked.update(s=settings) or runs
    )
    out = tmp_path / "figure.png"
    assert example.main(["--quick", "--steps", "7", "--out", str(out)]) == 0
    assert asked["s"].steps == 7
    printed = capsys.readouterr().out
    for name, run in runs.items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        assert f"{run.bits[-1]:.3f}" in row
        assert f"{run.error:.1e}" in row
    assert out.read_bytes().startswith(b"\x89PNG")


def test_projections_of_another_scale_by_muon(monkeypatch, tmp_path, capsys):
    runs, learn = [], example.learn
    monkeypatch.setattr(example, "QUICK", replace(SMALL, steps=6))
    monkeypatch.setattr(example, "learn", lambda *given: runs.append(learn(*given)) or runs[-1])
    arguments = ["--quick", "--optimizer", "muon", "--scale", "2"]
    assert example.main([*arguments, "--out", str(tmp_path / "figure.png")]) == 0
    run, twin, _ = runs
    assert run.error < 1e-5
    assert run.singular_values == pytest.approx([2.0] * 4 * 16, abs=1e-4)
    assert twin.error > 1e-3
    assert f"{run.bits[-1]:.3f}" in capsys.readouterr().out


def test_the_optimizer_is_the_one_asked_for(model):
    for name, kind in (("adam", ol.LandingAdam), ("muon", ol.LandingMuon)):
        optimizer = example.orthogonal(model, replace(SMALL, optimizer=name, angle=0.1))
        assert type(optimizer) is kind
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-2]
