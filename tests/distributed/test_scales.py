"""Scaled weights on ranks: as in one process, and as many messages as without a scale."""

import pytest

import ortholand as ol
from tests.distributed.counting import all_counted
from tests.distributed.ranks import run
from tests.distributed.scaling import half_precision, helped, wrong_scales

SHAPES = [(12, 4), (4, 12), (6, 6), (31, 3), (9, 6, 2), (8, 2, 3, 3)]
TALL = [(40, 4), (40, 4), (24, 8), (31, 3)]
SCALES = [0.1, 3.7, "fan"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_scaled_weights_step_on_ranks_as_in_one_process(ranks):
    cases = []
    for scale in SCALES:
        cases += [
            (SHAPES, ol.LandingSGD, {"lr": 0.1, "scale": scale}),
            (SHAPES, ol.LandingSGD, {"lr": 0.1, "scale": scale, "sharded": "owners"}),
            (
                SHAPES,
                ol.LandingSGD,
                {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "attraction": "after"}
                | {"scale": scale},
            ),
            (SHAPES, ol.LandingAdam, {"lr": 0.1, "attraction": "decoupled", "scale": scale}),
            (SHAPES, ol.RiemannianSGD, {"lr": 0.1, "scale": scale}),
        ]
    for results in run(all_counted, ranks, cases):
        assert all(result["error"] < 1e-12 for result in results)


def test_weights_of_several_scales_share_one_sum():
    cases = [(TALL, make, {"scale": s}) for make in (ol.LandingSGD, ol.LandingAdam) for s in SCALES]
    for results in run(all_counted, 2, cases):
        assert all(result["counts"] == {"c10d.allreduce_": 1} for result in results)
        assert all(result["read"] == 0 for result in results)


def test_a_forgotten_scale_is_named_on_every_rank():
    shapes = [(12, 3), (3, 12)]
    for messages in run(wrong_scales, 2, shapes, 3.7):
        assert len(messages) == 3
        assert all("scale=3.7 in its group" in message for message in messages)
        assert "it was 3.7 and is 0.5 now" in messages[2]


def test_projections_and_errors():
    for before, after, difference in run(helped, 2, SHAPES, "fan"):
        assert before > 0.5
        assert after < 1e-12
        assert difference < 1e-12


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "compensated"])
def test_half_precision(rounding):
    options = {"scale": 3.7, "rounding": rounding, "momentum": 0.9}
    for result in run(half_precision, 2, [(12, 4), (4, 12), (6, 6)], options):
        assert result["stays"]
        assert result["skipped"] == 3
        if rounding != "stochastic":  # where seeds are drawn one after the other
            assert result["error"] <= 4 * 2.0**-8
