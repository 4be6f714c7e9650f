"""All problems of the benchmark by name: the title, and what the seed makes."""

from collections.abc import Callable
from functools import partial

from ortholand_lab.benchmarks.solvers import problems, users
from ortholand_lab.benchmarks.solvers.problems import Case

PROBLEMS: dict[str, tuple[str, Callable[[int], Case]]] = {
    "procrustes-planted": (
        "Procrustes p = 40, planted, 400 columns",
        partial(problems.planted, 400),
    ),
    "procrustes-planted-square": (
        "Procrustes p = 40, planted, square data",
        partial(problems.planted, 40),
    ),
    "procrustes-gaussian": ("Procrustes p = 40, Gaussian", problems.gaussian),
    "ica": ("ICA, 40 Laplace sources, 5,000 samples", problems.ica),
    "kohn-sham": ("Kohn-Sham 100 x 10", partial(problems.electrons, 100, 10)),
    "kohn-sham-large": ("Kohn-Sham 2000 x 20", partial(problems.electrons, 2000, 20)),
    "pca-decaying": ("PCA n = 500, p = 20, eigenvalues 1 / i^2", problems.decaying_pca),
    "rotations": ("1,000 rotations from 3,000 differences", problems.rotations),
    "brockett-tiny": ("Brockett 20 x 3", partial(problems.brockett, 20, 3)),
    "brockett-small": ("Brockett 200 x 10", partial(problems.brockett, 200, 10)),
    "pca": ("PCA n = 1000, p = 200", problems.pca),
    "brockett-large": ("Brockett 1000 x 200", partial(problems.brockett, 1000, 200)),
    "brockett-minute": ("Brockett 10 x 2", partial(problems.brockett, 10, 2)),
    "eigenvector": ("smallest eigenvalue of 30 x 30", partial(problems.brockett, 30, 1)),
    "l4-small": ("l4 dictionary on O(8), 2,000 samples", partial(users.l4, 8, 8, 2_000)),
    "l4": ("l4 dictionary on O(30), 5,000 samples", partial(users.l4, 30, 30, 5_000)),
    "l4-sphere": ("one sparse direction of 50, 5,000 samples", partial(users.l4, 50, 1, 5_000)),
    "factors": ("orthogonal nonnegative factors 300 x 10", partial(users.factors, 300, 10)),
    "orbitals": ("Hartree-Fock energy, complex 60 x 6", partial(users.orbitals, 60, 6)),
    "trace-ratio": ("trace ratio of digits 64 x 9", partial(users.trace_ratio, 9)),
    "condensate": ("Gross-Pitaevskii, 2,000 points", partial(users.condensate, 2_000)),
    "robust-rotations": (
        "100 rotations, a tenth of the data wrong",
        partial(users.robust_rotations, 100),
    ),
    "laplacian": ("Laplacian 2500 x 8", partial(users.laplacian, 50, 8)),
    "joint-diagonalization": (
        "joint diagonalisation 20 x 20",
        partial(users.joint_diagonalization, 20, 15),
    ),
}
# Studies of their own: seconds to minutes a run; less than a millisecond, most of it the call.
LARGE = ("pca", "brockett-large")
MINUTE = ("brockett-minute", "eigenvector")
USERS = tuple(PROBLEMS)[tuple(PROBLEMS).index("l4-small") :]
USUAL = tuple(name for name in PROBLEMS if name not in (*LARGE, *MINUTE, *USERS))
