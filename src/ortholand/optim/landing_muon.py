"""LandingMuon: steepest descent in the spectral norm that lands on the manifold."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ortholand.geometry.matrices import working_dtype
from ortholand.geometry.polar import SKEW_STEPS, check_steps
from ortholand.geometry.views import matrices_shape, view_of
from ortholand.landing.attraction import LandingOptions
from ortholand.landing.muon import MuonMoments, called
from ortholand.optim.landing_optimizer import LandingWithAdam
from ortholand.optim.options import AdamGroupOptions, Group, options_of


class LandingMuon(LandingWithAdam):
    r"""Muon with orthogonal weights: the steepest descent in the spectral norm, in closed form.

    .. code-block:: text

        psi = Skew(G X^H)                                 relative gradient
        m   = momentum m + (1 - momentum) psi
        A   = msign(momentum m + (1 - momentum) psi)      (msign(m) without nesterov)
        X   = the landing step of :class:`ortholand.LandingSGD` in the direction A

    Of all tangent directions of spectral norm 1, ``-msign(psi) X`` descends most
    (``docs/muon.md``). msign sets all singular values to 1, by products only
    (:func:`ortholand.msign`), of 2p x 2p matrices for tall and wide weights. All planes turn by the
    same angle, whatever the size of the gradient. Groups with ``orthogonal=False`` take the step of
    ``torch.optim.AdamW``, with its own options.

    Args:
        params: parameters, named parameters or groups, as for :class:`ortholand.LandingSGD`.
            Give unconstrained groups a separate lr: theirs is AdamW's.
        lr: the angle in radians by which planes turn in a step; 0.01 to 0.1 are usual. It is also
            the spectral norm of the update: ``torch.optim.Muon`` takes the same one with
            ``lr = angle / max(1, rows / columns)^(1/2)`` (its default ``adjust_lr_fn``).
        momentum: decay of the mean of relative gradients, in [0, 1). torch's ``OneCycleLR`` and
            ``CyclicLR`` cycle ``betas`` instead (``docs/muon.md``).
        nesterov: look ahead, as ``torch.optim.Muon`` does by default.
        weight_decay: for groups with ``orthogonal=False`` only.
        steps: steps of msign, of three products each, from 1 to 11. With 4 steps, singular values
            of psi above 0.012 times the largest become 1; fewer steps leave small ones smaller.
            The first steps are in bfloat16 where that is fast (``docs/muon.md``).
        msign: a function to take in place of ours: from a batch of skew matrices ``(..., m, m)``,
            whose type may be float64, to their polar factors, of the same type, shape and device.
            A step with a result that is not finite is skipped. State dicts leave it out.
        betas: AdamW's, for groups with ``orthogonal=False`` only.
        attraction: as in :class:`ortholand.LandingSGD`, but ``"after"`` by default, which leaves an
            orthogonality error at rounding level.
        **options: further options, for all groups that do not set their own:
            :class:`ortholand.optim.options.AdamGroupOptions`. ``fused`` has no effect on orthogonal
            weights. lr is an angle at every ``scale``.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> optimizer = LandingMuon([X], lr=0.05)
    >>> X[0].sum().backward()
    >>> optimizer.step()
    >>> ortholand.orthogonality_error(optimizer) < 1e-4
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        *,
        steps: int = SKEW_STEPS,
        msign: Callable[[Tensor], Tensor] | None = None,
        betas: Sequence[float | Tensor] = (0.9, 0.999),
        attraction: str = "after",
        **options: Unpack[AdamGroupOptions],
    ) -> None:
        super().__init__(params, options_of(locals()))

    def check_options(self, options: Group) -> None:
        """Check Muon's conditions, and AdamW's."""
        if not 0 <= options["momentum"] < 1:
            raise ValueError(
                f"momentum must be in [0, 1), got {float(options['momentum'])}: it is the decay of "
                "a mean, which would never change at 1."
            )
        check_steps(options["steps"])
        self._try_msign(options)
        super().check_options(options)

    @torch.no_grad()
    def _try_msign(self, options: Group) -> None:
        """Let a user's msign take matrices of every size it will get, before weights move."""
        msign, tried = options["msign"], self._journal.tried
        if msign is None:
            return
        if not callable(msign):
            raise TypeError(f"msign must be a function of skew matrices or None, got {msign!r}.")
        params = options.get("params", ()) if options["orthogonal"] else ()
        for p in (p for p in params if isinstance(p, Tensor) and not p.is_meta):
            n, m = matrices_shape(p.shape, view_of(options))[-2:]
            m = n if n == m else 2 * m
            key = m, working_dtype(p.dtype), p.device
            if tried.get(key) is not msign:
                called(msign, torch.zeros(1, m, m, dtype=key[1], device=p.device))
                tried[key] = msign

    def state_dict(self) -> dict[str, Any]:
        """The state without a user's msign: when it is loaded, the optimizer keeps its own."""
        state = super().state_dict()
        for group in state["param_groups"]:
            if group.get("msign") is not None:
                del group["msign"]
        return state

    def how_it_lands(self, group: Group) -> LandingOptions:
        """How matrices land: with "after", twice.

        If the gradient has low rank, the direction has singular values below 1. One landing would
        leave up to ``3/4 lr^4`` of each, which exceeds rounding from lr = 0.02.
        """
        return replace(super().how_it_lands(group), landings=2, turns_alike=True)

    def options_at_scale(self, group: Group, scale: float) -> Group:  # noqa: ARG002
        """The group's own options: an angle is the same at every scale."""
        return group

    def moments(self, group: Group) -> MuonMoments:
        """Muon's moments."""
        return MuonMoments(group["momentum"], group["nesterov"], group["steps"], group["msign"])
