"""Training on several ranks is training in one process."""

import pytest
import torch

from tests.distributed.ranks import run
from tests.distributed.training import CASES, TOLERANCE, alone, trained


def check(kind, ranks, cases, dtype_name, steps=100):
    dtype = getattr(torch, dtype_name)
    results = run(trained, ranks, kind, cases, dtype, steps)
    for case in cases:
        expected = alone(case, dtype, steps)
        for result in results:
            for got, want, again in zip(result[case], expected, results[0][case], strict=True):
                assert torch.equal(got, again), "ranks differ"
                error = (got - want).abs().max().item()
                assert error < TOLERANCE[dtype_name], (case, tuple(want.shape))


@pytest.mark.parametrize(
    ("kind", "ranks", "case", "dtype", "steps"),
    [
        ("ddp", 2, "sgd", "float64", 100),
        ("fsdp", 2, "momentum", "float32", 100),
        ("fsdp", 4, "adam", "float64", 30),
        ("fsdp", 2, "muon", "float32", 100),
        ("fsdp", 4, "muon", "float32", 30),
    ],
)
def test_steps_on_ranks_are_those_of_one_process(kind, ranks, case, dtype, steps):
    check(kind, ranks, [case], dtype, steps)


both_types = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.mark.slow_distributed
@both_types
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", list(CASES))
def test_every_optimizer_trains_sharded_weights_as_whole_ones(case, ranks, dtype):
    check("fsdp", ranks, [case], dtype)


@pytest.mark.slow_distributed
@both_types
@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_training_is_that_of_one_process(ranks, dtype):
    check("ddp", ranks, ["sgd", "momentum", "adam", "riemannian"], dtype)


@pytest.mark.slow_distributed
@both_types
def test_a_mesh_that_also_replicates_trains_as_one_process(dtype):
    check("hsdp", 4, ["sgd", "momentum", "adam"], dtype)
