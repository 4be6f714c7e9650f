import pytest
import torch

from ortholand.geometry.views import as_matrices, as_weight, check_view, check_weight


@pytest.mark.parametrize("view", ["matrix", "kernel"])
@pytest.mark.parametrize(
    "shape", [(3, 3), (5, 2), (2, 5), (8, 3, 5, 5), (8, 3, 3, 5), (40, 3, 2, 2), (6, 4, 3)]
)
def test_views_are_tall_and_come_back(shape, view):
    weight = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    matrices = as_matrices(weight, view)
    assert matrices.shape[-2] >= matrices.shape[-1]
    assert torch.equal(as_weight(matrices, weight, view), weight)


def test_the_two_views_of_a_convolution():
    weight = torch.randn(8, 3, 5, 4)
    assert as_matrices(weight, "matrix").shape == (60, 8)
    assert as_matrices(weight, "kernel").shape == (8, 3, 5, 4)
    assert torch.equal(as_matrices(weight, "kernel")[2, 1], weight[2, 1])


def test_channels_last_weights_are_seen_the_same():
    weight = torch.randn(8, 3, 5, 4)
    strided = weight.to(memory_format=torch.channels_last)
    assert torch.equal(as_matrices(strided, "matrix"), as_matrices(weight, "matrix"))


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"at least 2 dimensions.*shape \(3,\).*orthogonal=False"),
        (torch.zeros(()), ValueError, "at least 2 dimensions"),
        (torch.zeros(3, 0), ValueError, r"at least one entry.*\(3, 0\)"),
        (torch.zeros(3, 3, dtype=torch.int64), TypeError, "int64"),
    ],
)
def test_weights_that_are_no_matrices(weight, error, message):
    with pytest.raises(error, match=message):
        check_weight(weight)


def test_unknown_view():
    with pytest.raises(ValueError, match=r"one of \('matrix', 'kernel', .*, got 'row'.*blocks="):
        check_view("row")
