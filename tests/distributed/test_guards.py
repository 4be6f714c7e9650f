"""Gradients that are not finite, steps of length zero, options and types."""

import pytest
import torch

import ortholand as ol
from tests.distributed.accidents import (
    KINDS,
    bad_gradients,
    compared,
    rounded_on_replicas,
    still_standing,
)
from tests.distributed.ranks import assert_same, run

OPTIMIZERS = [
    (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "attraction": "after"}),
    (ol.LandingAdam, {"lr": 0.01}),
    (ol.LandingMuon, {"lr": 0.01}),
]


def names(spoilt):
    return [f"w{2 * i + (not spoilt)}" for i in range(len(KINDS))]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow_distributed)])
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_what_one_rank_cannot_step_no_rank_steps_and_the_others_do(make, options, ranks):
    for results in run(bad_gradients, ranks, make, options):
        for result in results:
            spread, alone = result["spread"], result["alone"]
            # One matrix of each spoilt weight, once: a whole weight, or one of its kernels.
            assert spread["skipped"] == alone["skipped"] == len(KINDS)
            assert all(spread[f"{name}: skipped"] == 1 for name in names(spoilt=True))
            assert all(spread[f"{name}: skipped"] == 0 for name in names(spoilt=False))
            assert all(torch.isfinite(value).all() for k, value in spread.items() if k != "skipped")
            assert_same(spread, alone, 1e-12)


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS[:1])
def test_unconstrained_weights_are_left_alone_on_all_ranks_together(make, options):
    plain = {**options, "orthogonal": False}
    for results in run(bad_gradients, 2, make, plain):
        for result in results:
            assert result["spread"]["skipped"] == len(KINDS)
            assert_same(result["spread"], result["alone"], 1e-12)


@pytest.mark.parametrize("attraction", ["coupled", "decoupled", "after"])
def test_lr_zero_changes_nothing_and_gradients_stay(attraction):
    options = {"lr": 0.0, "attraction": attraction, "momentum": 0.9}
    for result in run(still_standing, 2, ol.LandingSGD, options):
        assert all(result["same"])
        assert all(result["kept"])
        assert all(result["own"])
        assert result["skipped"] == 0


@pytest.mark.parametrize(
    ("make", "options", "tolerance"),
    [
        (ol.LandingSGD, {"lr": torch.tensor(0.1), "attraction": "after"}, 1e-12),
        (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "foreach": True}, 1e-12),
        (ol.LandingSGD, {"lr": 1e3, "momentum": 0.9}, 1e-10),  # the safe step binds
        (ol.LandingAdam, {"lr": 0.01, "dtype": torch.complex128}, 1e-12),
        (ol.LandingAdam, {"lr": 0.01, "dtype": torch.bfloat16}, 2**-7),
        (ol.LandingSGD, {"lr": 1e-3, "momentum": 0.9, "dtype": torch.float16}, 2**-10),
        (ol.LandingAdam, {"lr": 1e-3, "orthogonal": False, "dtype": torch.bfloat16}, 2**-8),
    ],
)
def test_options_and_types_mean_what_they_mean_in_one_process(make, options, tolerance):
    for result in run(compared, 2, make, options, 3):
        assert_same(result["spread"], result["alone"], tolerance)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_ranks_that_have_the_same_weight_round_alike(rounding, orthogonal):
    options = {"lr": 0.01, "rounding": rounding, "orthogonal": orthogonal}
    first, *others = run(rounded_on_replicas, 4, ol.LandingAdam, options)
    assert all(first["moved"])
    for other in others:
        assert_same(other, first, 0)
    for i in range(len(KINDS)):
        weight, rest = first[f"w{i}"], first.get(f"w{i}: compensation")
        assert (rest is None) == (rounding == "stochastic")
        assert rest is None or torch.equal((weight.float() + rest).bfloat16(), weight)


@pytest.mark.slow_distributed
@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
def test_more_ranks_than_rows(make, options):
    for result in run(compared, 8, make, options, 5):
        assert_same(result["spread"], result["alone"], 1e-12)
