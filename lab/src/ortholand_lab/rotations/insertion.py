"""Inserting rotations into a model, and folding them into its weights."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ortholand.geometry import polar_projection, random_orthogonal
from ortholand_lab.rotations.anatomy import Anatomy, anatomy, linears
from ortholand_lab.rotations.hadamard import random_hadamard
from ortholand_lab.rotations.layers import (
    RotatedEmbedding,
    RotatedLinear,
    scale_inputs_,
    turned,
)
from ortholand_lab.rotations.quantization import Quantization

Start = Literal["hadamard", "random", "identity"]
NAME = "rotations"  # of the module that holds them, in the model
RESIDUAL = "residual"


class Rotations(nn.Module):
    """The rotations of a model: ``residual``, and ``heads``, one for each layer.

    All parameters are square orthogonal matrices, so any optimizer of this library takes
    ``rotations.parameters()``.
    """

    def __init__(self, residual: Tensor | None, heads: list[Tensor]) -> None:
        super().__init__()
        self.residual = None if residual is None else nn.Parameter(residual)
        self.heads = nn.ParameterList(heads)


def insert_rotations(
    model: nn.Module,
    *,
    residual: bool = True,
    heads: bool = True,
    quantization: Quantization | None = None,
    start: Start = "hadamard",
    seed: int = 0,
    untie: bool = False,
) -> Rotations:
    """Insert rotations into a Llama-type model, in place, without changing what it computes.

    Norms are fused into the layers after them, all weights are frozen, and linear layers rotate
    their weights in each forward pass, by the current rotations.

    Args:
        model: a Llama-type causal language model of transformers (Llama, Mistral, Qwen2 and
            3): RMSNorms before attention and MLP, and no others on the residual stream.
        residual: rotate the residual stream (R1 of SpinQuant).
        heads: rotate the values of all heads of a layer, between v_proj and o_proj (R2).
        quantization: how the decoder's linear layers are quantised from now on, with derivatives
            that pass straight through; None: not at all.
        start: ``"hadamard"``, with random signs, for sizes that have such matrices, as powers of
            two and most widths of models; ``"random"``, Haar-distributed; or ``"identity"``.
        seed: of the start.
        untie: give lm_head a weight of its own if it shares that of the embedding: the fused norm
            and the rotation make the two differ.

    Returns:
        The rotations; also ``model.rotations`` until :func:`fold_rotations_`.

    Raises:
        ValueError: if the model is of another type, or a size allows no such start. Then nothing
            has been changed.
    """
    if hasattr(model, NAME):
        raise ValueError("Rotations are inserted once. Use fold_rotations_(model) first.")
    if not (residual or heads):
        raise ValueError("There must be something to rotate: residual=True or heads=True.")
    parts = anatomy(model, heads=heads)
    tied = parts.embedding.weight is parts.head.weight
    if tied and not untie:
        raise ValueError(
            "Embedding and head must have separate weights, but model.embed_tokens and lm_head "
            "share one. Use untie=True: the head gets a copy, and tie_word_embeddings=False."
        )
    rotations = _start(parts, residual=residual, heads=heads, start=start, seed=seed)
    if tied:
        _untie(model, parts)
    _fuse_norms_(parts)
    model.requires_grad_(False)
    setattr(model, NAME, rotations)
    _insert(model, parts, rotations, quantization or Quantization())
    return rotations


@torch.no_grad()
def fold_rotations_(model: nn.Module) -> nn.Module:
    """Rotate the weights for good: plain layers again, without rotations or quantisation.

    Rotations are first projected to the nearest orthogonal matrix, and weights rotated in float64,
    so that the model computes what it did before rotations were inserted.

    Returns:
        The model, changed in place. Its parameters are still frozen.
    """
    rotations = getattr(model, NAME, None)
    if not isinstance(rotations, Rotations):
        raise ValueError("The model must have rotations: insert_rotations(model) first.")
    exact = {name: polar_projection(p.double()) for name, p in rotations.named_parameters()}
    for holder in list(model.modules()):
        for name, layer in list(holder.named_children()):
            if isinstance(layer, RotatedLinear):
                setattr(holder, name, _folded_linear(layer, exact))
            elif isinstance(layer, RotatedEmbedding):
                setattr(holder, name, _folded_embedding(layer, exact))
    delattr(model, NAME)
    return model


# --- the start


def _start(parts: Anatomy, *, residual: bool, heads: bool, start: Start, seed: int) -> Rotations:
    if start not in get_args(Start):
        raise ValueError(f"start must be one of {get_args(Start)}, got {start!r}.")
    like = parts.embedding.weight
    generator = torch.Generator().manual_seed(seed)

    def make(n: int, name: str) -> Tensor:
        if n < 2:
            raise ValueError(
                f"A rotation needs at least 2 dimensions, but {name} has {n}. Leave it out."
            )
        try:
            R = _orthogonal(n, start, generator)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return R.to(like.device, torch.promote_types(like.dtype, torch.float32))

    stream = make(parts.width, "The residual stream") if residual else None
    turns = [make(b.head_dim, f"A head of {b.name}") for b in parts.blocks] if heads else []
    return Rotations(stream, turns)


def _orthogonal(n: int, start: Start, generator: torch.Generator) -> Tensor:
    if start == "hadamard":
        return random_hadamard(n, generator)
    return random_orthogonal(n, n, seed=generator) if start == "random" else torch.eye(n)


# --- what surrounds them


def _untie(model: nn.Module, parts: Anatomy) -> None:
    parts.head.weight = nn.Parameter(parts.head.weight.detach().clone())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False


@torch.no_grad()
def _fuse_norms_(parts: Anatomy) -> None:
    readers = [(parts.norm, [parts.head])]
    for block in parts.blocks:
        attention, mlp = block.attention, block.mlp
        queries = [attention.q_proj, attention.k_proj, attention.v_proj]
        readers.append((block.attention_norm, queries))
        readers.append((block.mlp_norm, [mlp.gate_proj, mlp.up_proj]))
    for norm, layers in readers:
        for layer in layers:
            scale_inputs_(layer, norm.weight)
        norm.weight.fill_(1)


def _insert(
    model: nn.Module, parts: Anatomy, rotations: Rotations, quantization: Quantization
) -> None:
    stream = None if rotations.residual is None else RESIDUAL
    for i, block in enumerate(parts.blocks):
        turn = f"heads.{i}" if len(rotations.heads) else None
        reads = {"o_proj": turn, "down_proj": None}
        writes = {"v_proj": turn, "o_proj": stream, "down_proj": stream}
        for _, holder, name in linears(block):
            layer = RotatedLinear(
                getattr(holder, name),
                rotations,
                reads.get(name, stream),
                writes.get(name),
                quantization,
            )
            setattr(holder, name, layer)
    if stream is not None:
        parts.backbone.embed_tokens = RotatedEmbedding(parts.embedding, rotations, stream)
        model.lm_head = RotatedLinear(parts.head, rotations, stream, None, Quantization())


def _folded_linear(layer: RotatedLinear, exact: dict[str, Tensor]) -> nn.Linear:
    reads, writes = (None if n is None else exact[n] for n in (layer.reads, layer.writes))
    W, bias = layer.turned_weights(reads, writes)
    plain = layer.layer
    plain.weight.copy_(W)
    if bias is not None:
        plain.bias.copy_(bias)
    return plain


def _folded_embedding(layer: RotatedEmbedding, exact: dict[str, Tensor]) -> nn.Embedding:
    weight = layer.layer.weight
    weight.copy_(turned(weight.double(), exact[layer.writes]))
    return layer.layer
