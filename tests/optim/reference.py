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
        X = X - min(lr, reference_safe_step(X, L, lam, eps, rule)) * L
    return X


def norm(M):
    return torch.linalg.matrix_norm(M).item()


def reference_safe_step(X, L, lam, eps, rule):
    D = X.mH @ X - torch.eye(X.shape[1], dtype=X.dtype)
    d, q = norm(D), norm(L) ** 2
    if rule == "tight":
        q = norm(L.mH @ L)
    if rule == "spectral":  # for iterates inside of the ball
        d, q = min(norm(D @ D @ D @ D) ** 0.25, eps), norm(L.mH @ L @ L.mH @ L) ** 0.5
        eps *= 1 - 1e-4
    b = lam * d * (1 - d)
    cap = 1 / (2 * lam) if lam else math.inf
    return min((b + math.sqrt(b * b + q * (eps - d))) / q, cap) if q else cap
