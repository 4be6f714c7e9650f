"""Costs with known optima, and an independent look at results, as for the library's methods."""

from tests.solve.conftest import (  # noqa: F401
    brockett,
    distance,
    roundings,
    verified,
)
