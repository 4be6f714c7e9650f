"""Hugging Face PEFT adapters: orthonormal LoRA factors, OFT and BOFT blocks that stay rotations.

Needs peft: ``pip install "ortholand[peft]"``.
"""

from importlib.util import find_spec

if find_spec("peft") is None:
    raise ModuleNotFoundError(
        "ortholand.integrations.peft needs peft, which is not installed: "
        "pip install 'ortholand[peft]' (from a clone, '.[peft]').",
        name="peft",
    )

from ortholand.integrations.peft.optimizer import create_landing_optimizer

__all__ = ["create_landing_optimizer"]
