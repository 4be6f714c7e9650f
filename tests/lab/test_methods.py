"""Every method takes the step that its formula says, here written out in float64."""

import pytest
import torch
from torch import nn

from ortholand_lab.methods import (
    ADAPTIVE_METHODS,
    PAPER_METHODS,
    RETRACTION_METHODS,
    TRAINING_METHODS,
    careful,
    is_adaptive,
    is_trivialization,
    prepare,
)
from ortholand_lab.study.figures import METHOD_STYLES

LR = 1e-3
METHODS = tuple(dict.fromkeys((*TRAINING_METHODS, *PAPER_METHODS)))
SGD_METHODS = tuple(m for m in METHODS if not is_adaptive(m))


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4).double()


def convolution():
    torch.manual_seed(0)
    return nn.Conv2d(2, 3, 5).double()


MODELS = {"matrix": linear, "kernel": convolution}


def prepared(view, method, **options):
    def orthogonal(name, _):
        return name == "weight"

    return prepare(MODELS[view](), method, orthogonal=orthogonal, view=view, lr=LR, **options)


def cost(trainee):
    """Linear in the weight, so that its gradient is the same everywhere; quadratic in the bias."""
    weight = trainee.model.weight
    return (weight * slopes(weight)).sum() + trainee.model.bias.square().sum() / 2


def slopes(weight):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def skew(M):
    return (M - M.mT) / 2


def steps_by_formula(method, X, G, count, start=None, momentum=0.9):
    """Where X is after some steps with the constant gradient G; ``X = exp(start)``, if given."""
    B, buffer, V = X, torch.zeros_like(X), torch.zeros_like(X)
    identity = torch.eye(X.shape[-1], dtype=X.dtype)
    if start is not None:
        B, V = identity.expand_as(X), start
    for k in range(1, count + 1):
        if is_trivialization(method):
            assert k == 1 or "sgd" in method or "momentum" in method
            V = V - LR * direction(careful(method), B, V, G, buffer)
            X = B @ torch.linalg.matrix_exp(lower_skew(V))
            continue
        psi = skew(G @ X.mT)
        if method == "landing-momentum":
            psi = buffer = psi + momentum * buffer
        if careful(method) == "exponential":
            X = torch.linalg.matrix_exp(-LR * psi) @ X
        elif careful(method) == "cayley":
            X = torch.linalg.inv(identity + LR / 2 * psi) @ (identity - LR / 2 * psi) @ X
        else:
            X = X - LR * (psi @ X + (X @ X.mT - identity) @ X)
    return X


def lower_skew(V):
    return V.tril() - V.tril().mT


def direction(method, B, V, G, buffer):
    """What the Euclidean optimizer makes of the gradient with respect to V."""
    V = V.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((B @ torch.linalg.matrix_exp(lower_skew(V)) * G).sum(), V)
    if method == "trivialization-adam":  # bias-corrected moments of one gradient
        return gradient / (gradient.abs() + 1e-8)
    if method == "trivialization-rmsprop":
        return gradient / ((0.01 * gradient.square()).sqrt() + 1e-8)
    if method == "trivialization-momentum":
        buffer.mul_(0.9).add_(gradient)
        return buffer
    return gradient


@pytest.mark.parametrize("view", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_the_steps_are_those_of_the_formula(method, view):
    trainee = prepared(view, method)
    (X,) = (weight.detach().clone() for weight in trainee.weights())
    G = slopes(X)
    count = 1 if is_adaptive(method) else 3
    start = None
    if method.endswith("-identity"):
        start = trainee.model.parametrizations.weight.original.detach().clone()
    for _ in range(count):
        trainee.step(cost(trainee))
    (reached,) = trainee.weights()
    assert not torch.allclose(reached, X, rtol=0, atol=1e-4)
    expected = steps_by_formula(method, X, G, count, start)
    torch.testing.assert_close(reached.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", TRAINING_METHODS)
def test_all_methods_start_at_the_nearest_orthogonal_weights(method):
    trainee = prepared("kernel", method)
    before = convolution().weight
    U, _, V = torch.linalg.svd(before.detach())
    torch.testing.assert_close(trainee.model.weight.detach(), U @ V)
    assert trainee.orthogonality_error() < 1e-13


@pytest.mark.parametrize("view", MODELS)
def test_the_error_is_that_of_all_matrices_together(view):
    trainee = prepared(view, "landing")
    with torch.no_grad():
        trainee.model.weight.mul_(1.5)
    # Each matrix is now 1.5 times an orthogonal one: X^T X - I = 1.25 I.
    matrices, p = {"matrix": (1, 4), "kernel": (6, 5)}[view]
    assert trainee.orthogonality_error() == pytest.approx(1.25 * (matrices * p) ** 0.5)


def test_the_error_is_measured_in_float64():
    model = nn.Linear(2, 2)
    trainee = prepare(model, "landing", orthogonal=lambda n, _: n == "weight", view="matrix", lr=1)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2) * (1 + 2**-23))
    # In float32 the square would be rounded.
    assert trainee.orthogonality_error() == ((1 + 2**-23) ** 2 - 1) * 2**0.5


@pytest.mark.parametrize("method", SGD_METHODS)
def test_other_parameters_take_steps_of_sgd_with_their_own_options(method):
    options = dict(plain_lr=0.1, plain_momentum=0.5, plain_weight_decay=0.25)
    trainee = prepared("matrix", method, **options)
    b = trainee.model.bias.detach().clone()
    buffer = torch.zeros_like(b)
    for _ in range(3):
        trainee.step(cost(trainee))
        buffer = 0.5 * buffer + 1.25 * b
        b = b - 0.1 * buffer
    torch.testing.assert_close(trainee.model.bias.detach(), b)


@pytest.mark.parametrize("method", SGD_METHODS)
def test_without_options_other_parameters_have_the_same_rate_and_no_momentum(method):
    trainee = prepared("matrix", method)
    b = trainee.model.bias.detach().clone()
    for _ in range(2):
        trainee.step(cost(trainee))
    torch.testing.assert_close(trainee.model.bias.detach(), b * (1 - LR) ** 2)


@pytest.mark.parametrize("method", ADAPTIVE_METHODS)
def test_adaptive_optimizers_step_all_parameters(method):
    trainee = prepared("matrix", method, plain_lr=0.1)
    b = trainee.model.bias.detach().clone()
    trainee.step(cost(trainee))
    length = {"trivialization-adam": 0.1, "trivialization-rmsprop": 1.0}[method]
    torch.testing.assert_close(
        trainee.model.bias.detach(), b - length * b.sign(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("method", RETRACTION_METHODS)
def test_retractions_have_momentum_where_it_is_asked_for(method):
    reached = []
    for options in ({}, dict(momentum=0.5), dict(retraction_momentum=0.9)):
        trainee = prepared("matrix", method, **options)
        for _ in range(3):
            trainee.step(cost(trainee))
        reached.append(trainee.model.weight.detach())
    assert torch.equal(reached[0], reached[1])
    # 1 + 1.9 + 2.71 steps in place of 3, to first order
    assert not torch.allclose(reached[0], reached[2], rtol=0, atol=1e-4)


def test_gradients_do_not_add_up():
    trainee = prepared("matrix", "landing")
    trainee.step(cost(trainee))
    trainee.step(cost(trainee))
    torch.testing.assert_close(trainee.model.weight.grad, slopes(trainee.model.weight))


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method must be one of"):
        prepared("matrix", "straight on")


@pytest.mark.parametrize("method", ["polar", "qr"])
def test_every_retraction_of_the_library_is_a_method(method):
    trainee = prepared("kernel", method)
    (X,) = (weight.detach().clone() for weight in trainee.weights())
    trainee.step(cost(trainee))
    (reached,) = (weight.detach() for weight in trainee.weights())
    step = X - LR * skew(slopes(X) @ X.mT) @ X  # to which a retraction is equal to first order
    torch.testing.assert_close(reached, step, rtol=0, atol=100 * LR**2)
    assert not torch.allclose(reached, X, rtol=0, atol=1e-4)
    assert trainee.orthogonality_error() < 1e-12


def test_the_largest_error_is_that_of_one_matrix():
    trainee = prepared("kernel", "landing")
    with torch.no_grad():
        trainee.model.weight[2, 1] *= 1.5
    # 1.25 times the identity of 5 x 5, as above; all others are orthogonal.
    assert trainee.largest_error() == pytest.approx(1.25 * 5**0.5)
    with torch.no_grad():
        trainee.model.weight[0, 0] = torch.nan
    assert trainee.largest_error() != trainee.largest_error()


def test_every_method_has_a_style():
    assert set(METHODS) <= METHOD_STYLES.keys()
