import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ortholand as ol
from ortholand.nn import OrthogonalConv2d

# in_channels, out_channels, kernel_size, stride, groups
CASES = [
    *((4, 4, k, 1, 1) for k in range(1, 8)),
    *((3, 5, k, 1, 1) for k in (1, 2, 3, 5)),
    *((5, 3, k, 1, 1) for k in (2, 3, 7)),
    *((7, 1, 3, 1, 1), (1, 2, 3, 1, 1), (1, 1, 1, 1, 1)),
    *((6, 6, 3, 1, 2), (6, 9, 4, 1, 3), (8, 4, 3, 1, 2), (4, 4, 1, 1, 4)),
    *((3, 12, k, 2, 1) for k in (2, 3, 4)),
    *((3, 5, 3, 2, 1), (5, 4, 5, 2, 1), (6, 2, 4, 2, 1), (2, 11, 3, 2, 1), (3, 20, 3, 2, 1)),
    *((1, 9, 5, 2, 1), (1, 3, 2, 2, 1), (4, 6, 4, 2, 2), (6, 4, 3, 2, 2), (2, 16, 3, 2, 2)),
    *((1, 16, 4, 4, 1), (2, 40, 7, 4, 1), (3, 7, 6, 4, 1), (5, 3, 5, 4, 1), (4, 4, 7, 4, 2)),
    *((2, 8, 4, 4, 2), (9, 6, 2, 1, 3)),
]


def layer(case: tuple[int, ...], **options) -> OrthogonalConv2d:
    torch.manual_seed(0)
    channels_in, channels_out, k, stride, groups = case
    return OrthogonalConv2d(channels_in, channels_out, k, stride, groups, **options)


def by_jacobian(conv: nn.Module, channels: int, size: int) -> Tensor:
    """All singular values of a convolution without bias, from its images of unit vectors."""
    units = torch.eye(channels * size**2, dtype=next(conv.parameters()).dtype)
    images = conv(units.view(-1, channels, size, size)).detach()
    return torch.linalg.svdvals(images.flatten(1).double())


def by_fourier(conv: OrthogonalConv2d, size: int) -> Tensor:
    """The same for circular padding: frequencies that a stride identifies make one block."""
    kernel = conv.kernel().detach().double().unflatten(0, (conv.groups, -1))
    symbol = torch.fft.fft2(kernel, (size, size)) / conv.stride
    aliases = symbol.unflatten(-1, (conv.stride, -1)).unflatten(-3, (conv.stride, -1))
    blocks = aliases.movedim((4, 6), (0, 1)).flatten(4)
    return torch.linalg.svdvals(blocks).flatten()


THOROUGH = pytest.mark.thorough
randint = random.Random(0).randint
HELD_OUT = [
    pytest.param((g * randint(2, 6), g * randint(s, 4 * s), randint(s, 7), s, g), marks=THOROUGH)
    for s, g in zip((1, 1, 2, 4) * 15, (1, 2, 3) * 20, strict=True)
]


@pytest.mark.parametrize("case", CASES + HELD_OUT, ids=str)
@pytest.mark.parametrize("optimizer", [ol.LandingAdam, ol.LandingMuon])
def test_all_singular_values_are_1_during_training(case, optimizer):
    conv = layer(case, bias=False)
    start, steps = copy.deepcopy(conv), optimizer(ol.param_groups(conv), lr=0.1)
    x = torch.randn(4, case[0], 8, 8)
    target = torch.randn_like(conv(x).detach())
    for lr in (0.1, 0.1, 0.1, 0.1, 0.01, 0.01):  # radians: large, then as at the end of a schedule
        for group in steps.param_groups:
            group["lr"] = lr
        steps.zero_grad()
        (conv(x) * target).mean().backward()
        steps.step()
        assert (by_fourier(conv, 8) - 1).abs().max() < 1e-3
    values = by_jacobian(conv, case[0], 8)
    assert len(values) == min(case[0] * 64, case[1] * 64 // case[3] ** 2)
    assert (values - 1).abs().max() < 1e-4
    if max(conv.mix.shape[1:]) > 1:
        assert (conv.kernel() - start.kernel()).abs().max() > 0.01


@pytest.mark.parametrize("case", [(2, 3, 3, 1, 1), (2, 16, 5, 2, 2), (1, 33, 7, 4, 1)], ids=str)
def test_singular_values_by_two_methods_at_16_pixels(case):
    conv = layer(case, bias=False, dtype=torch.float64)
    by_unit_vectors, by_symbols = by_jacobian(conv, case[0], 16), by_fourier(conv, 16)
    assert by_unit_vectors.shape == by_symbols.shape
    torch.testing.assert_close(by_unit_vectors, torch.ones_like(by_symbols))
    torch.testing.assert_close(by_symbols, torch.ones_like(by_symbols))


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_with_zeros_around_images_the_norm_is_at_most_1(case):
    values = by_jacobian(layer(case, bias=False, padding_mode="zeros"), case[0], 8)
    assert values.max() < 1 + 1e-5
    if case[2] > case[3]:
        assert values.min() < 0.999


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_the_bound_contains_the_errors_of_the_factors(case):
    """The convolution is further from an isometry than the factors, but never beyond the bound."""
    exact, off = layer(case), layer(case)
    with torch.no_grad():
        for factor in (off.mix, off.projectors, off.lift):
            if factor is not None:
                factor += 0.001 * torch.randn_like(factor) + 0.004 * factor
    for dtype in (torch.float32, torch.float64, torch.float32):
        exact.to(dtype), off.to(dtype)
        assert by_fourier(exact, 16).max() <= exact.lipschitz_bound() < 1 + 1e-4
        assert 1 + 1e-3 < by_fourier(off, 16).max() <= off.lipschitz_bound() < 1.3


def test_the_composition_agrees_with_one_convolution_after_the_other():
    """Written independently: each projector as a convolution of its own, applied to an image."""
    conv = layer((3, 20, 4, 2, 1), bias=False, dtype=torch.float64)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before, _ = conv.padding
    y = torch.einsum("cm,bchw->bmhw", conv.lift[0], x).roll((before, before), (2, 3))
    for axis, factors in enumerate(conv.projectors[:, :, 0].flip(0).unbind(1)):
        for U in factors:
            Q, moved = U @ U.T, y.roll(-1, 2 + axis)
            y = moved + torch.einsum("nm,bmhw->bnhw", Q, y - moved)
    patches = y.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
    torch.testing.assert_close(conv(x), (patches @ conv.mix[0].T).permute(0, 3, 1, 2))
    torch.testing.assert_close(conv(x[0]), conv(x)[0])


def step(conv: OrthogonalConv2d) -> None:
    with torch.enable_grad():
        conv.requires_grad_(True)(torch.randn(2, 4, 8, 8)).square()[:, 0].sum().backward()
    ol.LandingAdam(ol.param_groups(conv), lr=0.1).step()
    conv.requires_grad_(False)


CHANGES = [
    step,
    torch.no_grad()(lambda conv: conv.mix.set_(-conv.mix)),
    torch.no_grad()(lambda conv: conv.projectors.copy_(conv.projectors.flip(-2))),
    lambda conv: conv.projectors.data.copy_(conv.projectors.data.flip(-2)),
    lambda conv: np.negative(conv.mix.detach().numpy(), out=conv.mix.detach().numpy()),
    lambda conv: conv.load_state_dict(layer((4, 4, 3, 1, 1)).state_dict()),
    lambda conv: conv.register_parameter("mix", nn.Parameter(-conv.mix.detach())),
    lambda conv: conv.double(),
    lambda conv: conv.reset_parameters(),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_kept_kernel_is_never_stale(change, mode):
    torch.manual_seed(1)
    conv, x = OrthogonalConv2d(4, 4, 3).eval().requires_grad_(False), torch.randn(2, 4, 8, 8)
    with mode():
        first = conv(x)
        assert conv._current_kernel() is conv._current_kernel()
    twin = copy.deepcopy(conv)
    change(conv)
    x = x.to(conv.mix.dtype)
    with mode():
        torch.testing.assert_close(conv(x), copy.deepcopy(conv)(x))  # which keeps nothing
        if conv.mix.dtype == first.dtype:
            assert (conv(x) - first).abs().max() > 0.1
        torch.testing.assert_close(twin(x.float()), first)


def test_a_kernel_kept_in_inference_mode_takes_no_gradient_away():
    conv, x = layer((4, 4, 3, 1, 1)).eval(), torch.randn(1, 4, 8, 8, requires_grad=True)
    with torch.inference_mode():
        conv(x)
    conv.requires_grad_(False)(x).sum().backward()
    conv.requires_grad_(True)(x.detach()).sum().backward()
    assert all(tensor.grad is not None for tensor in (x, *conv.parameters()))


def test_copies_and_pickles_are_without_the_kept_kernel_and_with_the_marks():
    conv, x = layer((4, 4, 3, 1, 1)).requires_grad_(False), torch.randn(1, 4, 8, 8)
    y, file = conv(x), io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    for copied in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert copied._kept is None
        assert torch.equal(copied(x), y)
        assert set(ol.marks.marks_of(copied)) == {"mix", "projectors"}
    assert torch.equal(torch.load(file, weights_only=False)(x), y)


def test_functional_gradients_and_compilation_compose_the_kernel():
    conv, x = layer((4, 4, 3, 1, 1)), torch.randn(1, 4, 8, 8)
    by_function = torch.func.grad(lambda p: torch.func.functional_call(conv, p, x)[:, 0].sum())
    conv(x)[:, 0].sum().backward()
    gradients = by_function(dict(conv.named_parameters()))
    torch.testing.assert_close(gradients["projectors"], conv.projectors.grad)
    compiled = torch.compile(conv, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), conv(x))


def test_first_and_second_derivatives():
    conv = layer((2, 3, 3, 1, 1), dtype=torch.float64)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*conv.named_parameters(), strict=True)

    def apply(image, *values):
        return torch.func.functional_call(conv, dict(zip(names, values, strict=True)), image)

    assert torch.autograd.gradcheck(apply, (x, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(apply, (x, *parameters), fast_mode=True)


def test_autocast_composes_in_full_precision():
    conv, x = layer((4, 4, 3, 1, 1)), torch.randn(1, 4, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(conv.kernel(), layer((4, 4, 3, 1, 1)).kernel())
        assert conv(x).dtype == torch.bfloat16


def test_on_the_meta_device_factors_are_marked_and_projected_later():
    conv = OrthogonalConv2d(4, 4, 3, device="meta").to_empty(device="cpu")
    nn.init.normal_(conv.mix), nn.init.normal_(conv.projectors)
    ol.orthogonalize_(conv)
    assert (by_fourier(conv, 8) - 1).abs().max() < 1e-5


BAD_OPTIONS = [
    ((4, 4, 2, 4, 1), {}, "kernel_size must be at least the stride.*kernel_size=2, stride=4.*=4"),
    ((4, 4, True, 1, 1), {}, "positive integers"),
    ((4, 4, (3, 3), 1, 1), {}, "give one number"),
    ((4, 6, 3, 1, 3), {}, "multiples of groups.*4, 6.*groups=2"),
    ((4, 4, 3, 1, 4), {}, "only shifts.*groups=4.*Use fewer groups"),
    ((1, 3, 3, 2, 1), {}, "only shifts.*kernel_size=2, or 8 output channels"),
    ((4, 4, 3, 1, 1), {"padding_mode": "reflect"}, "padding_mode must be.*reflect"),
]


@pytest.mark.parametrize(("case", "options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options_name_the_layer_and_the_fix(case, options, message):
    with pytest.raises(ValueError, match=message):
        layer(case, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_half_precision_and_complex_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match=r"OrthogonalConv2d\(4, 4, kernel_size=3\) needs float32"):
        layer((4, 4, 3, 1, 1), dtype=dtype)
    if not dtype.is_complex:
        with pytest.raises(TypeError, match=r"Use layer.float\(\)"):
            layer((4, 4, 3, 1, 1)).to(dtype)(torch.ones(1, 4, 8, 8, dtype=dtype))


BAD_IMAGES = [
    (torch.ones(1, 3, 8, 8), ValueError, r"takes images \(..., 4, height, width\), got \(1, 3"),
    (torch.ones(4, 8), ValueError, "takes images"),
    (torch.ones(1, 4, 8, 2), ValueError, "as large as the kernel.*8 x 2 pixels.*kernel_size=2"),
    (torch.ones(1, 4, 9, 8), ValueError, "multiple of the stride.*9 x 8"),
    (torch.ones(1, 4, 8, 8).half(), TypeError, "images are torch.float16"),
]


@pytest.mark.parametrize(("images", "error", "message"), BAD_IMAGES, ids=str)
def test_bad_images_name_the_layer_and_the_fix(images, error, message):
    conv = layer((4, 4, 3, 2, 1))
    with pytest.raises(error, match=message):
        conv(images)
