"""LandingSGD: stochastic gradient descent that lands on the manifold."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ortholand.landing.description import LandingStep
from ortholand.landing.moments import Momentum
from ortholand.optim.base import options_of
from ortholand.optim.landing_optimizer import LandingOptimizer
from ortholand.optim.landing_options import check_landing_options
from ortholand.optim.sgd import OrthogonalSGD
from ortholand.safe_step import DEFAULT_RULE


class LandingSGD(LandingOptimizer, OrthogonalSGD):
    r"""SGD with orthogonal weights, by the landing algorithm: products only, no retraction.

    .. code-block:: text

        psi  = Skew(G X^H)                          relative gradient
        A    = momentum A + (1 - dampening) psi     (A = psi without momentum)
        L    = A X + lam (X X^H - I) X              landing field
        eta  = min(lr, safe step)                   keeps ||X^H X - I||_2 <= eps
        X    = X - eta L

    Drop-in for :class:`torch.optim.SGD`: ``lr``, ``momentum``, ``dampening``, ``nesterov`` and
    ``maximize`` mean what they mean there. Parameters stay plain ``nn.Parameter``s, are never
    moved at construction, and ``p.grad`` is never modified.

    Args:
        params: parameters, named parameters or groups. The orthogonal ones must start within
            ``eps`` of the manifold; :func:`ortholand.orthogonalize_` moves them there.
        lr: target step; a float or a one-element tensor.
        momentum: momentum factor, on the relative gradients. For tall and wide matrices the
            buffer has the weight's shape (nothing n x n); see ``docs/optimizers.md``.
        dampening: dampening of the momentum, not applied to its first gradient.
        nesterov: Nesterov momentum.
        weight_decay: for groups with ``orthogonal=False`` only. On the manifold ``||X||`` is
            constant, so decay could only fight the constraint.
        lam: strength of the coupled attraction.
        eps: radius of the ball ``||X^H X - I||_2 <= eps`` that the safe step keeps, in (0, 1):
            all singular values stay between ``(1 - eps)^(1/2)`` and ``(1 + eps)^(1/2)``.
        safe_step: ``"spectral"``; ``"frobenius"`` and ``"tight"``, the paper's ball in the
            Frobenius norm, whose steps shrink with p (see :func:`ortholand.safe_step_size`); or
            ``None`` for no safeguard.
        attraction: ``"coupled"``, the paper's; ``"decoupled"``, ``X - eta R - omega X D``, whose
            pull does not shrink with lr; or ``"after"``: move, then land with a Newton-Schulz
            step, for the smallest orthogonality error (see ``docs/attractions.md``).
        omega: pull of the decoupled attraction, in [0, 1/2].
        maximize: ascend instead of descend.
        foreach: step parameters of the same matrix shape as one batch (True), one by one
            (False), or whichever is quicker for their size (None).
        fused: use compiled code on the CPU, many times faster for small matrices and with less
            memory for large ones: True, False, or None for True unless ``foreach`` is given.
            Needs a C++ compiler the first time (see :mod:`ortholand.native`); without one, and
            for anything it cannot do, torch's operations step.
        sharded: how weights spread over ranks (FSDP2's DTensors) step. ``"rows"``: tall
            matrices where their rows are, after one sum of Gram matrices over the ranks;
            ``"owners"``: each matrix whole on one rank, a different one for each, which moves
            less data if there are many matrices and ranks; ``"auto"``: whichever moves less. See
            ``docs/at_scale.md``.
        orthogonal: default of the group option. Groups with ``orthogonal=False`` take the step
            of ``torch.optim.SGD``.
        view: default of the group option: ``"matrix"`` treats a convolution weight as
            ``(out, in * kh * kw)``, ``"kernel"`` each of its kh x kw slices as a matrix.
        scale: default of the group option: weights are this multiple of orthonormal matrices. A
            positive number, or ``"fan"`` for ``sqrt(max(1, out / in))`` of each out x in matrix.
            lr refers to the weight, eps and the attraction to X = weight / scale. See
            ``docs/scaled_weights.md``.
        rounding: how float16 and bfloat16 weights keep steps too small for their precision, per
            group: ``"nearest"``, ``"stochastic"``, or ``"compensated"`` (None), which keeps the
            remainder in 2 extra bytes per entry. It has no effect on other types. See
            ``docs/precision.md``.

    Within the ball every matrix has full rank, so a square weight's determinant keeps its sign:
    started in SO(n), it stays there.

    A matrix whose step would not be finite (a NaN or infinite gradient) skips that step, and so
    does its momentum; ``optimizer.skipped_steps()`` counts such steps.

    >>> import torch, ortholand
    >>> X = torch.nn.Parameter(ortholand.random_orthogonal(8, 3, seed=0))
    >>> optimizer = LandingSGD([X], lr=0.1, momentum=0.9)
    >>> X[0].sum().backward()
    >>> optimizer.step()
    >>> ortholand.orthogonality_error(optimizer) < 0.5
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        lam: float = 1.0,
        eps: float = 0.5,
        safe_step: str | None = DEFAULT_RULE,
        attraction: str = "coupled",
        omega: float = 0.5,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        sharded: str = "rows",
        orthogonal: bool = True,
        view: str = "matrix",
        scale: float | str = 1.0,
        rounding: str | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check SGD's and landing's conditions."""
        super().check_options(options)
        check_landing_options(options)

    def landing_step(self, group: Mapping[str, Any]) -> LandingStep:
        """Momentum, then the attraction's move."""
        moments = Momentum(group["momentum"], group["dampening"], group["nesterov"])
        return LandingStep(moments, self.how_it_lands(group))
