"""No address leaves Python unless what is there is what compiled code will take it for."""

import ctypes

import numpy as np
import pytest
import torch
from torch import nn

from ortholand.native import address, array_address
from ortholand.native.border import (
    Extent,
    address_if_dense,
    address_if_plain,
    addresses_if_plain,
)
from ortholand.native.layout import Layout, layout_of


class Wrapped(torch.Tensor):
    """A subclass may have no memory of its own."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_what_is_plain_has_its_address(dtype):
    x = torch.zeros(4, 3, 3, dtype=dtype)
    assert address(x, dtype, 36) == x.data_ptr()
    assert address(x[1:3], dtype, 18) == x.data_ptr() + 9 * dtype.itemsize
    assert address(x[3], dtype, 9) == x[3].data_ptr()
    assert address(torch.zeros((), dtype=dtype), dtype, 1) != 0


def test_parameters_and_their_gradients():
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.zeros(2, 2)
    assert address(p, torch.float32, 4) == p.data_ptr()
    assert address(p.grad, torch.float32, 4) == p.grad.data_ptr()


def test_nothing_is_somewhere():
    assert address(torch.zeros(0, 3), torch.float32, 0) == 0


def freed(offset):
    x = torch.zeros(8)[offset : offset + 3]
    x.untyped_storage().resize_(0)
    return x


def cut():
    x = torch.zeros(8)[4:7]
    x.untyped_storage().resize_(24)
    return x


KINDS = {
    "subclass": (lambda: torch.zeros(3).as_subclass(Wrapped), "got a Wrapped"),
    "not a tensor": (lambda: [0.0] * 3, "got a list"),
    "device": (lambda: torch.zeros(3, device="meta"), "got one on meta"),
    "sparse": (lambda: torch.zeros(3).to_sparse(), "got one of layout torch.sparse_coo"),
    "blocked": (lambda: torch.zeros(3).to_mkldnn(), "got one of layout torch._mkldnn"),
    "dtype": (lambda: torch.zeros(3, dtype=torch.float64), "got torch.float64: use tensor.to"),
}

VALUES = {
    "too few": (lambda: torch.zeros(2), r"takes 3 numbers .* got 2 \(shape \(2,\)\)"),
    "too many": (lambda: torch.zeros(2, 2), r"takes 3 numbers .* got 4 \(shape \(2, 2\)\)"),
    "gaps": (lambda: torch.zeros(6)[::2], r"got strides \(2,\): use tensor.contiguous"),
    "expanded": (lambda: torch.zeros(1).expand(3), r"got strides \(0,\)"),
    "negated": (lambda: torch._neg_view(torch.zeros(3)), "marked as negated: use .*resolve_neg"),
    "freed": (lambda: freed(0), "got a storage of 0 bytes"),
    "freed, with offset": (lambda: freed(2), "got a storage of 0 bytes"),
    "cut": (cut, "got a storage of 24 bytes"),
}


THREE, ONE = Extent.of(torch.Size((3,))), Extent.of(torch.Size())


def refused_among_others(x):
    """Wherever it stands among tensors that are plain."""
    plain = [torch.zeros(3), torch.zeros(())]
    places = [
        addresses_if_plain([x, *plain], torch.float32, (THREE, THREE, ONE)),
        addresses_if_plain([plain[0], x, plain[1]], torch.float32, (THREE, THREE, ONE)),
        addresses_if_plain([*plain, x], torch.float32, (THREE, ONE, THREE)),
    ]
    return places == [None] * 3


def test_addresses_of_several():
    x = torch.zeros(4, 3, 3)
    p = nn.Parameter(torch.zeros(4, 3, 3))
    tensors = [p, x, x[1], torch.zeros(())]
    extents = [Extent.of(tensor.shape) for tensor in tensors]
    expected = [tensor.data_ptr() for tensor in tensors]
    assert addresses_if_plain(tensors, torch.float32, extents) == expected
    nothing = torch.zeros(0, 3)
    assert addresses_if_plain([nothing], torch.float32, [Extent.of(nothing.shape)]) == [0]


def test_several_must_have_their_shapes():
    """As many numbers of another shape are another state: that is an error to tell of."""
    for shape in ((3, 2), (6,), (1, 2, 3)):
        x = torch.zeros(shape)
        assert addresses_if_plain([x], torch.float32, [Extent.of(torch.Size((2, 3)))]) is None


def test_what_is_missing_or_of_no_compiled_type_has_no_address():
    assert addresses_if_plain([None], torch.float32, [THREE]) is None
    half = torch.zeros(3, dtype=torch.float16)
    assert addresses_if_plain([half], torch.float16, [THREE]) is None
    with pytest.raises(ValueError, match="zip"):
        addresses_if_plain([torch.zeros(3)], torch.float32, [THREE, THREE])


@pytest.mark.parametrize("name", KINDS)
def test_kinds_that_are_refused(name):
    make, message = KINDS[name]
    x = make()
    assert address_if_plain(x, torch.float32, 3) is None
    assert refused_among_others(x)
    with pytest.raises(TypeError, match=message):
        address(x, torch.float32, 3)


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_refused(name):
    make, message = VALUES[name]
    x = make()
    assert address_if_plain(x, torch.float32, 3) is None
    assert refused_among_others(x)
    with pytest.raises(ValueError, match=message):
        address(x, torch.float32, 3)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_what_transforms_show_is_refused(transform):
    def refused(x):
        assert address_if_plain(x, torch.float32, 3) is None
        assert refused_among_others(x)
        with pytest.raises(TypeError, match="without memory of its own"):
            address(x, torch.float32, 3)
        return x.sum()

    transform(refused)(torch.zeros(2, 3) if transform is torch.vmap else torch.zeros(3))


def test_types_that_no_compiled_code_has():
    x = torch.zeros(3, dtype=torch.complex64).conj()
    with pytest.raises(TypeError, match=r"use one of torch.float32, torch.float64, torch.int64"):
        address(x, torch.complex64, 3)


SHAPE, COLUMNS = torch.Size((4, 3)), (1, 4)


def test_what_is_dense_has_its_address():
    x = torch.zeros(3, 4).mT
    assert address_if_dense(x, torch.float32, SHAPE, COLUMNS) == x.data_ptr()
    one = torch.zeros(4, 1)  # strides of a dimension of size 1 mean nothing
    assert address_if_dense(one, torch.float32, one.shape, (1, 99)) == one.data_ptr()


def cut_columns():
    x = torch.zeros(3, 4).mT
    x.untyped_storage().resize_(44)
    return x


DENSE = {
    "other strides": lambda: torch.zeros(4, 3),
    "shape": lambda: torch.zeros(4, 3).mT,
    "dtype": lambda: torch.zeros(3, 4, dtype=torch.float64).mT,
    "gaps": lambda: torch.zeros(3, 8)[:, ::2].mT,
    "negated": lambda: torch._neg_view(torch.zeros(3, 4)).mT,
    "cut": cut_columns,
    "device": lambda: torch.zeros(3, 4, device="meta").mT,
    "subclass": lambda: torch.zeros(3, 4).as_subclass(Wrapped).mT,
}


@pytest.mark.parametrize("name", DENSE)
def test_what_is_not_dense_at_these_strides_is_refused(name):
    assert address_if_dense(DENSE[name](), torch.float32, SHAPE, COLUMNS) is None


def test_strides_that_overlap_are_refused():
    x = torch.zeros(12)
    for strides in ((0, 1), (1, 1), (4, 1), (1, 2)):
        tensor = x.as_strided((3, 2), strides)
        assert address_if_dense(tensor, torch.float32, tensor.shape, strides) is None


@pytest.mark.parametrize(
    ("shape", "strides", "view", "layout"),
    [
        ((9, 4), (4, 1), "matrix", (9, 4, 1, 4, 1, 1, 0, 0)),
        ((9, 4), (1, 9), "matrix", (9, 4, 1, 1, 9, 1, 0, 0)),
        ((4, 9), (9, 1), "kernel", (9, 4, 1, 1, 9, 1, 0, 0)),
        ((5, 1), (1, 1), "kernel", (5, 1, 1, 1, 1, 1, 0, 0)),
        ((7, 9, 4), (36, 4, 1), "kernel", (9, 4, 7, 4, 1, 7, 36, 252)),
        ((7, 2, 9, 4), (72, 36, 4, 1), "kernel", (9, 4, 14, 4, 1, 14, 36, 504)),
        ((7, 2, 9, 4), (72, 1, 8, 2), "kernel", (9, 4, 14, 8, 2, 2, 1, 72)),
        ((7, 2, 9, 4), (72, 1, 8, 2), "matrix", (72, 7, 1, 1, 72, 1, 0, 0)),
        ((80, 2, 9, 4), (1, 80, 640, 160), "matrix", (80, 72, 1, 1, 80, 1, 0, 0)),
    ],
)
def test_layouts(shape, strides, view, layout):
    assert layout_of(shape, strides, view) == Layout(*layout)


@pytest.mark.parametrize(
    ("shape", "strides", "view"),
    [
        ((9, 4), (8, 2), "matrix"),  # gaps
        ((9, 4), (0, 1), "matrix"),  # overlaps
        ((2, 3, 4), (3, 1, 6), "matrix"),  # the first dimension is in the midst
        ((2, 3, 2, 9, 4), (1, 2, 6, 48, 12), "kernel"),  # a stack of three levels
    ],
)
def test_layouts_that_strides_cannot_tell(shape, strides, view):
    assert layout_of(shape, strides, view) is None


class Subclass(np.ndarray):
    """What it has in memory is its own affair."""


def read_only():
    x = np.zeros((2, 3))
    x.setflags(write=False)
    return x


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_have_addresses(dtype):
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    found = array_address(x, np.dtype(dtype), 6)
    assert found == x.ctypes.data
    size = np.dtype(dtype).itemsize
    assert ctypes.string_at(found, 6 * size) == x.tobytes()


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.zeros((2, 3), np.float32), TypeError),
        (np.zeros((2, 3), ">f8"), TypeError),
        ([0.0] * 6, TypeError),
        (torch.zeros(6, dtype=torch.float64), TypeError),
        (np.zeros((2, 3)).view(Subclass), TypeError),
        (read_only(), TypeError),
        (np.zeros((3, 3)), ValueError),
        (np.zeros((3, 2)).T, ValueError),
        (np.zeros((4, 3))[::2], ValueError),
        (np.zeros(0), ValueError),
    ],
)
def test_other_arrays_are_refused(array, error):
    with pytest.raises(error):
        array_address(array, np.dtype(np.float64), 6)
