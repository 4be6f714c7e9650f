"""LandingSGD written out for one matrix, from the formulas alone: slow, plain, in float64.

Independent of the library on purpose. Python floats decide the step; n x n matrices are formed.
"""

import math

import torch


def reference_steps(
    X,
    gradients,
    *,
    lr,
    momentum=0.0,
    dampening=0.0,
    nesterov=False,
    lam=1.0,
    eps=0.5,
    rule="spectral",
):
    """The iterates of one matrix X (n >= p) under a list of gradients."""
    n, p = X.shape
    buffer = None
    for G in gradients:
        # Square: A accumulates Skew(G X^H). Tall: B accumulates G without X K, K Hermitian.
        g = (G @ X.mH - X @ G.mH) / 2 if n == p else G
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            g = g + momentum * buffer if nesterov else buffer
            if n > p:
                M = torch.linalg.solve(X.mH @ X, X.mH @ buffer)
                buffer = buffer - X @ (M + M.mH) / 2
        A = g if n == p else (g @ X.mH - X @ g.mH) / 2
        identity = torch.eye(n, dtype=X.dtype)
        L = A @ X + lam * (X @ X.mH - identity) @ X
        X = X - reference_step_length(X, L, lr, lam, eps, rule) * L
    return X


def norm(M):
    return torch.linalg.matrix_norm(M).item()


def residual(X):
    return X.mH @ X - torch.eye(X.shape[1], dtype=X.dtype)


def reference_step_length(X, L, lr, lam, eps, rule):
    D, size, cap = residual(X), norm(L), 1 / (2 * lam) if lam else math.inf
    if rule == "spectral":
        t = min(lr, cap, math.sqrt(2 * X.shape[1]) / size if size else math.inf)
        return t * reference_share(X, L, D, t, lam, eps)
    b, q = lam * norm(D) * (1 - norm(D)), size**2
    safe = (b + math.sqrt(b * b + q * (eps - norm(D)))) / q if q else math.inf
    return min(lr, safe, cap)


def reference_share(X, L, D, t, lam, eps):
    """The share that is taken of a measured trial step t, for iterates inside of the ball."""
    aim, d, E = eps * (1 - 1e-4), norm(D), residual(X - t * L)
    bound = (lambda M: norm(M @ M) ** 0.5) if lam else (lambda M: norm(M @ M @ M @ M) ** 0.25)
    reached = bound(E)
    free = d * (1 - 2 * lam * t) + (t * norm(L)) ** 2
    if max(free, d) <= aim or reached <= aim:
        return 1.0
    delta = min(bound(D), eps)
    slope, P = lam * t * delta, min(reached + delta, (t * norm(L)) ** 2)
    room = max(0.0, aim - delta)
    return min(1.0, (slope + math.sqrt(slope**2 + P * room)) / P) if P else 1.0
