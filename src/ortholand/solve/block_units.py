"""Units of the blocks of a product, so that one step length suits all of them."""

import math
from typing import Any

from ortholand.solve.arrays import norm, zeros
from ortholand.solve.manifolds import Product

MEMORY = 0.99  # weight of the past: a quickly changing metric would make past steps misleading
DRIFT = 4.0  # how many times a factor may change before the frozen one is replaced


class BlockUnits:
    """How much the gradient of each block changes per step of that block, and scaling by it.

    The numbers s of a model ``U diag(s) V^T`` may be in the hundreds where the columns of U have
    length 1: curvatures then differ by the square of that, whatever the cost.
    """

    def __init__(self, product: Product, like: Any) -> None:
        self.parts = [part for part, _, _ in product.packing.parts]
        self.logarithms: list[float | None] = [None] * len(self.parts)  # of the curvatures
        self.factors = zeros(tuple(like.shape), like) + 1
        self.roots = self.factors + 0  # of the factors when they were frozen

    def learn(self, step: Any, change: Any) -> None:
        for i, part in enumerate(self.parts):
            length, changed = norm(step[part]), norm(change[part])
            if not (length > 0 and 0 < changed / length < math.inf):
                continue
            seen, past = math.log(changed / length), self.logarithms[i]
            self.logarithms[i] = seen if past is None else MEMORY * past + (1 - MEMORY) * seen
        known = [one for one in self.logarithms if one is not None]
        for part, one in zip(self.parts, self.logarithms, strict=True):
            self.factors[part] = 1.0 if one is None else math.exp(min(max(known) - one, 100.0))

    def scaled(self, vector: Any) -> Any:
        """Each block divided by its curvature, relative to the largest."""
        return vector * self.factors

    def froze(self) -> bool:
        """Renew the roots if the factors have drifted away from them; whether they had."""
        drift = self.factors / (self.roots * self.roots)
        if float(drift.min()) > 1 / DRIFT and float(drift.max()) < DRIFT:
            return False
        self.roots = self.factors**0.5
        return True


def units_for(geometry: Any, like: Any) -> BlockUnits | None:
    """Units for a product; None for a single matrix, which needs none."""
    return BlockUnits(geometry, like) if isinstance(geometry, Product) else None
