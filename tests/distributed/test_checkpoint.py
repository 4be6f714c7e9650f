"""Saved on some ranks, loaded on others: training goes on as if nothing had happened."""

import pytest
import torch

from tests.distributed.checkpoints import (
    from_one_process,
    resume,
    save_and_go_on,
    through_a_local_state,
    through_a_whole_state,
)
from tests.distributed.ranks import assert_same, run
from tests.distributed.training import CASES, TOLERANCE, everything, new_model, train


@pytest.mark.parametrize(
    "case",
    ["adam-after", pytest.param("momentum-nesterov", marks=pytest.mark.slow_distributed)],
)
def test_a_checkpoint_of_four_ranks_goes_on_with_two_with_one_and_with_none(case, tmp_path):
    folder, dtype = str(tmp_path), torch.float64
    arguments = (folder, case, dtype, 4, 8)
    (first, *_) = run(save_and_go_on, 4, *arguments)
    assert first["saved"]["skipped"] > 0
    for ranks in (2, 1):
        for resumed in run(resume, ranks, *arguments):
            assert_same(resumed["saved"], first["saved"], 0)
            assert_same(resumed["after"], first["after"], 1e-11)
    with pytest.warns(UserWarning, match="single process"):
        resumed = resume(*arguments)
    assert_same(resumed["saved"], first["saved"], 0)
    assert_same(resumed["after"], first["after"], 1e-11)


@pytest.mark.parametrize("way", [through_a_whole_state, through_a_local_state])
def test_a_state_dict_goes_through_a_file_of_weights_only(way, tmp_path):
    for result in run(way, 2, str(tmp_path), "adam", torch.float32):
        assert_same(result["other"], result["one"], 0)


def test_the_state_of_one_process_goes_on_with_two_ranks():
    model = new_model(torch.float32)
    optimizer = CASES["momentum"](model)
    train(model, optimizer, 3)
    state, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    results = run(from_one_process, 2, state, weights, "momentum", torch.float32)
    train(model, optimizer, 6, 3)
    for result in results:
        assert_same(result, everything(model, optimizer), TOLERANCE["float32"])


def test_a_sharded_state_is_refused_by_a_plain_parameter():
    from torch.distributed.tensor import DTensor

    from ortholand.sharding.placement import restored

    class Fake(DTensor):
        def __new__(cls):
            return torch.Tensor._make_subclass(cls, torch.zeros(2, 2))

    with pytest.raises(
        ValueError, match=r"is a DTensor, but its parameter is not.*full_state_dict"
    ):
        restored(Fake(), torch.zeros(2, 2), torch.device("cpu"))
