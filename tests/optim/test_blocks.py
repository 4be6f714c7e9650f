"""Weights that are grids of matrices, or of vectors of length one."""

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import ortholand as ol
from tests import needs

GRIDS = [
    *[((4, 1), (64, 16)), ((3, 1), (48, 16)), ((2, 2), (16, 16)), ((1, 4), (16, 64))],
    *[((8, 1), (64, 64)), ((1, 8), (64, 64)), ((3, 5), (21, 20)), ((5, 3), (10, 36))],
    *[((16, 1), (16, 5)), ((1, 12), (7, 12)), ((2, 1), (6, 50)), ((1, 2), (280, 40))],
]
SPHERES = {"rows": (12, 1), "columns": (1, 6), "vector": None}
METHODS = {
    "LandingSGD": (ol.LandingSGD, {"lr": 0.1, "momentum": 0.9}),
    "LandingAdam": (ol.LandingAdam, {"lr": 0.05}),
    "LandingMuon": (ol.LandingMuon, {"lr": 0.05}),
    "RiemannianSGD": (ol.RiemannianSGD, {"lr": 0.1, "momentum": 0.9}),
    "PLAM": (ol.PLAM, {"lr": 0.02, "momentum": 0.9}),
    "PenaltySGD": (ol.PenaltySGD, {"lr": 0.02}),
}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-14}


def parts(W, blocks):
    """Each block of a matrix as a tensor of its own."""
    r, c = blocks
    return [block.clone() for rows in W.chunk(r) for block in rows.chunk(c, dim=1)]


def whole(blocks, grid):
    r, c = grid
    return torch.cat([torch.cat(blocks[i * c : (i + 1) * c], dim=1) for i in range(r)])


def gradients(shape, steps, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(steps)]


def start(shape, dtype=torch.float32, **constraint):
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return nn.Parameter(ol.orthogonalize_(W, **constraint))


def run(optimizer, weights, all_gradients):
    for G in all_gradients:
        for p, own in zip(weights, G if isinstance(G, list) else [G], strict=True):
            p.grad = own.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("engine", ["compiled", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", METHODS)
def test_blocks_step_as_separate_parameters(name, dtype, engine):
    make, options = METHODS[name]
    if engine == "reference" and "fused" in make.further_options:
        options = {**options, "fused": False}
    for blocks, shape in GRIDS:
        W = start(shape, dtype, blocks=blocks)
        separate = [nn.Parameter(block) for block in parts(W.detach(), blocks)]
        all_gradients = gradients(shape, 6, dtype)
        optimizer = run(make([W], blocks=blocks, **options), [W], all_gradients)
        run(make(separate, **options), separate, [parts(G, blocks) for G in all_gradients])
        if engine == "compiled" and name in ("LandingSGD", "LandingAdam"):
            assert ol.explain(optimizer)[0].engine == "compiled"
        expected = whole([block.detach() for block in separate], blocks)
        assert (W.detach() - expected).abs().max() <= TOLERANCES[dtype], (blocks, shape)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("view", SPHERES)
@pytest.mark.parametrize("name", ["LandingSGD", "LandingAdam"])
def test_rows_columns_and_vectors_are_grids(name, view, fused):
    make, options = METHODS[name]
    W, all_gradients = start((12, 6), view=view), gradients((12, 6), 6)
    run(make([W], view=view, fused=fused, **options), [W], all_gradients)
    if view == "vector":
        V = nn.Parameter(start((12, 6), view=view).detach().reshape(72, 1))
        run(make([V], fused=fused, **options), [V], [G.reshape(72, 1) for G in all_gradients])
    else:
        V, blocks = start((12, 6), blocks=SPHERES[view]), SPHERES[view]
        run(make([V], blocks=blocks, fused=fused, **options), [V], all_gradients)
    assert torch.equal(W.reshape(V.shape), V)


@pytest.mark.parametrize("fused", [None, False])
def test_a_parameter_of_one_dimension_is_a_vector_of_length_one(fused):
    gain = nn.Parameter(ol.orthogonalize_(torch.ones(9), view="vector", scale="fan"))
    assert torch.allclose(gain.detach(), torch.ones(9))
    optimizer = ol.LandingAdam([gain], lr=0.1, view="vector", scale="fan", fused=fused)
    run(optimizer, [gain], gradients((9,), 20))
    assert gain.norm().item() == pytest.approx(3.0, abs=1e-5)
    assert ol.orthogonality_error(optimizer) < 1e-5


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("name", ["LandingSGD", "LandingAdam"])
@pytest.mark.parametrize("view", SPHERES)
def test_lengths_stay_one_over_many_steps(view, name, fused):
    make, options = METHODS[name]
    W = start((12, 6), view=view)
    optimizer = make([W], view=view, fused=fused, attraction="after", **options)
    some = gradients((12, 6), 50)
    for _ in range(20 if fused is None else 2):
        run(optimizer, [W], some)
    dims = {"rows": (1,), "columns": (0,), "vector": (0, 1)}[view]
    assert (torch.linalg.vector_norm(W.detach().double(), dim=dims) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("fused", [None, False])
def test_adam_has_one_second_moment_for_each_block(fused):
    for constraint, shape in (
        ({"blocks": (4, 2)}, (4, 2)),
        ({"view": "rows"}, (8, 1)),
        ({"view": "columns"}, (1, 6)),
        ({"view": "vector"}, ()),
    ):
        W = start((8, 6), **constraint)
        optimizer = ol.LandingAdam([W], lr=0.1, fused=fused, **constraint)
        run(optimizer, [W], gradients((8, 6), 2))
        state = optimizer.state[W]
        assert state["exp_avg_sq"].shape == state["step"].shape == shape
        assert state["exp_avg"].shape == W.shape
        assert bool((state["exp_avg_sq"] > 0).all())


@pytest.mark.parametrize("fused", [None, False])
def test_a_block_that_is_not_finite_is_skipped_and_counted_alone(fused):
    W = start((8, 6), blocks=(4, 2))
    before, optimizer = W.detach().clone(), ol.LandingSGD([W], lr=0.1, blocks=(4, 2), fused=fused)
    (G,) = gradients((8, 6), 1)
    G[2, 4] = float("nan")
    run(optimizer, [W], [G])
    stayed = [
        torch.equal(a, b) for a, b in zip(parts(W, (4, 2)), parts(before, (4, 2)), strict=True)
    ]
    assert stayed == [i == 3 for i in range(8)]
    assert optimizer.skipped_steps() == 1
    (row,) = ol.explain(optimizer)
    assert (row.view, row.matrices) == ("4 x 2 blocks", 8)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    "constraint", [{"blocks": (2, 3)}, {"view": "rows"}, {"view": "columns"}, {"view": "vector"}]
)
def test_a_saved_run_is_resumed_bit_for_bit(constraint, fused):
    def make(W):
        return ol.LandingAdam([W], lr=0.05, fused=fused, **constraint)

    W, all_gradients = start((8, 6), **constraint), gradients((8, 6), 8)
    optimizer = run(make(W), [W], all_gradients[:4])
    memory = io.BytesIO()
    torch.save({"weight": W.detach(), "optimizer": optimizer.state_dict()}, memory)
    memory.seek(0)
    saved = torch.load(memory, weights_only=True)
    again = nn.Parameter(saved["weight"])
    resumed = make(again)
    resumed.load_state_dict(saved["optimizer"])
    run(optimizer, [W], all_gradients[4:])
    run(resumed, [again], all_gradients[4:])
    assert torch.equal(W, again)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"blocks": (2, 1)}, {"blocks": (4, 1)}),
        ({"blocks": (2, 1)}, {}),
        ({}, {"blocks": (2, 1)}),
        ({"view": "rows"}, {"view": "vector"}),
    ],
)
@pytest.mark.parametrize("name", ["LandingSGD", "LandingAdam"])
def test_a_state_of_another_grid_is_refused_before_anything_changes(name, here, there):
    make, options = METHODS[name]
    W, V = start((8, 6), **here), start((8, 6), **there)
    optimizer = run(make([W], **here, **options), [W], gradients((8, 6), 1))
    other = run(make([V], **there, **options), [V], gradients((8, 6), 1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"must be of the same blocks .* parameter 0 .* was saved"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert all(torch.equal(v, after["state"][0][k]) for k, v in before["state"][0].items())


def test_a_state_without_the_option_is_one_of_whole_matrices():
    W = start((8, 6))
    optimizer = run(ol.LandingSGD([W], lr=0.1, momentum=0.9), [W], gradients((8, 6), 1))
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["blocks"]
    optimizer.load_state_dict(saved)
    V = start((8, 6), blocks=(2, 1))
    with pytest.raises(ValueError, match="was saved as 'matrix', and the weight is '2 x 1 blocks'"):
        ol.LandingSGD([V], lr=0.1, momentum=0.9, blocks=(2, 1)).load_state_dict(saved)


def test_blocks_of_a_weight_with_state_must_not_change():
    W = start((8, 8), blocks=(2, 1))
    optimizer = ol.LandingSGD([W], lr=0.1, momentum=0.9, blocks=[2, 1])
    assert optimizer.param_groups[0]["blocks"] == (2, 1)
    run(optimizer, [W], gradients((8, 8), 1))
    before = W.detach().clone()
    for blocks in ((1, 2), (3, 1)):
        optimizer.param_groups[0]["blocks"] = blocks
        with pytest.raises(ValueError, match="'blocks' of a weight with state must not change"):
            optimizer.step()
        assert torch.equal(W, before)
    optimizer.param_groups[0]["blocks"] = (2, 1)
    optimizer.step()
    assert not torch.equal(W, before)


@pytest.mark.parametrize("make", [ol.LandingSGD, ol.LandingAdam, ol.RiemannianSGD])
@pytest.mark.parametrize(
    ("shape", "constraint", "message"),
    [
        ((10, 6), {"blocks": (4, 1)}, "has 10 rows, and 10 is not a multiple of 4"),
        ((10, 6), {"blocks": (5, 4)}, "has 6 columns, and 6 is not a multiple of 4"),
        ((4, 2, 3), {"blocks": (2, 4)}, "has 6 columns, and 6 is not a multiple of 4"),
        ((10, 6), {"blocks": (10, 6)}, "1 x 1 orthogonal matrix cannot move.*10 x 6 blocks"),
        ((10, 1), {"view": "rows"}, "1 x 1 orthogonal matrix cannot move"),
        ((1, 1), {"view": "vector"}, "1 x 1 orthogonal matrix cannot move"),
        ((10,), {"view": "rows"}, "needs at least 2 dimensions"),
        ((10, 6), {"view": "kernel", "blocks": (2, 1)}, "Leave one of them out"),
        ((8, 4), {"blocks": (2, 1)}, r"at distance .*Set blocks=\(2, 1\) there, too"),
        ((8, 4), {"view": "rows", "scale": 2.0}, r"Set view='rows' and scale=2 there, too"),
    ],
)
def test_what_cannot_be_such_a_grid_is_refused(make, shape, constraint, message):
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(7 * torch.ones(shape))], lr=0.1, **constraint)


@pytest.mark.parametrize("fused", [None, False])
def test_each_block_has_the_scale(fused):
    W = start((12, 6), blocks=(2, 3), scale="fan")  # 6 x 2 blocks
    first = W.detach()[:6, :2]
    assert torch.allclose(first.mT @ first, 3 * torch.eye(2), atol=1e-5)
    optimizer = ol.LandingAdam([W], lr=0.1, blocks=(2, 3), scale="fan", fused=fused)
    run(optimizer, [W], gradients((12, 6), 10))
    assert ol.orthogonality_error(optimizer) < 1e-3
    assert ol.orthogonality_error(W, blocks=(2, 3), scale=3**0.5) < 1e-3
    assert ol.orthogonality_error(W, blocks=(2, 3)) > 1


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("constraint", [{"blocks": (2, 3)}, {"view": "rows"}, {"view": "columns"}])
def test_weights_of_several_shapes_step_in_batches(constraint, foreach):
    """With rows of zeros, as on a device, where that helps."""
    shapes = [(12, 6), (4, 6), (24, 6), (12, 6), (8, 12), (12, 9)]
    weights = [start(shape, torch.float64, **constraint) for shape in shapes]
    alone = [start(shape, torch.float64, **constraint) for shape in shapes]
    all_gradients = [
        [gradients(shape, 1, torch.float64, seed=7 * k + i)[0] for i, shape in enumerate(shapes)]
        for k in range(5)
    ]
    run(ol.LandingAdam(weights, lr=0.05, foreach=foreach, **constraint), weights, all_gradients)
    for i, W in enumerate(alone):
        optimizer = ol.LandingAdam([W], lr=0.05, foreach=False, **constraint)
        run(optimizer, [W], [all_of[i] for all_of in all_gradients])
        assert (W - weights[i]).abs().max() < 1e-14


@pytest.mark.parametrize(
    "layout", [torch.clone, lambda W: W.mT.contiguous().mT], ids=["rows", "columns"]
)
@pytest.mark.parametrize("blocks", [(3, 1), (1, 4), (3, 4)])
def test_compiled_code_steps_blocks_in_any_dense_memory(blocks, layout):
    results = []
    for fused in (None, False):
        W = nn.Parameter(layout(start((9, 20), torch.float64, blocks=blocks).detach()))
        optimizer = ol.LandingAdam([W], lr=0.05, blocks=blocks, fused=fused)
        run(optimizer, [W], gradients((9, 20), 4, torch.float64))
        assert ol.explain(optimizer)[0].engine == ("reference" if fused is False else "compiled")
        results.append(W.detach())
    assert (results[0] - results[1]).abs().max() < 1e-13


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "constraint", [{"blocks": (2, 1)}, {"blocks": (1, 3)}, {"view": "rows"}, {"view": "columns"}]
)
def test_blocks_of_a_convolution_are_those_of_its_matrix(constraint, memory_format):
    flat = start((8, 12), torch.float64, **constraint)
    for fused in (None, False):
        W = nn.Parameter(flat.detach().clone().reshape(8, 3, 2, 2).to(memory_format=memory_format))
        V, all_gradients = nn.Parameter(flat.detach().clone()), gradients((8, 12), 4, torch.float64)
        optimizer = ol.LandingAdam([W], lr=0.05, fused=fused, **constraint)
        run(optimizer, [W], [G.reshape(8, 3, 2, 2) for G in all_gradients])
        run(ol.LandingAdam([V], lr=0.05, fused=fused, **constraint), [V], all_gradients)
        assert (W.reshape(8, 12) - V).abs().max() < 1e-13
        strided = memory_format is torch.channels_last and constraint.get("view") != "rows"
        if fused is None and strided and constraint != {"blocks": (2, 1)}:
            assert "memory of strides" in ol.explain(optimizer)[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constraint", [{"blocks": (2, 3)}, {"view": "rows"}])
def test_half_precision(constraint, dtype):
    W = start((8, 12), dtype, **constraint)
    optimizer = ol.LandingAdam([W], lr=0.01, **constraint)
    before = W.detach().clone()
    run(optimizer, [W], [G.to(dtype) for G in gradients((8, 12), 20)])
    assert not torch.equal(W, before)
    assert ol.orthogonality_error(W, **constraint) < 0.05


@pytest.mark.parametrize("fused", [None, False])
def test_a_step_of_zero_changes_nothing(fused):
    for constraint in ({"blocks": (2, 3)}, {"view": "rows"}, {"view": "columns"}):
        W = start((8, 12), **constraint)
        before = W.detach().clone()
        optimizer = ol.LandingAdam([W], lr=0.0, fused=fused, **constraint)
        run(optimizer, [W], gradients((8, 12), 2))
        assert torch.equal(W, before)


@needs.compiled_steps
@pytest.mark.thorough
@pytest.mark.parametrize("constraint", [{"blocks": (2, 3)}, {"view": "rows"}, {"view": "vector"}])
def test_compiled_by_torch(constraint):
    results = []
    for wrap in (lambda step: step, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        W = start((8, 12), **constraint)
        lr = torch.tensor(0.05)
        optimizer = ol.LandingAdam([W], lr=lr, fused=False, **constraint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the tracer, about code of torch's own
            step = wrap(lambda optimizer=optimizer: optimizer.step())
            for G in gradients((8, 12), 3):
                W.grad = G
                step()
        results.append(W.detach())
    assert (results[0] - results[1]).abs().max() < 1e-5
