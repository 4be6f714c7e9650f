import math

import pytest
import torch
from torch import nn

import ortholand_lab.rules  # noqa: F401  (registers "tight")
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand_lab.experiments.descents import (
    follow,
    growth,
    iterate,
    iterations_to,
    make_optimizer,
    within_ball,
)
from ortholand_lab.problems import Procrustes
from ortholand_lab.study.records import Record, Request, Result, RunOptions
from ortholand_lab.study.spec import Verdict


def record(**series):
    request = Request("study", 1, "unit", RunOptions("quick", 0, "cpu", 1), {}, {})
    return Record(request, Result(series, {}), {}, 1.0, "")


def test_iterations_to_a_distance_are_interpolated():
    run = record(iteration=[0, 10, 20, 40], to_optimum=[8.0, 4.0, 1.0, 2.0])
    assert iterations_to(run, "to_optimum", 4.0) == pytest.approx(10)
    assert iterations_to(run, "to_optimum", 2.0) == pytest.approx(15)
    assert iterations_to(run, "to_optimum", 0.5) == math.inf


def test_iterations_to_an_error_are_interpolated_if_it_is_not_zero():
    run = record(iteration=[0, 10, 20], error=[1.0, 1e-2, 1e-4])
    assert iterations_to(run, "error", 1e-1) == pytest.approx(5)
    assert iterations_to(run, "error", 1e-3) == pytest.approx(15)
    assert iterations_to(run, "error", 1e-5) == math.inf
    exact = record(iteration=[0, 10, 20], error=[1.0, 1e-2, 0.0])
    assert iterations_to(exact, "error", 1e-5) == 20


def test_a_run_that_starts_at_the_goal_or_is_no_number_does_not_get_there():
    assert iterations_to(record(iteration=[0, 10], error=[1.0, 0.5]), "error", 2.0) == math.inf
    lost = record(iteration=[0, 10, 20], error=[1.0, math.nan, 0.1])
    assert iterations_to(lost, "error", 0.5) == math.inf


def test_growth_is_counted_from_the_first_percent_on():
    run = record(iteration=[0, 1, 10, 1000], error=[1e-3, 5.0, 2.0, 6.0])
    assert growth(run, "error") == 3.0
    short = record(iteration=[0, 1, 2], error=[0.0, 2.0, 5.0])
    assert growth(short, "error") == 2.5
    exact = record(iteration=[0, 1, 2], error=[0.0, 0.0, 1e-300])
    assert growth(exact, "error") > 1


def test_the_ball_ends_at_eps_and_a_nan_is_outside():
    assert within_ball([0.1, 0.5], 2).verdict is Verdict.HOLDS
    for outside in (0.51, math.nan):
        assert within_ball([outside, 0.1], 2).verdict is Verdict.FAILS
    assert within_ball([0.6], 1, 0.7).measured == "at most 0.6000 in 1 runs, eps = 0.7"


def test_a_descent_is_measured_at_the_marks():
    state, ticks = [0.0], []

    def advance():
        state[0] += 1

    series = follow([0, 1, 4, 6], advance, lambda: {"y": -state[0]}, ticks.append)
    assert series == {"iteration": [0, 1, 4, 6], "y": [0.0, -1.0, -4.0, -6.0]}
    assert ticks == [1, 3, 2]


def test_a_method_is_a_retraction_or_a_way_of_landing():
    X = nn.Parameter(torch.eye(3))
    by_retraction = make_optimizer(X, "polar", 0.2, lam=0.7)
    landing = make_optimizer(X, "landing-tight", 0.2, lam=0.7, safe_step="tight")
    assert isinstance(by_retraction, RiemannianSGD)
    assert isinstance(landing, LandingSGD)
    assert by_retraction.param_groups[0]["retraction"] == "polar"
    assert [landing.param_groups[0][name] for name in ("lam", "safe_step")] == [0.7, "tight"]
    assert {o.param_groups[0]["lr"] for o in (by_retraction, landing)} == {0.2}


def test_an_iteration_steps_along_the_gradient_of_the_problem():
    problem = Procrustes.gaussian(4, seed=0)
    X = nn.Parameter(torch.eye(4, dtype=problem.A.dtype))
    before = problem.fun(X.detach())
    iterate(X, problem, make_optimizer(X, "landing", 0.01))
    assert problem.fun(X.detach()) < before
