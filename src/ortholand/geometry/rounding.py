"""How float32 results are stored in a half-precision weight.

Rounded to the nearest number, a weight often does not move. *Stochastic* rounding goes up or down
at random; *compensated* keeps the remainder in the state. The state identifies the method.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ortholand.geometry.matrices import HALF_TYPES as HALF_TYPES
from ortholand.geometry.matrices import working_dtype

ROUNDINGS = ("nearest", "stochastic", "compensated")
DEFAULT_ROUNDING = "compensated"

COMPENSATION = "compensation"  # state of a compensated weight: the remainder to add to it
SEED = "rounding_seed"  # state of a stochastically rounded one: a number each step increments
ROUNDING_STATE = (COMPENSATION, SEED)

# Bits of a float32 that a type has no room for, where its numbers are normal.
_DROPPED = {torch.float16: 13, torch.bfloat16: 16}


def check_rounding(rounding: object) -> None:
    """Raise unless it is a known rounding, or None for the default."""
    if rounding is not None and rounding not in ROUNDINGS:
        raise ValueError(
            f"rounding must be one of {ROUNDINGS}, or None for {DEFAULT_ROUNDING!r}, got "
            f"{rounding!r}."
        )


def prepare_rounding(weight: Tensor, state: MutableMapping[str, Any], rounding: str | None) -> None:
    """Give a weight the state that this rounding needs, and remove any other's."""
    way = (rounding or DEFAULT_ROUNDING) if weight.dtype in HALF_TYPES else "nearest"
    if way != "compensated":
        state.pop(COMPENSATION, None)
    elif COMPENSATION not in state:
        state[COMPENSATION] = torch.zeros_like(weight)
    if way != "stochastic":
        state.pop(SEED, None)
    elif SEED not in state:
        state[SEED] = torch.randint(2**62, (), dtype=torch.int64, device=weight.device)


def exact_value(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The weight in the type used for computation, including the rounding remainder."""
    dtype = working_dtype(weight.dtype)
    if weight.dtype == dtype:
        return weight
    X, rest = weight.to(dtype), state.get(COMPENSATION)
    if rest is None:
        return X
    total = X + rest
    # Otherwise other code has set the weight, and the remainder does not belong to it.
    return torch.where(rounded(total, weight.dtype) == X, total, X)


def keep_(weight: Tensor, exact: Tensor, state: Mapping[str, Any]) -> None:
    """Store a computed value, rounded in the way that the weight's state says."""
    if COMPENSATION in state:
        kept, rest = with_rest(exact, weight.dtype)
        weight.copy_(kept)
        state[COMPENSATION].copy_(rest)
    elif SEED in state:
        weight.copy_(rounded_at_random(exact, weight.dtype, state[SEED]))
        state[SEED].add_(1)
    else:
        weight.copy_(exact)


# The functions below take and return float32; their results are exact in the 16-bit type.


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a type."""
    if not torch.compiler.is_compiling():
        return exact.to(dtype).to(exact.dtype)
    # Inductor removes a cast there and back; it leaves bit operations alone.
    dropped, bits = _DROPPED[dtype], exact.view(torch.int32)
    to_even = (bits >> dropped) & 1
    kept = _without_last_bits(bits + (2 ** (dropped - 1) - 1) + to_even, dropped)
    if dtype == torch.float16:
        kept = _where_subnormal(exact, (exact * 2.0**24).round(), kept)
        kept = torch.where(kept.abs() > torch.finfo(dtype).max, exact * torch.inf, kept)
    return torch.where(torch.isfinite(exact), kept, exact)


def with_rest(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest numbers of a type, and the nearest to their remainders.

    Done twice, because a remainder that is rounded up to half a unit belongs to another number.
    """
    kept = rounded(exact, dtype)
    total = kept + rounded(exact - kept, dtype)
    kept = rounded(total, dtype)
    return kept, total - kept


def rounded_at_random(exact: Tensor, dtype: torch.dtype, seed: Tensor) -> Tensor:
    """One of the two neighbours in a type, so that the mean is the number; never infinite."""
    dropped, noise = _DROPPED[dtype], random_bits(exact, seed)
    bits = exact.view(torch.int32) + (noise & (2**dropped - 1))
    kept = _without_last_bits(bits, dropped)
    if dtype == torch.float16:
        low = (exact * 2.0**24).floor()
        crosses = (noise + 0.5) * 2.0**-24 < exact * 2.0**24 - low
        kept = _where_subnormal(exact, low + crosses, kept)
    return torch.where(kept.abs() <= torch.finfo(dtype).max, kept, rounded(exact, dtype))


def _without_last_bits(bits: Tensor, count: int) -> Tensor:
    return (bits & -(2**count)).view(torch.float32)


def _where_subnormal(exact: Tensor, units: Tensor, otherwise: Tensor) -> Tensor:
    """Multiples of the smallest float16 number, where float16 is subnormal."""
    return torch.where(exact.abs() < 2.0**-14, units * 2.0**-24, otherwise)


def random_bits(like: Tensor, seed: Tensor) -> Tensor:
    """24-bit integers that depend only on the seed and their position, wherever they are made."""
    columns = like.shape[-1] if like.ndim else 1
    rows = like.numel() // max(columns, 1)
    i, j = (torch.arange(k, device=like.device) for k in (rows, columns))
    low, high = _mixed(seed & _MASK), _mixed((seed >> 32) & _MASK)
    row = _mixed(_mixed((i + low) & _MASK) ^ high)
    bits = _mixed(row.unsqueeze(-1) ^ _mixed((j + high) & _MASK))
    return (bits >> 8).to(torch.int32).reshape(like.shape)


_MASK = 2**32 - 1


def _mixed(z: Tensor) -> Tensor:
    """Map one 32-bit number (stored in 64 bits) to another, mixing all its bits."""
    for _ in range(2):
        z = ((z >> 16) ^ z) * 0x45D9F3B & _MASK  # below 2^59: nothing overflows
    return (z >> 16) ^ z
