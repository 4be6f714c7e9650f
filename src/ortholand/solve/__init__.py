"""Solvers for a cost on matrices with orthonormal columns, without retractions."""

from ortholand.solve.minimize import METHODS, minimize

__all__ = ["METHODS", "minimize"]
