"""Layers, names and outputs of the networks, against forward passes written out by hand."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import ortholand
from ortholand_lab.models import LeNet5, TanhMLP, resnet18

MODELS = {
    "mlp": lambda seed: TanhMLP(6, 3, seed=seed),
    "lenet": lambda seed: LeNet5(seed=seed),
    "resnet": lambda seed: resnet18(seed=seed),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_alone_decides_the_start(name):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (MODELS[name](seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.rand(3), expected)  # the user's random numbers go on undisturbed
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_tanh_mlp():
    model = TanhMLP(6, 3, seed=2)
    x = images(4, 6)
    expected = x
    for i in range(3):
        W, b = (model.state_dict()[f"layers.{i}.{name}"] for name in ("weight", "bias"))
        expected = torch.tanh(expected @ W.T + b)
    torch.testing.assert_close(model(x), expected)


def test_tanh_mlp_starts_orthogonal_with_standard_normal_biases():
    model = TanhMLP(seed=0)
    assert len(model.layers) == 10
    assert all(layer.weight.shape == (100, 100) for layer in model.layers)
    assert ortholand.orthogonality_error(model, orthogonal="layers.*.weight") < 1e-4
    biases = torch.cat([layer.bias.detach() for layer in model.layers])
    assert abs(biases.mean()) < 0.1
    assert abs(biases.std() - 1) < 0.1


def determinants(special):
    layers = TanhMLP(5, 20, seed=0, special=special).layers
    return {round(float(torch.linalg.det(layer.weight.detach()))) for layer in layers}


def test_tanh_mlp_determinants():
    assert determinants(special=True) == {1}
    assert determinants(special=False) == {-1, 1}


def test_lenet_layers_are_the_papers():
    shapes = {name: tuple(p.shape) for name, p in LeNet5(seed=0).named_parameters()}
    assert shapes == {
        "conv1.weight": (6, 1, 5, 5),
        "conv1.bias": (6,),
        "conv2.weight": (16, 6, 5, 5),
        "conv2.bias": (16,),
        "conv3.weight": (120, 16, 4, 4),
        "conv3.bias": (120,),
        "linear.weight": (10, 120),
        "linear.bias": (10,),
    }


def correlate(x, weight, bias):
    """A convolution as sums of products of shifted images."""
    k, size = weight.shape[-1], x.shape[-1] - weight.shape[-1] + 1
    out = bias.view(1, -1, 1, 1).expand(len(x), -1, size, size).clone()
    for i in range(k):
        for j in range(k):
            shifted = x[:, :, i : i + size, j : j + size]
            out += torch.einsum("nchw,oc->nohw", shifted, weight[:, :, i, j])
    return out


def mean_of_four(x):
    return torch.stack([x[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]).mean(0)


def test_lenet_output():
    model = LeNet5(seed=1).double()
    weights = model.state_dict()
    x = images(3, 1, 28, 28).double()
    expected = x
    for name in ("conv1", "conv2", "conv3"):
        expected = correlate(expected, weights[f"{name}.weight"], weights[f"{name}.bias"])
        expected = (expected.exp() - (-expected).exp()) / (expected.exp() + (-expected).exp())
        expected = expected if name == "conv3" else mean_of_four(expected)
    assert expected.shape == (3, 120, 1, 1)
    expected = expected.flatten(1) @ weights["linear.weight"].T + weights["linear.bias"]
    torch.testing.assert_close(model(x), expected)


def torchvision_shapes():
    """Names and shapes as ``torchvision.models.resnet18(num_classes=10)`` has them."""
    shapes = {"conv1.weight": (64, 3, 7, 7)} | batch_norm("bn1", 64)
    width = 64
    for stage, out in enumerate((64, 128, 256, 512), start=1):
        for block, n_in in enumerate((width, out)):
            name = f"layer{stage}.{block}"
            shapes |= {f"{name}.conv1.weight": (out, n_in, 3, 3)} | batch_norm(f"{name}.bn1", out)
            shapes |= {f"{name}.conv2.weight": (out, out, 3, 3)} | batch_norm(f"{name}.bn2", out)
            if n_in != out:
                shapes |= {f"{name}.downsample.0.weight": (out, n_in, 1, 1)}
                shapes |= batch_norm(f"{name}.downsample.1", out)
        width = out
    return shapes | {"fc.weight": (10, 512), "fc.bias": (10,)}


def batch_norm(name, n):
    names = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{part}": (n,) for part in names} | {f"{name}.num_batches_tracked": ()}


def test_resnet_has_torchvisions_names_and_shapes():
    model = resnet18(seed=0)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert list(shapes.items()) == list(torchvision_shapes().items())
    assert sum(p.numel() for p in model.parameters()) == 11_181_642


def test_resnet_starts_as_torchvisions():
    weights = resnet18(seed=0).state_dict()
    for name in ("conv1.weight", "layer2.0.conv1.weight", "layer4.1.conv2.weight"):
        fan_out = weights[name].shape[0] * weights[name][0, 0].numel()
        assert abs(weights[name].std() / (2 / fan_out) ** 0.5 - 1) < 0.05
        assert abs(weights[name].mean()) < 0.1 * weights[name].std()
    assert weights["layer1.0.bn2.weight"].eq(1).all()
    assert weights["fc.weight"].abs().max() <= 512**-0.5


def normalise(x, weights, name):
    """Batch normalisation with the batch's own statistics."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
    scale, shift = (weights[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def residual_block(x, weights, name, stride):
    y = F.conv2d(x, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
    y = F.relu(normalise(y, weights, f"{name}.bn1"))
    y = F.conv2d(y, weights[f"{name}.conv2.weight"], padding=1)
    y = normalise(y, weights, f"{name}.bn2")
    if f"{name}.downsample.0.weight" in weights:
        x = F.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=stride)
        x = normalise(x, weights, f"{name}.downsample.1")
    return F.relu(x + y)


def test_resnet_output_while_training():
    model = resnet18(seed=3).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # else scales of 1 and shifts of 0 would hide a mistake
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    weights = model.state_dict()
    x = images(4, 3, 32, 32).double()
    y = F.conv2d(x, weights["conv1.weight"], stride=2, padding=3)
    y = F.max_pool2d(F.relu(normalise(y, weights, "bn1")), 3, stride=2, padding=1)
    for stage in (1, 2, 3, 4):
        y = residual_block(y, weights, f"layer{stage}.0", stride=1 if stage == 1 else 2)
        y = residual_block(y, weights, f"layer{stage}.1", stride=1)
    expected = y.mean((2, 3)) @ weights["fc.weight"].T + weights["fc.bias"]
    torch.testing.assert_close(model(x), expected)


def test_a_narrower_resnet_has_fewer_channels_in_the_same_layers():
    wide, narrow = (resnet18(width=width, seed=0).state_dict() for width in (64, 8))
    assert list(wide) == list(narrow)
    for name, weight in narrow.items():
        factors = [w / n for w, n in zip(wide[name].shape, weight.shape, strict=True)]
        free = weight.shape != wide[name].shape
        assert set(factors) <= {1.0, 8.0}, name
        assert (8.0 in factors) == free, name
    assert narrow["layer4.1.conv2.weight"].shape == (64, 64, 3, 3)
    assert narrow["fc.weight"].shape == (10, 64)
