"""Problems as users of manifold solvers bring them: nonlinear, complex, robust, badly scaled.

Each is a function of the seed and makes a :class:`Case` written in NumPy only.
"""

from typing import Any

import numpy as np
import scipy.sparse

from ortholand_lab.benchmarks.solvers.problems import Case, Parts

Array = np.ndarray[Any, Any]


def _orthonormal(random: np.random.Generator, n: int, p: int) -> Array:
    return np.linalg.qr(random.standard_normal((n, p)))[0]


def l4(n: int, p: int, samples: int, seed: int) -> Case:
    """Complete dictionary learning, ``-sum (X^T Y)^4 / 4``: an orthogonal mix of sparse sources."""
    random = np.random.default_rng(seed)
    sources = random.standard_normal((n, samples)) * (random.random((n, samples)) < 0.3)
    Y = _orthonormal(random, n, n) @ sources

    def at(X: Array) -> Parts:
        Z = X.T @ Y
        squares = Z * Z
        return (
            lambda: -np.vdot(squares, squares) / (4 * samples),
            lambda: -(Y @ (squares * Z).T) / samples,
            lambda V: -3 / samples * (Y @ (squares * (V.T @ Y)).T),
        )

    return Case(None, _orthonormal(random, n, p), parts=at)


def factors(n: int, p: int, seed: int) -> Case:
    """Orthogonal nonnegative factors: entries below zero are penalised."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.eye(p), n // p, axis=0) * random.random((n, 1))
    M = groups @ random.random((p, 2 * n)) + 0.1 * random.random((n, 2 * n))
    C, weight = M @ M.T, 10.0
    C /= np.linalg.norm(C, 2)

    def at(X: Array) -> Parts:
        CX, below = C @ X, np.minimum(X, 0)
        return (
            lambda: (weight * np.vdot(below, below) - np.vdot(X, CX)) / 2,
            lambda: weight * below - CX,
            lambda V: weight * (X < 0) * V - C @ V,
        )

    return Case(None, _orthonormal(random, n, p), parts=at)


def orbitals(n: int, p: int, seed: int) -> Case:
    """Hartree and Fock's energy of p complex orbitals: one-body, density and exchange terms."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((2, n, n))
    H = noise[0] + 1j * noise[1]
    H = (H + H.conj().T) / (2 * np.sqrt(n)) + np.diag(np.linspace(0, 10, n))
    places = np.arange(n)
    W = 2 / (1 + abs(places[:, None] - places))

    def mean_field(D: Array) -> Array:
        return np.diag(W @ D.diagonal().real) - W * D

    def at(X: Array) -> Parts:
        two = mean_field(X @ X.conj().T)
        FX = (H + two) @ X

        def hessian(V: Array) -> Array:
            D = V @ X.conj().T
            return 2 * ((H + two) @ V + mean_field(D + D.conj().T) @ X)

        value = lambda: (np.vdot(X, H @ X) + np.vdot(X, two @ X) / 2).real  # noqa: E731
        return value, lambda: 2 * FX, hessian

    start = random.standard_normal((n, p)) + 1j * random.standard_normal((n, p))
    return Case(None, np.linalg.qr(start)[0], of_span=True, parts=at)


def trace_ratio(p: int, seed: int) -> Case:
    """Discriminant analysis of 1,797 digits: between classes over within them."""
    from sklearn.datasets import load_digits

    rows, labels = load_digits(return_X_y=True)
    means = np.stack([rows[labels == k].mean(0) for k in range(10)])
    within, between = rows - means[labels], means[labels] - rows.mean(0)
    B = within.T @ within / len(rows) + 0.1 * np.eye(64)
    A = between.T @ between / len(rows)

    def at(X: Array) -> Parts:
        AX, BX = A @ X, B @ X
        a, b = np.vdot(X, AX), np.vdot(X, BX)
        G = -2 / b * (AX - a / b * BX)

        def hessian(V: Array) -> Array:
            da, db = 2 * np.vdot(AX, V), 2 * np.vdot(BX, V)
            change = (da - a / b * db) / b
            return -2 / b * (A @ V - a / b * (B @ V) - change * BX) - db / b * G

        return lambda: -a / b, lambda: G, hessian

    return Case(None, _orthonormal(np.random.default_rng(seed), 64, p), of_span=True, parts=at)


def condensate(n: int, seed: int) -> Case:
    """Gross and Pitaevskii's ground state on a line: one column."""
    random = np.random.default_rng(seed)
    places = np.linspace(-1, 1, n)
    trap, h = 50 * places**2 + 5 * np.sin(12 * places) ** 2, places[1] - places[0]
    ones = np.full(n - 1, -0.5 / h**2)
    L = scipy.sparse.diags_array([ones, trap + 1 / h**2, ones], offsets=[-1, 0, 1]).tocsr()
    L, beta = L * h**2, 100 * h  # of the size of 1

    def at(X: Array) -> Parts:
        LX, squares = L @ X, X * X
        return (
            lambda: np.vdot(X, LX) / 2 + beta / 4 * np.vdot(squares, squares),
            lambda: LX + beta * squares * X,
            lambda V: L @ V + 3 * beta * squares * V,
        )

    start = np.exp(-4 * places**2)[:, None] * (1 + 0.1 * random.standard_normal((n, 1)))
    return Case(None, start / np.linalg.norm(start), parts=at)


def robust_rotations(count: int, seed: int) -> Case:
    """Rotations from differences of which a tenth is wrong: smoothed absolute values."""
    random = np.random.default_rng(seed)

    def turns(m: int) -> Array:
        Q = np.linalg.qr(random.standard_normal((m, 3, 3)))[0]
        return Q * np.linalg.det(Q)[:, None, None]

    truth, m, delta = turns(count), 5 * count, 0.1
    first, second = np.concatenate(
        [[np.arange(count), np.roll(np.arange(count), -1)], random.integers(count, size=(2, m))], 1
    )
    first, second = first[first != second], second[first != second]
    H = truth[first].swapaxes(-1, -2) @ truth[second]
    wrong = random.random(len(H)) < 0.1
    H[wrong] = turns(int(wrong.sum()))
    ones, pairs = np.ones(len(H)), np.arange(len(H))
    to_first = scipy.sparse.csr_matrix((ones, (first, pairs)), shape=(count, len(H)))
    to_second = scipy.sparse.csr_matrix((ones, (second, pairs)), shape=(count, len(H)))

    def errors(X: Array) -> Array:
        return X[second] - X[first] @ H

    def gather(E: Array) -> Array:
        back = (E @ H.swapaxes(-1, -2)).reshape(-1, 9)
        return (to_second @ E.reshape(-1, 9) - to_first @ back).reshape(count, 3, 3)

    def at(X: Array) -> Parts:
        E = errors(X)
        size = np.sqrt(np.einsum("kij,kij->k", E, E) + delta**2)[:, None, None]

        def hessian(V: Array) -> Array:
            F = errors(V)
            along = np.einsum("kij,kij->k", E, F)[:, None, None]
            return gather(F / size - along / size**3 * E)

        return lambda: size.sum(), lambda: gather(E / size), hessian

    near = truth + 0.3 * random.standard_normal(truth.shape)
    U, _, Vh = np.linalg.svd(near)
    X0 = U @ Vh
    X0[:, :, 0] *= np.linalg.det(X0)[:, None]
    return Case(None, X0, parts=at)


def laplacian(side: int, p: int, seed: int) -> Case:
    """The smallest eigenvalues of the Laplacian of a square grid; the matrix is sparse."""
    ones = np.ones(side)
    line = scipy.sparse.diags_array([-ones[1:], 2 * ones, -ones[1:]], offsets=[-1, 0, 1])
    L = scipy.sparse.kronsum(line, 1.1 * line).tocsr()
    random = np.random.default_rng(seed)

    def at(X: Array) -> Parts:
        LX = L @ X
        return lambda: np.vdot(X, LX) / 2, lambda: LX, lambda V: L @ V

    return Case(None, _orthonormal(random, side**2, p), of_span=True, parts=at, matrix=L)


def joint_diagonalization(n: int, count: int, seed: int) -> Case:
    """Matrices with the same eigenvectors, nearly, and of sizes from 1 to 1,000."""
    random = np.random.default_rng(seed)
    Q = _orthonormal(random, n, n)
    noise = 0.01 * random.standard_normal((count, n, n))
    spectra = random.standard_normal((count, 1, n)) * np.logspace(0, 1.5, n)
    C = ((Q * spectra) @ Q.T + noise + noise.swapaxes(-1, -2)) / 10
    C *= np.logspace(0, 1, count)[:, None, None]

    def at(X: Array) -> Parts:
        CX = C @ X
        d = np.einsum("ij,kij->kj", X, CX)

        def hessian(V: Array) -> Array:
            change = 2 * np.einsum("ij,kij->kj", V, CX)
            return -4 * np.einsum("kj,kij->ij", change, CX) - 4 * np.einsum("kj,kij->ij", d, C @ V)

        return lambda: -np.vdot(d, d), lambda: -4 * np.einsum("kj,kij->ij", d, CX), hessian

    return Case(None, _orthonormal(random, n, n), parts=at)
