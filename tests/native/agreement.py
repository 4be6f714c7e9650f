"""When a compiled step is the reference's."""

import torch


def assert_same(one, other, dtype, factor=1.0):
    """Weight and state are equal to rounding, of which ``factor`` tells how much."""
    (X, state), (Y, other_state) = one, other
    tolerance = 100 * factor * torch.finfo(dtype).eps
    torch.testing.assert_close(X, Y, rtol=tolerance, atol=tolerance)
    assert state.keys() == other_state.keys()
    assert state["skipped"] == other_state["skipped"]
    for name in state.keys() - {"skipped", "limited"}:  # a step may be lr but for rounding
        size = float(other_state[name].abs().max()) or 1.0
        torch.testing.assert_close(
            state[name], other_state[name], rtol=tolerance, atol=tolerance * size
        )
