"""Orthogonal weights in other people's libraries. Nothing of it is imported by ``ortholand``.

- :mod:`ortholand.integrations.peft`: adapters of Hugging Face PEFT with orthonormal factors or
  orthogonal blocks.
- :mod:`ortholand.integrations.rotations`: rotations of a Llama-type model that make it easier to
  quantise, learnt and folded into its weights.
"""
