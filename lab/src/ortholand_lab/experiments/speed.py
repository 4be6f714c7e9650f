"""Time of one step as p grows (the paper's figure 2): landing and the four retractions.

A step begins with the Euclidean gradient G and ends with the next iterate. Retractions are timed
in three forms: as a short program has them, the formulas of the paper's table 1 by torch's
functions; as carefully as this library writes them; and as a whole step of an optimizer.
"""

import math
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ortholand.fields import landing_field, penalty_field
from ortholand.geometry import random_orthogonal, relative_gradient
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.retractions import Retraction, retract
from ortholand_lab.experiments.descents import FASTER
from ortholand_lab.study.figures import DOTS, METHOD_STYLES, add_legend, label_plainly, plot_method
from ortholand_lab.study.records import MissingRecordError, Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import Action, time_in_turn
from ortholand_lab.textbook import TEXTBOOK_RETRACTIONS

# What is run.


TEXTBOOK, CAREFUL, OPTIMIZER = "textbook", "careful", "optimizer"  # forms of a step
WARM_UP = 1  # repetitions that do not count


@dataclass(frozen=True)
class SpeedSettings:
    """The paper uses 500 repetitions on a GPU, and does not say how long the steps are."""

    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1000, 2000)
    repetitions: int = 500  # at most
    least_repetitions: int = 7
    work: float = 2e10  # fewer repetitions where they times p^3 would exceed it
    lr: float = 0.1
    lam: float = 1.0


@dataclass(frozen=True)
class SpeedTask:
    """Steps of all methods at one size, timed in turn."""

    p: int
    settings: SpeedSettings  # of the whole run: claims are about all its sizes

    @property
    def repetitions(self) -> int:
        """The number of repetitions, fewer for large matrices."""
        by_work = int(self.settings.work / self.p**3)
        return min(self.settings.repetitions, max(self.settings.least_repetitions, by_work))


def unit_name(p: int) -> str:
    """Name of the unit of a size."""
    return f"p-{p}"


def plan(settings: SpeedSettings) -> list[Unit[SpeedTask]]:
    """A unit for each size."""
    tasks = [SpeedTask(p, settings) for p in settings.sizes]
    return [Unit(unit_name(t.p), t, WARM_UP + t.repetitions, timed=True) for t in tasks]


def run(task: SpeedTask, context: Context) -> Result:
    """Time every action in turn, as often as requested."""
    seconds = time_in_turn(
        make_actions(task, context),
        repetitions=task.repetitions,
        warm_up=WARM_UP,
        device=context.device,
        tick=context.tick,
    )
    return Result(seconds, {})


def make_actions(task: SpeedTask, context: Context) -> dict[str, Action]:
    """Steps from a random rotation with a random gradient, whose singular values are about 1."""
    X = random_orthogonal(task.p, task.p, seed=context.seed)
    generator = torch.Generator().manual_seed(context.seed + 1)
    G = torch.randn(task.p, task.p, generator=generator) / math.sqrt(task.p)
    X, G = X.to(context.device), G.to(context.device)
    lr, lam = task.settings.lr, task.settings.lam
    actions = {
        "landing": Action(lambda: X - lr * landing_field(X, G, lam)),
        "landing-field": Action(lambda: landing_field(X, G, lam)),
        "penalty-field": Action(lambda: penalty_field(X, G, lam)),
        form_name(OPTIMIZER, "landing"): optimizer_action(LandingSGD, X, G, lr=lr, lam=lam),
    }
    for name, textbook in TEXTBOOK_RETRACTIONS.items():
        for form, function in ((TEXTBOOK, textbook), (CAREFUL, partial(retract, method=name))):
            actions[form_name(form, name)] = Action(partial(riemannian_step, function, X, G, lr))
        actions[form_name(OPTIMIZER, name)] = optimizer_action(
            RiemannianSGD, X, G, lr=lr, retraction=name
        )
    return actions


def form_name(form: str, method: str) -> str:
    """Name of the action for a step of a method in a form; landing has only one formula."""
    return "landing" if method == "landing" and form != OPTIMIZER else f"{form}-{method}"


def riemannian_step(retraction: Retraction, X: Tensor, G: Tensor, lr: float) -> Tensor:
    """A step of Riemannian gradient descent."""
    return retraction(X, -lr * relative_gradient(X, G))


def optimizer_action(
    kind: type[LandingSGD] | type[RiemannianSGD], X: Tensor, G: Tensor, **options: float | str
) -> Action:
    """An optimizer's step, each time from the same X, because its cost depends on its length."""
    parameter = nn.Parameter(X.clone())
    parameter.grad = G.clone()
    optimizer = kind([parameter], **options)  # pyrefly: ignore
    return Action(optimizer.step, partial(parameter.data.copy_, X))


# What is claimed.


LARGE = 100  # sizes from here on are what the claims speak of
PAPER_FACTOR, ABOUT = 8.0, 1.5  # "about 8 times faster": that, within this factor
EIGHT = 8.0  # "about 8 times as costly", for twice the size
ORDER_OF_MAGNITUDE = 10.0
HALF_MORE = (1.25, 1.75)  # ratios that round to "50 % more" rather than to none or twice


def all_sizes(records: Records) -> dict[int, Record]:
    """The record of every size, smallest first."""
    return {p: records[unit_name(p)] for p in sorted(records.settings["sizes"])}


def large_sizes(records: Records) -> dict[int, Record]:
    """The records of the sizes that the claims refer to."""
    large = {p: record for p, record in all_sizes(records).items() if p >= LARGE}
    if not large:
        raise MissingRecordError(f"no size of {LARGE} or more at this preset")
    return large


def seconds_of(record: Record, action: str) -> float:
    """Median time of an action."""
    return median(record.series(action))


def ratios(record: Record, form: str) -> dict[str, float]:
    """Time of a step of each retraction, relative to landing's."""
    landing = seconds_of(record, form_name(form, "landing"))
    return {m: seconds_of(record, form_name(form, m)) / landing for m in TEXTBOOK_RETRACTIONS}


def large_ratios(form: str, records: Records) -> dict[int, dict[str, float]]:
    """:func:`ratios` for every large size."""
    return {p: ratios(record, form) for p, record in large_sizes(records).items()}


def landing_is_faster(form: str, records: Records) -> Finding:
    """Whether landing is faster than every retraction, at every large size."""
    found = large_ratios(form, records)
    return Finding.of(_ranges(found), _least(found) > FASTER)


def about_eight_times(anywhere: bool, records: Records) -> Finding:
    """Every retraction takes about 8 times as long or more; the paper says so of a GPU."""
    found = large_ratios(TEXTBOOK, records)
    if not anywhere and _on_cpu(records):
        return Finding("not run on a GPU", Verdict.OPEN)
    return Finding.of(_ranges(found), _least(found) > PAPER_FACTOR / ABOUT)


def exponential_is_fastest(records: Records) -> Finding:
    """Whether the exponential is the fastest by torch's functions; the paper's are on a GPU."""
    found = large_ratios(TEXTBOOK, records)
    fastest = {p: min(of, key=of.__getitem__) for p, of in found.items()}
    named = ", ".join(f"p = {p}: {METHOD_STYLES[name].label}" for p, name in fastest.items())
    measured = f"on {_device(records)} the fastest at {named}"
    if _on_cpu(records):
        return Finding(f"{measured}; not run on a GPU", Verdict.OPEN)
    return Finding.of(measured, set(fastest.values()) == {"exponential"})


def polar_is_slowest_by_far(records: Records) -> Finding:
    """Whether polar is far slower than any other retraction; the paper says so of a GPU."""
    factors = [
        of["polar"] / max(ratio for name, ratio in of.items() if name != "polar")
        for of in large_ratios(TEXTBOOK, records).values()
    ]
    low, high = min(factors), max(factors)
    measured = f"{low:.1f} to {high:.1f} times the slowest other, on {_device(records)}"
    if _on_cpu(records):
        return Finding(f"{measured}; not run on a GPU", Verdict.OPEN)
    return Finding.of(measured, low >= ORDER_OF_MAGNITUDE)


def field_costs_half_more(records: Records) -> Finding:
    """Three products against two, at every large size; not decided where times scatter more."""
    named, verdicts = [], []
    for p, record in large_sizes(records).items():
        turns = zip(record.series("landing-field"), record.series("penalty-field"), strict=True)
        low, middle, high = quantiles([a / b for a, b in turns], n=4, method="inclusive")
        named.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) at p = {p}")
        inside = HALF_MORE[0] < low and high < HALF_MORE[1]
        beyond = high <= HALF_MORE[0] or low >= HALF_MORE[1]
        verdicts.append(Verdict.of(inside) if inside or beyond else Verdict.OPEN)
    measured = f"in its time, median and quartiles: {', '.join(named)}"
    return Finding(measured, Verdict.worst(verdicts))


def exponential_at_twice_the_size(records: Records) -> Finding:
    """A textbook step by the exponential at 2p in units of that at p, the largest of such pairs."""
    runs = large_sizes(records)
    pairs = [p for p in runs if 2 * p in runs]
    if not pairs:
        return Finding(f"no sizes p >= {LARGE} and 2p at this preset", Verdict.OPEN)
    p = max(pairs)
    name = form_name(TEXTBOOK, "exponential")
    factor = seconds_of(runs[2 * p], name) / seconds_of(runs[p], name)
    measured = f"{factor:.1f} times from p = {p} to {2 * p}"
    return Finding.of(measured, EIGHT / ABOUT <= factor <= EIGHT * ABOUT)


def _least(found: dict[int, dict[str, float]]) -> float:
    return min(min(of.values()) for of in found.values())


def _ranges(found: dict[int, dict[str, float]]) -> str:
    """How the ratios vary over the sizes."""
    listed = ", ".join(
        f"{METHOD_STYLES[name].label} {min(of[name] for of in found.values()):.1f} to "
        f"{max(of[name] for of in found.values()):.1f}"
        for name in TEXTBOOK_RETRACTIONS
    )
    return f"p = {min(found)} to {max(found)}, in landing's time: {listed}"


def _device(records: Records) -> str:
    return next(iter(records.values())).request.options.device


def _on_cpu(records: Records) -> bool:
    return _device(records).startswith("cpu")


CLAIMS = (
    Claim.of_paper(
        f"For p >= {LARGE} a step of landing takes less time than one of each retraction, by "
        f"more than {FASTER - 1:.0%}.",
        "In higher dimension, the landing algorithm is much cheaper than the retraction method.",
        partial(landing_is_faster, TEXTBOOK),
        partial(landing_is_faster, CAREFUL),
    ),
    Claim.beyond(
        "The same holds of whole steps of our optimizers: LandingSGD with its safe step, and "
        "RiemannianSGD.",
        partial(landing_is_faster, OPTIMIZER),
    ),
    Claim.of_paper(
        f"On a GPU landing is about {PAPER_FACTOR:.0f} times faster than the retractions (each "
        f"takes at least {PAPER_FACTOR / ABOUT:.1f} times as long, p >= {LARGE}).",
        "The proposed method is about 8 times faster than retraction methods.",
        partial(about_eight_times, False),
    ),
    Claim.beyond(
        f"On the device of this run, too, it is about {PAPER_FACTOR:.0f} times faster.",
        partial(about_eight_times, True),
    ),
    Claim.of_paper(
        "Of the retractions the exponential is the fastest in torch, on a GPU.",
        "We only compare to the exponential retraction, since in Pytorch it is the fastest "
        "retraction.",
        exponential_is_fastest,
    ),
    Claim.of_paper(
        "On a GPU the projection (polar) retraction is orders of magnitude more costly than "
        "the others.",
        "the projection retraction, which is orders of magnitude more costly to compute than "
        "other retractions on a GPU",
        polar_is_slowest_by_far,
    ),
    Claim.of_paper(
        "The landing field takes 50 % more time than the gradient of the penalty method, three "
        f"products instead of two (given the gradient of f, p >= {LARGE}; 25 to 75 %).",
        "computing the landing field is only 50% more costly than the gradient of g",
        field_costs_half_more,
    ),
    Claim.of_paper(
        "The exponential at size 2p, which a trivialization's gradient needs, costs about 8 times "
        f"as much as at size p (a whole step, within a factor {ABOUT}).",
        "it is about 8 times as costly as computing the exp of a p x p matrix",
        exponential_at_twice_the_size,
    ),
)


# How it is drawn.


def draw_times(records: Records) -> Figure:
    """The paper's figure, and the same in units of landing's time."""
    figure = Figure(figsize=(8, 4))
    times, relative = figure.subplots(1, 2)
    runs = all_sizes(records)
    for method in ("landing", *TEXTBOOK_RETRACTIONS):
        name = form_name(TEXTBOOK, method)
        seconds = [seconds_of(run, name) for run in runs.values()]
        plot_method(times, method, list(runs), seconds, **DOTS)
    times.set(xscale="log", yscale="log", xlabel="p", ylabel="time of a step, seconds")
    _draw_ratios(relative, runs, TEXTBOOK)
    relative.set_ylabel("in units of landing's time")
    add_legend(figure, times)
    return figure


def draw_forms(records: Records) -> Figure:
    """Ratios for carefully written retractions, and for whole optimizers."""
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2, sharey=True)
    titles = {CAREFUL: "carefully written formulas", OPTIMIZER: "optimizers, whole steps"}
    for axes, (form, title) in zip(panels, titles.items(), strict=True):
        _draw_ratios(axes, all_sizes(records), form)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("in units of landing's time")
    add_legend(figure, panels[0])
    return figure


def _draw_ratios(axes: Axes, runs: dict[int, Record], form: str) -> None:
    plot_method(axes, "landing", list(runs), [1.0] * len(runs))
    for method in TEXTBOOK_RETRACTIONS:
        found = [ratios(run, form)[method] for run in runs.values()]
        plot_method(axes, method, list(runs), found, **DOTS)
    axes.set(xscale="log", yscale="log", xlabel="p")
    label_plainly(axes.yaxis)


FIGURES = (
    FigureSpec(
        "speed",
        "Time of one step as p grows, float32, one thread: landing, and the four retractions "
        "by torch's functions. Left: seconds. Right: in units of landing's time.",
        draw_times,
    ),
    FigureSpec(
        "speed-forms",
        "The same ratios where the retractions are written as carefully as in this library "
        "(left), and for whole steps of optimizers, landing's safe step included (right).",
        draw_forms,
    ),
)


SPEED = Study(
    name="speed",
    title="Time of a step as p grows",
    paper_figure="Figure 2",
    summary=(
        "One step from a random p x p rotation with a random gradient whose singular values are "
        "about 1, step size 0.1, in float32: from the Euclidean gradient to the next iterate, by "
        "landing (field and update) and by the four retractions. Retractions are the paper's "
        "formulas by torch's functions (matrix_exp, svd, solve, qr); the library's own, with "
        "series for short steps and Cholesky's factorisation for QR; and whole steps of "
        "optimizers, LandingSGD with its safe step against RiemannianSGD. All take turns on one "
        "thread, and medians are compared. The paper times 500 repetitions on a GPU; here there "
        "are fewer for large matrices, and smoke and quick end at smaller sizes. A run on a CPU "
        "does not decide what the paper says of a GPU."
    ),
    settings={
        "smoke": SpeedSettings(sizes=(10, 30, 60), repetitions=30),
        "quick": SpeedSettings(
            sizes=(10, 20, 50, 100, 200, 500, 1000), repetitions=60, work=1.25e9
        ),
        "paper": SpeedSettings(),
    },
    plan=plan,
    run=run,
    claims=CLAIMS,
    figures=FIGURES,
    seconds={"smoke": 3, "quick": 35, "paper": 360},
)
