"""The factory of optimizers for the adapters of a PEFT model."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.boft.layer import BOFTLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.oft.layer import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ortholand.integrations.peft.blocks import make_blocks_orthogonal, make_butterfly_orthogonal
from ortholand.integrations.peft.factors import (
    FACTORS,
    Factors,
    has_diagonal,
    make_orthonormal,
    orthonormal_weights,
)
from ortholand.optim import LandingAdam
from ortholand.optim.base import OrthogonalOptimizer


def create_landing_optimizer(
    model: nn.Module,
    optimizer_cls: type[OrthogonalOptimizer] = LandingAdam,
    *,
    lr: float = 1e-3,
    orthogonal_lr: float | None = None,
    factors: Factors = "both",
    weight_decay: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> OrthogonalOptimizer:
    """An optimizer that trains the active adapters of a PEFT model with orthogonal weights.

    - **LoRA**: ``W + scaling B diag(s) A``. B has orthonormal columns, A orthonormal rows, and s is
      free: a learnt singular value decomposition. Alternatively only one of the factors is
      orthonormal, and the other free.
    - **OFT and BOFT**: the blocks are rotations themselves. Forward passes no longer compute a
      Cayley transform or its series, and R is orthogonal up to rounding.

    The model is converted in place, without changing what it computes. (OFT's Neumann series is
    replaced by the nearest rotation; for a new adapter both are the identity.) All other
    trainable weights take the optimizer's unconstrained step, AdamW's by default.
    ``save_pretrained`` writes ordinary adapters, which PEFT loads without this library;
    ``merge_and_unload``, ``load_adapter``, the Trainer and Accelerate work as before. Call it
    before ``accelerator.prepare``.

    Args:
        model: a PeftModel with adapters of these types, or a model with such layers in it.
        optimizer_cls: :class:`ortholand.LandingAdam`, :class:`ortholand.LandingMuon` or
            :class:`ortholand.LandingSGD`.
        lr: learning rate of unconstrained weights; AdamW's.
        orthogonal_lr: learning rate of orthogonal weights, for LandingAdam and LandingMuon the
            angle in radians by which columns or planes turn in a step; ``lr`` if not given.
        factors: which factors of a LoRA are orthonormal: ``"both"``, ``"A"`` or ``"B"``.
        weight_decay: weight decay of unconstrained weights.
        seed: seed for orthonormal directions where a factor is zero.
        **options: further options of the optimizer.

    Raises:
        ValueError: if there is no such adapter, or a layer allows no orthonormal factor or
            rotation. Then nothing has been changed.
    """
    orthogonal_lr = lr if orthogonal_lr is None else orthogonal_lr
    _check_arguments(optimizer_cls, factors, seed)
    make: Callable[..., OrthogonalOptimizer] = optimizer_cls
    make(
        _any_groups(orthogonal_lr, weight_decay), lr=lr, **options
    )  # raises if an option is not allowed
    places = list(_places(model))
    if not places:
        raise ValueError(_nothing_found(model))
    for place in places:
        _check_place(place, factors)
    _check_ties(places, model)
    chosen = _Chosen()
    for i, place in enumerate(places):
        _convert(place, model, factors, seed + 2 * i, chosen)
    return make(_groups(model, chosen, lr, orthogonal_lr, weight_decay), lr=lr, **options)


class _Place(NamedTuple):
    """A layer, its name and the adapter in it that is trained."""

    name: str
    layer: Any  # PEFT does not say of what types its attributes are
    adapter: str


@dataclass
class _Chosen:
    """Identities of orthogonal matrices, of stacks of square blocks, and of diagonals."""

    matrices: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    diagonals: set[int] = field(default_factory=set)


def _check_arguments(optimizer_cls: type[OrthogonalOptimizer], factors: str, seed: int) -> None:
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, OrthogonalOptimizer)):
        raise TypeError(
            "optimizer_cls must keep weights orthogonal, as LandingAdam, LandingMuon and "
            f"LandingSGD do, got {optimizer_cls!r}."
        )
    if not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}.")
    if factors not in FACTORS:
        raise ValueError(f"factors must be one of {FACTORS}, got {factors!r}.")


def _any_groups(orthogonal_lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups with the options that a model's will have."""
    return [
        dict(params=[nn.Parameter(torch.eye(2))], orthogonal=True, lr=orthogonal_lr),
        dict(params=[nn.Parameter(torch.eye(2))], orthogonal=False, weight_decay=weight_decay),
    ]


def _places(model: nn.Module) -> Iterator[_Place]:
    """The active, trainable adapters of supported types."""
    layers: Iterable[tuple[str, Any]] = model.named_modules()
    for name, layer in layers:
        for adapter in layer.active_adapters if isinstance(layer, BaseTunerLayer) else ():
            if any(p.requires_grad for p in _adapter_weights(layer, adapter)):
                yield _Place(name, layer, adapter)


def _adapter_weights(layer: Any, adapter: str) -> list[nn.Parameter]:
    """Factors or blocks of a layer; empty for layers of other types."""
    if isinstance(layer, LoraLayer) and not isinstance(layer, AdaLoraLayer):
        held: list[Any] = [layer.lora_A, layer.lora_B]
    elif isinstance(layer, OFTLayer):
        held = [layer.oft_R]
    elif isinstance(layer, BOFTLayer):
        return [layer.boft_R[adapter]] if adapter in layer.boft_R else []
    else:
        return []
    return [p for modules in held if adapter in modules for p in modules[adapter].parameters()]


def _nothing_found(model: nn.Module) -> str:
    found = {type(m).__module__.split(".")[2] for m in model.modules() if _is_adapter(m)}
    given = f"adapters of the types {sorted(found)}" if found else f"a {type(model).__name__}"
    fix = (
        "Use a LoraConfig, OFTConfig or BOFTConfig, and make sure the adapter is active and not "
        "frozen (is_trainable=True when loading it)."
    )
    return (
        "A landing optimizer is for LoRA adapters of linear and convolution layers, OFT and BOFT, "
        f"but got {given} with none that is trainable. {fix}"
    )


def _is_adapter(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer) and type(module).__module__.startswith("peft.tuners.")


# --- what can be done with a layer


def _check_place(place: _Place, factors: Factors) -> None:
    layer = place.layer
    if any(weight.is_meta for weight in _adapter_weights(layer, place.adapter)):
        raise ValueError(
            f"Weights must have values, but {place.name} is on the meta device. Load them first "
            "(low_cpu_mem_usage=False)."
        )
    if layer.merged:
        raise ValueError(
            f"Adapters must not be merged, but {place.name} is. Use unmerge_adapter()."
        )
    if isinstance(layer, LoraLayer):
        _check_factors(place, layer, factors)
    elif isinstance(layer, OFTLayer):
        _check_oft(place, layer)
    else:
        _check_boft(place)


# Variants of LoRA that use only the product of the factors.
PRODUCT_VARIANTS = ("Dora", "ALora", "QALora")


def _check_factors(place: _Place, layer: Any, factors: Factors) -> None:
    if hasattr(layer, "parameter_name"):
        raise ValueError(
            f"Factors must belong to one weight, but {place.name} holds those of stacked experts "
            "(target_parameters). Leave it out of the LoraConfig."
        )
    if hasattr(layer, "is_parallel_a"):
        raise ValueError(
            f"Factors must be whole on each rank, but those of {place.name} are spread by Megatron "
            f"({type(layer).__name__}). Leave it out of target_modules."
        )
    variant = layer.lora_variant.get(place.adapter)
    if variant is not None and not type(variant).__name__.lstrip("_").startswith(PRODUCT_VARIANTS):
        raise ValueError(
            "Factors can be made orthonormal where only their product matters, but "
            f"{place.name} is a {type(variant).__name__}, which uses them in another way. Use a "
            "LoraConfig without that variant (DoRA and aLoRA will do)."
        )
    if factors != "both" and has_diagonal(layer, place.adapter):
        raise ValueError(
            f"Both factors of {place.name} were made orthonormal before, but this call has "
            f"factors={factors!r}. Use factors='both', or load the saved adapter again."
        )
    _check_trained(place, layer)
    A, B = layer.lora_A[place.adapter].weight, layer.lora_B[place.adapter].weight
    rank, inputs, outputs = A.shape[0], A[0].numel(), B.shape[0]
    for factor, size, what in (("A", inputs, "inputs"), ("B", outputs, "outputs")):
        if factors in (factor, "both") and rank > size:
            raise ValueError(
                f"The factor {factor} can be orthonormal if the rank is at most the number of "
                f"{what}, but {place.name} has rank {rank} and {size} {what}. Use a lower rank "
                "there (rank_pattern), or leave the layer out."
            )


def _check_trained(place: _Place, layer: Any) -> None:
    for factor in "AB":
        for weight in getattr(layer, f"lora_{factor}")[place.adapter].parameters():
            if not weight.requires_grad:
                raise ValueError(
                    "Both factors must be trained, because one takes the lengths that the other "
                    f"loses, but {factor} of {place.name} is frozen. Unfreeze it "
                    "(requires_grad_(True)), or leave the layer out."
                )


def _check_oft(place: _Place, layer: Any) -> None:
    module = layer.oft_R[place.adapter]
    if module.coft:
        raise ValueError(
            f"Constrained OFT keeps Cayley parameters small, but {place.name} will have none. Use "
            "OFTConfig(coft=False)."
        )
    _check_block_size(place, module.block_size, "oft_block_size")


def _check_boft(place: _Place) -> None:
    blocks = place.layer.boft_R
    if len(blocks) > 1:
        raise ValueError(
            f"A BOFT layer can have one adapter here, but {place.name} has {sorted(blocks)}. "
            "Delete the others: model.delete_adapter(name)."
        )
    _check_block_size(place, blocks[place.adapter].shape[-1], "boft_block_size")


def _check_block_size(place: _Place, size: int, option: str) -> None:
    if size < 2:
        raise ValueError(
            f"A rotation needs blocks of at least 2 x 2, but those of {place.name} are {size} x "
            f"{size}. Use a larger {option} that divides the layer's inputs, or leave it out."
        )


def _check_ties(places: list[_Place], model: nn.Module) -> None:
    """Raise if a weight is shared, because it cannot be converted for one of its users alone."""
    own: dict[int, str] = {}
    for place in places:
        for weight in _adapter_weights(place.layer, place.adapter):
            other = own.setdefault(_memory(weight), place.name)
            if other != place.name:
                raise ValueError(_shared(other, place.name))
    inside = {id(w) for place in places for w in _adapter_weights(place.layer, place.adapter)}
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) not in inside and _memory(weight) in own:
            raise ValueError(_shared(own[_memory(weight)], name))


def _memory(weight: nn.Parameter) -> int:
    """Where it lies: PEFT ties adapters of embedding and head by parameters on the same memory."""
    return weight.untyped_storage().data_ptr() or id(weight)


def _shared(one: str, other: str) -> str:
    return (
        f"Each layer must have adapter weights of its own, but {one} and {other} share one. Leave "
        "one of them out of target_modules, or use ensure_weight_tying=False."
    )


# --- conversion and groups


def _convert(place: _Place, model: nn.Module, factors: Factors, seed: int, chosen: _Chosen) -> None:
    layer, adapter = place.layer, place.adapter
    if isinstance(layer, LoraLayer):
        make_orthonormal(layer, adapter, factors, seed)
        chosen.matrices.update(map(id, orthonormal_weights(layer, adapter, factors)))
        if factors == "both":
            chosen.diagonals.add(id(layer.lora_A[adapter].diagonal))
    elif isinstance(layer, OFTLayer):
        chosen.blocks.add(id(make_blocks_orthogonal(layer, adapter)))
        _no_series(model, adapter)
    else:
        chosen.blocks.add(id(make_butterfly_orthogonal(layer, adapter)))


def _no_series(model: nn.Module, adapter: str) -> None:
    """Switch off the truncated series, so that a loaded adapter does not use it."""
    configs = getattr(model, "peft_config", {})
    if adapter in configs:
        configs[adapter].use_cayley_neumann = False


def _groups(
    model: nn.Module, chosen: _Chosen, lr: float, orthogonal_lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def those(which: set[int]) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in named if id(p) in which]

    orthogonal = dict(orthogonal=True, lr=orthogonal_lr)
    plain = dict(orthogonal=False, lr=lr)
    rest = {id(p) for _, p in named} - chosen.matrices - chosen.blocks - chosen.diagonals
    groups = [
        dict(params=those(chosen.matrices), view="matrix", **orthogonal),
        dict(params=those(chosen.blocks), view="kernel", **orthogonal),
        # A decay would pull the diagonal to zero, and with it the whole update.
        dict(params=those(chosen.diagonals), weight_decay=0.0, **plain),
        dict(params=those(rest), weight_decay=weight_decay, **plain),
    ]
    return [group for group in groups if group["params"]]
