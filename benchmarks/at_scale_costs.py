"""What a step of sharded weights costs the busiest rank, on paper.

k matrices of n x p numbers, n >= p, over R ranks as FSDP2's ``fully_shard`` spreads them. Received
are the numbers that come from other ranks; a sum over ranks runs in a ring. Arithmetic is counted
in additions and multiplications, products of matrices apart from decompositions: the former run at
a GPU's full speed, the latter far below it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ortholand.landing import AdamMoments, Momentum
from ortholand.sharding.costs import received_by_columns, received_by_owner, received_by_sum

SGD = Momentum(momentum=0.9)
ADAM = AdamMoments()


class Weights(NamedTuple):
    """k matrices of n x p over R ranks."""

    n: int
    p: int
    k: int
    R: int

    @property
    def rows(self) -> int:
        """Rows of each on the busiest rank."""
        return math.ceil(self.n / self.R)

    @property
    def owned(self) -> int:
        """Matrices of the busiest owner."""
        return math.ceil(self.k / self.R)

    @property
    def others(self) -> float:
        """Share of a gathered tensor that comes from other ranks."""
        return (self.R - 1) / self.R


class Cost(NamedTuple):
    """Of a step, for the busiest rank."""

    received: float  # numbers
    products: float  # arithmetic in products of matrices
    decompositions: float = 0.0  # arithmetic in QR, Cholesky, linear systems


def fsdp(w: Weights) -> Cost:
    """FSDP2's own traffic, to compare with: two gathers of the weights, a scatter of gradients."""
    return Cost(3 * w.others * w.n * w.p * w.k, 0)


def landing_rows(w: Weights) -> Cost:
    """LandingSGD with momentum, tall: Gram matrices are summed, each rank moves its rows.

    Six products with the rows, three of p x p matrices on every rank.
    """
    flops = 12 * w.rows * w.p**2 + 6 * w.p**3
    return Cost(received_by_sum(w.R, w.k * SGD.summed_numbers(w.p)), w.k * flops)


def landing_adam_rows(w: Weights) -> Cost:
    """LandingAdam, tall: seven products with the rows, nine of p x p matrices."""
    flops = 14 * w.rows * w.p**2 + 18 * w.p**3
    return Cost(received_by_sum(w.R, w.k * ADAM.summed_numbers(w.p)), w.k * flops)


def landing_columns(w: Weights) -> Cost:
    """LandingSGD with momentum, wide (p x n): rows become columns and back."""
    received = received_by_columns(w.p, w.n, w.R, w.k, 1, SGD.summed_numbers(w.p))
    return Cost(received, landing_rows(w).products)


def landing_owners(w: Weights) -> Cost:
    """LandingSGD with momentum, each matrix whole on one rank: five products, square three."""
    flops = 10 * w.n * w.p**2 if w.n > w.p else 6 * w.n**3
    return Cost(received_by_owner(w.n, w.p, w.R, w.k, 1), w.owned * flops)


def qr_owners(w: Weights) -> Cost:
    """A QR retraction, each matrix whole on one rank: ``RiemannianSGD`` here.

    Q comes from the Cholesky factor of the Gram matrix, which is quicker than Householder's way.
    """
    products = 10 * w.n * w.p**2 if w.n > w.p else 6 * w.n**3
    received = received_by_owner(w.n, w.p, w.R, w.k, 1)
    return Cost(received, w.owned * products, w.owned * (w.p**3 / 3 + w.n * w.p**2))


def qr_everywhere(w: Weights) -> Cost:
    """``torch.linalg.qr`` of a DTensor: every rank gathers every matrix and decomposes it."""
    return Cost(w.others * w.n * w.p * w.k, 0, w.k * householder(w.n, w.p))


def polar_owners(w: Weights) -> Cost:
    """A polar retraction, each matrix whole on one rank: ``RiemannianSGD`` here.

    Short steps need products only, a series in the Gram matrix; long ones an eigendecomposition.
    """
    products = 12 * w.n * w.p**2 + 2 * w.p**3 if w.n > w.p else 10 * w.n**3
    return Cost(received_by_owner(w.n, w.p, w.R, w.k, 1), w.owned * products)


def polar_everywhere(w: Weights) -> Cost:
    """``torch.linalg.svd`` of a DTensor: as :func:`qr_everywhere`, and the factors' product."""
    svd = 6 * w.n * w.p**2 + 20 * w.p**3
    return Cost(w.others * w.n * w.p * w.k, w.k * 2 * w.n * w.p**2, w.k * svd)


def qr_by_gram(w: Weights) -> Cost:
    """QR by the Cholesky factor of a summed Gram matrix. Nobody offers it; the best that QR can do.

    The same three Gram matrices as landing; then the factor, and triangular systems for the rows.
    """
    tangent = 10 * w.rows * w.p**2 + 8 * w.p**3
    factor = w.p**3 / 3 + w.rows * w.p**2
    return Cost(received_by_sum(w.R, w.k * SGD.summed_numbers(w.p)), w.k * tangent, w.k * factor)


def parametrization(w: Weights) -> Cost:
    """torch's ``parametrizations.orthogonal``: no message but FSDP2's own; all on every rank.

    Of a square matrix the Cayley map: n x n systems forwards and backwards, and three products. Of
    a tall one Householder's product, torch's choice, whose gradient takes about ``10 n^2 p``, and
    products with a basis.
    """
    if w.n == w.p:
        return Cost(0, w.k * 6 * w.n**3, w.k * 16 / 3 * w.n**3)
    products = 14 * w.n**2 * w.p - 4 * w.n * w.p**2
    return Cost(0, w.k * products, w.k * householder(w.n, w.p) / 2)


def householder(n: int, p: int) -> float:
    """Householder's QR, with Q formed."""
    return 4 * n * p**2 - 4 / 3 * p**3


METHODS: dict[str, Callable[[Weights], Cost]] = {
    "landing, rows": landing_rows,
    "landing, owners": landing_owners,
    "QR, owners": qr_owners,
    "polar, owners": polar_owners,
    "QR, gathered everywhere": qr_everywhere,
    "polar, gathered everywhere": polar_everywhere,
    "QR by Gram matrices (nobody offers it)": qr_by_gram,
    "parametrization": parametrization,
}
