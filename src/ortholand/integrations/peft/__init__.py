"""Adapters of Hugging Face PEFT: orthonormal LoRA factors, OFT and BOFT blocks that stay rotations.

Needs peft: ``pip install "ortholand[peft]"``.
"""

from ortholand.integrations.peft.optimizer import create_landing_optimizer

__all__ = ["create_landing_optimizer"]
