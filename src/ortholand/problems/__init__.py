"""Optimisation problems with known optima, for users, tests and benchmarks."""

from ortholand.problems.procrustes import Procrustes

__all__ = ["Procrustes"]
