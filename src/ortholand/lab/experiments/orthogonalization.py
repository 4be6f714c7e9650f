"""Error after one step against the size of the gradient (the paper's figure 4).

A step begins near the manifold but not on it. The polar and QR retractions project whatever comes;
the exponential and Cayley retractions carry the error along; landing reduces it while the gradient
is small, and adds to it when the gradient is large.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ortholand.geometry import distance, gram_residual
from ortholand.lab.study.figures import METHOD_STYLES, plot_method
from ortholand.lab.study.records import Record, Records, Result
from ortholand.lab.study.spec import (
    Claim,
    Context,
    FigureSpec,
    Finding,
    Study,
    Unit,
    Verdict,
)
from ortholand.retractions import RETRACTIONS, retract

LANDING, AFTER = "landing", "landing-after"
METHODS = (LANDING, AFTER, "exponential", "polar", "cayley", "qr")
CARRIED = ("exponential", "cayley")  # that multiply X by an orthogonal matrix
DTYPES = ("float64", "float32")
SAME = 0.01  # errors that differ by less, relatively, count as the same
PAPER_FACTOR, ABOUT = 10.0, 1.5  # "a factor of about 10": that, within this factor


@dataclass(frozen=True)
class Settings:
    """The paper's settings are the defaults; it does not give its values of gamma."""

    p: int = 100
    sigma: float = 1e-4
    lr: float = 0.3
    lam: float = 1.0
    repetitions: int = 50
    smallest: float = 1e-5  # gamma
    largest: float = 1e4
    per_decade: int = 4


@dataclass(frozen=True)
class Task:
    """One step of a method in a precision, from every start and for every gamma."""

    method: str
    dtype: str
    p: int
    sigma: float
    lr: float
    lam: float
    repetitions: int
    gammas: tuple[float, ...]


def unit_name(method: str, dtype: str) -> str:
    """Name of the unit of a method in a precision."""
    return f"{method}-{dtype}"


def plan(settings: Settings) -> list[Unit[Task]]:
    """Every method in every precision."""
    gammas = gamma_grid(settings)
    return [
        Unit(
            unit_name(method, dtype),
            Task(
                method,
                dtype,
                settings.p,
                settings.sigma,
                settings.lr,
                settings.lam,
                settings.repetitions,
                gammas,
            ),
            len(gammas),
        )
        for dtype in DTYPES
        for method in METHODS
    ]


def gamma_grid(settings: Settings) -> tuple[float, ...]:
    """From the smallest to the largest, evenly on a logarithmic axis."""
    decades = math.log10(settings.largest / settings.smallest)
    count = round(decades * settings.per_decade)
    return tuple(settings.smallest * 10 ** (decades * i / count) for i in range(count + 1))


def run(task: Task, context: Context) -> Result:
    """One step for each gamma, from all starts at once; the errors are measured in float64."""
    columns: dict[str, list[float]] = {name: [] for name in ("gamma", "before", "after")}
    # All methods of a seed draw the same numbers.
    generator = torch.Generator().manual_seed(context.seed)
    for gamma in task.gammas:
        X, A = draw(task, gamma, generator)
        X, A = (M.to(context.device, getattr(torch, task.dtype)) for M in (X, A))
        moved = step(task, X, A)
        errors = [float(distance(M.double()).mean()) for M in (X, moved)]
        for column, number in zip(columns.values(), (gamma, *errors), strict=True):
            column.append(number)
        context.tick(1)
    return Result(columns, {})


def draw(task: Task, gamma: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Starts ``I + E`` with entries of E of size sigma, and skew A with entries of size gamma."""
    shape = (task.repetitions, task.p, task.p)
    E, N = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    lower = torch.tril(N, diagonal=-1)
    return torch.eye(task.p, dtype=E.dtype) + task.sigma * E, gamma * (lower - lower.mT)


def step(task: Task, X: Tensor, A: Tensor) -> Tensor:
    """A descent step in the direction of A: by the plain formulas, without a safe step.

    The paper writes ``+ eta A`` for retractions and ``- eta A`` for landing; here the sign is one.
    """
    if task.method in RETRACTIONS:
        return retract(X, -task.lr * A, task.method)
    if task.method == AFTER:
        Y = X - task.lr * A @ X
        return Y - Y @ gram_residual(Y) / 2
    return X - task.lr * (A + task.lam * gram_residual(X.mT)) @ X


# Claims. Where the paper says "small", the smallest gamma counts, and the largest for "large".


def ratios(run: Record) -> list[float]:
    """The error after the step in units of the error before, for each gamma."""
    return [a / b for a, b in zip(run.series("after"), run.series("before"), strict=True)]


def polar_projects(records: Records) -> Finding:
    """At every gamma: the error is one of rounding."""
    measured, holds = [], True
    for dtype in DTYPES:
        worst = max(records[unit_name("polar", dtype)].series("after"))
        p = records[unit_name("polar", dtype)].configuration["p"]
        holds = holds and worst < 10 * p * torch.finfo(getattr(torch, dtype)).eps
        measured.append(f"{dtype}: at most {worst:.1e}")
    return Finding("; ".join(measured), Verdict.of(holds))


def carried_when_small(records: Records) -> Finding:
    """The exponential and Cayley retractions at the smallest gamma."""
    found = {m: ratios(records[unit_name(m, "float64")])[0] for m in CARRIED}
    measured = ", ".join(f"{METHOD_STYLES[m].label} {r:.4f}" for m, r in found.items())
    return Finding(
        f"{measured} of the error before",
        Verdict.of(all(abs(r - 1) < SAME for r in found.values())),
    )


def increased_when_large(records: Records) -> Finding:
    """As printed: both retractions, in float64 or in float32."""
    increases = [all(_increases(records, m, dtype) for m in CARRIED) for dtype in DTYPES]
    return Finding(_list_largest(records), Verdict.of(any(increases)))


def carried_always(records: Records) -> Finding:
    """As corrected: an orthogonal factor changes no singular value, however long the step."""
    found = [ratio for m in CARRIED for ratio in ratios(records[unit_name(m, "float64")])]
    return Finding(
        _list_largest(records), Verdict.of(all(abs(ratio - 1) < SAME for ratio in found))
    )


def _increases(records: Records, method: str, dtype: str) -> list[float]:
    """The gammas for which a retraction increases the error."""
    run = records[unit_name(method, dtype)]
    return [g for g, r in zip(run.series("gamma"), ratios(run), strict=True) if r > 1 + SAME]


def _list_largest(records: Records) -> str:
    listed = []
    for dtype in DTYPES:
        for method in CARRIED:
            most = max(ratios(records[unit_name(method, dtype)]))
            gammas = _increases(records, method, dtype)
            where = f" (from gamma = {min(gammas):.3g} on)" if gammas else ""
            listed.append(f"{METHOD_STYLES[method].label} in {dtype} {most:.4f}{where}")
    largest = records[unit_name(CARRIED[0], DTYPES[0])].series("gamma")[-1]
    return f"times the error before, at most, up to gamma = {largest:g}: {', '.join(listed)}"


def landing_reduces(
    expected: Callable[[Record], float], within: float, records: Records
) -> Finding:
    """Landing's factor at the smallest gamma beside an expected one."""
    run = records[unit_name(LANDING, "float64")]
    factor, goal = 1 / ratios(run)[0], expected(run)
    measured = f"{run.series('before')[0]:.4f} to {run.series('after')[0]:.5f}, {factor:.3f} times"
    return Finding(measured, Verdict.of(goal / within < factor < goal * within))


def paper_factor(_: Record) -> float:
    """What the paper reads from its figure."""
    return PAPER_FACTOR


def corrected_factor(run: Record) -> float:
    """To first order in the error the step maps D to ``(1 - 2 eta lam) D``."""
    return 1 / (1 - 2 * run.configuration["lr"] * run.configuration["lam"])


def landing_corrects_itself(records: Records) -> Finding:
    """At the smallest gamma."""
    found = {m: ratios(records[unit_name(m, "float64")])[0] for m in (LANDING, *CARRIED)}
    landing = found[LANDING]
    measured = ", ".join(f"{METHOD_STYLES[m].label} {r:.3f}" for m, r in found.items())
    corrects = landing < 1 - SAME and all(found[m] > 1 - SAME for m in CARRIED)
    return Finding(f"{measured} of the error before", Verdict.of(corrects))


def landing_errs_when_large(records: Records) -> Finding:
    """Where it turns from reducing the error to adding to it."""
    run = records[unit_name(LANDING, "float64")]
    others = max(ratios(records[unit_name(m, "float64")])[-1] for m in CARRIED)
    pairs = list(zip(run.series("gamma"), ratios(run), strict=True))
    reduced = [gamma for gamma, ratio in pairs if ratio < 1]
    turn = f"reduced up to gamma = {max(reduced):.2g}" if reduced else "never reduced"
    gamma, ratio = pairs[-1]
    return Finding(f"{turn}; {ratio:.1e} times the error at {gamma:g}", Verdict.of(ratio > others))


def move_then_land(records: Records) -> Finding:
    """Quadratic: of an error e, 3/4 e^2 remains, at most 3/4 of the norm squared."""
    run = records[unit_name(AFTER, "float64")]
    before, after = run.series("before")[0], run.series("after")[0]
    measured = f"{before:.4f} to {after:.1e}, {before / after:.0f} times"
    return Finding(measured, Verdict.of(after < before**2))


# The figure.


def draw_errors(records: Records) -> Figure:
    """The paper's figure, in two precisions."""
    figure = Figure(figsize=(8, 4.3))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for method in METHODS:
            run = records[unit_name(method, dtype)]
            _draw_curve(axes, method, run.series("gamma"), run.series("after"))
        before = records[unit_name(LANDING, dtype)].series("before")[0]
        axes.axhline(before, color="#777777", linewidth=0.8, zorder=1)
        axes.set(xscale="log", yscale="log", xlabel=r"gradient scale $\gamma$")
        axes.minorticks_off()
        axes.set_title(dtype, fontsize=10)
    panels[0].set_ylabel(r"$\|X^\top X - I\|$ after the step")
    panels[0].set_ylim(top=1e4)
    below = dict(xytext=(-2, -12), textcoords="offset points", ha="right", color="#555555")
    panels[0].annotate("before", (1, before), xycoords=("axes fraction", "data"), **below)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def _draw_curve(axes: Axes, method: str, x: Sequence[float], y: Sequence[float]) -> None:
    if method != AFTER:
        plot_method(axes, method, x, y)
        return
    style = dict(color=METHOD_STYLES[LANDING].colour, linewidth=1.2, linestyle=(0, (1, 1)))
    axes.plot(x, y, label="landing: move, then land", **style)


ORTHOGONALIZATION = Study(
    name="orthogonalization",
    title="Orthogonality error after one step",
    paper_figure="Figure 4",
    summary=(
        "From X = I + E, entries of E normal of size sigma = 1e-4, one step in the direction of a "
        "random skew matrix A with entries of size gamma: by landing, X - eta (A + X X^T - I) X, "
        "and by the four retractions R(X, -eta A), eta = 0.3, p = 100. Errors are means over 50 "
        "draws. The paper writes +eta A for the retractions; here the sign is one. Added to the "
        "paper: float32, the QR retraction, and landing that moves first and "
        "then lands with a Newton-Schulz step (X - eta A X = Y, then Y - Y (Y^T Y - I) / 2). "
        "Landing has no safe step here, as in the paper's formula. Quick and paper differ in "
        "nothing but the number of gammas; smoke has smaller matrices and fewer draws."
    ),
    settings={
        "smoke": Settings(p=40, repetitions=5, per_decade=2),
        "quick": Settings(per_decade=2),
        "paper": Settings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim(
            "The projection (polar) retraction leaves a very small error, whatever gamma.",
            "paper",
            polar_projects,
        ),
        Claim(
            "For small gamma the exponential and Cayley retractions leave the error as it is.",
            "paper",
            carried_when_small,
        ),
        Claim(
            "When gamma gets large enough, the exponential and Cayley retractions increase the "
            f"error (both, by more than {SAME:.0%}, in float64 or in float32).",
            "paper",
            increased_when_large,
        ),
        Claim(
            "They do not, but for rounding: they multiply X by an orthogonal matrix, which leaves "
            f"the error as it is (float64: within {SAME:.0%} for every gamma).",
            "correction",
            carried_always,
        ),
        Claim(
            f"For small gamma one step of landing reduces the error about {PAPER_FACTOR:.0f} "
            f"times (within a factor {ABOUT}).",
            "paper",
            partial(landing_reduces, paper_factor, ABOUT),
        ),
        Claim(
            "For small gamma one step of landing reduces the error 1 / (1 - 2 eta lam) = 2.5 times "
            f"(within {SAME:.0%}).",
            "correction",
            partial(landing_reduces, corrected_factor, 1 + SAME),
        ),
        Claim(
            "Landing corrects itself: unlike the exponential and Cayley retractions it reduces the "
            "error for small gamma.",
            "paper",
            landing_corrects_itself,
        ),
        Claim(
            "For large gamma a step of landing without its safe step leaves a larger error than "
            "the exponential and Cayley retractions.",
            "beyond the paper",
            landing_errs_when_large,
        ),
        Claim(
            "For small gamma, moving first and then landing squares the error: it ends below the "
            "square of the error before.",
            "correction",
            move_then_land,
        ),
    ),
    figures=(
        FigureSpec(
            "orthogonalization",
            "Mean distance to the manifold after one step from a matrix near it, against the scale "
            "gamma of the gradient, by landing and by the four retractions; in float64 and in "
            "float32. The grey line is the distance before the step, which the exponential and "
            "Cayley retractions keep; in float32 the exponential adds rounding where steps turn X "
            "by thousands of radians.",
            draw_errors,
        ),
    ),
    threads=1,
    seconds={"smoke": 1, "quick": 10, "paper": 20},
)
