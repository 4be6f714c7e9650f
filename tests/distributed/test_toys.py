"""What the library does not know steps on ranks as in one process, by the route that it offers."""

from tests.distributed.ranks import run
from tests.distributed.toys import toys_counted

SHAPES = [(12, 4), (6, 6), (4, 12), (8, 2, 3, 3)]


def test_new_attractions_and_rules_step_on_ranks_as_in_one_process():
    cases = [
        (SHAPES, {"attraction": "lazy", "lr": 0.1, "momentum": 0.9}),
        (SHAPES, {"attraction": "tangent only", "lr": 0.1}),
        (SHAPES, {"safe_step": "cautious", "lr": 30.0}),
        ([(12, 4)], {"attraction": "lazy", "lr": 0.1}),
        ([(12, 4)], {"attraction": "tangent only", "lr": 0.1}),
        ([(12, 4)], {"safe_step": "cautious", "lr": 30.0}),
    ]
    for results in run(toys_counted, 2, cases):
        assert all(result["error"] < 1e-11 for result in results)
        lazy, tangent, cautious = (result["counts"] for result in results[3:])
        # Without a Gram form a tall matrix has an owner; with one, Gram matrices are summed.
        assert lazy == cautious == {"c10d.alltoall_base_": 2}
        assert tangent == {"c10d.allreduce_": 1}
