"""Hooks and profilers see every step, though torch's wrapper is left out while there are none."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import ortholand as ol

METHODS = [ol.LandingSGD, ol.LandingAdam, ol.LandingMuon, ol.RiemannianSGD]


def made(method):
    X = nn.Parameter(ol.random_orthogonal(5, 5, seed=0))
    X.grad = torch.ones(5, 5)
    return method([X], lr=0.01)


def labels(profile):
    averages = profile.key_averages()
    return {e.key: e.count for e in averages if e.key.startswith("Optimizer.step")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("profiler", [torch.profiler.profile, torch.autograd.profiler.profile])
def test_a_profiler_sees_each_step_by_its_name(method, profiler):
    optimizer = made(method)
    optimizer.step()
    with profiler() as profile:
        optimizer.step()
        optimizer.step()
    optimizer.step()
    assert labels(profile) == {f"Optimizer.step#{method.__name__}.step": 2}


@pytest.mark.parametrize("method", METHODS)
def test_hooks_that_come_and_go(method):
    optimizer, calls = made(method), []
    ways = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
    }
    for name, register in ways.items():
        optimizer.step()
        handle = register(lambda *_, name=name: calls.append(name))
        optimizer.step()
        handle.remove()
        optimizer.step()
        assert calls == [name]
        calls.clear()


def test_a_subclass_with_a_step_of_its_own_has_its_hooks_once():
    class Mine(ol.LandingSGD):
        def step(self, closure=None):
            calls.append("step")
            return super().step(closure)

    class Base(ol.LandingSGD):
        pass

    class Other(Base):
        def step(self, closure=None):
            calls.append("step")
            return super().step(closure)

    for kind in (Mine, Other):
        calls: list[str] = []
        optimizer = made(kind)
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))  # noqa: B023
        optimizer.step()
        assert calls.count("step") == 1
        # Where the base has made optimizers too, torch wraps its step again: so with torch's own.
        assert calls[:2] == ["pre", "step"]


def test_closures_and_their_values_pass():
    optimizer = made(ol.LandingSGD)
    assert optimizer.step(lambda: 3) == 3
    assert optimizer.step(closure=lambda: 4) == 4
    assert optimizer.step() is None
    optimizer.register_step_post_hook(lambda *_: None)
    assert optimizer.step(lambda: 5) == 5


def test_schedulers_see_that_a_step_was_taken():
    optimizer = made(ol.LandingSGD)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()  # warns if no step came before
    assert scheduler.get_last_lr() == [0.005]
