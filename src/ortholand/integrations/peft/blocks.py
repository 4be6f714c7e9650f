"""OFT and BOFT with blocks that are rotations themselves, not functions of skew matrices.

PEFT's layers rotate their inputs by ``R = (I - Q)(I + Q)^-1``, Q skew. Every forward pass computes
it by a solve or, by default in OFT, by a truncated Neumann series, which is not a rotation unless Q
is small. Here R is the parameter: nothing is computed in a forward pass, and the optimizer keeps R
orthogonal.

Saved adapters are ordinary ones: state_dicts hold Q instead of R.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.oft.layer import OFTRotationModule
from torch import Tensor, nn

from ortholand.geometry import polar_projection
from ortholand.geometry.matrices import identity_like, skew

Layer = Any  # an OFTLayer or BOFTLayer; PEFT does not say of what types its attributes are
LARGEST_SKEW = 1e4  # largest entry of Q; a rotation by half a turn would need infinite ones


class OrthogonalBlocks(OFTRotationModule):
    """PEFT's rotation of inputs, by blocks ``(r, b, b)`` that are themselves orthogonal."""

    def __init__(self, module: Any) -> None:
        """Blocks nearest to those that the module computes now."""
        super().__init__(
            module.r,
            module.n_elements,
            module.block_size,
            module.in_features,
            block_share=module.block_share,
            kernel_size=module.kernel_size,
            use_cayley_neumann=False,
        )
        old = module.weight
        made = module._cayley_batch(
            old, module.block_size, module.use_cayley_neumann, module.num_cayley_neumann_terms
        )
        R = polar_projection(made.double()).to(old.dtype)  # to the rounding of its own type
        self.weight = nn.Parameter(R, requires_grad=old.requires_grad)
        self.to(old.device)
        self.train(module.training)
        self.register_state_dict_post_hook(_save_skew_entries)
        self.register_load_state_dict_pre_hook(_load_skew_entries)

    def _cayley_batch(self, Q: Tensor, *_: Any, **__: Any) -> Tensor:
        return Q


@torch.no_grad()
def make_blocks_orthogonal(layer: Layer, adapter: str) -> nn.Parameter:
    """Turn a layer's blocks into a parameter, and return it."""
    module = layer.oft_R[adapter]
    if not isinstance(module, OrthogonalBlocks):
        module = layer.oft_R[adapter] = OrthogonalBlocks(module)
    return module.weight


@torch.no_grad()
def make_butterfly_orthogonal(layer: Layer, adapter: str) -> nn.Parameter:
    """The same for BOFT, whose parameter already has the shape of its blocks."""
    blocks = layer.boft_R[adapter]
    if layer.__dict__.get("cayley_batch") is not _as_it_is:
        shape = blocks.shape
        made = layer.cayley_batch(blocks.flatten(0, 1))
        blocks.copy_(polar_projection(made.double()).reshape(shape))
        layer.cayley_batch = _as_it_is
        layer.update_layer = _refuse_another_adapter
        layer.register_state_dict_post_hook(_save_skew_butterfly)
        layer.register_load_state_dict_pre_hook(_load_skew_butterfly)
    return blocks


def _as_it_is(blocks: Tensor) -> Tensor:
    return blocks


def _refuse_another_adapter(adapter_name: str, *_: Any, **__: Any) -> None:
    raise ValueError(
        "A BOFT layer whose blocks are themselves orthogonal can have one adapter, but "
        f"{adapter_name!r} is to be added. Merge the first (merge_and_unload), or load both into a "
        "model that no landing optimizer was created for."
    )


# --- saved and loaded as ordinary adapters


def cayley(Q: Tensor) -> Tensor:
    """``(I - Q)(I + Q)^-1`` of skew matrices, PEFT's convention."""
    Q = Q.double()
    identity = identity_like(Q)
    return torch.linalg.solve(identity + Q, identity - Q)  # they commute


def inverse_cayley(R: Tensor, name: str) -> Tensor:
    """The skew Q with ``cayley(Q) = R``.

    Raises:
        ValueError: if R turns a plane by about half a turn, which no finite Q does.
    """
    R = polar_projection(R.double())
    identity = identity_like(R)
    Q = skew(torch.linalg.solve_ex(identity + R, identity - R).result)
    if not (Q.abs() < LARGEST_SKEW).all():
        raise ValueError(
            f"PEFT keeps rotations as Cayley transforms, which reach any but half a turn, but a "
            f"block of {name} turns a plane by one (entries up to {float(Q.abs().max()):.1e}, at "
            f"most {LARGEST_SKEW:.0e}). Use merge_and_unload() and save the model itself."
        )
    return Q


@torch.no_grad()
def _save_skew_entries(
    module: Any, state_dict: dict[str, Tensor], prefix: str, _: Mapping[str, Any]
) -> None:
    key = f"{prefix}weight"
    if key in state_dict:
        R = state_dict[key]
        Q = inverse_cayley(R, key)
        state_dict[key] = Q[:, module.rows, module.cols].to(R.dtype)


@torch.no_grad()
def _load_skew_entries(module: Any, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    key = f"{prefix}weight"
    entries = state_dict.get(key)
    if entries is not None and entries.shape == (module.r, module.n_elements):
        Q = module._pytorch_skew_symmetric(entries.double(), module.block_size)
        state_dict[key] = cayley(Q).to(entries.dtype)


@torch.no_grad()
def _save_skew_butterfly(
    layer: Layer, state_dict: dict[str, Tensor], prefix: str, _: Mapping[str, Any]
) -> None:
    for adapter in layer.boft_R:
        key = f"{prefix}boft_R.{adapter}"
        if key in state_dict:
            R = state_dict[key]
            state_dict[key] = inverse_cayley(R, key).to(R.dtype)


@torch.no_grad()
def _load_skew_butterfly(layer: Layer, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for adapter in layer.boft_R:
        key = f"{prefix}boft_R.{adapter}"
        if key in state_dict:
            state_dict[key] = cayley(skew(state_dict[key])).to(state_dict[key].dtype)
