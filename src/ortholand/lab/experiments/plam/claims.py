"""What is claimed: how often PLAM explodes, that landing does not, and where the boundary is."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from ortholand.lab.experiments.plam.runs import EXPLODED, LANDED, has_exploded
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import Claim, Finding, Verdict

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
    Claim("PLAM always explodes.", "paper", always_explodes),
    Claim(
        "PLAM explodes on about three problems in four (68 to 80 %) and lands on almost one in "
        "four (17 to 29 %).",
        "correction",
        mostly_explodes,
    ),
    Claim("Landing always succeeds: it lands on every problem.", "paper", landing_always_lands),
    Claim(
        "The safe step keeps every iterate of landing within eps of the manifold.",
        "correction",
        landing_stays_near,
    ),
    Claim(
        "The example, as printed: PLAM explodes (delta > 0) or becomes singular (delta < 0) for "
        "alpha^2 < lam, stays for alpha^2 = lam, lands for alpha^2 > lam.",
        "paper",
        partial(example_goes, printed_fate),
    ),
    Claim(
        "The example, corrected: the former for 2 alpha^2 > lam; it stays for 2 alpha^2 = lam and "
        "lands for 2 alpha^2 < lam.",
        "correction",
        partial(example_goes, corrected_fate),
    ),
    Claim("Landing lands from all starts of the example.", "paper", example_lands),
)
