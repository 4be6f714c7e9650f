"""What is loaded into an optimizer fits it; else an error says what was found, and nothing changes.

That own states come back bit for bit is in ``test_conformance.py`` and ``test_seams.py``.
"""

import copy
import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import ortholand as ol
from tests.optim.cases import CASES, Case, each_case
from tests.optim.test_conformance import mixed, parameters, run, snapshot, weights

OURS = {
    "LandingSGD": lambda params: ol.LandingSGD(params, lr=0.1, momentum=0.9),
    "LandingAdam": lambda params: ol.LandingAdam(params, lr=0.1),
    "LandingMuon": lambda params: ol.LandingMuon(params, lr=0.1),
    "RiemannianSGD": lambda params: ol.RiemannianSGD(params, lr=0.1, momentum=0.9),
    "PLAM": lambda params: ol.PLAM(params, lr=0.01, momentum=0.9),
}
each_of_ours = pytest.mark.parametrize("method", OURS)


def two_groups(orthogonal=True) -> list[dict]:
    X = nn.Parameter(ol.random_orthogonal(4, 4, seed=0))
    Y = nn.Parameter(ol.random_orthogonal(6, 3, seed=1))
    first = {"params": [("mix", X), ("tall", Y)], "orthogonal": orthogonal}
    return [first, {"params": [("bias", nn.Parameter(torch.ones(3)))], "orthogonal": False}]


def bare(groups) -> list[dict]:
    """The same groups for an optimizer of torch."""
    return [{"params": [p for _, p in group["params"]]} for group in groups]


def everything(optimizer) -> dict:
    return copy.deepcopy({**optimizer.state_dict(), "weights": snapshot(optimizer)})


def assert_unchanged(optimizer, before) -> None:
    now = everything(optimizer)
    assert repr(now["param_groups"]) == repr(before["param_groups"])
    assert now["state"].keys() == before["state"].keys()
    for i, state in before["state"].items():
        assert state.keys() == now["state"][i].keys()
        for name, value in state.items():
            assert torch.equal(now["state"][i][name], value)
    for now_, before_ in zip(now["weights"], before["weights"], strict=True):
        assert torch.equal(now_, before_)


def assert_refused(optimizer, state, *patterns, error=ValueError) -> str:
    """Loading raises, changes nothing, leaves no hooks, and training goes on as if it were not."""
    twin = copy.deepcopy(optimizer)
    before, given = everything(optimizer), repr(state)
    with pytest.raises(error) as raised:
        optimizer.load_state_dict(state)
    for pattern in patterns:
        assert re.search(pattern, str(raised.value)), (pattern, str(raised.value))
    assert_unchanged(optimizer, before)
    assert repr(state) == given
    run(optimizer, 2, first_seed=70)
    run(twin, 2, first_seed=70)
    assert_unchanged(optimizer, {**everything(twin), "param_groups": before["param_groups"]})
    return str(raised.value)


class Foreign(torch.optim.Optimizer):
    """An optimizer of somebody else, by its options and the names of its state."""

    def __init__(self, params, options, *names):
        self.names = names
        super().__init__(params, {"lr": 0.1, **options})

    def step(self, closure=None):
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            self.state[p] = {name: torch.ones_like(p) for name in self.names}


FOREIGN = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "AMSGrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Lion": lambda params: Foreign(params, {"betas": (0.9, 0.99), "weight_decay": 0}, "exp_avg"),
    "geoopt's Adam": lambda params: Foreign(
        params,
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False, "stabilize": 10},
        "exp_avg",
        "exp_avg_sq",
    ),
    "geoopt's SGD": lambda params: Foreign(
        params,
        {"momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False, "stabilize": None},
        "momentum_buffer",
    ),
    "POGO": lambda params: Foreign(params, {"momentum": 0.9, "lambda_": 0.5}, "momentum_buffer"),
    "nothing known": lambda params: Foreign(params, {}, "memory"),
}
each_foreign = pytest.mark.parametrize("foreign", FOREIGN)


class TestStatesOfOtherOptimizers:
    @each_of_ours
    @each_foreign
    @pytest.mark.parametrize("steps", [0, 2])
    def test_they_are_refused_beside_orthogonal_weights(self, method, foreign, steps):
        theirs = FOREIGN[foreign](bare(two_groups()))
        run(theirs, steps)
        ours = OURS[method](two_groups())
        run(ours, 3)
        said = assert_refused(ours, theirs.state_dict(), "group 0", method, "weights.*new")
        found = {*theirs.defaults, *getattr(theirs, "names", ())}
        assert any(repr(name) in said for name in found), said

    @each_of_ours
    @each_foreign
    def test_they_are_refused_whatever_their_groups(self, method, foreign):
        """The first thing to say is not that the number of groups is another one."""
        params = [p for group in bare(two_groups()) for p in group["params"]]
        theirs = FOREIGN[foreign](params)
        run(theirs, 2)
        said = assert_refused(OURS[method](two_groups()), theirs.state_dict(), method)
        assert "number of" not in said

    @each_of_ours
    def test_torchs_muon(self, method):
        X = nn.Parameter(ol.random_orthogonal(4, 4, seed=0))
        theirs = torch.optim.Muon([nn.Parameter(X.detach().clone())], lr=0.1)
        run(theirs, 2)
        ours = OURS[method]([X])
        run(ours, 2)
        assert_refused(ours, theirs.state_dict(), "'eps'", "'ns_steps'", "'momentum_buffer'")

    def test_what_is_found_is_said(self):
        theirs = torch.optim.AdamW(bare(two_groups()))
        run(theirs, 1)
        ours = ol.LandingSGD(two_groups())
        assert_refused(ours, theirs.state_dict(), "'betas'.*'eps'", "'exp_avg', 'exp_avg_sq'")
        assert ours.param_groups[0]["eps"] == 0.5

    @pytest.mark.parametrize("method", ["LandingAdam", "LandingMuon"])
    @pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW], ids=["Adam", "AdamW"])
    def test_plain_groups_continue_adam(self, method, theirs):
        """The formulas are the same, so the next steps are; eps is called adam_eps here."""
        groups = two_groups(orthogonal=False)
        adam = theirs(bare(groups), lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
        run(adam, 3)
        ours = OURS[method](copy.deepcopy(groups))
        ours.load_state_dict(adam.state_dict())
        for group in ours.param_groups:
            assert (group["eps"], group["adam_eps"], group["betas"]) == (0.5, 1e-3, (0.8, 0.9))
            assert group.keys() == {*ours.defaults, "params", "param_names"}
        run(adam, 3, first_seed=9)
        run(ours, 3, first_seed=9)
        for p, q in zip(parameters(adam), parameters(ours), strict=True):
            torch.testing.assert_close(p, q)

    @pytest.mark.parametrize("method", ["LandingAdam", "LandingMuon"])
    def test_plain_groups_do_not_continue_what_is_not_adam(self, method):
        for foreign in ("AMSGrad", "NAdam", "Adamax", "Adafactor", "RMSprop", "Lion"):
            for steps in (0, 2) if foreign == "AMSGrad" else (2,):
                theirs = FOREIGN[foreign](bare(two_groups()))
                run(theirs, steps)
                assert_refused(OURS[method](two_groups(orthogonal=False)), theirs.state_dict())

    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    @pytest.mark.parametrize("method", ["LandingSGD", "RiemannianSGD", "PLAM", "LandingMuon"])
    def test_torchs_sgd_is_continued(self, method, momentum):
        theirs = torch.optim.SGD(bare(two_groups()), lr=0.03, momentum=momentum)
        torch.optim.lr_scheduler.CyclicLR(theirs, 0.03, 0.1, cycle_momentum=momentum > 0)
        run(theirs, 3)
        ours = OURS[method](two_groups(orthogonal=True))
        if method == "LandingMuon" and momentum:  # its plain groups are AdamW's
            assert_refused(ours, theirs.state_dict(), "group 1", "'momentum_buffer'")
            return
        ours.load_state_dict(theirs.state_dict())
        for group in ours.param_groups:
            assert group["lr"] == theirs.param_groups[0]["lr"]
            assert group["initial_lr"] == 0.03
        for p, q in zip(parameters(theirs), parameters(ours), strict=True):
            assert ("momentum_buffer" in ours.state[q]) == (momentum > 0)
            if momentum and p.shape != (4, 4):
                buffers = (o.state[x]["momentum_buffer"] for o, x in ((theirs, p), (ours, q)))
                assert torch.equal(*buffers)
        run(ours, 2)
        again = OURS[method](two_groups())
        again.load_state_dict(ours.state_dict())
        kept = {"weights": snapshot(again), "param_groups": again.state_dict()["param_groups"]}
        assert_unchanged(again, {**everything(ours), **kept})

    def test_a_momentum_of_sgd_is_none_of_adam(self):
        theirs = torch.optim.SGD(bare(two_groups()), lr=0.03, momentum=0.9)
        run(theirs, 2)
        assert_refused(ol.LandingAdam(two_groups()), theirs.state_dict(), "'momentum_buffer'")

    def test_options_of_the_user_s_own_are_kept(self):
        theirs = torch.optim.SGD([{**group, "lr_scale": 0.5} for group in bare(two_groups())])
        groups = [{**group, "lr_scale": 1.0} for group in two_groups()]
        ours = ol.LandingSGD(groups)
        ours.load_state_dict(theirs.state_dict())
        assert [group["lr_scale"] for group in ours.param_groups] == [0.5, 0.5]

    @each_of_ours
    @pytest.mark.parametrize("source", OURS)
    def test_states_of_our_other_optimizers(self, method, source):
        """The same buffers: loaded. Others: refused. Never are they taken for what they are not."""
        theirs, ours = OURS[source](two_groups()), OURS[method](two_groups())
        run(theirs, 3)
        skew = {"LandingSGD", "RiemannianSGD"}
        if source == method or {source, method} == skew or (source == "PLAM" and method in skew):
            ours.load_state_dict(theirs.state_dict())
            for p in parameters(ours):
                assert "momentum_buffer" in ours.state[p] or "exp_avg" in ours.state[p]
            run(ours, 2)
            assert ours.skipped_steps() == 0
        else:
            assert_refused(ours, theirs.state_dict(), "group 0", method)

    @each_of_ours
    def test_other_groups_are_counted(self, method):
        source = OURS[method](two_groups())
        run(source, 1)
        one = OURS[method](two_groups()[:1])
        assert_refused(one, source.state_dict(), r"\[2\]", r"\[2, 1\]", "as they were")
        uneven = two_groups()
        uneven[0]["params"].pop()
        assert_refused(OURS[method](uneven), source.state_dict(), r"\[1, 1\]", r"\[2, 1\]")

    @each_of_ours
    def test_what_is_no_state(self, method):
        ours, groups = OURS[method](two_groups()), OURS[method](two_groups()).state_dict()
        run(ours, 1)
        model = nn.Linear(3, 3).state_dict()
        for wrong in (model, {}, {**groups, "state": 3}, {**groups, "param_groups": 3}):
            assert_refused(ours, wrong, "state_dict", "'param_groups'")
        assert_refused(ours, {**groups, "state": {0: "everything"}}, "'mix'", "'everything'")

    @each_of_ours
    def test_invalid_options_are_refused(self, method):
        ours = OURS[method](two_groups())
        run(ours, 1)
        for options, error in (({"lr": -1.0}, ValueError), ({"view": "row"}, ValueError)):
            state = copy.deepcopy(ours.state_dict())
            state["param_groups"][0].update(options)
            assert_refused(ours, state, next(iter(options)), error=error)


WRONG = {
    "a string": "much",
    "a list": [1.0, 2.0],
    "a dictionary": {"a": 1},
    "an array": np.ones((4, 4), dtype=np.float32),
    "a vector": torch.ones(5),
    "a matrix": torch.ones(5, 5),
    "an empty tensor": torch.ones(0),
    "booleans": torch.ones(4, 4, dtype=torch.bool),
    "integers": torch.ones(4, 4, dtype=torch.int64),
    "complex": torch.ones(4, 4, dtype=torch.complex64),
    "sparse": torch.eye(4).to_sparse(),
    "NaN": torch.full((4, 4), math.nan),
    "infinite": torch.full((4, 4), math.inf),
    "a boolean": torch.tensor(True),
    "a complex number": torch.tensor(1j),
    "a sparse number": torch.tensor(1.0).to_sparse(),
    "not a number": torch.tensor(math.nan),
    "negative": torch.tensor(-1.0),
    "a fraction": torch.tensor(0.5),
    "True": True,
    "nan": math.nan,
}
MATRICES = {"momentum_buffer", "exp_avg", "compensation"}


@pytest.fixture(
    params=[c for c in CASES if "-" not in c.name or "momentum" in c.name], ids=lambda c: c.name
)
def case(request):
    return request.param


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_cannot_be_state_are_refused(case: Case, what, dtype):
    """Every name of every optimizer's state, of orthogonal weights and of others."""
    wrong, tried = WRONG[what], 0
    optimizer = case(named(*weights(dtype, ("square",)), plain(dtype)))
    run(optimizer, 2)
    saved = optimizer.state_dict()
    for i, weight in ((0, "the matrix"), (1, "the vector")):
        for name in saved["state"][i]:
            if is_valid(name, what, orthogonal=i == 0):
                continue
            state = {**saved, "state": {**saved["state"], i: {**saved["state"][i], name: wrong}}}
            said = assert_refused(optimizer, state, f"'{weight}'", f"'{name}'")
            assert f"del state_dict['state'][{i}]" in said
            tried += 1
    assert tried > 1


def is_valid(name, what, orthogonal) -> bool:
    """Whether such a state can be had after all."""
    if what in ("NaN", "infinite") and name == "compensation":  # then it is not added
        return True
    if what == "infinite" and name == "exp_avg_sq":  # gradients of 1e30 leave it so
        return not orthogonal
    if what == "a fraction":
        return name == "step" or (name == "exp_avg_sq" and orthogonal)
    return False


def named(*groups) -> list[dict]:
    """Names for the weights: "the matrix" and "the vector"."""
    names = ("the matrix", "the vector")
    return [
        {**group, "params": [(name, *group["params"])]}
        for name, group in zip(names, groups, strict=True)
    ]


def plain(dtype):
    return {"params": [nn.Parameter(torch.ones(4, 4, dtype=dtype))], "orthogonal": False}


@each_case
def test_a_state_of_weights_in_another_order_is_refused(case: Case):
    optimizer = case(mixed())
    run(optimizer, 2)
    saved = optimizer.state_dict()
    states = {**saved["state"], 1: saved["state"][2], 2: saved["state"][1]}
    if not any(value.ndim for value in states[1].values()):
        pytest.skip("it has no buffers")
    assert_refused(optimizer, {**saved, "state": states}, r"\(3, 7\)", r"\(7, 3\)")


def test_buffers_of_none_and_steps_as_numbers_are_those_of_older_versions_of_torch():
    groups = two_groups(orthogonal=False)
    optimizer = ol.LandingSGD(groups, momentum=0.9)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {2: {"momentum_buffer": None}}})
    run(optimizer, 1)
    adam = ol.LandingAdam(groups)
    run(adam, 2)
    saved = copy.deepcopy(adam.state_dict())
    for i, step in ((0, 2), (1, 2.0), (2, torch.tensor(2))):
        saved["state"][i]["step"] = step
    twin = ol.LandingAdam(copy.deepcopy(groups))
    twin.load_state_dict(saved)
    for optimizer in (adam, twin):
        run(optimizer, 2)
    for p, q in zip(parameters(adam), parameters(twin), strict=True):
        assert torch.equal(p, q)


def test_half_of_adam_s_state_is_refused():
    optimizer = ol.LandingAdam(two_groups())
    run(optimizer, 1)
    for name in ("step", "exp_avg_sq", "exp_avg"):
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][2][name]
        assert_refused(optimizer, saved, "'bias'", repr(name))


class Remembering(ol.LandingSGD):
    """An optimizer with state of its own: any numbers."""

    def state_kinds(self, group):
        return {**super().state_kinds(group), "last": "matrix", "size": "number"}

    def matrix_step(self, X, G, state, group):
        step = super().matrix_step(X, G, state, group)
        size = G.sum(dim=(-2, -1)) - 100
        return step._replace(state={**step.state, "last": G / 0, "size": size})


def test_state_of_an_extension_is_loaded_and_its_shapes_are_checked():
    optimizer, twin = (Remembering(weights(names=("square", "tall"))) for _ in range(2))
    run(optimizer, 2)
    twin.load_state_dict(optimizer.state_dict())
    assert_unchanged(twin, {**everything(twin), "state": everything(optimizer)["state"]})
    for name in ("last", "size"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1][name] = torch.ones(5)
        assert_refused(optimizer, saved, name, r"shape \(7, 3\)")


def test_weights_without_state_have_none_after_loading():
    optimizer = ol.LandingSGD(two_groups())
    optimizer.load_state_dict(ol.LandingSGD(two_groups()).state_dict())
    assert not optimizer.state


def test_a_loaded_state_that_makes_a_plain_group_orthogonal_is_checked_before_the_next_step():
    source = ol.LandingSGD(two_groups())
    groups = two_groups(orthogonal=False)
    with torch.no_grad():
        groups[0]["params"][0][1].mul_(3)
    target = ol.LandingSGD(groups)
    target.load_state_dict(source.state_dict())
    before = snapshot(target)
    with pytest.raises(ValueError, match=r"must start.*'mix'"):
        run(target, 1)
    for p, value in zip(parameters(target), before, strict=True):
        assert torch.equal(p, value)
