"""Figures and tables: directions against inner steps, and training results."""

import math
from statistics import fmean, stdev

from matplotlib.figure import Figure

from ortholand.lab.benchmarks.muon.claims import (
    cases_of,
    judged,
    needed,
    our_quality,
    tall_cases,
    time_of,
    tried_in,
    tuning,
)
from ortholand.lab.benchmarks.muon.contenders import CONTENDERS
from ortholand.lab.benchmarks.muon.directions import PUBLISHED_RATE
from ortholand.lab.benchmarks.muon.runs import STEP_TIMES
from ortholand.lab.benchmarks.muon.searches import TANGENCY, VALUE, Case
from ortholand.lab.study.figures import add_legend
from ortholand.lab.study.records import MissingRecordError, Records
from ortholand.lab.study.spec import FigureSpec, TableSpec

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = {"gaussian": "-", "decaying": "--", "network": ":"}  # by the kind of the gradient


def draw(records: Records) -> Figure:
    """Value and tangency against inner steps with the published rate; ours at its cost."""
    figure = Figure(figsize=(8, 4.6))
    value, tangency = figure.subplots(1, 2)
    cases = tall_cases(records)
    shapes = list(dict.fromkeys((case.rows, case.columns) for case in cases))
    for case in cases:
        colour = COLOURS[shapes.index((case.rows, case.columns)) % len(COLOURS)]
        look = dict(color=colour, linestyle=DASHES[case.kind], linewidth=1.3)
        search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
        curve = [t for t in tried_in(search) if t.rate == PUBLISHED_RATE]
        steps, ours = [t.steps for t in curve], our_quality(search)
        x = cost.value("ours") / cost.value("inner_step")
        point = dict(color=colour, marker="o", linestyle="none", clip_on=False)
        value.plot(steps, [abs(t.value - 1) for t in curve], label=case.name, **look)
        value.plot([x], [abs(ours.value - 1)], **point)
        tangency.plot(steps, [t.tangency for t in curve], **look)
        tangency.plot([x], [ours.tangency], **point)
    for axes, bound, title in (
        (value, VALUE, "distance of the value from the optimum"),
        (tangency, TANGENCY, r"$\|\mathrm{Sym}(X^\top R)\| / \|R\|$"),
    ):
        axes.axhline(bound, color="#7F7F7F", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="inner steps of the dual ascent", title=title)
    add_legend(figure, value, 4)
    return figure


def direction_table(records: Records) -> list[list[str]]:
    """How many inner steps each case needs, and their cost compared with ours."""
    head = [
        *("case", "inner steps", "with the best rate", "our value", "our tangency"),
        *("inner step, ms", "our step, ms", "ours / dual ascent", "with the best rate"),
    ]
    return [head, *(_direction_row(case, records) for case in cases_of(records))]


def _direction_row(case: Case, records: Records) -> list[str]:
    search, cost = records[f"search-{case.name}"], records[f"cost-{case.name}"]
    cap, ours = search.configuration["cap"], our_quality(search)
    counts = [needed(search, rate) for rate in (PUBLISHED_RATE, None)]
    shares = [cost.value("ours") / time_of(case, records, r) for r in (PUBLISHED_RATE, None)]
    return [
        case.name.replace("-", " "),
        *(f"not in {cap:,}" if math.isinf(count) else f"{count:,.0f}" for count in counts),
        f"{ours.value:.4f}",
        f"{ours.tangency:.0e}",
        f"{1e3 * cost.value('inner_step'):.2f}",
        f"{1e3 * cost.value('ours'):.2f}",
        *(f"{'< ' * math.isinf(n)}{s:.2g}" for n, s in zip(counts, shares, strict=True)),
    ]


def training_table(records: Records) -> list[list[str]]:
    """A row for each trained method, the most accurate first."""
    head = [
        *("method", "lr", "test accuracy", "loss", "step, ms", "value", "tangency"),
        *("largest ‖XᵀX − I‖", "largest singular value"),
    ]
    rows = []
    for method, contender in CONTENDERS.items():
        if (unit := f"training-{method}") in records:
            outcomes = judged(records[unit])
            accuracy = [100 * o.accuracy for o in outcomes]
            spread = f" ± {stdev(accuracy):.2f}" if len(accuracy) > 1 else ""
            milliseconds = 1e3 * records[STEP_TIMES].value(method)
            row = [
                contender.label,
                f"{records[unit].value('best'):g}",
                f"{fmean(accuracy):.2f}{spread} %",
                f"{fmean(o.loss for o in outcomes):.3f}",
                f"{milliseconds:.2f}",
                _or_dash(fmean(o.value for o in outcomes), ".3f"),
                _or_dash(max(o.tangency for o in outcomes), ".0e"),
                f"{max(o.error for o in outcomes):.0e}" if contender.constrained else "-",
                f"{max(o.singular for o in outcomes):.4g}",
            ]
            rows.append((-fmean(accuracy), row))
    if not rows:
        raise MissingRecordError("no training is recorded")
    return [head, *(row for _, row in sorted(rows))]


def _or_dash(number: float, form: str) -> str:
    return "-" if math.isnan(number) else f"{number:{form}}"


def rates_table(records: Records) -> list[list[str]]:
    """The accuracies by which learning rates were chosen."""
    rows = []
    for method, contender in CONTENDERS.items():
        if (unit := f"training-{method}") in records:
            tried: dict[float, list[float]] = {}
            for outcome in tuning(records[unit]):
                tried.setdefault(outcome.lr, []).append(100 * outcome.accuracy)
            cells = ", ".join(f"{lr:g}: {fmean(a):.2f}" for lr, a in sorted(tried.items()))
            rows.append([contender.label, cells])
    if not rows:
        raise MissingRecordError("no training is recorded")
    return [
        ["method", "learning rate: test accuracy, %, mean over the seeds it is chosen with"],
        *rows,
    ]


FIGURES = (
    FigureSpec(
        "muon-directions",
        "Dual ascent with its published rate: how far the value is from the optimum (left) and how "
        "far the direction is from tangent (right), against inner steps. Points: ours, at what its "
        "whole step costs in inner steps. Grey: good enough. Full lines: Gaussian gradients; "
        "dashed: singular values 1, 1/2, 1/3, ...; dotted: the network's own.",
        draw,
    ),
)
TABLES = (
    TableSpec(
        "muon-directions",
        "Inner steps of a dual ascent that is good enough, and ours",
        direction_table,
    ),
    TableSpec("muon-training", "The network on CIFAR-10", training_table),
    TableSpec("muon-rates", "How learning rates were chosen", rates_table),
)
