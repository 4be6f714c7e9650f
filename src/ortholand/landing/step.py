"""What the parts of a step pass to each other."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

# Per weight: a tensor of its shape, or a real number for each of its matrices. Both start at zero.
StateKind = Literal["matrix", "number"]


SKIPPED = "skipped"  # the state that counts the steps of a weight that were not taken
LIMITED = "limited"  # the state that counts those that the safe step made shorter than lr
COUNTS = (SKIPPED, LIMITED)


class Slot(NamedTuple):
    """A weight, its gradient and its state. Engines write to the weight and to the state."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Any]


def count_of(name: str, state: dict[str, Any], device: torch.device) -> Tensor:
    """One of the counts of a weight's steps so far, kept where the weight is."""
    count = state.get(name)
    if count is None:
        count = state[name] = torch.zeros((), dtype=torch.int64, device=device)
    elif not (count.is_cpu and device.type == "cpu") and count.device != device:
        count = state[name] = count.to(device)
    return count


class MatrixStep(NamedTuple):
    """The step of a batch of matrices."""

    moved: Tensor  # where the matrices go, (..., n, p)
    taken: Any  # which may go there, a Tensor (...); the others stay. None, of whole matrices: all
    state: dict[str, Tensor]  # the state after a step that is taken, (..., n, p) or (...)
    limited: Tensor | None = None  # where the safe step was less than lr, (...); None: nowhere

    @classmethod
    def of(cls, move: tuple[Tensor, Tensor], state: dict[str, Tensor]) -> "MatrixStep":
        """A step from a move and a state; the library's own moves also say what was limited."""
        return cls(*move, state, getattr(move, "limited", None))


class Rows(NamedTuple):
    """How many of the rows of tall matrices are local, and how many there are."""

    here: int
    total: int  # n

    @property
    def share(self) -> float:
        """This part's share of the identity; the shares of all parts add up to 1."""
        return self.here / self.total


class GramSums(NamedTuple):
    """Sums over rows: the local ones, or all."""

    hermitian: tuple[Tensor, Tensor]  # X^H X - I (the share of it) and B^H B, (..., p, p)
    others: tuple[Tensor, ...]  # X^H B and the like, and numbers per matrix


class PendingStep(NamedTuple):
    """A step of tall matrices that waits for sums over all their rows, on several ranks or here.

    The step that follows from them may wait for further sums.
    """

    sums: GramSums
    finish: "Callable[[GramSums], MatrixStep | PendingStep]"
