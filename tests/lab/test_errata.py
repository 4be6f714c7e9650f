"""The errata: every measurement agrees, and would not if the mathematics were the paper's."""

import pytest
import torch

from ortholand_lab import errata
from ortholand_lab.errata import ERRATA, Erratum


@pytest.mark.parametrize("name", ERRATA)
def test_measurement_agrees_with_the_correction(name):
    erratum = ERRATA[name]()
    assert isinstance(erratum, Erratum)
    assert erratum.name == name
    assert erratum.agrees is True, erratum.measured
    assert erratum.paper != erratum.corrected
    assert any(character.isdigit() for character in erratum.measured)


def test_measurement_is_reproducible_whatever_the_global_seed():
    before = ERRATA["floor"]()
    torch.manual_seed(123)
    assert ERRATA["floor"]() == before


@pytest.mark.parametrize("name", ["jacobian", "best-lam"])
def test_the_papers_spectrum_would_not_agree(name, monkeypatch):
    field = errata.landing_field  # with lam / 2 in it, lam is an eigenvalue instead of 2 lam
    monkeypatch.setattr(errata, "landing_field", lambda X, G, lam: field(X, G, lam / 2))
    assert not ERRATA[name]().agrees


def test_steps_three_times_as_long_would_not_agree(monkeypatch):
    rule = errata.safe_step_size
    monkeypatch.setattr(errata, "safe_step_size", lambda *args, **kw: 3 * rule(*args, **kw))
    assert not ERRATA["safe-step"]().agrees


def test_a_safe_paper_rule_would_not_agree(monkeypatch):
    monkeypatch.setattr(
        errata, "paper_step_size", lambda a, d, lam, eps: 1e-3 / (d + a + lam) * eps
    )
    assert not ERRATA["safe-step"]().agrees


def test_the_papers_stiefel_gradient_would_not_agree(monkeypatch):
    # psi X as if it were the whole gradient
    monkeypatch.setattr(errata, "relative_gradient_times_x", lambda X, G: G - X @ (G.mT @ X))
    assert not ERRATA["stiefel"]().agrees


def test_the_papers_hessian_would_not_agree(monkeypatch):
    # Sym(G X^T A) vanishes under Skew, as if the gradient were zero.
    hessian = errata.riemannian_hessian
    monkeypatch.setattr(
        errata,
        "riemannian_hessian",
        lambda X, xi, *, gradient, hessian_product: hessian(
            X, xi, gradient=0 * gradient, hessian_product=hessian_product
        ),
    )
    assert not ERRATA["hessian"]().agrees
