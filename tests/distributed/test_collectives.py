"""What a step communicates, as CommDebugMode counts it, and how many numbers."""

import pytest
import torch

import ortholand as ol
from ortholand.sharding.costs import received_by_columns, received_by_owner
from tests.distributed.counting import all_counted, calls, changing
from tests.distributed.ranks import run

SGD, ADAM, MUON = ol.LandingSGD, ol.LandingAdam, ol.LandingMuon
ALL_REDUCE, ALL_TO_ALL = "c10d.allreduce_", "c10d.alltoall_base_"

TALL = [(40, 4)] * 3 + [(24, 8)]
NESTEROV = {"momentum": 0.9, "nesterov": True}
SINGLE = {"dtype": torch.float32}
DAMPENED = {"momentum": 0.9, "dampening": 0.5}


def by_columns(shape, ranks, count=1, states=0, summed=None):
    rows, columns = shape
    summed = 2 * rows**2 + rows if summed is None else summed
    in_ring = 2 * count * summed * (ranks - 1) / ranks
    return received_by_columns(rows, columns, ranks, count, states, summed) - in_ring


# By these ranks notice that their options differ: two more numbers in each sum, and one for each
# rank in the first message to owners or columns.
MARKS = 2

# (shapes, optimizer, options), {collective: how often}, numbers summed, numbers received
TALL_CASES = [
    ((TALL, SGD, {}), {ALL_REDUCE: 1}, 3 * (2 * 16 + 4) + (2 * 64 + 8)),
    ((TALL, SGD, {"momentum": 0.9, "attraction": "after"}), {ALL_REDUCE: 1}, 244),
    ((TALL, SGD, {"safe_step": "frobenius", "attraction": "decoupled"}), {ALL_REDUCE: 1}, 244),
    ((TALL, SGD, NESTEROV), {ALL_REDUCE: 1}, 3 * (3 * 16 + 4) + (3 * 64 + 8)),
    ((TALL, SGD, DAMPENED), {ALL_REDUCE: 1}, 244 + 4),
    ((TALL, ADAM, {}), {ALL_REDUCE: 1}, 3 * (3 * 16 + 4 + 2) + (3 * 64 + 8 + 2)),
    # Muon sums single precision in double, and double precision a second time.
    ((TALL, MUON, SINGLE), {ALL_REDUCE: 1}, 3 * (3 * 16 + 4) + (3 * 64 + 8)),
    ((TALL, MUON, SINGLE | {"nesterov": False, "attraction": "coupled"}), {ALL_REDUCE: 1}, 244),
    ((TALL, MUON, {}), {ALL_REDUCE: 2}, 3 * (5 * 16 + 4) + (5 * 64 + 8)),
    ((TALL, MUON, {"momentum": 0.0, "attraction": "decoupled"}), {ALL_REDUCE: 2}, 244 + 224),
    # Kernels of a convolution: nothing but the count of skipped steps, one per weight.
    (([(8, 3, 3, 3), (4, 2, 5, 3)], SGD, {}), {ALL_REDUCE: 1}, 2),
    (([(8, 3, 3, 3), (4, 2, 5, 3)], ADAM, {"attraction": "after"}), {ALL_REDUCE: 1}, 2),
    (([(8, 3, 3, 3), (4, 2, 5, 3)], SGD, {"safe_step": "frobenius"}), {ALL_REDUCE: 1}, 2),
    # Unconstrained weights: a number per weight, whether it may step.
    (([(8, 4), (8, 8)], SGD, {"orthogonal": False, "momentum": 0.9}), {ALL_REDUCE: 1}, 2),
    # One long matrix: summing moves less than an owner would have to receive.
    (([(400, 4)], SGD, {"sharded": "auto"}), {ALL_REDUCE: 1}, 36),
]


def other_cases(ranks):
    """Square and wide weights, and the optimizers that know no step by rows."""
    square, wide, flat = (8, 8), (8, 16), (4, 64)
    both = {ALL_TO_ALL: 2}
    turned = {ALL_TO_ALL: 2, ALL_REDUCE: 1}
    numbers = lambda count, owned, length: (count - owned) * length  # noqa: E731
    return [
        # Every rank owns as many: each receives the bound exactly, and the numbers of the others.
        (
            ([square] * ranks, SGD, {}),
            both,
            0,
            received_by_owner(8, 8, ranks, ranks, 0) + numbers(ranks, 1, 1),
        ),
        (
            ([wide] * 2 * ranks, ADAM, {}),
            both,
            0,
            received_by_owner(8, 16, ranks, 2 * ranks, 1) + numbers(2 * ranks, 2, 3),
        ),
        (
            ([(16, 8)] * ranks, ol.RiemannianSGD, {"momentum": 0.5}),
            both,
            0,
            received_by_owner(16, 8, ranks, ranks, 1) + numbers(ranks, 1, 1),
        ),
        (
            ([(16, 8)] * ranks, ADAM, {"sharded": "owners"}),
            both,
            0,
            received_by_owner(16, 8, ranks, ranks, 1) + numbers(ranks, 1, 3),
        ),
        # As many as there are ranks, and not very tall: owners receive less than a sum.
        (
            ([(16, 8)] * 2 * ranks, SGD, {"sharded": "auto"}),
            both,
            0,
            received_by_owner(16, 8, ranks, 2 * ranks, 0) + numbers(2 * ranks, 2, 1),
        ),
        (([flat], SGD, {}), turned, 36, by_columns(flat, ranks)),
        (([flat], SGD, {"momentum": 0.9}), turned, 36, by_columns(flat, ranks, states=1)),
        (([flat], ADAM, {}), turned, 54, by_columns(flat, ranks, states=1)),
    ]


def branches(case) -> int:
    """How many values may be read: where matrices are whole on the CPU, is lr safe for a batch?"""
    shapes, make, options = case
    asks = make is not ol.RiemannianSGD and options.get("safe_step", "spectral") != "frobenius"
    return len(set(shapes)) if asks else 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_tall_weights_and_kernels_step_with_one_all_reduce_and_no_gather(ranks):
    asked, counts, summed = zip(*TALL_CASES, strict=True)
    for result in run(all_counted, ranks, list(asked)):
        for got, case, count, numbers in zip(result, asked, counts, summed, strict=True):
            assert got["counts"] == count, case
            assert (got["summed"], got["received"]) == (numbers + MARKS * count[ALL_REDUCE], 0), (
                case
            )
            assert got["error"] < (1e-6 if "dtype" in case[2] else 1e-12), case
            assert got["read"] <= (branches(case) if len(case[0][0]) == 4 else 0), case


@pytest.mark.parametrize("ranks", [2, 4])
def test_square_and_wide_weights_go_to_owners_or_are_turned(ranks):
    cases = other_cases(ranks)
    for result in run(all_counted, ranks, [case[0] for case in cases]):
        for got, (case, counts, summed, received) in zip(result, cases, strict=True):
            assert got["counts"] == counts, case
            summed += MARKS * counts.get(ALL_REDUCE, 0)
            assert (got["summed"], got["received"]) == (summed, received + ranks - 1), case
            assert got["error"] < 1e-12, case
            assert got["read"] <= branches(case), case


def test_very_many_weights_step_in_several_rounds():
    many = [(40, 4)] * 3 + [(24, 8), (4, 64)] + [(8, 8)] * 7
    # Numbers that each of two ranks brings: its rows of weight and gradient, and what is summed.
    tall, square = 2 * 80 + 36, 2 * 32
    longest = 2 * tall
    assert 6 * square <= longest < 7 * square
    # Two of 40 x 4, then one and one; the wide one by itself; six squares and one.
    expected = {ALL_REDUCE: 3 + 1, ALL_TO_ALL: 2 + 2 * 2}
    asked = [(many, SGD, {}), (many, ADAM, {"attraction": "after"})]
    for first, second in run(all_counted, 2, asked, longest):
        assert first["counts"] == expected
        assert first["error"] < 1e-12
        assert second["error"] < 1e-12


def test_wide_weights_go_the_way_on_which_the_busiest_rank_receives_less():
    def columns_win(rows, columns, ranks, count):
        size = (rows, columns, ranks, count, 0)
        return received_by_columns(*size, 2 * rows**2 + rows) < received_by_owner(*size)

    assert columns_win(64, 1024, 2, 1)
    assert not columns_win(64, 256, 2, 1)
    assert columns_win(64, 256, 8, 1)  # one owner is a bottleneck
    assert not columns_win(64, 256, 8, 8)  # eight are not
    assert not columns_win(64, 1024, 4, 4)


def test_a_step_makes_few_calls_whatever_the_number_of_equal_weights():
    one, four, large, wide = [(64, 8)], [(64, 8)] * 4, [(512, 128)] * 4, [(8, 512)]
    after = {"attraction": "after", "momentum": 0.9}
    cases = [
        *((shapes, make, SINGLE) for shapes in (one, wide) for make in (SGD, ADAM)),
        (one, SGD, SINGLE | after),
        (one, MUON, SINGLE),
        (four, ADAM, SINGLE),
        (large, ADAM, SINGLE),
        ([(8, 8)] * 4, ADAM, SINGLE),
    ]
    for counts in run(calls, 2, cases):
        for count, case in zip(counts, cases, strict=True):
            assert count <= 250, case


@pytest.mark.parametrize(("lr", "scale"), [(0.1, 1.0), (torch.tensor(0.1), 2.0)])
def test_a_step_regroups_what_has_changed(lr, scale):
    """Which weights have gradients, their types, and options may change between two steps."""
    for difference in run(changing, 2, lr, scale):
        assert difference < 1e-12
