"""Blocks or whole weights: what is orthogonal is what was asked for, and stays so."""

import pytest

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

example = load_example("blocks_or_whole", "showing", "orthogonal_attention")


@pytest.mark.parametrize(("make", "grid"), [(example.heads, (2, 1)), (example.gates, (4, 1))])
def test_blocks_are_orthogonal_by_themselves(make, grid):
    (group, *_) = ol.param_groups(make(20, example.QUICK, "blocks"))
    assert group["blocks"] == grid
    (whole, *_) = ol.param_groups(make(20, example.QUICK, "whole"))
    assert whole["blocks"] is None
    assert [name for name, _ in group["params"]] != []
    with pytest.raises(ValueError, match="say which parameters are orthogonal"):
        ol.param_groups(make(20, example.QUICK, "free"))


def test_it_runs_and_tells(capsys):
    assert example.main(["--quick", "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    for name in example.MODELS:
        for weights in example.WEIGHTS:
            assert f"{name}: {weights}" in printed
    text = example.read_text()
    bits, error = example.learn(example.gates, "blocks", text, example.QUICK, 0)
    assert f"{bits:.3f}" in printed
    assert error < 1e-5
