"""From a group's options to :class:`ortholand.landing.LandingOptions`."""

from collections.abc import Mapping
from typing import Any

from ortholand.landing import LandingOptions, find_attraction
from ortholand.optim.checks import check_bool, check_finite, scalar_lr
from ortholand.safe_step import check_ball, find_rule

SHARDED = ("rows", "owners", "auto")


def landing_options(group: Mapping[str, Any]) -> LandingOptions:
    """How the matrices of a group land."""
    safe_step = group["safe_step"]
    return LandingOptions(
        lr=scalar_lr(group["lr"]),
        attraction=find_attraction(group["attraction"]),
        rule=None if safe_step is None else find_rule(safe_step),
        lam=group["lam"],
        eps=group["eps"],
        omega=group["omega"],
    )


def check_landing_options(options: Mapping[str, Any]) -> None:
    """Raise unless ball, rule and attraction are valid."""
    for name in ("lam", "eps", "omega"):
        check_finite(name, options[name])
    check_ball(options["lam"], options["eps"])
    if options["safe_step"] is not None:
        find_rule(options["safe_step"])
    find_attraction(options["attraction"])
    if options["sharded"] not in SHARDED:
        raise ValueError(f"sharded must be one of {SHARDED}, got {options['sharded']!r}.")
    if options["fused"] is not None:
        check_bool("fused", options["fused"])
    if not 0 <= options["omega"] <= 0.5:
        raise ValueError(
            f"omega must be in [0, 1/2], got {options['omega']}: 1/2 is a full Newton-Schulz step, "
            "and more overshoots the manifold."
        )
