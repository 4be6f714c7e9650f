"""Orthogonal weights in other libraries. ``import ortholand`` imports none of this.

- :mod:`ortholand.integrations.peft`: Hugging Face PEFT adapters with orthonormal factors or
  orthogonal blocks.
- :mod:`ortholand.integrations.rotations`: rotations of a Llama-type model that make it easier to
  quantise, learnt and folded into its weights.
"""
