"""Orthogonal weights in other libraries. ``import ortholand`` imports none of this.

- :mod:`ortholand.integrations.peft`: Hugging Face PEFT adapters with orthonormal factors or
  orthogonal blocks.
"""
