"""Ranks whose options or groups differ raise the same error, before their weights have moved."""

import pytest
import torch

import ortholand as ol
from tests.distributed.disagreeing import (
    SHAPES,
    after_a_change,
    at_construction,
    at_first_step,
    each,
    messages_of_schedule,
    other_groups,
    replicas_differ,
    scheduled,
)
from tests.distributed.ranks import run

RULE = "Ranks must step the weights that they share with the same options"


def check_errors(results, *expected):
    assert len(set(results)) == 1  # the same on all ranks
    assert results[0].startswith(RULE), results[0]
    for text in expected:
        assert text in results[0]


OPTIONS = [  # of an optimizer, and those of the last rank
    (ol.LandingSGD, {"lr": 0.1}, {"lr": 0.2}),
    (ol.LandingSGD, {"lr": 0.1}, {"lr": torch.tensor(0.2)}),
    (ol.LandingSGD, {"lr": 0.1}, {"momentum": 0.5}),
    (ol.LandingSGD, {"lr": 0.1, "orthogonal": False}, {"weight_decay": 0.2}),
    (ol.LandingAdam, {"lr": 0.1}, {"betas": (0.9, 0.99)}),
    (ol.LandingMuon, {"lr": 0.1}, {"attraction": "coupled"}),
    (ol.RiemannianSGD, {"lr": 0.1}, {"retraction": "qr"}),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("when", [at_construction, at_first_step])
def test_other_options(when, ranks):
    for (*_, other), *results in zip(OPTIONS, *run(each, ranks, when, OPTIONS), strict=True):
        check_errors(results, f"'{next(iter(other))}' of group 0 is", f"on rank {ranks - 1}")


CHANGES = [{"lr": 0.3}, {"momentum": 0.7}, {"lr": 0.3, "momentum": 0.7}]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow_distributed)])
def test_after_a_change(ranks):
    cases = [(shape, plain, CHANGES) for shape in SHAPES.values() for plain in (True, False)]
    for results in zip(*run(each, ranks, after_a_change, cases), strict=True):
        for first, *others in zip(*results, strict=True):
            assert all(other == first for other in others)
            stepped, again, error, resumed = first
            assert [stepped, again, resumed] == ["stepped"] * 3
            assert error.startswith(RULE)


GROUPS = {  # of the last rank
    "a group less": "there are 2 groups on rank 0 and 1 on rank 1",
    "a group more": "there are 2 groups on rank 0 and 3 on rank 1",
    "a weight less": "'weights' of group 0 is [(20, 4), (12, 3)] on rank 0 and [(20, 4)] on rank 1",
    "another order": "'weights' of group 0",
    "groups exchanged": "'lr' of group 0 is 0.1 on rank 0 and 0.2 on rank 1",
}


def test_other_groups():
    cases = [(kind,) for kind in GROUPS]
    for (kind,), *results in zip(cases, *run(each, 2, other_groups, cases), strict=True):
        check_errors(results, GROUPS[kind])


def test_replicas():
    check_errors(run(replicas_differ, 4), "'lr' of group 0 is 0.1")


def test_schedules_and_weights_of_one_rank_are_no_disagreement():
    for result in run(scheduled, 2):
        assert result["steps"] == ["stepped"] * 4


def test_a_change_on_all_ranks_costs_no_message():
    for result in run(messages_of_schedule, 2):
        assert result["counts"] == [2, 1, 1]
