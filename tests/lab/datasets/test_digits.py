import pytest
import torch
from sklearn.datasets import load_digits

from ortholand_lab.datasets import digits, find_dataset


@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_the_digits_have_the_shape_of_what_they_stand_in_for(name, shape):
    data = find_dataset(name, offline=True).load()
    assert data.name == "digits"
    assert data.train_images.shape == (1500, *shape)
    assert data.test_images.shape == (297, *shape)
    assert data.train_images.dtype == data.test_images.dtype == torch.uint8
    assert data.train_images.is_contiguous()
    assert int(data.train_images.min()) == 0
    assert int(data.train_images.max()) == 255
    labels = torch.cat([data.train_labels, data.test_labels])
    assert labels.tolist() == load_digits().target.tolist()
    assert torch.equal(data.train_images[:, :1].expand(-1, shape[0], -1, -1), data.train_images)


def test_enlarging_is_bilinear():
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 16.0
    larger = digits.enlarge(image, 32)[0, 0].double()
    # Four times as large, a pixel is a pyramid over eight: (1, 3, 5, 7, 7, 5, 3, 1) / 8.
    slope = torch.tensor([1, 3, 5, 7, 7, 5, 3, 1]).double() / 8
    expected = torch.zeros(32, 32, dtype=torch.float64)
    expected[10:18, 14:22] = 255 * slope[:, None] * slope
    torch.testing.assert_close(larger, expected, atol=0.5, rtol=0)


def test_a_digit_is_still_the_digit():
    data = find_dataset("cifar10", offline=True).load()
    means = data.train_images[:, 0].double().reshape(-1, 8, 4, 8, 4).mean(dim=(2, 4))
    originals = torch.from_numpy(load_digits().images[:1500]) * 255 / 16
    flat = torch.stack([means.flatten(), originals.flatten()])
    assert float(torch.corrcoef(flat)[0, 1]) > 0.95
