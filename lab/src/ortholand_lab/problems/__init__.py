"""Optimisation problems with known optima, for studies, examples and tests."""

from ortholand_lab.problems.base import Problem
from ortholand_lab.problems.brockett import Brockett
from ortholand_lab.problems.ica import ICA, amari_distance, separate, whiten
from ortholand_lab.problems.kohn_sham import KohnSham
from ortholand_lab.problems.pca import PCA
from ortholand_lab.problems.procrustes import Procrustes

__all__ = [
    "ICA",
    "PCA",
    "Brockett",
    "KohnSham",
    "Problem",
    "Procrustes",
    "amari_distance",
    "separate",
    "whiten",
]
