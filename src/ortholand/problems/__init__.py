"""Optimisation problems with known optima, for users, tests and benchmarks."""

from ortholand.problems.pca import PCA
from ortholand.problems.procrustes import Procrustes

__all__ = ["PCA", "Procrustes"]
