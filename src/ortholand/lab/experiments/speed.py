"""Time of one step as p grows (the paper's figure 2): landing beside the four retractions.

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
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from torch import Tensor, nn

from ortholand.fields import landing_field, penalty_field
from ortholand.geometry import polar_projection, random_orthogonal, relative_gradient
from ortholand.geometry.manifold import orthonormal_factor
from ortholand.geometry.matrices import identity_like
from ortholand.lab.study.figures import METHOD_STYLES, plot_method
from ortholand.lab.study.records import MissingRecordError, Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.lab.study.timing import Action, time_in_turn
from ortholand.optim import LandingSGD, RiemannianSGD
from ortholand.retractions import Retraction, retract

RETRACTIONS = ("exponential", "polar", "cayley", "qr")
TEXTBOOK, CAREFUL, OPTIMIZER = "textbook", "careful", "optimizer"  # forms of a step
LARGE = 100  # sizes from here on are what the claims speak of
FASTER = 1.05  # times that differ by less than this factor count as the same
PAPER_FACTOR, ABOUT = 8.0, 1.5  # "about 8 times faster": that, within this factor
ORDER_OF_MAGNITUDE = 10.0
HALF_MORE = (1.25, 1.75)  # ratios that round to "50 % more" rather than to none or twice


@dataclass(frozen=True)
class Settings:
    """The paper has 500 repetitions on a GPU, and does not say how long the steps are."""

    sizes: tuple[int, ...] = (10, 20, 50, 100, 200, 500, 1000, 2000)
    repetitions: int = 500  # at most
    least_repetitions: int = 7
    work: float = 2e10  # fewer repetitions where they times p^3 would exceed it
    lr: float = 0.1
    lam: float = 1.0


@dataclass(frozen=True)
class Task:
    """Steps of all methods at one size, timed in turn."""

    p: int
    repetitions: int
    lr: float
    lam: float
    sizes: tuple[int, ...]  # of the whole run: claims are about all of them


def unit_name(p: int) -> str:
    """Name of the unit of a size."""
    return f"p-{p}"


def plan(settings: Settings) -> list[Unit[Task]]:
    """A unit for each size."""
    units = []
    for p in settings.sizes:
        by_work = max(settings.least_repetitions, int(settings.work / p**3))
        repetitions = min(settings.repetitions, by_work)
        task = Task(p, repetitions, settings.lr, settings.lam, settings.sizes)
        units.append(Unit(unit_name(p), task, repetitions))
    return units


def run(task: Task, context: Context) -> Result:
    """Time every action as often as asked, in turn."""
    actions = make_actions(task, context)
    seconds = time_in_turn(
        actions, repetitions=task.repetitions, device=context.device, tick=context.tick
    )
    return Result(seconds, {})


def make_actions(task: Task, context: Context) -> dict[str, Action]:
    """Steps from a random rotation with a random gradient, whose singular values are about 1."""
    X = random_orthogonal(task.p, task.p, seed=context.seed)
    generator = torch.Generator().manual_seed(context.seed + 1)
    G = torch.randn(task.p, task.p, generator=generator) / math.sqrt(task.p)
    X, G = X.to(context.device), G.to(context.device)
    lr, lam = task.lr, task.lam
    actions = {
        "landing": Action(lambda: X - lr * landing_field(X, G, lam)),
        "landing-field": Action(lambda: landing_field(X, G, lam)),
        "penalty-field": Action(lambda: penalty_field(X, G, lam)),
        form_name(OPTIMIZER, "landing"): optimizer_action(LandingSGD, X, G, lr=lr, lam=lam),
    }
    for name in RETRACTIONS:
        careful = partial(retract, method=name)
        for form, function in ((TEXTBOOK, TEXTBOOK_RETRACTIONS[name]), (CAREFUL, careful)):
            actions[form_name(form, name)] = Action(partial(riemannian_step, function, X, G, lr))
        actions[form_name(OPTIMIZER, name)] = optimizer_action(
            RiemannianSGD, X, G, lr=lr, retraction=name
        )
    return actions


def form_name(form: str, method: str) -> str:
    """Name of the action that is a step of a method in a form; landing has one formula only."""
    return "landing" if method == "landing" and form != OPTIMIZER else f"{form}-{method}"


def riemannian_step(retraction: Retraction, X: Tensor, G: Tensor, lr: float) -> Tensor:
    """A step of Riemannian gradient descent."""
    return retraction(X, -lr * relative_gradient(X, G))


def optimizer_action(
    kind: type[LandingSGD] | type[RiemannianSGD], X: Tensor, G: Tensor, **options: float | str
) -> Action:
    """An optimizer's step, each time from the same X: how long it is decides how it is done."""
    parameter = nn.Parameter(X.clone())
    parameter.grad = G.clone()
    optimizer = kind([parameter], **options)  # pyrefly: ignore
    return Action(optimizer.step, partial(parameter.data.copy_, X))


# The paper's table 1, as a short program has it.


def exponential(X: Tensor, A: Tensor) -> Tensor:
    """``exp(A) X``."""
    return torch.linalg.matrix_exp(A) @ X


def polar(X: Tensor, A: Tensor) -> Tensor:
    """Nearest orthogonal matrix to ``X + A X``, by its singular value decomposition."""
    return polar_projection(X + A @ X)


def cayley(X: Tensor, A: Tensor) -> Tensor:
    """``(I - A/2)^-1 (I + A/2) X``."""
    identity = identity_like(A)
    return torch.linalg.solve(identity - A / 2, (identity + A / 2) @ X)


def qr(X: Tensor, A: Tensor) -> Tensor:
    """Q of ``X + A X`` by Householder's method."""
    return orthonormal_factor(X + A @ X)


TEXTBOOK_RETRACTIONS: dict[str, Retraction] = {
    "exponential": exponential,
    "polar": polar,
    "cayley": cayley,
    "qr": qr,
}


# Claims.


def all_sizes(records: Records) -> list[Record]:
    """The record of every size, smallest first."""
    if not records:
        raise MissingRecordError("no size is recorded")
    sizes = next(iter(records.values())).configuration["sizes"]
    return [records[unit_name(p)] for p in sorted(sizes)]


def large_sizes(records: Records) -> list[Record]:
    """Those that the claims speak of."""
    return [record for record in all_sizes(records) if record.configuration["p"] >= LARGE]


def seconds_of(record: Record, action: str) -> float:
    """Median time of an action."""
    return median(record.series(action))


def ratios(record: Record, form: str) -> dict[str, float]:
    """Time of a step of each retraction, in the time of landing's."""
    landing = seconds_of(record, form_name(form, "landing"))
    return {name: seconds_of(record, form_name(form, name)) / landing for name in RETRACTIONS}


def landing_is_faster(form: str, records: Records) -> Finding:
    """At every large size, than every retraction."""
    found = [ratios(record, form) for record in large_sizes(records)]
    if not found:
        return _no_large_size()
    holds = min(min(ratio.values()) for ratio in found) > FASTER
    return Finding(_ranges(records, form), Verdict.of(holds))


def about_eight_times(anywhere: bool, records: Records) -> Finding:
    """Every retraction takes about 8 times as long or more; the paper says so of a GPU."""
    found = [ratios(record, TEXTBOOK) for record in large_sizes(records)]
    if not found:
        return _no_large_size()
    holds = min(min(ratio.values()) for ratio in found) > PAPER_FACTOR / ABOUT
    if anywhere or _on_gpu(records):
        return Finding(_ranges(records, TEXTBOOK), Verdict.of(holds))
    return Finding("not run on a GPU", Verdict.OPEN)


def exponential_is_fastest(records: Records) -> Finding:
    """Of the retractions, by torch's functions."""
    found = [ratios(record, TEXTBOOK) for record in large_sizes(records)]
    if not found:
        return _no_large_size()
    fastest = [min(ratio, key=lambda name, of=ratio: of[name]) for ratio in found]
    sizes = [record.configuration["p"] for record in large_sizes(records)]
    named = ", ".join(
        f"p = {p}: {METHOD_STYLES[name].label}" for p, name in zip(sizes, fastest, strict=True)
    )
    return Finding(f"fastest at {named}", Verdict.of(set(fastest) == {"exponential"}))


def polar_is_slowest_by_far(records: Records) -> Finding:
    """Than any other retraction; the paper says so of a GPU."""
    found = [ratios(record, TEXTBOOK) for record in large_sizes(records)]
    if not found:
        return _no_large_size()
    factors = [
        ratio["polar"] / max(ratio[n] for n in RETRACTIONS if n != "polar") for ratio in found
    ]
    device = records[next(iter(records))].request.options.device
    measured = f"{min(factors):.1f} to {max(factors):.1f} times the slowest other, on {device}"
    if not _on_gpu(records):
        return Finding(f"{measured}; not run on a GPU", Verdict.OPEN)
    return Finding(measured, Verdict.of(min(factors) >= ORDER_OF_MAGNITUDE))


def field_costs_half_more(records: Records) -> Finding:
    """Three products beside two, at every large size; not decided where the times scatter more."""
    if not large_sizes(records):
        return _no_large_size()
    listed, verdicts = [], set()
    for record in large_sizes(records):
        low, middle, high = _quartiles(record, "landing-field", "penalty-field")
        listed.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) at p = {record.configuration['p']}")
        inside = [HALF_MORE[0] < ratio < HALF_MORE[1] for ratio in (low, high)]
        beyond = high <= HALF_MORE[0] or low >= HALF_MORE[1]
        verdicts.add(Verdict.FAILS if beyond else Verdict.HOLDS if all(inside) else Verdict.OPEN)
    worst = next(v for v in (Verdict.FAILS, Verdict.OPEN, Verdict.HOLDS) if v in verdicts)
    return Finding(f"in its time, median and quartiles: {', '.join(listed)}", worst)


def _quartiles(record: Record, action: str, other: str) -> list[float]:
    """Of the ratio of two actions that were timed one after the other, turn by turn."""
    pairs = zip(record.series(action), record.series(other), strict=True)
    return quantiles([a / b for a, b in pairs], n=4, method="inclusive")


def _ranges(records: Records, form: str) -> str:
    """How the ratios vary over the large sizes."""
    found = {record.configuration["p"]: ratios(record, form) for record in large_sizes(records)}
    listed = ", ".join(
        f"{METHOD_STYLES[name].label} {min(r[name] for r in found.values()):.1f} to "
        f"{max(r[name] for r in found.values()):.1f}"
        for name in RETRACTIONS
    )
    return f"p = {min(found)} to {max(found)}, in landing's time: {listed}"


def _no_large_size() -> Finding:
    return Finding(f"no size of {LARGE} or more at this preset", Verdict.OPEN)


def _on_gpu(records: Records) -> bool:
    return not next(iter(records.values())).request.options.device.startswith("cpu")


# Figures.


def draw_times(records: Records) -> Figure:
    """The paper's figure, and the same in units of landing's time."""
    figure = Figure(figsize=(8, 4))
    times, relative = figure.subplots(1, 2)
    runs = all_sizes(records)
    sizes = [record.configuration["p"] for record in runs]
    for method in ("landing", *RETRACTIONS):
        name = form_name(TEXTBOOK, method)
        plot_method(times, method, sizes, [seconds_of(record, name) for record in runs])
        times.lines[-1].set(marker="o", markersize=3)
    times.set(xscale="log", yscale="log", xlabel="p", ylabel="time of a step, seconds")
    _draw_ratios(relative, runs, TEXTBOOK)
    relative.set_ylabel("in units of landing's time")
    _add_legend(figure, times)
    return figure


def draw_forms(records: Records) -> Figure:
    """Ratios for retractions that are written carefully, and for whole optimizers."""
    figure = Figure(figsize=(8, 4))
    panels = figure.subplots(1, 2, sharey=True)
    titles = {CAREFUL: "carefully written formulas", OPTIMIZER: "optimizers, whole steps"}
    for axes, (form, title) in zip(panels, titles.items(), strict=True):
        _draw_ratios(axes, all_sizes(records), form)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("in units of landing's time")
    _add_legend(figure, panels[0])
    return figure


def _draw_ratios(axes: Axes, runs: list[Record], form: str) -> None:
    sizes = [record.configuration["p"] for record in runs]
    plot_method(axes, "landing", sizes, [1.0] * len(sizes))
    for method in RETRACTIONS:
        plot_method(axes, method, sizes, [ratios(record, form)[method] for record in runs])
        axes.lines[-1].set(marker="o", markersize=3)
    axes.set(xscale="log", yscale="log", xlabel="p")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


SPEED = Study(
    name="speed",
    title="Time of a step as p grows",
    paper_figure="Figure 2",
    summary=(
        "One step from a random p x p rotation with a random gradient whose singular values are "
        "about 1, step size 0.1, in float32: from the Euclidean gradient to the next iterate, by "
        "landing (field and update) and by the four retractions. Formulas are taken from the "
        "paper's table by way of torch's functions (matrix_exp, svd, solve, qr); beside them "
        "stand the library's retractions, which use series for short steps and Cholesky's "
        "factorisation for QR, and the steps of whole optimizers, LandingSGD with its safe step "
        "against RiemannianSGD. The methods take turns, and medians are compared, on one thread. "
        "The paper times 500 repetitions on a GPU; here there are fewer for large matrices, and "
        "smoke and quick end at smaller sizes. What the paper says of a GPU is not decided by a "
        "run on a CPU."
    ),
    settings={
        "smoke": Settings(sizes=(10, 30, 60), repetitions=30),
        "quick": Settings(
            sizes=(10, 20, 50, 100, 200, 500, 1000),
            repetitions=60,
            work=1.25e9,
        ),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            f"For p >= {LARGE} a step of landing takes less time than one of each retraction, by "
            f"more than {FASTER - 1:.0%}: the paper's formulas by torch's functions.",
            "paper",
            partial(landing_is_faster, TEXTBOOK),
        ),
        Claim(
            "The same, beside retractions that are written as carefully as this library's.",
            "beyond the paper",
            partial(landing_is_faster, CAREFUL),
        ),
        Claim(
            "The same for whole steps of optimizers: LandingSGD with its safe step, and "
            "RiemannianSGD.",
            "beyond the paper",
            partial(landing_is_faster, OPTIMIZER),
        ),
        Claim(
            f"On a GPU landing is about {PAPER_FACTOR:.0f} times faster than the retractions (each "
            f"takes at least {PAPER_FACTOR / ABOUT:.1f} times as long, p >= {LARGE}).",
            "paper",
            partial(about_eight_times, False),
        ),
        Claim(
            f"On the device of this run, too, it is about {PAPER_FACTOR:.0f} times faster.",
            "beyond the paper",
            partial(about_eight_times, True),
        ),
        Claim(
            "Of the retractions the exponential is the fastest in torch.",
            "paper",
            exponential_is_fastest,
        ),
        Claim(
            "On a GPU the projection (polar) retraction is orders of magnitude more costly than "
            "the others.",
            "paper",
            polar_is_slowest_by_far,
        ),
        Claim(
            "The landing field takes 50 % more time than the gradient of the penalty method, three "
            f"products beside two (given the gradient of f, p >= {LARGE}; 25 to 75 %).",
            "paper",
            field_costs_half_more,
        ),
    ),
    figures=(
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
    ),
    threads=1,
    seconds={"smoke": 3, "quick": 35, "paper": 360},
)
