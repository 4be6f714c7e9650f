"""What is constant on the manifold moves no iterate on ranks either."""

from tests.distributed.multipliers import differences
from tests.distributed.ranks import run
from tests.optim.multipliers import ATTRACTIONS, METHODS, NORM

SHAPES = [(6, 6), (40, 4), (9, 4), (4, 30)]


def test_a_multiplier_moves_no_iterate():
    # In Gram matrices of B, from which Muon's polar factor comes, C is squared: a second sum over
    # ranks repairs what the first one loses.
    cases = [(m, a, NORM) for m in METHODS for a in ATTRACTIONS]
    for found in run(differences, 2, cases, SHAPES, 4):
        assert max(found) < 1e-9, dict(zip(cases, found, strict=True))
