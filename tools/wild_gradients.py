"""Steps of every optimizer with finite gradients of every size, up to the largest number of a type.

Each case draws a method, a type, a shape, an engine, options and a few gradients, and checks after
each step that weights and state are finite, that weights are in the ball (if there is a safe step)
up to rounding, and that a weight that stands still, or a state that is kept, is counted.

    python tools/wild_gradients.py --cases 100000

It prints the violations, each with the seed of its case (``--first SEED --cases 1`` repeats it).
"""

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ortholand as ol
from ortholand import native
from ortholand.geometry import distance
from ortholand.geometry.matrices import real_dtype, to_working_dtype, wide_dtype
from ortholand.landing.step import PendingStep, Rows
from ortholand.sharding.exchange import message_of, sums_of

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
MOMENTA: tuple[dict[str, Any], ...] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "nesterov": True},
)
SHAPES = (
    ((1, 1), (2, 2), (3, 3), (5, 5), (6, 6), (12, 12), (20, 20)),  # square
    ((3, 1), (4, 3), (7, 5), (9, 8), (30, 12), (17, 2), (40, 5), (100, 4), (300, 9)),  # tall
    ((1, 3), (3, 4), (5, 7), (12, 30), (2, 17), (5, 40), (9, 300)),  # wide
    ((3, 4, 4), (20, 3, 3), (4, 6, 3), (3, 2, 20), (2, 10, 80)),  # batches
)
LARGE = ((130, 130), (140, 130), (130, 150), (256, 256))
KINDS = ("full", "constant", "rank one", "normal", "one entry", "one column", "mixed", "sequel")


@dataclass
class Case:
    """What is stepped, and how."""

    method: str
    engine: str  # "reference", "compiled" or "ranks"
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: dict[str, Any]
    gradients: list[tuple[str, float]]  # the kind and the size of each
    seed: int
    ranks: int = 1
    start: float = 0.0  # how far from the manifold it starts, in parts of eps

    @property
    def has_ball(self) -> bool:
        """Whether a safe step keeps weights in a ball."""
        return self.options.get("safe_step") is not None


@dataclass
class Report:
    """How many cases were run, and what was wrong with which."""

    cases: int = 0
    steps: int = 0
    skipped: int = 0
    violations: list[tuple[int, str]] = field(default_factory=list)


def draw(seed: int, *, large: float = 0.03) -> Case:
    """The case of a seed; ``large`` is the share of matrices with more than 128 columns."""
    rng = random.Random(seed)
    method = rng.choice(
        ["sgd"] * 5 + ["adam"] * 3 + ["muon"] * 2 + ["riemannian", "plam", "penalty"]
    )
    dtype = rng.choice(DTYPES)
    kinds = rng.choice(SHAPES)
    shape = rng.choice(LARGE) if rng.random() < large else rng.choice(kinds)
    options: dict[str, Any] = {"lr": 10 ** rng.uniform(-6, 6), "view": "kernel"}
    if method in ("sgd", "riemannian", "plam", "penalty"):
        options.update(rng.choice(MOMENTA))
    if method == "riemannian":
        options["retraction"] = rng.choice(["exponential", "polar", "cayley", "qr"])
        options["lr"] = 10 ** rng.uniform(-6, 0)
    if method == "muon":
        options["momentum"] = rng.choice([0.0, 0.9, 0.99])
        options["nesterov"] = rng.random() < 0.5
    if method == "adam":
        options["betas"] = (rng.choice([0.0, 0.9, 0.999]), rng.choice([0.0, 0.99, 0.999]))
    engine = "reference"
    if method in ("sgd", "adam", "muon"):
        rule = rng.choice(["spectral", "spectral", "frobenius", None])
        engine = rng.choice(["reference", "compiled", "compiled", "ranks"])
        if engine == "ranks" and (len(shape) > 2 or shape[0] <= shape[1]):
            engine = "compiled"
        options |= {
            "safe_step": rule,
            "attraction": rng.choice(["coupled", "decoupled", "after"]),
            "lam": rng.choice([0.0, 0.1, 1.0, 10.0]),
            "eps": rng.choice([0.05, 0.5, 0.9]),
            "omega": rng.choice([0.5, 0.5, 0.2, 0.0]),
            "fused": engine == "compiled",
        }
        if rule is None:
            options["lr"] = 10 ** rng.uniform(-6, 12)
    options["maximize"] = rng.random() < 0.1
    if engine != "ranks" and rng.random() < 0.1:
        options["scale"] = rng.choice([0.1, 30.0])
    gradients = [(rng.choice(KINDS), _size(rng, dtype)) for _ in range(rng.choice([2, 3, 4]))]
    start = rng.choice([0.0, 0.0, 0.5, 0.95]) if options.get("safe_step") else 0.0
    ranks = rng.choice([2, 3])
    if engine == "reference" and rng.random() < 0.3:  # as on a GPU: no value may be read
        options["lr"] = torch.tensor(options["lr"], dtype=torch.float64)
    if engine == "reference":
        options["foreach"] = rng.choice([None, None, True, False])
    return Case(method, engine, dtype, shape, options, gradients, seed, ranks, start)


def _size(rng: random.Random, dtype: torch.dtype) -> float:
    """A size of gradients: the largest number, others near it, or any above 1."""
    largest = torch.finfo(dtype).max
    decades = math.log10(largest)
    return rng.choice(
        [
            largest,
            largest / rng.choice([1.5, 2, 3, 4, 10, 100]),
            10 ** rng.uniform(0.9 * decades, decades),
            10 ** rng.uniform(0.4 * decades, 0.6 * decades),
            10 ** rng.uniform(0, decades),
            10 ** rng.uniform(-decades, 0),
        ]
    )


def gradient(kind: str, size: float, X: Tensor, before: Tensor | None, generator: Any) -> Tensor:
    """A finite gradient whose largest entry has this size."""
    wide = X.to(wide_dtype(X)) / _largest(X)
    noise = torch.randn(wide.shape, generator=generator, dtype=wide.dtype)
    if kind == "constant":
        noise = torch.ones_like(noise)
    elif kind == "rank one":
        noise = noise[..., :1] @ noise[..., :1, :]
    elif kind == "normal":  # no tangent part but rounding
        tall = wide if wide.shape[-2] >= wide.shape[-1] else wide.mT
        H = tall.mH @ (noise if tall is wide else noise.mT)
        normal = tall @ (H + H.mH)
        noise = normal if tall is wide else normal.mT
    elif kind == "one entry":
        noise[..., 1:, :] = 0
        noise[..., 1:] = 0
    elif kind == "one column":
        noise[..., 1:] = 0
    elif kind == "mixed":  # all sizes in one matrix
        noise = noise * 10 ** torch.empty(noise.shape, dtype=torch.float64).uniform_(
            -30, 0, generator=generator
        )
    elif kind == "sequel" and before is not None:  # against the last one
        noise = -before.to(wide.dtype) / _largest(before)
    unit = noise / _largest(noise)
    limit = torch.finfo(X.dtype).max
    parts = torch.view_as_real(unit) if unit.is_complex() else unit
    parts = (parts * size).to(real_dtype(X.dtype)).clamp(-limit, limit)
    return torch.view_as_complex(parts) if unit.is_complex() else parts


def _largest(M: Tensor) -> float:
    parts = torch.view_as_real(M) if M.is_complex() else M
    return max(float(parts.abs().max()), 1e-300)


class Whole:
    """A weight with an optimizer."""

    def __init__(self, X: Tensor, case: Case) -> None:
        self.weight = nn.Parameter(X)
        self.optimizer = make_optimizer(self.weight, case)

    def step(self, G: Tensor) -> int:
        """Step; return how many matrices were skipped."""
        self.weight.grad = G
        before = self.optimizer.skipped_steps()
        self.optimizer.step()
        return self.optimizer.skipped_steps() - before

    def value(self) -> Tensor:
        """The weight."""
        return self.weight.detach().clone()

    def state(self) -> dict[str, Tensor]:
        """The state that a step changes."""
        kept = self.optimizer.state[self.weight]
        return {k: v.clone() for k, v in kept.items() if k not in ("skipped", "limited")}


class Ranks:
    """A tall weight whose rows are on several ranks, which are played one after the other."""

    def __init__(self, X: Tensor, case: Case) -> None:
        self.optimizer = make_optimizer(nn.Parameter(X), case)
        self.maximize = case.options["maximize"]
        group = self.optimizer.param_groups[0]
        self.kinds = dict(self.optimizer.state_kinds(group))
        landing = self.optimizer.landing_step(group)
        assert landing is not None
        assert landing.gram_step is not None
        self.gram_step = landing.gram_step
        self.parts = list(X.clone().tensor_split(case.ranks))
        self.states = [self._new_state(part) for part in self.parts]

    def _new_state(self, part: Tensor) -> dict[str, Tensor]:
        whole = to_working_dtype(part)[None]
        number = torch.zeros(1, dtype=real_dtype(whole.dtype))
        return {
            k: torch.zeros_like(whole if v == "matrix" else number) for k, v in self.kinds.items()
        }

    def step(self, G: Tensor) -> int:
        """Step; return how many matrices were skipped."""
        G = to_working_dtype(-G if self.maximize else G)
        n = sum(part.shape[0] for part in self.parts)
        shares = zip(self.parts, G.tensor_split(len(self.parts)), self.states, strict=True)
        steps = [
            self.gram_step(to_working_dtype(X)[None], B[None], state, Rows(X.shape[0], n))
            for X, B, state in shares
        ]
        while isinstance(steps[0], PendingStep):
            messages = zip(*[message_of(step.sums) for step in steps], strict=True)
            sums = [sum(tensors[1:], start=tensors[0]) for tensors in messages]
            steps = [step.finish(sums_of([tensor.clone() for tensor in sums])) for step in steps]
        results = steps
        taken = {bool(result.taken) for result in results}
        assert len(taken) == 1, "ranks differ in what they take"
        if taken == {False}:
            return 1
        for i, result in enumerate(results):
            self.parts[i] = result.moved[0].to(self.parts[i].dtype)
            self.states[i] = {k: result.state[k].to(v.dtype) for k, v in self.states[i].items()}
        return 0

    def value(self) -> Tensor:
        """The weight."""
        return torch.cat(self.parts)

    def state(self) -> dict[str, Tensor]:
        """The state that a step changes."""
        return {f"{k}{i}": v.clone() for i, s in enumerate(self.states) for k, v in s.items()}


def make_optimizer(X: nn.Parameter, case: Case) -> Any:
    """The optimizer of a case."""
    kinds = {
        "sgd": ol.LandingSGD,
        "adam": ol.LandingAdam,
        "muon": ol.LandingMuon,
        "riemannian": ol.RiemannianSGD,
        "plam": ol.PLAM,
        "penalty": ol.PenaltySGD,
    }
    return kinds[case.method]([X], **case.options)


def start_of(case: Case, generator: Any) -> Tensor:
    """A weight on the manifold, or at some distance from it in the ball."""
    dtype = wide_dtype(torch.empty(0, dtype=case.dtype))
    X = ol.random_orthogonal(*case.shape, seed=generator, dtype=dtype)
    if case.start:
        p = min(case.shape[-2:])
        radius = case.start * case.options["eps"]
        if case.options["safe_step"] != "spectral":
            radius /= math.sqrt(p)
        X = X * math.sqrt(1 + (radius if case.seed % 2 else -radius))
    return (X * case.options.get("scale", 1.0)).to(case.dtype)


def run(case: Case) -> tuple[int, int, list[str]]:
    """Run a case: its steps, how many matrices were skipped, and what was wrong."""
    generator = torch.Generator().manual_seed(case.seed)
    X = start_of(case, generator)
    subject = (Ranks if case.engine == "ranks" else Whole)(X, case)
    before, skipped = None, 0
    for k, (kind, size) in enumerate(case.gradients):
        G = gradient(kind, size, X, before, generator)
        kept_gradient, state_before, X_before = G.clone(), subject.state(), subject.value()
        missed = subject.step(G)
        skipped += missed
        X = subject.value()
        wrong = check(case, X_before, X, state_before, subject.state(), missed, kind, size)
        if not torch.equal(G, kept_gradient):
            wrong.append("gradient changed")
        if wrong:
            return k + 1, skipped, [f"step {k + 1} ({kind}, {size:.3g}): {w}" for w in wrong]
        before = G
    return len(case.gradients), skipped, []


def check(
    case: Case,
    X_before: Tensor,
    X: Tensor,
    state_before: dict[str, Tensor],
    state: dict[str, Tensor],
    missed: int,
    kind: str,
    size: float,
) -> list[str]:
    """What is wrong after a step."""
    wrong = [f"{k} not finite" for k, v in state.items() if not bool(torch.isfinite(v).all())]
    if not bool(torch.isfinite(X).all()):
        return [*wrong, "weight not finite"]
    matrices = math.prod(case.shape[:-2])
    stands = torch.equal(X, X_before)
    changed = [
        k for k, v in state.items() if not torch.equal(v, state_before.get(k, torch.zeros_like(v)))
    ]
    if missed == matrices:
        if not stands or changed:
            wrong.append(f"counted as skipped, but changed: weight {not stands}, {changed}")
    elif missed > matrices:
        wrong.append(f"{missed} skipped of {matrices}")
    if not case.has_ball:
        return wrong
    reached = _distance(case, X)
    n, p = case.shape[-2:]
    rounding = 8 * torch.finfo(case.dtype).eps * (math.sqrt(n) + math.sqrt(p))
    if not reached <= case.options["eps"] + rounding:
        wrong.append(f"distance {reached:.6g}")
    scale = case.options.get("scale", 1.0)
    length = case.options["lr"] * (1 if case.method == "muon" else size)  # Muon's lr is an angle
    moves = kind == "full" and min(n, p) > 1 and length / scale > 0.1
    # Distances are known up to p^(1/4): what may be at the edge is treated as if it were.
    inside = _distance(case, X_before) * min(n, p) ** 0.25 < 0.9 * case.options["eps"]
    if stands and not changed and not missed and moves and inside:
        wrong.append("stands still, not counted")
    return wrong


def _distance(case: Case, X: Tensor) -> float:
    Z = X.to(wide_dtype(X)) / case.options.get("scale", 1.0)
    return float(distance(Z, spectral=case.options["safe_step"] == "spectral").max())


def run_cases(first: int, count: int, *, large: float = 0.03, seconds: float = math.inf) -> Report:
    """Run the cases of some seeds."""
    report, start = Report(), time.monotonic()
    for seed in range(first, first + count):
        if time.monotonic() - start > seconds:
            break
        case = draw(seed, large=large)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of frozen weights
            try:
                steps, skipped, wrong = run(case)
            except (RuntimeError, AssertionError) as error:  # no finite gradient may raise
                steps, skipped, wrong = 0, 0, [f"raised {type(error).__name__}, {error}"]
        report.cases += 1
        report.steps += steps
        report.skipped += skipped
        report.violations += [(seed, f"{case}: {w}") for w in wrong]
    return report


def main() -> int:
    """Run the cases asked for, and print what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--large", type=float, default=0.03, help="share of large matrices")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):  # else torch's operations would be tested instead
        if why := native.why_no_code(dtype):
            parser.error(f"No compiled code: {why}.")
    report = run_cases(arguments.first, arguments.cases, large=arguments.large)
    for seed, wrong in report.violations[:50]:
        print(f"{seed}: {wrong}")
    kinds = Counter(wrong.rsplit(": ", 1)[-1].split(" 1")[0] for _, wrong in report.violations)
    print(f"{report.cases} cases, {report.steps} steps, {report.skipped} matrices skipped")
    print(f"{len(report.violations)} violations", dict(kinds.most_common(10)) or "")
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
