"""Learnt rotations for quantisation, as in SpinQuant (Liu et al. 2024), for Llama-type models.

A rotation of the residual stream, and one of each layer's values, do not change what a model
computes, because each layer undoes the rotation of the one before. But they spread outliers
over all coordinates, so that fewer bits suffice, and some rotations do so better than others:

    rotations = insert_rotations(model, quantization=Quantization(4, 4))
    optimizer = ortholand.LandingSGD(rotations.parameters(), lr=0.1)
    ...                          # minimise the loss of the fake-quantised model, as usual
    fold_rotations_(model)       # plain layers again, with rotated weights
"""

from ortholand_lab.rotations.hadamard import random_hadamard
from ortholand_lab.rotations.insertion import (
    Rotations,
    fold_rotations_,
    insert_rotations,
)
from ortholand_lab.rotations.quantization import Quantization, fake_quantize

__all__ = [
    "Quantization",
    "Rotations",
    "fake_quantize",
    "fold_rotations_",
    "insert_rotations",
    "random_hadamard",
]
