"""Marked weights next to torch's parametrization: the same start, and what each keeps."""

import io

import pytest
import torch

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
Console = pytest.importorskip("rich.console").Console

example = load_example("marked_weights", "showing")


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


@pytest.fixture(scope="module")
def outcomes():
    return example.learn_all(example.QUICK, range(2), Console(file=io.StringIO()))


def test_all_start_equal(outcomes):
    for seed in range(2):
        first, *others = [runs[seed].losses[0] for runs in outcomes.values()]
        assert others == pytest.approx([first] * len(others), rel=1e-4)


def test_who_stays_orthogonal(outcomes):
    for name, runs in outcomes.items():
        for run in runs:
            assert run.losses[-1] < run.losses[0]
            assert (run.error < 1e-5) == (name != "free")


def test_the_mark_is_all_that_the_class_says():
    model = example.Network(ol.orthogonal, example.QUICK)
    plain = example.Network(lambda layer: layer, example.QUICK)
    assert model.state_dict().keys() == plain.state_dict().keys()
    orthogonal, rest = ol.param_groups(model)
    assert len(orthogonal["params"]) == example.QUICK.depth
    assert len(rest["params"]) == example.QUICK.depth + 4


def test_rates_are_among_those_that_were_tried():
    for name, contestant in example.CONTESTANTS.items():
        assert contestant.lr in contestant.tried, name


def test_no_image_is_in_both_parts():
    digits = example.read_digits(example.QUICK, seed=0)
    both = torch.cat([digits.train[0], digits.test[0]])
    assert len(digits.test[0]) == example.QUICK.test
    assert len(both) == 1797
    assert len(both.unique(dim=0)) == 1797


def test_what_is_shown(outcomes, console, tmp_path):
    example.show(outcomes, example.QUICK, console)
    example.search(example.QUICK, console)
    assert "parametrization" in console.file.getvalue()
    example.draw(outcomes, example.QUICK, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
