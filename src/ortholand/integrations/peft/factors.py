"""LoRA with orthonormal factors: ``W + scaling B diag(s) A``, ``B^T B = I`` and ``A A^T = I``.

PEFT's layers compute ``W + scaling B A``. One orthonormal factor needs nothing but an optimizer
that keeps it so, because the other factor takes its lengths. If both are orthonormal, a
diagonal s stands between them. The module of A then computes ``diag(s) A`` and returns this as
its weight, so that whatever PEFT does with factors (forward passes of any layer, merges, sums of
adapters, DoRA's norms) is right and needs no s.

A layer is converted without changing what it computes. What is saved is an ordinary LoRA without
further tensors, which loads without this library.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ortholand.geometry import distance, random_orthogonal
from ortholand.geometry.matrices import to_working_dtype

Factors = Literal["both", "A", "B"]
FACTORS: tuple[Factors, ...] = ("both", "A", "B")
NEGATIVE = 2.0  # length of a saved column of B whose s is negative; a power of two rounds nothing
Layer = Any  # a LoraLayer; PEFT does not say of what types its attributes are


@torch.no_grad()
def make_orthonormal(layer: Layer, adapter: str, factors: Factors, seed: int) -> None:
    """Make factors of a layer orthonormal, without changing what the layer computes."""
    if has_diagonal(layer, adapter):
        return
    A, B = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    rows, columns = (to_working_dtype(M).flatten(1) for M in (A, B))
    if factors == "A":
        rows, rest = _polar_factors(rows.mT, seed)
        rows, columns = rows.mT, columns @ rest.mT
    elif factors == "B":
        columns, rest = _polar_factors(columns, seed)
        rows = rest @ rows
    else:
        columns, s, rows = singular_factors(columns, rows, seed)
        _insert_diagonal(layer, adapter, s.to(A.dtype))
    A.copy_(rows.reshape(A.shape))
    B.copy_(columns.reshape(B.shape))


def has_diagonal(layer: Layer, adapter: str) -> bool:
    """Whether both factors of a layer were made orthonormal."""
    return isinstance(layer.lora_A[adapter], ScaledRows)


def orthonormal_weights(layer: Layer, adapter: str, factors: Factors) -> list[nn.Parameter]:
    """The parameters that :func:`make_orthonormal` has made so."""
    A, B = layer.lora_A[adapter], layer.lora_B[adapter]
    if factors == "both":
        return [A.layer.weight, B.weight]
    return [A.weight if factors == "A" else B.weight]


def singular_factors(B: Tensor, A: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """``U, s, V^T`` with ``U diag(s) V^T = B A``, by factorising tall and small matrices.

    Where s is zero, as at the start of a LoRA, the directions are random.
    """
    columns, left = _orthonormal_basis(B, seed)
    rows, right = _orthonormal_basis(A.mT, seed + 1)
    U, s, Vh = torch.linalg.svd(left @ right.mT)
    return columns @ U, s, Vh @ rows.mT


def _orthonormal_basis(M: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Q and ``Q^T M``; Q's orthonormal columns span those of M, and are random if M is zero."""
    if not M.any():
        return _random_like(M, seed), M.new_zeros(M.shape[1], M.shape[1])
    Q, R = torch.linalg.qr(M)
    return Q, R


def _polar_factors(M: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Q with orthonormal columns and P with ``Q P = M``, P symmetric; Q is random if M is zero."""
    if not M.any():
        return _random_like(M, seed), M.new_zeros(M.shape[1], M.shape[1])
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh, Vh.mT * s @ Vh


def _random_like(M: Tensor, seed: int) -> Tensor:
    # Drawn on the CPU, so that a seed means the same everywhere.
    return random_orthogonal(*M.shape, seed=seed, dtype=M.dtype).to(M.device)


# --- the diagonal


class ScaledRows(nn.Module):
    """A linear or convolution layer whose outputs are multiplied by s, in the place of the layer.

    Its weight is ``diag(s) A``, computed when asked for.
    """

    def __init__(self, layer: nn.Module, s: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.diagonal = nn.Parameter(s)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """``diag(s) A x``."""
        dimensions = self.layer.get_parameter("weight").ndim - 2  # of a kernel
        return self.layer(x) * self.diagonal.reshape(-1, *[1] * dimensions)

    @property
    def weight(self) -> Tensor:
        """What PEFT takes for the factor A."""
        return _times_rows(self.diagonal, self.layer.get_parameter("weight"))

    def __getattr__(self, name: str) -> Any:
        """Sizes, strides and whatever else PEFT may ask a layer for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _times_rows(s: Tensor, A: Tensor) -> Tensor:
    return s.reshape(-1, *[1] * (A.ndim - 1)) * A


def _insert_diagonal(layer: Layer, adapter: str, s: Tensor) -> None:
    if not any(isinstance(module, ScaledRows) for module in layer.lora_A.values()):
        layer.register_state_dict_post_hook(_fold_diagonals)
        layer.register_load_state_dict_pre_hook(_unfold_diagonals)
    layer.lora_A[adapter] = ScaledRows(layer.lora_A[adapter], s)


# --- saved and loaded as an ordinary LoRA


class _Keys:
    """Names in a state_dict: of ordinary factors, and of the parameters that stand for them."""

    def __init__(self, prefix: str, adapter: str) -> None:
        self.A, self.B = (f"{prefix}lora_{factor}.{adapter}.weight" for factor in "AB")
        self.rows = f"{prefix}lora_A.{adapter}.layer.weight"
        self.diagonal = f"{prefix}lora_A.{adapter}.diagonal"


def _scaled(layer: Layer) -> list[str]:
    return [name for name, module in layer.lora_A.items() if isinstance(module, ScaledRows)]


def _fold_diagonals(
    layer: Layer, state_dict: dict[str, Tensor], prefix: str, _: Mapping[str, Any]
) -> None:
    for adapter in _scaled(layer):
        keys = _Keys(prefix, adapter)
        if {keys.rows, keys.diagonal, keys.B} <= state_dict.keys():
            rows, s = state_dict.pop(keys.rows), state_dict.pop(keys.diagonal)
            state_dict[keys.A], state_dict[keys.B] = folded(rows, s, state_dict[keys.B])


@torch.no_grad()
def _unfold_diagonals(layer: Layer, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for adapter in _scaled(layer):
        keys, module = _Keys(prefix, adapter), layer.lora_A[adapter]
        if not {keys.A, keys.B} & state_dict.keys():
            continue
        # The layer's factor stands in for one that is not given.
        rows, present = module.layer.weight, layer.lora_B[adapter].weight
        A, B = folded(rows, module.diagonal, present)
        A, B = state_dict.pop(keys.A, A), state_dict.get(keys.B, B)
        if A.shape != rows.shape or B.shape != present.shape:
            state_dict[keys.rows], state_dict[keys.B] = A, B  # torch says what is wrong
            continue
        state_dict[keys.rows], state_dict[keys.diagonal], state_dict[keys.B] = unfolded(A, B, rows)


def folded(rows: Tensor, s: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of an ordinary LoRA from which :func:`unfolded` finds rows, s and B again.

    A row of the first has the length of s, which leaves the sign: it is in the length of B's
    column.
    """
    lengths = torch.where(s < 0, NEGATIVE, 1.0).to(s)
    columns = lengths.reshape(-1, *[1] * (B.ndim - 2)) * B  # B is (outputs, rank, 1, ...)
    return _times_rows(s / lengths, rows), columns


def unfolded(A: Tensor, B: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Orthonormal rows, s and orthonormal columns of any LoRA.

    An adapter that this library saved is restored as it was; where s is zero, with the present
    rows. For other adapters the result is the singular value decomposition.
    """
    rows, columns = (to_working_dtype(M).flatten(1) for M in (A, B))
    lengths, norms = rows.norm(dim=1), columns.norm(dim=0)
    near = max(torch.finfo(A.dtype).eps ** 0.5, 1e-4)
    negative = norms > NEGATIVE**0.5
    columns = torch.where(negative, columns / NEGATIVE, columns)
    known = bool(distance(columns) < near)
    if known and not lengths.any():
        rows, s = to_working_dtype(present).flatten(1).to(lengths.device), lengths
    elif known and lengths.all() and distance(rows / lengths[:, None]) < near:
        s = torch.where(negative, -NEGATIVE * lengths, lengths)
        rows = rows / torch.where(negative, -lengths, lengths)[:, None]
    else:
        columns, s, rows = singular_factors(to_working_dtype(B).flatten(1), rows, seed=0)
    return (
        rows.reshape(A.shape).to(A.dtype),
        s.to(A.dtype),
        columns.reshape(B.shape).to(B.dtype),
    )
