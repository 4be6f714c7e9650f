"""The study of networks with certificates: norms, attacks, and what is said of the records."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from ortholand.nn import MaxMin, OrthogonalConv2d, lipschitz_bound
from ortholand_lab.benchmarks.certified import (
    AOC,
    CERTIFIED,
    CONTENDERS,
    FREE,
    LANDING,
    MUON,
    RADII,
    RESHAPED,
    chosen_rates,
    draw,
    make_table,
    plan,
    search_table,
)
from ortholand_lab.benchmarks.certified.contenders import CAYLEY, cayley_linear, small_cnn
from ortholand_lab.benchmarks.certified.training import (
    Split,
    attack,
    circular_norm,
    margins,
    measured_bound,
    said_bound,
    within,
)
from ortholand_lab.datasets import Dataset
from ortholand_lab.study.records import Record, Records, Request, Result, RunOptions
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import Verdict

SETTINGS = CERTIFIED.settings["smoke"]


def made_up(
    *, certified: float = 0.3, changed: float = 0.0, excess: float = 1e-5, step: float = 0.01
) -> Records:
    """Records of all methods, in which landing has these values."""
    records = {}
    methods = tuple(method for method, _ in CERTIFIED.whole.best)
    for seed in range(2):
        for method in methods:
            ours = method == LANDING
            shares = [(certified if ours else 0.3) + 0.01 * seed] * len(RADII)
            series = {"radius": RADII, "said": shares, "certified": shares}
            values = {
                "accuracy": 0.5,
                "bound": 1.0,
                "said_bound": 1.0 + excess * (ours or method == MUON),
            }
            values |= {"attacked": 5_000.0, "changed": changed, "parameters": 9.0}
            values |= {"step": {LANDING: step, MUON: 0.01}.get(method, 0.02)}
            values |= {f"robust_{r}": 0.4 for r in (36, 72, 108)}
            unit = f"{method}-seed{seed}"
            configuration = {"method": method, "lr": 0.1}
            options = RunOptions("full", 0, "cpu", 1)
            request = Request("certified", 1, unit, options, configuration, {})
            records[unit] = Record(request, Result(series, values), {}, 1.0, "")
    return Records(records)


@pytest.mark.parametrize(
    ("records", "failing"),
    [
        (made_up(), None),
        (made_up(certified=0.295), None),
        (made_up(certified=0.28), 0),
        (made_up(step=0.017), 1),
        (made_up(changed=1.0), 4),
        (made_up(excess=-1e-9), 5),
        (made_up(excess=0.01), 5),
    ],
)
def test_claims_can_hold_and_fail(records, failing):
    verdicts = [claim.judge(records).verdict for claim in CERTIFIED.claims]
    assert verdicts == [Verdict.FAILS if i == failing else Verdict.HOLDS for i in range(6)]
    assert CERTIFIED.claims[0].judge(Records({})).verdict == Verdict.OPEN


def test_the_table_and_the_figure_show_all_methods():
    head, *rows = make_table(made_up())
    assert [row[0] for row in rows] == [
        CONTENDERS[m].label for m in CONTENDERS if m in dict(CERTIFIED.whole.best)
    ]
    assert dict(zip(head, rows[0], strict=True))["certified 36/255"] == "30.5 ± 0.7"
    [axes] = draw(made_up()).axes
    labels = [line.get_label() for line in axes.lines]
    assert {CONTENDERS[m].label for m in (LANDING, AOC, RESHAPED, FREE)} < set(labels)


def test_the_norm_of_a_convolution_is_that_of_its_matrix():
    generator = torch.Generator().manual_seed(0)
    for k, s in ((3, 1), (4, 2)):
        conv = nn.Conv2d(2, 3, k, s, (k - s) // 2, bias=False, padding_mode="circular").double()
        conv.weight.data.normal_(generator=generator)
        J = conv(torch.eye(128, dtype=torch.float64).view(128, 2, 8, 8)).flatten(1).detach()
        expected = float(torch.linalg.matrix_norm(J, 2))
        found = circular_norm(conv.weight.detach(), s, torch.Size((8, 8)))
        assert found == pytest.approx(expected)


def test_bounds_of_untrained_networks():
    torch.manual_seed(0)
    shape, networks = torch.Size((3, 32, 32)), {}
    for method in (LANDING, RESHAPED, FREE):
        model = networks[method] = small_cnn(CONTENDERS[method]).requires_grad_(False)
        said, measured = said_bound(model, method), measured_bound(model, shape)
        assert (said is None) == (method == FREE)
        if method == LANDING:
            assert measured <= said < 1.001 * measured
        if method == RESHAPED:
            assert measured > 5 * said
    assert said_bound(networks[LANDING], LANDING) == lipschitz_bound(
        networks[LANDING], margins=True
    )


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (6, 6)])
def test_cayley_layers_are_orthonormal(shape):
    W = cayley_linear(*shape).weight.detach()
    gram = W @ W.T if len(W) < W.shape[1] else W.T @ W
    torch.testing.assert_close(gram, torch.eye(min(shape)), atol=1e-5, rtol=0)
    with pytest.raises(NotImplementedError, match="fully connected"):
        CONTENDERS[CAYLEY].convolution(1, 1, 1, 1)


def test_the_attack_finds_what_is_known_for_one_layer():
    """A margin falls by the norm of the difference of two rows, times the radius."""
    model = nn.Sequential(nn.Linear(4, 2))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    labels = model(x).argmax(1)
    slope = (model[0].weight[0] - model[0].weight[1]).norm().detach()
    before = margins(model(x), labels)
    found = attack(model.requires_grad_(False), Split(x, labels), before / slope, 10)
    torch.testing.assert_close(found, torch.zeros(5), atol=1e-4, rtol=0)
    moved = within(x, torch.full((5, 1), 0.5))
    assert (moved.norm(dim=1) <= 0.5 + 1e-6).all()


def test_rates_are_those_that_the_search_found_best():
    searched = {}
    for unit in plan(CERTIFIED.whole):
        if unit.task.held_out and CONTENDERS[unit.task.method].installed:
            share = 1.0 - abs(math.log(unit.task.lr / 0.02))
            series = {"radius": RADII, "said": [share] * len(RADII)}
            options = RunOptions("full", 0, "cpu", 1)
            request = Request("certified", 1, unit.name, options, asdict(unit.task), {})
            result = Result(series, {"accuracy": share})
            searched[unit.name] = Record(request, result, {}, 1.0, "")
    found = chosen_rates(Records(searched))
    assert found[LANDING] == 0.03
    assert found[FREE] == 0.01
    assert len(search_table(Records(searched))) == 1 + len(searched)


def test_a_small_run_from_end_to_end(store, watcher):
    pixels = torch.randint(0, 256, (120, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(120) % 10
    data = Dataset("CIFAR-10", pixels, labels, pixels[:20], labels[:20])
    source = type("Source", (), {"identity": "noise", "load": lambda self: data})()
    tiny = replace(
        CERTIFIED,
        settings={"smoke": SETTINGS},
        plan=lambda settings: [u for u in plan(settings) if u.task.method in (LANDING, FREE)][-2:],
    )
    options = RunOptions("smoke", 0, "cpu", 1, "noise")
    run = run_study(tiny, options, store, watcher, source)
    assert not run.missing
    landing = run.records[f"{LANDING}-seed0"]
    assert landing.value("changed") == 0
    assert landing.value("bound") <= landing.value("said_bound")
    assert isinstance(small_cnn(CONTENDERS[LANDING])[0], OrthogonalConv2d)
    assert isinstance(small_cnn(CONTENDERS[FREE])[1], MaxMin)
