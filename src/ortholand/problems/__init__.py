"""Optimisation problems with known optima, for users, tests and benchmarks."""

from ortholand.problems.base import Problem
from ortholand.problems.brockett import Brockett
from ortholand.problems.dictionary import Dictionary
from ortholand.problems.ica import ICA, amari_distance, separate, whiten
from ortholand.problems.joint_diagonalization import JointDiagonalization
from ortholand.problems.kohn_sham import KohnSham
from ortholand.problems.pca import PCA
from ortholand.problems.procrustes import Procrustes

__all__ = [
    "ICA",
    "PCA",
    "Brockett",
    "Dictionary",
    "JointDiagonalization",
    "KohnSham",
    "Problem",
    "Procrustes",
    "amari_distance",
    "separate",
    "whiten",
]
