"""Error after one step from near the manifold, by size of the gradient (the paper's figure 4)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ortholand.geometry import distance, gram_residual
from ortholand.retractions import retract
from ortholand_lab.study.figures import METHOD_STYLES, add_legend, listed, plot_method
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit
from ortholand_lab.textbook import RETRACTION_FORMS, RETRACTION_NAMES, textbook

LANDING, AFTER = "landing", "landing-after"
STEP_METHODS = (LANDING, AFTER, *RETRACTION_NAMES)
PAPER_METHODS = tuple(map(textbook, STEP_METHODS))
CARRIED = ("exponential", "cayley")  # that multiply X by an orthogonal matrix
TEXTBOOKS = tuple(map(textbook, CARRIED))
DTYPES = ("float64", "float32")
SAME = 0.01  # errors that differ by less, relatively, count as the same
PAPER_FACTOR, ABOUT = 10.0, 1.5  # "a factor of about 10": that, within this factor


@dataclass(frozen=True)
class OneStepSettings:
    """The paper's settings are the defaults; it does not give its values of gamma."""

    p: int = 100
    sigma: float = 1e-4
    lr: float = 0.3
    lam: float = 1.0
    repetitions: int = 50
    smallest: float = 1e-5  # gamma
    largest: float = 1e4
    per_decade: int = 4


# To first order in the error the step of landing maps D to (1 - 2 eta lam) D.
FIRST_ORDER_FACTOR = 1 / (1 - 2 * OneStepSettings.lr * OneStepSettings.lam)


@dataclass(frozen=True, kw_only=True)
class OneStepRun(OneStepSettings):
    """One step of a method in a precision, from every start and for every gamma."""

    method: str
    dtype: str


def plan(settings: OneStepSettings) -> list[Unit[OneStepRun]]:
    """Every method in every precision."""
    runs = [
        OneStepRun(**vars(settings), method=method, dtype=dtype)
        for dtype in DTYPES
        for method in dict.fromkeys((*STEP_METHODS, *PAPER_METHODS))
    ]
    return [Unit(f"{run.method}-{run.dtype}", run, len(gamma_grid(run))) for run in runs]


def gamma_grid(settings: OneStepSettings) -> list[float]:
    """The values of gamma, evenly spaced on a logarithmic axis."""
    decades = math.log10(settings.largest / settings.smallest)
    count = round(decades * settings.per_decade)
    return [settings.smallest * 10 ** (decades * i / count) for i in range(count + 1)]


def run(task: OneStepRun, context: Context) -> Result:
    """One step for each gamma, from all starts at once; the errors are measured in float64."""
    # All methods of a seed draw the same numbers.
    generator = torch.Generator().manual_seed(context.seed)
    errors, gammas = [], gamma_grid(task)
    for gamma in gammas:
        X, A = draw(task, gamma, generator)
        X, A = (M.to(context.device, getattr(torch, task.dtype)) for M in (X, A))
        errors.append([float(distance(M.double()).mean()) for M in (X, step(task, X, A))])
        context.tick(1)
    before, after = zip(*errors, strict=True)
    return Result({"gamma": gammas, "before": before, "after": after}, {})


def draw(task: OneStepRun, gamma: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Starts ``I + E`` with entries of E of size sigma, and skew A with entries of size gamma."""
    shape = (task.repetitions, task.p, task.p)
    E, N = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    lower = torch.tril(N, diagonal=-1)
    return torch.eye(task.p, dtype=E.dtype) + task.sigma * E, gamma * (lower - lower.mT)


def step(task: OneStepRun, X: Tensor, A: Tensor) -> Tensor:
    """A descent step in the direction of A: by the plain formulas, without a safe step.

    The paper writes ``+ eta A`` for retractions and ``- eta A`` for landing; here the sign is one.
    """
    if task.method in RETRACTION_FORMS:
        return retract(X, -task.lr * A, RETRACTION_FORMS[task.method])
    if task.method == AFTER:
        Y = X - task.lr * A @ X
        return Y - Y @ gram_residual(Y) / 2
    return X - task.lr * (A + task.lam * gram_residual(X.mT)) @ X


# Claims. Where the paper says "small", the smallest gamma counts, and the largest for "large".


def run_of(records: Records, method: str, dtype: str = "float64") -> Record:
    """The record of a method in a precision."""
    return records[f"{method}-{dtype}"]


def ratios(run: Record) -> list[float]:
    """The error after the step relative to the error before, for each gamma."""
    return [a / b for a, b in zip(run.series("after"), run.series("before"), strict=True)]


def polar_projects(polar: str, records: Records) -> Finding:
    """Whether, at every gamma, the error is at rounding level."""
    p = run_of(records, polar).configuration["p"]
    worst = {dtype: max(run_of(records, polar, dtype).series("after")) for dtype in DTYPES}
    tiny = all(w < 10 * p * torch.finfo(getattr(torch, d)).eps for d, w in worst.items())
    measured = "; ".join(f"{dtype}: at most {w:.1e}" for dtype, w in worst.items())
    return Finding.of(measured, tiny)


def carried_when_small(methods: Sequence[str], records: Records) -> Finding:
    """The exponential and Cayley retractions at the smallest gamma."""
    found = {m: ratios(run_of(records, m))[0] for m in methods}
    same = all(abs(r - 1) < SAME for r in found.values())
    return Finding.of(f"{listed(found, '.4f')} of the error before", same)


def increased_when_large(methods: Sequence[str], records: Records) -> Finding:
    """As printed: the error grows for both retractions, in float64 or in float32."""
    increases = [all(_increases(records, m, dtype) for m in methods) for dtype in DTYPES]
    return Finding.of(_list_largest(methods, records), any(increases))


def carried_always(records: Records) -> Finding:
    """As corrected: an orthogonal factor changes no singular value, however long the step."""
    same = all(abs(r - 1) < SAME for m in CARRIED for r in ratios(run_of(records, m)))
    return Finding.of(_list_largest(CARRIED, records), same)


def _increases(records: Records, method: str, dtype: str) -> list[float]:
    """The gammas for which a retraction increases the error."""
    run = run_of(records, method, dtype)
    return [g for g, r in zip(run.series("gamma"), ratios(run), strict=True) if r > 1 + SAME]


def _list_largest(methods: Sequence[str], records: Records) -> str:
    found = []
    for dtype in DTYPES:
        for method in methods:
            most = max(ratios(run_of(records, method, dtype)))
            gammas = _increases(records, method, dtype)
            where = f" (from gamma = {min(gammas):.3g} on)" if gammas else ""
            found.append(f"{METHOD_STYLES[method].label} in {dtype} {most:.4f}{where}")
    largest = run_of(records, methods[0]).series("gamma")[-1]
    return f"times the error before, at most, up to gamma = {largest:g}: {', '.join(found)}"


def landing_reduces(goal: float, within: float, records: Records) -> Finding:
    """Landing's factor at the smallest gamma, compared with an expected one."""
    run = run_of(records, LANDING)
    before, after = run.series("before")[0], run.series("after")[0]
    measured = f"{before:.4f} to {after:.5f}, {before / after:.3f} times"
    return Finding.of(measured, goal / within < before / after < goal * within)


def landing_corrects_itself(methods: Sequence[str], records: Records) -> Finding:
    """Whether landing reduces the error at the smallest gamma."""
    found = {m: ratios(run_of(records, m))[0] for m in (LANDING, *methods)}
    corrects = found[LANDING] < 1 - SAME and all(found[m] > 1 - SAME for m in methods)
    return Finding.of(f"{listed(found, '.3f')} of the error before", corrects)


def landing_errs_when_large(records: Records) -> Finding:
    """Where landing turns from reducing the error to adding to it."""
    run = run_of(records, LANDING)
    others = max(ratios(run_of(records, m))[-1] for m in CARRIED)
    pairs = list(zip(run.series("gamma"), ratios(run), strict=True))
    reduced = [gamma for gamma, ratio in pairs if ratio < 1]
    turn = f"reduced up to gamma = {max(reduced):.2g}" if reduced else "never reduced"
    gamma, ratio = pairs[-1]
    return Finding.of(f"{turn}; {ratio:.1e} times the error at {gamma:g}", ratio > others)


def move_then_land(records: Records) -> Finding:
    """Quadratic: of an error e, 3/4 e^2 remains, at most 3/4 of the norm squared."""
    run = run_of(records, AFTER)
    before, after = run.series("before")[0], run.series("after")[0]
    measured = f"{before:.4f} to {after:.1e}, {before / after:.0f} times"
    return Finding.of(measured, after < before**2)


# The figure.


def draw_errors(records: Records) -> Figure:
    """The paper's figure, in two precisions."""
    figure = Figure(figsize=(8, 4.3))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for method in PAPER_METHODS:
            run = run_of(records, method, dtype)
            plot_method(axes, method, run.series("gamma"), run.series("after"))
        before = run_of(records, LANDING, dtype).series("before")[0]
        axes.axhline(before, color="#777777", linewidth=0.8, zorder=1)
        axes.set(xscale="log", yscale="log", xlabel=r"gradient scale $\gamma$")
        axes.minorticks_off()
        axes.set_title(dtype, fontsize=10)
    panels[0].set_ylabel(r"$\|X^\top X - I\|$ after the step")
    panels[0].set_ylim(top=1e4)
    below = dict(xytext=(-2, -12), textcoords="offset points", ha="right", color="#555555")
    panels[0].annotate("before", (1, before), xycoords=("axes fraction", "data"), **below)
    add_legend(figure, panels[0], 3)
    return figure


ORTHOGONALIZATION = Study(
    name="orthogonalization",
    title="Orthogonality error after one step",
    paper_figure="Figure 4",
    summary=(
        "From X = I + E, entries of E normal of size sigma = 1e-4, one step in the direction of a "
        "random skew matrix A with entries of size gamma: by landing, X - eta (A + X X^T - I) X, "
        "and by the four retractions R(X, -eta A), eta = 0.3, p = 100. Errors are means over 50 "
        "draws. The paper writes +eta A for the retractions; here the sign is one. Added to the "
        "paper: float32, the QR retraction, and landing that moves first and then lands with a "
        "Newton-Schulz step (X - eta A X = Y, then Y - Y (Y^T Y - I) / 2). Landing has no safe "
        "step here, as in the paper's formula. Quick and paper differ in nothing but the number "
        "of gammas; smoke has smaller matrices and fewer draws."
    ),
    settings={
        "smoke": OneStepSettings(p=40, repetitions=5, per_decade=2),
        "quick": OneStepSettings(per_decade=2),
        "paper": OneStepSettings(),
    },
    plan=plan,
    run=run,
    claims=(
        Claim.of_paper(
            "The projection (polar) retraction leaves a very small error, whatever gamma.",
            "The projection retraction yields a very small orthogonalization error.",
            partial(polar_projects, textbook("polar")),
            partial(polar_projects, "polar"),
        ),
        Claim.of_paper(
            "For small gamma the exponential and Cayley retractions leave the error as it is.",
            "the orthogonalization error stays the same if gamma is small",
            partial(carried_when_small, TEXTBOOKS),
            partial(carried_when_small, CARRIED),
        ),
        Claim.of_paper(
            "When gamma gets large enough, the exponential and Cayley retractions increase the "
            f"error (both, by more than {SAME:.0%}, in float64 or in float32).",
            "When gamma gets large enough, they increase the orthogonalization error.",
            partial(increased_when_large, TEXTBOOKS),
            partial(increased_when_large, CARRIED),
            erratum="one-step-retractions",
        ),
        Claim(
            "They do not, but for rounding: they multiply X by an orthogonal matrix, which leaves "
            f"the error as it is (float64: within {SAME:.0%} for every gamma).",
            "correction",
            carried_always,
        ),
        Claim.of_paper(
            f"For small gamma one step of landing reduces the error about {PAPER_FACTOR:.0f} "
            f"times (within a factor {ABOUT}).",
            "Here, one iteration reduces the error by a factor ~10",
            partial(landing_reduces, PAPER_FACTOR, ABOUT),
            erratum="one-step",
        ),
        Claim(
            "For small gamma one step of landing reduces the error 1 / (1 - 2 eta lam) = 2.5 "
            f"times (within {SAME:.0%}).",
            "correction",
            partial(landing_reduces, FIRST_ORDER_FACTOR, 1 + SAME),
        ),
        Claim.of_paper(
            "Landing corrects itself: unlike the exponential and Cayley retractions it reduces "
            "the error for small gamma.",
            "unlike the exponential and Cayley retractions, it can decrease the orthogonalization "
            "error",
            partial(landing_corrects_itself, TEXTBOOKS),
            partial(landing_corrects_itself, CARRIED),
        ),
        Claim.beyond(
            "For large gamma a step of landing without its safe step leaves a larger error than "
            "the exponential and Cayley retractions.",
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
            "Mean distance to the manifold after one step from a matrix near it, against the "
            "scale gamma of the gradient, by landing and by the four textbook retractions; in "
            "float64 and in float32. The grey line is the distance before the step, which the "
            "exponential and Cayley retractions keep but for rounding: in float32 torch's "
            "matrix_exp adds errors where steps turn X by thousands of radians. Our exponential "
            "does not.",
            draw_errors,
        ),
    ),
    seconds={"smoke": 1, "quick": 10, "paper": 20},
)
