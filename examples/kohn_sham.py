"""Electrons on a line: the ground state of a Kohn-Sham energy on a grid of 10,000 points.

    python examples/kohn_sham.py --out kohn_sham.png

A chain of nuclei binds two electrons in each of p orbitals, the orthonormal columns of X. Their
energy is kinetic (a sparse Laplacian), attraction by the nuclei, self-repulsion of the density
(a soft Coulomb potential, by a fast Fourier transform), and Dirac's local exchange. It
depends on the span of X alone, so X is a point of the Grassmann manifold.

On a fine grid the Laplacian makes the problem ill-conditioned: 1 to 200,000 here. The remedy is one
line, a preconditioner that solves with Laplacian + 1, a banded matrix. The chemists' method is
shown for comparison: the self-consistent field, which diagonalises the Hamiltonian of one density,
mixes the new density with the old, and begins again. On a line it diagonalises by a tridiagonal
solver, its best case: in three dimensions there is none.

Needs matplotlib and rich: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.fft import irfft, rfft
from scipy.linalg import cho_solve_banded, cholesky_banded, eigh_tridiagonal
from scipy.optimize import OptimizeResult
from scipy.sparse import csr_array, diags_array

import ortholand as ol
from showing import LOOKS, make_table, two_panels

Array = NDArray[np.float64]

SPACING = 3.0  # of the nuclei, in Bohr radii
CHARGE = 2.0  # of a nucleus, which brings two electrons
MARGIN = 12.0  # from the last nucleus to the walls
EXCHANGE = (3 / np.pi) ** (1 / 3)  # Dirac's potential is -EXCHANGE rho^(1/3)
MIXING = 0.7  # part of the new density in a self-consistent field
EMPTY = 1e-30  # densities below have no exchange worth a division by them


# --- the energy


@dataclass(frozen=True)
class Chain:
    """Nuclei on a line between two walls, and a grid; energies in hartree, lengths in Bohr radii.

    Columns of X are orthonormal; as functions, orbitals are X / sqrt(h), h the grid's spacing.
    """

    points: int = 10_000
    orbitals: int = 8

    @cached_property
    def nuclei(self) -> Array:
        """Where they are."""
        return SPACING * (np.arange(self.orbitals) - (self.orbitals - 1) / 2)

    @cached_property
    def grid(self) -> Array:
        """Points between the walls, where orbitals vanish."""
        wall = self.nuclei[-1] + MARGIN
        return np.linspace(-wall, wall, self.points + 2)[1:-1]

    @property
    def h(self) -> float:
        """Distance of two points."""
        return float(self.grid[1] - self.grid[0])

    @cached_property
    def kinetic(self) -> csr_array:
        """Minus half the second differences."""
        off = -np.ones(self.points - 1) / (2 * self.h**2)
        diagonal = np.full(self.points, 1 / self.h**2)
        return diags_array([off, diagonal, off], offsets=[-1, 0, 1]).tocsr()

    @cached_property
    def attraction(self) -> Array:
        """The potential of the nuclei."""
        return -CHARGE * sum(soft_coulomb(self.grid - place) for place in self.nuclei)

    @cached_property
    def repulsion(self) -> Array:
        """The soft Coulomb potential of a unit charge, transformed; twice the grid, no wrapping."""
        distance = self.h * np.arange(self.points)
        half = soft_coulomb(distance)
        return rfft(np.concatenate([half, [0.0], half[:0:-1]]))

    def hartree(self, rho: Array) -> Array:
        """The potential of a density."""
        size = 2 * self.points
        return self.h * irfft(self.repulsion * rfft(rho, size), size)[: self.points]

    def density(self, X: Array) -> Array:
        """Electrons per length."""
        return 2 / self.h * (X * X).sum(1)

    def potential(self, rho: Array) -> Array:
        """What an electron feels."""
        return self.attraction + self.hartree(rho) - EXCHANGE * np.cbrt(rho)

    def energy_and_gradient(self, X: Array) -> tuple[float, Array]:
        """The electrons' energy, and its Euclidean gradient."""
        rho, TX = self.density(X), self.kinetic @ X
        hartree = self.hartree(rho)
        local = self.attraction + hartree / 2 - 0.75 * EXCHANGE * np.cbrt(rho)
        energy = 2 * np.sum(X * TX) + self.h * np.sum(rho * local)
        potential = self.attraction + hartree - EXCHANGE * np.cbrt(rho)
        return energy, 4 * (TX + potential[:, None] * X)

    def hessian_product(self, X: Array, V: Array) -> Array:
        """The Euclidean Hessian at X, applied to V."""
        rho = self.density(X)
        change = 4 / self.h * (X * V).sum(1)
        stiffness = EXCHANGE / 3 * np.maximum(rho, EMPTY) ** (-2 / 3)
        response = self.hartree(change) - stiffness * change
        return 4 * (self.kinetic @ V + self.potential(rho)[:, None] * V + response[:, None] * X)

    @cached_property
    def shifted_laplacian(self) -> Array:
        """Cholesky factor of kinetic + 1, two diagonals."""
        bands = [self.kinetic.diagonal() + 1, np.append(self.kinetic.diagonal(-1), 0)]
        return cholesky_banded(np.array(bands), lower=True)

    def smooth(self, _: Array, V: Array) -> Array:
        """The preconditioner: ``(kinetic + 1)^-1 V``, whatever X is."""
        return cho_solve_banded((self.shifted_laplacian, True), V)

    def start(self, seed: int) -> Array:
        """Random orbitals, smooth ones."""
        noise = np.random.default_rng(seed).standard_normal((self.points, self.orbitals))
        return np.linalg.qr(self.smooth(noise, noise))[0]


def soft_coulomb(distance: Array) -> Array:
    """``1 / sqrt(1 + distance^2)``: Coulomb's potential on a line, without its pole."""
    return 1 / np.sqrt(1 + distance**2)


# --- the contestants


@dataclass(frozen=True)
class Run:
    """What a contestant did; its curves have one entry for each iteration."""

    X: Array
    energy: float
    gradient: list[float]  # norms of the Riemannian gradient
    seconds: list[float]  # of the processor
    evaluations: int
    products: int = 0  # with the Hessian


Contestant = Callable[[Chain, Array, float, float], Run]


def by_newton(chain: Chain, X: Array, enough: float, patience: float) -> Run:
    """Newton's method: Hessian products, and the preconditioner for its inner iterations."""
    options = {"preconditioner": chain.smooth}
    hessp = chain.hessian_product
    return by_landing(chain, X, enough, patience, method="newton", hessp=hessp, options=options)


def by_gradients(chain: Chain, X: Array, enough: float, patience: float) -> Run:
    """Gradients and the preconditioner."""
    options = {"preconditioner": chain.smooth}
    return by_landing(chain, X, enough, patience, method="bb", options=options)


def by_energy_alone(chain: Chain, X: Array, enough: float, patience: float) -> Run:
    """What is chosen where nothing but the energy and its gradient is known."""
    return by_landing(chain, X, enough, patience, options={})


def by_landing(
    chain: Chain, X: Array, enough: float, patience: float, options: dict[str, Any], **how: Any
) -> Run:
    """``ol.minimize``, until the gradient's norm is enough or patience ends, in seconds."""
    norms, seconds, begin = [], [], time.process_time()

    def note(intermediate_result: OptimizeResult) -> None:
        norms.append(intermediate_result.grad_norm)
        seconds.append(time.process_time() - begin)

    result = ol.minimize(
        chain.energy_and_gradient,
        X,
        jac=True,
        manifold=ol.Grassmann(),
        gtol=0,
        callback=note,
        options={**options, "atol": enough, "maxtime": patience},
        **how,
    )
    return Run(result.x, result.fun, norms, seconds, result.nfev, result.nhev)


def by_self_consistency(chain: Chain, X: Array, enough: float, patience: float) -> Run:
    """Diagonalise the Hamiltonian of a density, mix the new density with the old, repeat."""
    rho, begin = chain.density(X), time.process_time()
    diagonal, off = chain.kinetic.diagonal(), chain.kinetic.diagonal(1)
    norms, seconds = [np.inf], [0.0]
    while norms[-1] > enough and seconds[-1] < patience:
        felt = diagonal + chain.potential(rho)
        X = eigh_tridiagonal(felt, off, select="i", select_range=(0, chain.orbitals - 1))[1]
        energy, gradient = chain.energy_and_gradient(X)
        norms.append(float(np.linalg.norm(gradient - X @ (X.T @ gradient))))
        seconds.append(time.process_time() - begin)
        rho = (1 - MIXING) * rho + MIXING * chain.density(X)
    return Run(X, energy, norms[1:], seconds[1:], len(norms) - 1)


CONTESTANTS: dict[str, Contestant] = {
    "Newton, preconditioned": by_newton,
    "BB, preconditioned": by_gradients,
    "self-consistent field": by_self_consistency,
    "gradients alone": by_energy_alone,
}


# --- telling and drawing


def table(chain: Chain, runs: dict[str, Run]) -> Table:
    """What came out."""
    title = f"Ground state of {2 * chain.orbitals} electrons on {chain.points:,} points"
    headings = ("by", "energy", "gradient", "evaluations", "products", "seconds")
    rows = [
        (
            name,
            f"{run.energy:.8f}",
            f"{run.gradient[-1]:.1e}",
            f"{run.evaluations:,}",
            f"{run.products:,}" if run.products else "-",
            f"{run.seconds[-1]:.2f}",
        )
        for name, run in runs.items()
    ]
    caption = "Products: with the Hessian. A self-consistent field diagonalises at each evaluation."
    return make_table(title, headings, rows, caption)


def draw(chain: Chain, runs: dict[str, Run], path: Path) -> None:
    """The density between the nuclei, and how the gradients fell."""
    with two_panels(path, f"{2 * chain.orbitals} electrons on a line") as (left, right):
        X = next(iter(runs.values())).X
        rho = chain.density(X)
        # Any basis of the span has this energy; that of the Hamiltonian has orbitals.
        here = chain.kinetic @ X + chain.potential(rho)[:, None] * X
        levels, turn = np.linalg.eigh(X.T @ here)
        orbitals = X @ turn / chain.h**0.5
        left.fill_between(chain.grid, rho, color=LOOKS[0]["color"], alpha=0.2, linewidth=0)
        left.plot(chain.grid, rho, label="density", **LOOKS[0])
        for which, look in ((0, LOOKS[1]), (-1, LOOKS[3])):
            sign = np.sign(orbitals[np.abs(orbitals[:, which]).argmax(), which])
            label = f"orbital {range(chain.orbitals)[which] + 1}, at {levels[which]:.2f} hartree"
            left.plot(chain.grid, sign * orbitals[:, which], label=label, linewidth=1.2, **look)
        left.plot(chain.nuclei, 0 * chain.nuclei, "k^", markersize=5, label="nuclei")
        left.set(xlabel="place, in Bohr radii", title="density and two of the orbitals")
        left.set_ylim(top=1.6 * rho.max())
        for look, (name, run) in zip(LOOKS, runs.items(), strict=False):
            right.loglog(run.seconds, run.gradient, label=name, **look)
        right.set(xlabel="seconds of the processor", title="norm of the Riemannian gradient")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 1 if the preconditioned methods did not get there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("kohn_sham.png"), help="the figure")
    parser.add_argument("--points", type=int, default=Chain.points, help="of the grid")
    parser.add_argument("--orbitals", type=int, default=Chain.orbitals, help="and nuclei")
    parser.add_argument("--enough", type=float, default=1e-6, help="norm of the gradient")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for each contestant")
    parser.add_argument("--seed", type=int, default=0, help="of the start")
    options = parser.parse_args(arguments)
    console = Console()
    chain = Chain(options.points, options.orbitals)
    start = chain.start(options.seed)
    chain.energy_and_gradient(start)  # what is prepared once is nobody's time
    runs = {}
    for name, contestant in CONTESTANTS.items():
        with console.status(f"{name} ..."):
            runs[name] = contestant(chain, start, options.enough, options.patience)
    console.print(table(chain, runs))
    draw(chain, runs, options.out)
    console.print(f"Figure: {options.out}")
    reached = [runs[name].gradient[-1] <= options.enough for name in list(CONTESTANTS)[:2]]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
