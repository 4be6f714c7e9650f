"""What a step of sharded weights costs the busiest rank, on paper.

k matrices of n x p numbers, n >= p, over R ranks as FSDP2's ``fully_shard`` spreads them. Numbers
received are those that come from other ranks; a sum over ranks runs in a ring. Arithmetic is
counted in additions and multiplications, separately for products of matrices and for
decompositions: the former run at a GPU's full speed, the latter far below it. ``norms``: with the
products by which landing's safe step measures where a move leads. On its owner's CPU a matrix takes
them where lr may be too long; a GPU always, because finding out whether it must would take longer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from ortholand.landing import AdamMoments, Momentum
from ortholand.sharding.costs import received_by_columns, received_by_owner, received_by_sum

SGD = Momentum(momentum=0.9)
ADAM = AdamMoments()
DTYPE, BYTES = torch.float32, 4  # of a number


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
    def gathered(self) -> float:
        """Numbers that come from other ranks when all matrices are gathered."""
        return (self.R - 1) / self.R * self.n * self.p * self.k

    @property
    def sent_to_owners(self) -> float:
        """Numbers that the busiest owner receives, with one buffer of state for each matrix."""
        return received_by_owner(self.n, self.p, self.R, self.k, 1)


class Cost(NamedTuple):
    """The cost of a step for the busiest rank."""

    received: float  # numbers
    products: float  # arithmetic in products of matrices
    decompositions: float = 0.0  # arithmetic in QR, Cholesky, linear systems


def fsdp(w: Weights) -> Cost:
    """FSDP2's own traffic, for comparison: two gathers of the weights, a scatter of gradients."""
    return Cost(3 * w.gathered, 0)


def landing_rows(w: Weights) -> Cost:
    """LandingSGD with momentum, tall: Gram matrices are summed, each rank moves its rows.

    Six products with the rows; on every rank thirteen of p x p matrices.
    """
    flops = 12 * w.rows * w.p**2 + 26 * w.p**3
    return Cost(received_by_sum(w.R, w.k * SGD.summed_numbers(w.p, DTYPE)), w.k * flops)


def landing_adam_rows(w: Weights) -> Cost:
    """LandingAdam, tall: seven products with the rows, eleven of p x p matrices."""
    flops = 14 * w.rows * w.p**2 + 22 * w.p**3
    return Cost(received_by_sum(w.R, w.k * ADAM.summed_numbers(w.p, DTYPE)), w.k * flops)


def landing_columns(w: Weights) -> Cost:
    """LandingSGD with momentum, wide (p x n): rows become columns and back."""
    received = received_by_columns(w.p, w.n, w.R, w.k, 1, SGD.summed_numbers(w.p, DTYPE))
    return Cost(received, landing_rows(w).products)


def landing_owners(w: Weights, norms: bool = False) -> Cost:
    """LandingSGD with momentum, each matrix whole on one rank.

    Square: three products; with norms six. Tall: five, and two with one vector; with norms six, and
    three of p x p matrices. (torch's counter does not count the one of these that is in place.)
    """
    if w.n == w.p:
        flops = (12 if norms else 6) * w.n**3
    elif norms:
        flops = 12 * w.n * w.p**2 + 6 * w.p**3
    else:
        flops = 8 * w.n * w.p**2 + 4 * w.n * w.p
    return Cost(w.sent_to_owners, w.owned * flops)


def qr_owners(w: Weights) -> Cost:
    """A QR retraction, each matrix whole on one rank: ``RiemannianSGD`` here.

    Q comes from the Cholesky factor of the Gram matrix, which is quicker than Householder's method.
    """
    flops = 12 * w.n * w.p**2 if w.n > w.p else 6 * w.n**3
    factor = w.p**3 / 3 + w.n * w.p**2
    return Cost(w.sent_to_owners, w.owned * flops, w.owned * factor)


def qr_everywhere(w: Weights) -> Cost:
    """``torch.linalg.qr`` of a DTensor: every rank gathers every matrix and decomposes it."""
    return Cost(w.gathered, 0, w.k * householder(w.n, w.p))


def polar_owners(w: Weights) -> Cost:
    """A polar retraction, each matrix whole on one rank: ``RiemannianSGD`` here.

    Short steps need products only, a series in the Gram matrix; long ones an eigendecomposition.
    """
    flops = 14 * w.n * w.p**2 + 4 * w.p**3 if w.n > w.p else 12 * w.n**3
    return Cost(w.sent_to_owners, w.owned * flops)


def polar_everywhere(w: Weights) -> Cost:
    """``torch.linalg.svd`` of a DTensor: as :func:`qr_everywhere`, and the factors' product."""
    svd = 6 * w.n * w.p**2 + 20 * w.p**3
    return Cost(w.gathered, w.k * 2 * w.n * w.p**2, w.k * svd)


def qr_by_gram(w: Weights) -> Cost:
    """QR by the Cholesky factor of a summed Gram matrix: the best QR can do, offered by nobody.

    The same three Gram matrices as landing; then the factor, and triangular systems for the rows.
    """
    tangent = 10 * w.rows * w.p**2 + 8 * w.p**3
    factor = w.p**3 / 3 + w.rows * w.p**2
    return Cost(landing_rows(w).received, w.k * tangent, w.k * factor)


def parametrization(w: Weights) -> Cost:
    """torch's ``parametrizations.orthogonal``: no messages beyond FSDP2's; all on every rank.

    For a square matrix the Cayley map: n x n systems forwards and backwards, and three products.
    For a tall one Householder's product, torch's choice, whose gradient takes about ``10 n^2 p``,
    and products with a basis.
    """
    if w.n == w.p:
        return Cost(0, w.k * 6 * w.n**3, w.k * 16 / 3 * w.n**3)
    products = 14 * w.n**2 * w.p - 4 * w.n * w.p**2
    return Cost(0, w.k * products, w.k * householder(w.n, w.p) / 2)


def householder(n: int, p: int) -> float:
    """Householder's QR, with Q formed."""
    return 4 * n * p**2 - 4 / 3 * p**3


def free_pass(w: Weights) -> Cost:
    """Forwards and backwards: a gather, a scatter of gradients, and products with one vector."""
    return Cost(2 * w.gathered, 4 * w.n * w.p * w.k)


def parametrized_pass(w: Weights) -> Cost:
    """The same through a parametrization."""
    return Cost(*(a + b for a, b in zip(free_pass(w), parametrization(w), strict=True)))


# --- what the formulas say of many GPUs

ON_PAPER: dict[str, Callable[[Weights], Cost]] = {
    "FSDP2's own traffic": fsdp,
    "landing, rows": landing_rows,
    "landing, owners": partial(landing_owners, norms=True),
    "QR, owners": qr_owners,
    "polar, owners": polar_owners,
    "QR, gathered everywhere": qr_everywhere,
    "polar, gathered everywhere": polar_everywhere,
    "QR by Gram matrices (nobody offers it)": qr_by_gram,
    "parametrization": parametrization,
}
GPUS = (8, 64, 512)
SCENES = {  # title -> n, p, k
    "1,000 tall matrices of 16384 x 256": (16384, 256, 1000),
    "1,000 tall matrices of 8192 x 2048": (8192, 2048, 1000),
    "2,000 square matrices of 4096 x 4096": (4096, 4096, 2000),
    "one tall matrix of 1,000,000 x 256": (1_000_000, 256, 1),
}


def predict(
    n: int,
    p: int,
    k: int,
    bandwidth: float = 25.0,
    products: float = 100.0,
    decompositions: float = 1.0,
) -> list[list[str]]:
    """A table of gigabytes received and milliseconds, for each method and number of GPUs.

    For GPUs with the given GB/s and TFLOP/s, if nothing overlaps and messages have no latency.
    """
    rows = [["step", *(f"{what}, {R} GPUs" for R in GPUS for what in ("GB", "ms"))]]
    for name, cost_of in ON_PAPER.items():
        if n > p or cost_of not in (landing_rows, qr_by_gram):
            numbers: list[float] = []
            for cost in (cost_of(Weights(n, p, k, R)) for R in GPUS):
                gigabytes = cost.received * BYTES / 1e9
                arithmetic = cost.products / products + cost.decompositions / decompositions
                numbers += gigabytes, 1e3 * gigabytes / bandwidth + arithmetic / 1e9
            rows.append([name, *map(_digits, numbers)])
    return rows


def _digits(number: float) -> str:
    """Two digits or more, no exponent."""
    return "0" if not number else f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"
