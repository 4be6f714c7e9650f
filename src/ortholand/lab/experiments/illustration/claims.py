"""What is claimed: both methods arrive, and only landing leaves the manifold on its way."""

import math
from collections.abc import Sequence

from ortholand.lab.experiments.illustration.runs import AWAY, FIELD, LANDING, RETRACTION, SINGULAR
from ortholand.lab.study.figures import listed
from ortholand.lab.study.records import Record, Records
from ortholand.lab.study.spec import Claim, Finding

ARRIVED = 1e-6  # a distance to the optimum, or to the manifold, that counts as there
LEFT = 1e-2  # a distance to the manifold that is seen in the figure
ROUNDING = 1e-13  # of float64, with room for some tens of operations


def both_converge(records: Records) -> Finding:
    """The caption of the paper's figure."""
    ends = {m: records[m].series("to_optimum")[-1] for m in (LANDING, RETRACTION)}
    start = records[LANDING].series("to_optimum")[0]
    measured = f"from {start:.2g} to: {listed(ends, '.1e')}"
    return Finding.of(measured, max(ends.values()) < ARRIVED)


def only_landing_leaves(records: Records) -> Finding:
    """Away from the manifold and back on it; the retraction on it all the time."""
    landing, retraction = (records[m].series("to_manifold") for m in (LANDING, RETRACTION))
    measured = (
        f"landing at most {max(landing):.2g}, in the end {landing[-1]:.1e}; "
        f"retraction at most {max(retraction):.1e}"
    )
    away_and_back = max(landing) > LEFT and landing[-1] < ARRIVED
    return Finding.of(measured, away_and_back and max(retraction) < ROUNDING)


def parts_are_orthogonal(records: Records) -> Finding:
    """Whether the parts are orthogonal wherever there is an arrow and neither vanishes."""
    field = records[FIELD]
    pairs = list(zip(field.series("scalar_product"), field.series("product_of_norms"), strict=True))
    cosines = [abs(product) / size for product, size in pairs if size > ARRIVED]
    largest = max(cosines, default=math.inf)
    measured = (
        f"cosine of their angle at most {largest:.1e}, at {len(cosines)} of {len(pairs)} points; "
        "one of them vanishes at the others"
    )
    return Finding.of(measured, largest < ROUNDING)


def lands_from_anywhere(records: Records) -> Finding:
    """As printed: it lands from every start, hence from a singular matrix too."""
    runs = [records[name] for name in (*AWAY, SINGULAR)]
    return Finding.of(_from_to(runs), all(_lands(run) for run in runs))


def lands_from_full_rank(records: Records) -> Finding:
    """As corrected: it lands from full rank; a singular matrix is at distance 1 or more."""
    runs, singular = [records[name] for name in AWAY], records[SINGULAR]
    stays = min(singular.series("to_manifold")) >= 1
    measured = f"{_from_to(runs)}; singular: {_from_to([singular])}"
    return Finding.of(measured, stays and all(_lands(run) for run in runs))


def _lands(run: Record) -> bool:
    distances = run.series("to_manifold")
    return distances[0] > LEFT and distances[-1] < ARRIVED


def _from_to(runs: Sequence[Record]) -> str:
    ends = [(run.series("to_manifold")[0], run.series("to_manifold")[-1]) for run in runs]
    return "; ".join(f"from {first:.2g} to {last:.2g}" for first, last in ends)


def picture_is_complete(records: Records) -> Finding:
    """Check that drawing two of four coefficients hides nothing."""
    names = (LANDING, RETRACTION, *AWAY)
    furthest = max(max(records[name].series("out_of_plane")) for name in names)
    return Finding.of(f"at most {furthest:.1e} out of the plane", furthest < ROUNDING)


CLAIMS = (
    Claim(
        "Landing and the retraction both converge to the optimum X_* "
        f"(distance below {ARRIVED:.0e}).",
        "paper",
        both_converge,
    ),
    Claim(
        "The retraction stays on the manifold; landing leaves it on the way and in the end "
        "is on it.",
        "paper",
        only_landing_leaves,
    ),
    Claim(
        "The two parts of the landing field, tangent and normal, are orthogonal wherever an "
        "arrow is drawn, on the manifold and off it.",
        "paper",
        parts_are_orthogonal,
    ),
    Claim(
        "Landing arrives on the manifold regardless of its start: from inside, from outside, "
        "and from the singular matrix 0.",
        "paper",
        lands_from_anywhere,
    ),
    Claim(
        "It arrives on the manifold from the starts of full rank, inside and outside; a "
        "singular matrix stays singular.",
        "correction",
        lands_from_full_rank,
    ),
    Claim(
        "The picture hides nothing: no iterate leaves the plane of the multiples of rotations.",
        "beyond the paper",
        picture_is_complete,
    ),
)
