"""LandingSGD: stochastic gradient descent that lands on the manifold."""

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from ortholand.optim.landing_optimizer import LandingOptimizer
from ortholand.optim.options import LandingGroupOptions, options_of
from ortholand.optim.sgd import OrthogonalSGD


class LandingSGD(LandingOptimizer, OrthogonalSGD):
    r"""SGD with orthogonal weights, by the landing algorithm: products only, no retraction.

    .. code-block:: text

        psi  = Skew(G X^H)                          relative gradient
        A    = momentum A + (1 - dampening) psi     (A = psi without momentum)
        L    = A X + lam (X X^H - I) X              landing field
        eta  = min(lr, safe step)                   keeps ||X^H X - I||_2 <= eps
        X    = X - eta L

    Drop-in for :class:`torch.optim.SGD`, whose options mean the same. Parameters stay plain
    ``nn.Parameter``s, are never moved at construction, and ``p.grad`` is never modified.

    Args:
        params: parameters, named parameters or groups. The orthogonal ones must start within
            ``eps`` of the manifold; :func:`ortholand.orthogonalize_` moves them there.
        lr: target step; a float or a one-element tensor.
        momentum: momentum factor, on the relative gradients; see ``docs/optimizers.md``.
        dampening: dampening of the momentum, not applied to its first gradient.
        nesterov: Nesterov momentum.
        weight_decay: for groups with ``orthogonal=False`` only: ``||X||`` is constant.
        attraction: ``"coupled"``, the paper's; ``"decoupled"``, ``X - eta R - omega X D``, whose
            pull does not shrink with lr; or ``"after"``: move, then land with a Newton-Schulz
            step, for the smallest orthogonality error (see ``docs/attractions.md``).
        **options: further options, for all groups that do not set their own:
            :class:`ortholand.optim.options.LandingGroupOptions`.

    Within the ball every matrix has full rank, so a square weight's determinant keeps its sign:
    started in SO(n), it stays there.

    A matrix whose step would not be finite skips it, and so does its momentum;
    ``optimizer.skipped_steps()`` counts such steps.

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
        attraction: str = "coupled",
        **options: Unpack[LandingGroupOptions],
    ) -> None:
        super().__init__(params, options_of(locals()))
