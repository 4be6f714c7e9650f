"""PLAM and landing (the paper's appendix): both are infeasible, one of them can explode."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from ortholand.geometry import distance
from ortholand.optim import LandingSGD
from ortholand.optim.infeasible import PLAM as PlamSGD  # noqa: N811
from ortholand_lab.methods import PAPER_RULE
from ortholand_lab.study.figures import METHOD_STYLES, plot_method
from ortholand_lab.study.records import Record, Records, Result
from ortholand_lab.study.spec import Claim, Context, FigureSpec, Finding, Study, Unit, Verdict
from ortholand_lab.study.timing import marks

# What is run.


INFEASIBLE_METHODS = ("plam", "landing")
EXPLODED = 1e6  # a distance to the manifold from which PLAM does not return
LANDED = 1e-3  # a distance to the manifold that counts as on it


@dataclass(frozen=True)
class PlamSettings:
    """The paper's settings are the defaults; it does not say how many iterations."""

    problems: int = 1_000  # the paper has 10
    drawn: int = 10  # of these problems, in the figure
    iterations: int = 40_000
    lr: float = 1e-3
    lam: float = 1.0
    eps: float = 0.5
    # The middle one is the corrected boundary, 1 is the printed one.
    alphas: tuple[float, ...] = (0.5, 0.6, math.sqrt(0.5), 0.8, 0.9, 1.0, 1.2)
    deltas: tuple[float, ...] = (0.1, -0.1)
    example_lr: float = 0.01
    example_iterations: int = 1_500


@dataclass(frozen=True)
class PlamRun:
    """A method on many matrices at once."""

    method: str
    iterations: int
    lr: float
    lam: float
    eps: float


@dataclass(frozen=True)
class RandomProblems(PlamRun):
    """A method on random problems, of which some are drawn."""

    problems: int
    drawn: int


@dataclass(frozen=True)
class Example(PlamRun):
    """A method on the paper's example, for pairs of alpha and delta."""

    starts: tuple[tuple[float, float], ...]


def plan(settings: PlamSettings) -> list[Unit[RandomProblems | Example]]:
    """Both parts, with both methods."""
    s, units = settings, []
    starts = tuple((alpha, delta) for delta in s.deltas for alpha in s.alphas)
    for method in INFEASIBLE_METHODS:
        problems = RandomProblems(method, s.iterations, s.lr, s.lam, s.eps, s.problems, s.drawn)
        example = Example(method, s.example_iterations, s.example_lr, s.lam, s.eps, starts)
        units.append(Unit(f"problems-{method}", problems, problems.iterations))
        units.append(Unit(f"example-{method}", example, example.iterations))
    return units


def run(task: RandomProblems | Example, context: Context) -> Result:
    """Do one unit of work."""
    if isinstance(task, Example):
        return run_example(task, context)
    return run_problems(task, context)


def run_problems(task: RandomProblems, context: Context) -> Result:
    """Distances of the problems to be drawn, and what has become of all so far."""
    start = torch.eye(2, dtype=torch.float64, device=context.device).repeat(task.problems, 1, 1)
    rows, wanted, largest = [], set(marks(task.iterations)), distance(start)
    gradient = random_gradient(task.problems, context)
    for k, X in iterates(task, start, gradient, context):
        d = distance(X)
        torch.maximum(largest, d, out=largest)
        if k in wanted:
            shares = [float(which.double().mean()) for which in (has_exploded(d), d < LANDED)]
            rows.append((k, *shares, *d[: task.drawn].tolist()))
    names = ("iteration", "exploded", "near", *(f"distance_{i}" for i in range(task.drawn)))
    return Result.of_rows(names, rows, largest_distance=float(largest.max()))


def run_example(task: Example, context: Context) -> Result:
    """The entry x = 1 + delta of every start, now and then."""
    alphas, deltas = torch.tensor(task.starts, dtype=torch.float64, device=context.device).mT
    start = torch.diag_embed(torch.stack([torch.ones_like(deltas), 1 + deltas], -1))
    wanted = {*range(0, task.iterations, max(1, task.iterations // 250)), task.iterations}
    path = iterates(task, start, example_gradient(alphas), context)
    rows = [(k, *X[:, 1, 1].tolist()) for k, X in path if k in wanted]
    names = ("iteration", *(f"x_{i}" for i in range(len(task.starts))))
    return Result.of_rows(names, rows)


def iterates(
    task: PlamRun, start: Tensor, gradient: Callable[[Tensor], Tensor], context: Context
) -> Iterator[tuple[int, Tensor]]:
    """Every iterate of a method on a batch of matrices, each matrix by itself."""
    X = nn.Parameter(start)
    # PLAM as it is; landing with its safe step.
    shared = dict(lr=task.lr, lam=task.lam, view="kernel")
    plam = task.method == "plam"
    optimizer = (
        PlamSGD([X], **shared)
        if plam
        else LandingSGD([X], eps=task.eps, safe_step=PAPER_RULE, **shared)
    )
    yield 0, X.detach()
    for k in range(1, task.iterations + 1):
        X.grad = gradient(X.detach())
        optimizer.step()
        context.tick(1)
        yield k, X.detach()


def random_gradient(problems: int, context: Context) -> Callable[[Tensor], Tensor]:
    """Gradients of ``||A X - B||^2``, A and B standard normal. A is on the left here."""
    generator = torch.Generator().manual_seed(context.seed)
    A, B = torch.randn(2, problems, 2, 2, generator=generator, dtype=torch.float64)
    gram, target = (M.to(context.device) for M in (2 * A.mT @ A, 2 * A.mT @ B))
    return lambda X: torch.baddbmm(target, gram, X, beta=-1)


def example_gradient(alphas: Tensor) -> Callable[[Tensor], Tensor]:
    """Gradients of ``||alpha X - B||^2``, B = diag(1, 0)."""
    B = torch.diag(torch.tensor([1.0, 0.0], dtype=alphas.dtype, device=alphas.device))
    factor = alphas[:, None, None]
    return lambda X: 2 * factor * (factor * X - B)


def has_exploded(d: Tensor) -> Tensor:
    """Whether a matrix is far from the manifold, or no longer a number."""
    return ~(d < EXPLODED)


# What is claimed.


LONG = 10.0  # lr times iterations: a run so long decides what becomes of nearly all problems
MANY = 500  # a share of so many problems is known to about 5 %


# Claims about the random problems.


def always_explodes(records: Records) -> Finding:
    """As printed, about ten problems; judged on all that were run."""
    run = records["problems-plam"]
    return Finding(_shares(run), _on_all(run, "exploded"))


def mostly_explodes(records: Records) -> Finding:
    """As corrected: 74 % and 23 % of 1,000 problems, with a margin for other samples."""
    run = records["problems-plam"]
    if not _is_long(run) or run.configuration["problems"] < MANY:
        return Finding(f"{_shares(run)}; too few, or not long enough", Verdict.OPEN)
    exploded, landed = run.series("exploded")[-1], run.series("near")[-1]
    return Finding.of(_shares(run), 0.68 < exploded < 0.8 and 0.17 < landed < 0.29)


def landing_always_lands(records: Records) -> Finding:
    """Whether landing lands on every problem."""
    run = records["problems-landing"]
    measured = f"{_shares(run)}; never further than {run.value('largest_distance'):.3f}"
    return Finding(measured, _on_all(run, "near"))


def landing_stays_near(records: Records) -> Finding:
    """Whether landing stays near, at every iteration of every problem."""
    run = records["problems-landing"]
    largest, eps = run.value("largest_distance"), run.configuration["eps"]
    measured = f"at most {largest:.4f}, eps = {eps}; PLAM: "
    measured += f"{records['problems-plam'].value('largest_distance'):.1e}"
    return Finding.of(measured, largest <= eps)


def _shares(run: Record) -> str:
    problems, drawn = run.configuration["problems"], run.configuration["drawn"]
    ends = torch.tensor([run.series(f"distance_{i}")[-1] for i in range(drawn)])
    counts = int(has_exploded(ends).sum()), int((ends < LANDED).sum())
    exploded, landed = run.series("exploded")[-1], run.series("near")[-1]
    return (
        f"{exploded:.1%} of {problems} problems explode, {landed:.1%} land ({counts[0]} and "
        f"{counts[1]} of the first {drawn}), {1 - exploded - landed:.1%} neither"
    )


def _on_all(run: Record, what: str) -> Verdict:
    """Whether it happened on every problem; a short run cannot show that it never will."""
    if run.series(what)[-1] == 1:
        return Verdict.HOLDS
    return Verdict.FAILS if _is_long(run) else Verdict.OPEN


def _is_long(run: Record) -> bool:
    return run.configuration["lr"] * run.configuration["iterations"] >= LONG


# Claims about the example.


def fate(start: float, end: float) -> str:
    """What became of the entry x = 1 + delta."""
    if not abs(end) < math.sqrt(EXPLODED):
        return "explodes"
    if abs(end - start) < 1e-9:
        return "stays"
    if abs(end - 1) < LANDED:
        return "lands"
    return "becomes singular" if abs(end) < 0.05 else "undecided"


def fates(run: Record) -> dict[tuple[float, float], str]:
    """What became of every start."""
    starts = [tuple(start) for start in run.configuration["starts"]]
    ends = [run.series(f"x_{i}")[-1] for i in range(len(starts))]
    return {s: fate(1 + s[1], end) for s, end in zip(starts, ends, strict=True)}


def printed_fate(alpha: float, delta: float, lam: float) -> str:
    """The paper's proposition, with beta for lam: it explodes for alpha^2 < beta."""
    return _fate_by(lam - alpha**2, delta)


def corrected_fate(alpha: float, delta: float, lam: float) -> str:
    """The field is ``(2 alpha^2 - lam) (x - x^3)``: it explodes for 2 alpha^2 > lam."""
    return _fate_by(2 * alpha**2 - lam, delta)


def _fate_by(push: float, delta: float) -> str:
    if abs(push) < 1e-12:
        return "stays"
    if push < 0:
        return "lands"
    return "explodes" if delta > 0 else "becomes singular"


def example_goes(predicted: Callable[[float, float, float], str], records: Records) -> Finding:
    """The fates of PLAM on the example, compared with a prediction."""
    run = records["example-plam"]
    found, lam = fates(run), run.configuration["lam"]
    wrong = {s: f for s, f in found.items() if f != predicted(*s, lam)}
    verdict = Verdict.FAILS if wrong else Verdict.HOLDS
    if set(wrong.values()) == {"undecided"}:
        verdict = Verdict.OPEN
    return Finding(f"{_list_fates(found)}; {len(wrong)} of {len(found)} not as said", verdict)


def example_lands(records: Records) -> Finding:
    """Whether landing lands from the same starts."""
    run = records["example-landing"]
    found = fates(run)
    ends = [abs(run.series(f"x_{i}")[-1] - 1) for i in range(len(found))]
    measured = f"|x - 1| at most {max(ends):.1e} in the end, {len(ends)} starts"
    return Finding.of(measured, set(found.values()) == {"lands"})


def _list_fates(found: Mapping[tuple[float, float], str]) -> str:
    parts = []
    for delta in dict.fromkeys(d for _, d in found):
        by_fate: dict[str, list[str]] = {}
        for (alpha, at), name in found.items():
            if at == delta:
                by_fate.setdefault(name, []).append(f"{alpha:.3g}")
        listed = ", ".join(f"alpha {' '.join(a)} {name}" for name, a in by_fate.items())
        parts.append(f"delta {delta:g}: {listed}")
    return "; ".join(parts)


PLAM_CLAIMS = (
    Claim.of_paper(
        "PLAM always explodes.",
        "PLAM always explodes, while the landing algorithm always succeeds.",
        always_explodes,
        erratum="plam-problems",
    ),
    Claim(
        "PLAM explodes on about three problems in four (68 to 80 %) and lands on almost one in "
        "four (17 to 29 %).",
        "correction",
        mostly_explodes,
    ),
    Claim.of_paper(
        "Landing always succeeds: it lands on every problem.",
        "PLAM always explodes, while the landing algorithm always succeeds.",
        landing_always_lands,
    ),
    Claim(
        "The safe step keeps every iterate of landing within eps of the manifold.",
        "correction",
        landing_stays_near,
    ),
    Claim.of_paper(
        "The example, as printed: PLAM explodes (delta > 0) or becomes singular (delta < 0) for "
        "alpha^2 < lam, stays for alpha^2 = lam, lands for alpha^2 > lam.",
        "If alpha^2 < beta, then delta(t) goes to infinity in a finite time if delta(0) > 0.",
        partial(example_goes, printed_fate),
        erratum="plam-example",
    ),
    Claim(
        "The example, corrected: the former for 2 alpha^2 > lam; it stays for 2 alpha^2 = lam and "
        "lands for 2 alpha^2 < lam.",
        "correction",
        partial(example_goes, corrected_fate),
    ),
    Claim.of_paper(
        "Landing lands from all starts of the example.",
        "such bad behavior cannot happen for the landing flow",
        example_lands,
    ),
)


# How it is drawn.


def draw_problems(records: Records) -> Figure:
    """The paper's figure, and what became of all problems."""
    figure = Figure(figsize=(8, 4.2))
    paths, shares = figure.subplots(1, 2)
    runs = {method: records[f"problems-{method}"] for method in INFEASIBLE_METHODS}
    for run in runs.values():
        _draw_paths(paths, run)
        _draw_shares(shares, run)
    configuration = runs["plam"].configuration
    paths.set(xscale="log", yscale="log", ylim=(1e-9, 1e4), xlim=(1, None))
    paths.set(xlabel="iterations", ylabel=r"to the manifold, $\|X^\top X - I\|$")
    shares.set(xscale="log", xlim=(1, None), ylim=(-3, 103), xlabel="iterations")
    shares.set_ylabel(f"share of {configuration['problems']:,} problems, %")
    shares.legend(loc="center left", fontsize=9)
    handles = paths.lines[:: configuration["drawn"]]
    labels = [METHOD_STYLES[method].label for method in INFEASIBLE_METHODS]
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    return figure


def _draw_paths(axes: Axes, run: Record) -> None:
    """Draw the paths without the start, which a logarithmic axis cannot show."""
    for i in range(run.configuration["drawn"]):
        # What is not finite would not be drawn, and the curve would end before it explodes.
        y = [d if d < EXPLODED else EXPLODED for d in run.series(f"distance_{i}")]
        thin = dict(linewidth=1.1, linestyle="-", alpha=0.8)
        plot_method(axes, run.configuration["method"], run.series("iteration")[1:], y[1:], **thin)


def _draw_shares(axes: Axes, run: Record) -> None:
    method = run.configuration["method"]
    looks: dict[str, Any] = {"exploded": "-", "near": (0, (4, 2))}
    for name, dashes in looks.items():
        y = [100 * share for share in run.series(name)]
        look = dict(linestyle=dashes, linewidth=1.6, label=f"{METHOD_STYLES[method].label}: {name}")
        plot_method(axes, method, run.series("iteration")[1:], y[1:], **look)


def draw_example(records: Records) -> Figure:
    """The entry x = 1 + delta: with PLAM for every alpha; with landing, independent of alpha."""
    figure = Figure(figsize=(8, 4.2))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, method in zip(panels, INFEASIBLE_METHODS, strict=True):
        run = records[f"example-{method}"]
        time = [run.configuration["lr"] * k for k in run.series("iteration")]
        for i, (alpha, _) in enumerate(run.configuration["starts"]):
            axes.plot(time, run.series(f"x_{i}"), linewidth=1.5, **_look(run, alpha))
        axes.set(xlabel="iterations times step", xlim=(0, time[-1]), ylim=(-0.05, 2.0))
        axes.set_title(METHOD_STYLES[method].label, fontsize=10)
    panels[0].set_ylabel(r"$x = 1 + \delta$")
    named = dict(zip(*panels[0].get_legend_handles_labels()[::-1], strict=True))  # each alpha once
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named))
    return figure


def _look(run: Record, alpha: float) -> dict[str, Any]:
    if run.configuration["method"] != "plam":
        return dict(color=METHOD_STYLES[run.configuration["method"]].colour)
    alphas = sorted({a for a, _ in run.configuration["starts"]})
    shade = 0.9 * alphas.index(alpha) / max(1, len(alphas) - 1)
    return dict(color=matplotlib.colormaps["cividis"](shade), label=f"$\\alpha$={alpha:.3g}")


PLAM_FIGURES = (
    FigureSpec(
        "plam",
        "Left: distance to the manifold on ten random problems with p = 2, by PLAM and by "
        "landing. Right: share of all problems on which either has exploded by then, or is near "
        f"the manifold (within {LANDED:g}), as all are at the start.",
        draw_problems,
    ),
    FigureSpec(
        "plam-example",
        "The paper's example: the entry x = 1 + delta of diag(1, x), which is 1 on the manifold, "
        "from 1.1 and from 0.9, by PLAM (left) and by landing (right, where alpha makes no "
        "difference). PLAM explodes or becomes singular for 2 alpha^2 > lam = 1, that is for "
        "alpha > 0.707.",
        draw_example,
    ),
)


PLAM = Study(
    name="plam",
    title="PLAM compared with landing",
    paper_figure="Appendix C",
    summary=(
        "PLAM (Gao et al., 2019) follows G - Sym(G X^T) X + lam (X X^T - I) X, which equals the "
        "landing field on the manifold only. Both are run on f(X) = ||AX - B||^2 for 2 x 2 "
        "matrices A and B of standard normal entries, from the identity, with lam = 1 and the "
        "step 1e-3, in float64: ten problems in the paper, of which it says that PLAM always "
        "explodes; here 1,000, the first ten of which are drawn. A problem has exploded from "
        f"distance {EXPLODED:.0e} on, and landed below {LANDED:g}. Then the paper's example, f = "
        "||alpha X - diag(1, 0)||^2 from diag(1, 1 + delta), for alphas on both sides of the "
        "printed boundary (alpha^2 = lam) and of the corrected one (2 alpha^2 = lam). Landing has "
        "its safe step. Quick has fewer iterations than the paper preset (the paper does not say "
        "how many it has); smoke has fewer problems and too few iterations to decide all."
    ),
    settings={
        "smoke": PlamSettings(problems=100, iterations=1_000),
        "quick": PlamSettings(iterations=10_000),
        "paper": PlamSettings(),
    },
    plan=plan,
    run=run,
    claims=PLAM_CLAIMS,
    figures=PLAM_FIGURES,
    seconds={"smoke": 3, "quick": 15, "paper": 60},
)
