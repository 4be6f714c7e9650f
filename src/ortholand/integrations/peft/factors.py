"""LoRA with orthonormal factors: ``W + scaling B diag(s) A``, ``B^T B = I`` and ``A A^T = I``.

PEFT's layers compute ``W + scaling B A``. One orthonormal factor needs only an optimizer that keeps
it so: the other factor absorbs the rest. If both are orthonormal, a diagonal s goes between
them. It is a parameter of the layer, ``lora_diagonal``, which PEFT's own mechanism for LoRA
variants brings into forward passes and merges.

A layer is converted without changing what it computes. Saved adapters are ordinary LoRAs:
state_dicts hold ``diag(s) A`` instead of A, so loading them does not need this library. s
is saved too, so that training resumes where it was.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import Linear, LoraVariant, _ConvNd
from torch import Tensor, nn

from ortholand.geometry import random_orthogonal
from ortholand.geometry.matrices import to_working_dtype

Factors = Literal["both", "A", "B"]
FACTORS: tuple[Factors, ...] = ("both", "A", "B")
DIAGONAL = "lora_diagonal"
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
    return adapter in getattr(layer, DIAGONAL, ())


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


def why_not_both(layer: Layer, adapter: str) -> str | None:
    """Why a layer cannot have a diagonal between its factors; None if it can."""
    if adapter in layer.lora_variant and not has_diagonal(layer, adapter):
        return f"is a {type(layer.lora_variant[adapter]).__name__}, which knows no diagonal"
    if not isinstance(layer, Linear | _ConvNd):
        return f"is a {type(layer).__module__}.{type(layer).__name__}, which knows no diagonal"
    return None


# --- the diagonal


class DiagonalVariant(LoraVariant):
    """``W + scaling B diag(s) A``, for PEFT's forward passes and merges."""

    @staticmethod
    def init(module: Layer, adapter_name: str, **kwargs: Any) -> None:
        """Do nothing: the diagonal is inserted into an existing layer."""

    @staticmethod
    def forward(module: Layer, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """The layer's output."""
        inner = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        s = getattr(module, DIAGONAL)[active_adapter]
        along = -1 if isinstance(module, Linear) else 1
        inner = inner * s.reshape([-1 if i == along % inner.ndim else 1 for i in range(inner.ndim)])
        return result + module.lora_B[active_adapter](inner) * module.scaling[active_adapter]

    @staticmethod
    def merge_safe(module: Layer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight with the update."""
        return orig_weight + _update(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Layer, active_adapter: str, orig_weight: Tensor) -> None:
        """Add the update in place."""
        orig_weight.data += _update(module, active_adapter).to(orig_weight.dtype)

    @staticmethod
    def unmerge(module: Layer, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """The weight without the update."""
        return orig_weight - _update(module, active_adapter).to(orig_weight.dtype)


@torch.no_grad()
def _update(layer: Layer, adapter: str) -> Tensor:
    """The update as PEFT computes it from the factors, with A multiplied by the diagonal."""
    weight = layer.lora_A[adapter].weight
    A = weight.data
    weight.data = _times_rows(getattr(layer, DIAGONAL)[adapter], A)
    try:
        return layer.get_delta_weight(adapter)
    finally:
        weight.data = A


def _times_rows(s: Tensor, A: Tensor) -> Tensor:
    return s.reshape(-1, *[1] * (A.ndim - 1)) * A


def _insert_diagonal(layer: Layer, adapter: str, s: Tensor) -> None:
    if not hasattr(layer, DIAGONAL):
        setattr(layer, DIAGONAL, nn.ParameterDict())
        # PEFT looks here for what it freezes, moves and deletes.
        layer.adapter_layer_names = (*layer.adapter_layer_names, DIAGONAL)
        layer.register_state_dict_post_hook(_fold_diagonals)
        layer.register_load_state_dict_pre_hook(_unfold_diagonals)
    getattr(layer, DIAGONAL)[adapter] = nn.Parameter(s)
    layer.lora_variant[adapter] = DiagonalVariant()


# --- saved and loaded as an ordinary LoRA


def _fold_diagonals(
    layer: Layer, state_dict: dict[str, Tensor], prefix: str, _: Mapping[str, Any]
) -> None:
    for adapter in getattr(layer, DIAGONAL):
        keys = _keys(prefix, adapter)
        if keys[0] in state_dict and keys[2] in state_dict:
            state_dict[keys[0]] = _times_rows(state_dict[keys[2]], state_dict[keys[0]])


@torch.no_grad()
def _unfold_diagonals(layer: Layer, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for adapter in getattr(layer, DIAGONAL):
        keys = _keys(prefix, adapter)
        if keys[0] in state_dict and keys[2] in state_dict:
            _divide_by_diagonal(layer, adapter, state_dict, keys)
        elif keys[0] in state_dict and keys[1] in state_dict:
            _factorise(state_dict, keys)


def _keys(prefix: str, adapter: str) -> tuple[str, str, str]:
    """The keys of A, B and the diagonal."""
    return (
        f"{prefix}lora_A.{adapter}.weight",
        f"{prefix}lora_B.{adapter}.weight",
        f"{prefix}{DIAGONAL}.{adapter}",
    )


def _divide_by_diagonal(
    layer: Layer, adapter: str, state_dict: dict[str, Tensor], keys: tuple[str, str, str]
) -> None:
    """Load what we saved: rows that were multiplied by zero keep the layer's values."""
    folded, s = state_dict[keys[0]], state_dict[keys[2]]
    present = layer.lora_A[adapter].weight.to(folded)
    zero = s.reshape(-1, *[1] * (folded.ndim - 1)) == 0
    inverse = torch.where(s == 0, 1, s).reciprocal()
    state_dict[keys[0]] = torch.where(zero, present, _times_rows(inverse, folded))


def _factorise(state_dict: dict[str, Tensor], keys: tuple[str, str, str]) -> None:
    """Load a plain LoRA, saved elsewhere, by factorising it."""
    A, B = state_dict[keys[0]], state_dict[keys[1]]
    columns, s, rows = singular_factors(
        to_working_dtype(B).flatten(1), to_working_dtype(A).flatten(1), seed=0
    )
    state_dict[keys[0]] = rows.reshape(A.shape).to(A.dtype)
    state_dict[keys[1]] = columns.reshape(B.shape).to(B.dtype)
    state_dict[keys[2]] = s.to(A.dtype)
