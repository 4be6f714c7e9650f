import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import ortholand as ol
from ortholand.nn import MaxMin, OrthogonalConv2d, OrthogonalLinear, UnitRowLinear, export
from tests.nn.test_certificates import network


@pytest.mark.parametrize("optimizer", [ol.LandingAdam, ol.LandingMuon, ol.LandingSGD])
def test_all_factors_are_trained_and_stay_orthonormal(optimizer):
    model = network()
    before = copy.deepcopy(model.state_dict())
    steps = optimizer(model.parameters(), lr=0.01)
    for _ in range(5):
        steps.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.arange(8) % 4).backward()
        steps.step()
    assert ol.orthogonality_error(model) < 1e-3
    assert all((p - before[name]).abs().max() > 0 for name, p in model.named_parameters())


def test_linear_layers_start_on_the_manifold_and_depend_on_the_seed():
    for shape in ((5, 3), (3, 5), (4, 4)):
        torch.manual_seed(3)
        layer = OrthogonalLinear(*shape, dtype=torch.float64)
        assert ol.orthogonality_error(layer) < 1e-12
        assert not layer.bias.any()
        torch.manual_seed(3)
        assert torch.equal(OrthogonalLinear(*shape, dtype=torch.float64).weight, layer.weight)


def test_unit_rows_have_norm_1_after_steps_too():
    layer = UnitRowLinear(6, 4, bias=False, dtype=torch.float64)
    steps = ol.LandingAdam(ol.param_groups(layer), lr=0.05)
    for _ in range(10):
        layer(torch.randn(3, 6, dtype=torch.float64)).sum().backward()
        steps.step()
    torch.testing.assert_close(layer.weight.norm(dim=-1), torch.ones(4, 1, dtype=torch.float64))
    gram = layer.weight[:, 0] @ layer.weight[:, 0].T
    assert (gram - torch.eye(4)).abs().max() > 0.01  # the rows need not be orthogonal


def test_max_min_permutes_numbers_and_refuses_odd_channels():
    x = torch.randn(2, 6, 3, 3)
    y = MaxMin()(x)
    torch.testing.assert_close(y.sort(dim=1).values, x.sort(dim=1).values)
    assert (y[:, :3] >= y[:, 3:]).all()
    assert torch.equal(MaxMin(dim=-3)(x[0]), y[0])
    with pytest.raises(ValueError, match=r"MaxMin\(\) pairs channels.*\(2, 5\).*even"):
        MaxMin()(torch.ones(2, 5))


@pytest.mark.parametrize("training", [True, False])
def test_an_exported_model_has_the_same_outputs(training):
    model, x = network().train(training), torch.randn(3, 1, 8, 8)
    model[5].bias.data.normal_()
    plain = export(model)
    torch.testing.assert_close(plain(x), model(x), atol=1e-5, rtol=0)
    assert not any(type(m).__module__.startswith("ortholand") for m in plain.modules())
    assert not list(ol.marks.marked(plain))
    assert all(m.training == training for m in plain.modules())
    assert isinstance(model[0][0], OrthogonalConv2d)


@pytest.mark.parametrize("padding_mode", ["circular", "zeros"])
@pytest.mark.parametrize("sizes", [(4, 6, 3, 1, 1), (4, 6, 4, 1, 2), (4, 6, 3, 2, 1), (4, 6, 7, 4)])
def test_exported_convolutions_pad_alike(sizes, padding_mode):
    conv, x = OrthogonalConv2d(*sizes, padding_mode=padding_mode), torch.randn(2, 4, 8, 8)
    plain = export(conv)
    torch.testing.assert_close(plain(x), conv(x), atol=1e-5, rtol=0)
    assert isinstance(plain, nn.Conv2d) == ((sizes[2] - sizes[3]) % 2 == 0)


def test_an_exported_model_is_loaded_without_this_library(tmp_path):
    file = tmp_path / "model.pickle"
    data = pickle.dumps((export(network()), torch.zeros(1, 1, 8, 8)))
    assert b"ortholand" not in data
    file.write_bytes(data)
    code = "import pickle, sys; f, x = pickle.load(open(sys.argv[1], 'rb')); print(*f(x).shape)"
    command = [sys.executable, "-W", "ignore", "-c", code, str(file)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1 4\n"


def test_a_layer_that_is_used_twice_is_exported_once():
    layer = OrthogonalLinear(3, 3)
    plain = export(nn.Sequential(layer, layer))
    assert plain[0] is plain[1]
    computed = ol.trivialize_(OrthogonalLinear(3, 3), "weight")
    assert type(export(computed)) is nn.Linear
    with pytest.raises(ValueError, match=r"forward of their own, but got Own\(\)"):
        export(type("Own", (MaxMin,), {"forward": abs})())
