"""Models as users build them: projected late, tensor-parallel, on other meshes."""

import pytest

import ortholand as ol
from tests.distributed.building import (
    advice_on_fsdp1,
    after_a_forward_pass,
    marked_steps,
    on_a_part_of_the_ranks,
    parts_on_another_device,
    state_of_another_mesh,
    tensor_parallel_steps,
)
from tests.distributed.ranks import assert_same, run


def test_weights_that_a_forward_pass_left_whole_are_taken_back_first():
    for result in run(after_a_forward_pass, 2):
        assert result["whole"]  # else the test shows nothing
        assert result["error"] < 1e-5
        assert all(result["moved"])


@pytest.mark.parametrize("kind", ["before", "later", "ddp", "meta"])
@pytest.mark.parametrize("bare", [False, True])
def test_marked_weights_are_found_and_step_as_in_one_process(kind, bare):
    prefix = "module." if kind == "ddp" else ""
    for result in run(marked_steps, 2, kind, bare):
        assert result["names"][:2] == [f"{prefix}up.weight", f"{prefix}down.weight"]
        assert result["keys"] == [
            f"{prefix}{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        ]
        assert max(result["first"], result["error"]) < 1e-6
        for got, want in zip(result["spread"], result["alone"], strict=True):
            assert (got - want).abs().max() < 1e-11


@pytest.mark.parametrize("data", [1, 2, 4])
def test_tensor_parallel_weights_step_as_in_one_process(data):
    for result in run(tensor_parallel_steps, 4, data):
        assert_same(result["spread"], result["alone"], 1e-11)
        assert result["error"] < 1e-3


def test_a_state_goes_from_one_mesh_to_another():
    for results in run(state_of_another_mesh, 4):
        for result in results.values():
            assert_same(result["other"], result["one"], 1e-11)


def test_a_rank_that_has_no_part_in_a_weight_leaves_it_alone():
    for result in run(on_a_part_of_the_ranks, 3):
        assert result["error"] < 0.1  # 0.36 before the projection
        assert result["part"] is None or (result["part"] - result["whole"]).abs().max() < 1e-12


def test_fsdp1_is_answered_with_fsdp2():
    for said in run(advice_on_fsdp1, 2):
        assert "use fully_shard (FSDP2)" in said


SGD, ADAM = (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}), (ol.LandingAdam, {"lr": 0.1})


@pytest.mark.parametrize("shape", [(20, 4), (9, 9), (6, 2, 3, 3)])
@pytest.mark.parametrize(("make", "options"), [SGD, ADAM])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_state_is_where_the_weight_is_and_not_where_its_mesh_is(shape, make, options, orthogonal):
    options = {**options, "orthogonal": orthogonal}
    for devices in run(parts_on_another_device, 2, shape, make, options):
        assert len(devices) > 1
        assert set(devices.values()) == {"cpu"}
