"""Hadamard matrices of powers of two and of Paley's sizes."""

import pytest
import torch

import ortholand as ol
from ortholand_lab.rotations import random_hadamard
from ortholand_lab.rotations.hadamard import hadamard


@pytest.mark.parametrize("n", [1, 2, 4, 12, 20, 24, 28, 36, 44, 60, 64, 76, 96, 108, 120])
def test_rows_are_orthogonal(n):
    H = hadamard(n)
    assert torch.equal(H.abs(), torch.ones(n, n))
    assert torch.equal(H @ H.mT, n * torch.eye(n))


@pytest.mark.parametrize("n", [768, 896, 1152, 1536, 2304, 2560, 3072, 3584, 5120])
def test_there_is_one_of_the_widths_of_models(n):
    core = n
    while core % 2 == 0 and hadamard(core // 2) is not None:
        core //= 2
    assert core in (1, 12, 20, 28, 36)


def test_signs_are_drawn():
    H = random_hadamard(12, seed=0)
    assert ol.distance(H.double()) < 1e-6
    assert torch.equal(H, random_hadamard(12, seed=0))
    assert not torch.equal(H, random_hadamard(12, seed=1))
    assert torch.equal(H, random_hadamard(12, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("n", [0, -4, 3, 6, 18, 52, 2.0])
def test_sizes_that_have_none(n):
    with pytest.raises(ValueError, match=f"got size {n}. Use start='random'"):
        random_hadamard(n, seed=0)
