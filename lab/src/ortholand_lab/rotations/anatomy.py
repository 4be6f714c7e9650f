"""The parts of a Llama-type model that rotations concern, found by name and checked."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

KNOWN_NORMS = ("input_layernorm", "post_attention_layernorm")
# Norms of queries and keys, which no rotation here reaches.
HEAD_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm")
SINKS = "sinks"  # logits of attention, a number for each head


@dataclass(frozen=True)
class Block:
    """A decoder layer: what reads the residual stream after each norm, and what writes to it."""

    name: str
    attention_norm: Any
    attention: Any  # with q_proj, k_proj, v_proj and o_proj
    mlp_norm: Any
    mlp: Any  # with gate_proj, up_proj and down_proj
    head_dim: int  # 0 where heads are not turned


@dataclass(frozen=True)
class Anatomy:
    """A model from its embedding to its head."""

    width: int
    backbone: Any  # holds the embedding
    embedding: nn.Embedding
    blocks: tuple[Block, ...]
    norm: Any
    head: nn.Linear


def anatomy(model: nn.Module, *, heads: bool) -> Anatomy:
    """The parts of a model; raises where one is missing or of a kind that rotations would harm.

    Args:
        model: that they are of.
        heads: whether heads will be turned, too.
    """
    backbone = _part(model, "model", "the model")
    embedding = _part(backbone, "embed_tokens", "the model's backbone")
    if type(embedding) is not nn.Embedding:
        raise _wrong_layer("model.embed_tokens", embedding, "nn.Embedding")
    _check_weight(embedding.weight, "model.embed_tokens")
    layers = _part(backbone, "layers", "the model's backbone")
    norm = _part(backbone, "norm", "the model's backbone")
    _check_norm(norm, "model.norm")
    head = _linear(model, "lm_head", "the model", "lm_head")
    blocks = tuple(_block(layer, f"model.layers.{i}", heads) for i, layer in enumerate(layers))
    parts = Anatomy(embedding.embedding_dim, backbone, embedding, blocks, norm, head)
    _check_nothing_else(model, parts)
    return parts


def linears(block: Block) -> Iterator[tuple[str, nn.Module, str]]:
    """Name of each linear layer, the module that holds it, and its name there."""
    for part, holder, names in (
        ("self_attn", block.attention, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("mlp", block.mlp, ("gate_proj", "up_proj", "down_proj")),
    ):
        for name in names:
            yield f"{block.name}.{part}.{name}", holder, name


def _block(layer: nn.Module, name: str, heads: bool) -> Block:
    attention, mlp = _part(layer, "self_attn", name), _part(layer, "mlp", name)
    norms = [_part(layer, norm, name) for norm in KNOWN_NORMS]
    head_dim = _head_dim(attention, name) if heads else 0
    block = Block(name, norms[0], attention, norms[1], mlp, head_dim)
    for full, holder, key in linears(block):
        _linear(holder, key, full.rpartition(".")[0], full)
    for norm, module in zip(KNOWN_NORMS, norms, strict=True):
        _check_norm(module, f"{name}.{norm}")
    for key, module in layer.named_modules():
        last = key.rpartition(".")[2]
        if "norm" in type(module).__name__.lower() and last not in (*KNOWN_NORMS, *HEAD_NORMS):
            raise ValueError(
                "Rotations can pass only the norms before attention and MLP, but "
                f"{name}.{key} is another one ({type(module).__name__}): this is not a Llama-type "
                "model, and its weights cannot be rotated."
            )
    values = attention.v_proj.out_features
    if heads and values % block.head_dim:
        raise ValueError(
            f"The values must be heads of head_dim numbers, but {name}.self_attn.v_proj has "
            f"{values} outputs and head_dim is {block.head_dim}. Use heads=False."
        )
    return block


def _check_nothing_else(model: nn.Module, parts: Anatomy) -> None:
    """A weight of any other kind (scales of the residual stream, say) would not be turned."""
    modules: list[nn.Module] = [parts.embedding, parts.norm, parts.head]
    for block in parts.blocks:
        modules += [block.attention_norm, block.mlp_norm]
        modules += [getattr(holder, name) for _, holder, name in linears(block)]
        modules += [m for n, m in block.attention.named_children() if n in HEAD_NORMS]
    known = {id(p) for module in modules for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known and name.rpartition(".")[2] != SINKS:
            raise ValueError(
                "Rotations can pass embedding, norms, head and the linear layers of attention and "
                f"MLP, but {name} is a weight of another kind: this is no Llama-type model, and "
                "what it computes would change."
            )


def _head_dim(attention: nn.Module, name: str) -> int:
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int):
        raise ValueError(
            f"The size of a head must be known, but {name}.self_attn has no head_dim. Set it "
            "there, or use heads=False."
        )
    return head_dim


def _part(holder: nn.Module, key: str, name: str) -> Any:  # torch does not know its type
    part = getattr(holder, key, None)
    if not isinstance(part, nn.Module):
        raise ValueError(
            "Rotations are for Llama-type models (model.embed_tokens, layers with self_attn and "
            f"mlp, norm, lm_head), but {name} ({type(holder).__name__}) has no {key}. Pass "
            "the causal language model itself, without wrappers and adapters."
        )
    return part


def _linear(holder: nn.Module, key: str, name: str, full: str) -> nn.Linear:
    linear = _part(holder, key, name)
    if type(linear) is not nn.Linear:
        raise _wrong_layer(full, linear, "nn.Linear")
    _check_weight(linear.weight, full)
    return linear


def _check_weight(weight: Tensor, name: str) -> None:
    """Whether it holds numbers that can be turned."""
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor  # torchao's are not
    if not (plain and weight.is_floating_point()):
        held = weight.dtype if plain else type(weight.data).__name__
        raise ValueError(
            f"Weights must be plain floating-point numbers, but {name} holds {held}. Turn the "
            "model before it is quantised or sharded."
        )
    if weight.is_meta:
        raise ValueError(f"Weights must have values, but {name} is on the meta device. Load them.")


def _wrong_layer(name: str, found: nn.Module, wanted: str) -> ValueError:
    return ValueError(
        f"A rotated weight must belong to a plain {wanted}, but {name} is a "
        f"{type(found).__module__}.{type(found).__name__}. Rotate the model before quantising it, "
        "and merge adapters first (merge_and_unload)."
    )


def _check_norm(norm: nn.Module, name: str) -> None:
    """Raise unless it is ``weight * x / rms(x)``: subtracting a mean does not rotate with x."""
    weight = getattr(norm, "weight", None)
    right = isinstance(weight, Tensor) and getattr(norm, "bias", None) is None
    if isinstance(weight, Tensor) and weight.device.type == "meta":
        raise ValueError(f"Weights must have values, but {name} is on the meta device. Load them.")
    if right:
        x = torch.linspace(-1, 3, 2 * len(weight), device=weight.device).reshape(2, -1)
        expected = x * x.square().mean(-1, keepdim=True).rsqrt()
        with torch.no_grad():
            found = norm(x.to(weight.dtype)).float()
        right = torch.allclose(found, weight.float() * expected, rtol=0.02, atol=0.02)
    if not right:
        raise ValueError(
            f"Rotations pass norms of the form weight * x / rms(x), but {name} "
            f"({type(norm).__name__}) computes something else. A LayerNorm must first be converted "
            "to an RMSNorm; norms with 1 + weight are not supported."
        )
