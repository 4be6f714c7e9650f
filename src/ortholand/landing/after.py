"""Move, then land: a Newton-Schulz step at the point that the tangent move has reached."""

import torch
from torch import Tensor

from ortholand.fields import tangent
from ortholand.geometry.matrices import (
    add_product,
    finite_matrices,
    is_finite,
    newton_schulz,
    per_matrix,
    subtract_scaled_,
)
from ortholand.landing.attraction import (
    Attraction,
    LandingOptions,
    LimitedMove,
    Move,
    field_bounds,
    residual_of,
    step_length,
    unless_zero,
)
from ortholand.landing.gram import Coefficients, FieldGram, Gram, times
from ortholand.safe_step import FieldBounds, largest_step_before_landing


class After(Attraction):
    """The move to ``Y = c (X - eta R)``, then the Newton-Schulz step ``Y - Y (Y^H Y - I) / 2``.

    It leaves an error of order eta^4. A tangent move can only increase the singular values of X:
    ``E = (X - eta R)^H (X - eta R) - I`` is ``D + eta^2 R^H R``. With ``c = (1 + m)^(-1/2)``, m the
    mean eigenvalue of the second term, the step leaves ``3/4 (e - m)^2`` of an eigenvalue e of E
    instead of ``3/4 e^2``, at no cost, and the safe step still holds: subtracting its mean from a
    matrix reduces its Frobenius norm, and leaves the eigenvalues between ``-(delta + m)`` and
    ``delta + eta^2 ||R||_2^2``, where m is at most what the latter adds. With ``landings = 2``
    another Newton-Schulz step follows: an eigenvalue e of the residual becomes ``-3/4 e^2`` again,
    so the error is of order eta^8.
    """

    name = "after"
    sharp = True
    compiled = 2

    def move(self, X: Tensor, B: Tensor, options: LandingOptions) -> Move:
        """As the class says; Y's Gram matrix is measured, so it includes R's rounding errors."""
        R, D, d, tangency_error = tangent(X, B)
        field = field_bounds(options, R, d, tangency_error, residual_of(X, D))
        del D
        eta, m, taken, limited = step_and_taken(field, X.shape[-1], options)
        c = (m + 1).rsqrt()
        Y = subtract_scaled_(R, X, eta).mul_(per_matrix(c, X))
        for _ in range(options.landings):
            Y = newton_schulz(Y)
        return LimitedMove.of(unless_zero(options.lr, Y, X), taken, limited)

    def coefficients(self, gram: Gram, options: LandingOptions) -> Coefficients:
        """The Gram form, with ``Y^H Y - I`` derived as ``c^2 (D + eta^2 R^H R) + (c^2 - 1) I``.

        What rounding adds to it appears in the D of the next step.
        """
        near = gram.is_near(options.lr)
        field = FieldGram(gram, near=near)
        bounds = field.bounds(gram.unit, options.rule, options.eps)
        eta, m, taken, limited = step_and_taken(bounds, gram.D.shape[-1], options)
        c = (m + 1).rsqrt()
        tangent = -eta * gram.unit
        E = gram.D + times(tangent.square(), field.tangent_square)
        cube = c**3 / 2
        W = times(-cube, E)  # c (I - (Y^H Y - I) / 2) - I
        W.diagonal(dim1=-2, dim2=-1).add_((1.5 * c - 1 - cube)[..., None])
        for _ in range(options.landings - 1):
            W = land_again(E, W)
        taken = taken & finite_matrices(W)  # R^H R may overflow where its norm does not
        a, b = field.tangent_coefficients
        a = times(tangent, a)
        new_a = add_product(W + a, a, W)
        new_a = unless_zero(options.lr, new_a, torch.zeros_like(a))
        new_b = b + W / 2 if gram.hides(W) else add_product(b, b, W)  # b = (I + D) / 2
        return Coefficients(new_a, times(tangent, new_b), taken, limited)


def land_again(E: Tensor, W: Tensor) -> Tensor:
    """``W'`` for which ``Y (I + W')`` is ``Y (I + W)`` after a Newton-Schulz step.

    With ``I + E`` the Gram matrix of Y. W commutes with E, so the next one is
    ``(I + W)^2 (I + E)``: residual ``F = E + (2 W + W^2) (I + E)``, and ``W' = W - (I + W) F / 2``.
    """
    V = add_product(2 * W, W, W)
    F = add_product(E + V, V, E)
    return add_product(W - F / 2, W, F, alpha=-0.5)


def step_and_taken(
    field: FieldBounds, p: int, options: LandingOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """eta, the mean m that the move adds, which matrices may step, and which are limited."""

    def largest(bound: Tensor, distance: Tensor) -> Tensor:
        return largest_step_before_landing(bound, distance, options.aim, field.tangency_error)

    eta, distance, limited = step_length(options, field, largest, pull=0.0)
    length = eta * field.norm
    taken = is_finite(length)
    if options.rule is not None:
        taken = taken & (distance < 1)  # from there Newton-Schulz steps may lead anywhere
    if isinstance(options.lr, Tensor):
        taken = taken & (options.lr >= 0)
    return eta, length.square() / p, taken, limited
