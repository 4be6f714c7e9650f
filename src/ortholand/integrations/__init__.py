"""Orthogonal weights in other libraries. ``import ortholand`` imports none of this.

- :mod:`ortholand.integrations.peft`: Hugging Face PEFT adapters with orthonormal factors or
  orthogonal blocks.
- :mod:`ortholand.integrations.watching`: numbers to log, for any loop.
- :mod:`ortholand.integrations.lightning` and :mod:`ortholand.integrations.transformers`: callbacks
  that log them.
"""
