"""What is constant on the manifold moves no iterate on ranks either."""

from tests.distributed.multipliers import differences
from tests.distributed.ranks import run
from tests.optim.multipliers import ATTRACTIONS, METHODS, NORM

SHAPES = [(6, 6), (40, 4), (9, 4), (4, 30)]


def test_a_multiplier_moves_no_iterate():
    # Muon's polar factor comes from Gram matrices of B on ranks, in which C is squared.
    cases = [(m, a, 10.0 if "Muon" in m else NORM) for m in METHODS for a in ATTRACTIONS]
    for found in run(differences, 2, cases, SHAPES, 4):
        assert max(found) < 1e-9, dict(zip(cases, found, strict=True))
