"""Electrons on a line: the energy's derivatives, and that all ways lead to one ground state."""

import numpy as np
import pytest

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

example = load_example("kohn_sham", "showing")


@pytest.fixture(scope="module")
def chain():
    return example.Chain(points=200, orbitals=2)


def test_the_energy_has_the_derivatives_it_says(chain):
    X = chain.start(0)
    check = ol.check_gradient(chain.energy_and_gradient, True, X)
    assert check.ok, check
    check = ol.check_hessian(chain.energy_and_gradient, X, jac=True, hessp=chain.hessian_product)
    assert check.ok, check


def test_the_repulsion_is_a_sum_over_all_pairs_of_points(chain):
    rho = np.random.default_rng(0).random(chain.points)
    distances = chain.grid[:, None] - chain.grid
    expected = chain.h * example.soft_coulomb(distances) @ rho
    np.testing.assert_allclose(chain.hartree(rho), expected, rtol=1e-10)


def test_two_electrons_for_each_orbital(chain):
    assert chain.h * chain.density(chain.start(1)).sum() == pytest.approx(2 * chain.orbitals)


def test_the_preconditioner_solves_with_the_shifted_laplacian(chain):
    V = np.random.default_rng(0).standard_normal((chain.points, 3))
    np.testing.assert_allclose(chain.kinetic @ chain.smooth(V, V) + chain.smooth(V, V), V)


@pytest.mark.parametrize("seed", [0, 1])
def test_all_ways_lead_to_one_ground_state(chain, seed):
    start = chain.start(seed)
    runs = {n: way(chain, start, 1e-6, 60.0) for n, way in example.CONTESTANTS.items()}
    lowest = min(run.energy for run in runs.values())
    for name, run in runs.items():
        assert run.gradient[-1] <= 1e-6, name
        assert run.energy - lowest < 1e-10, name
        assert np.linalg.norm(run.X.T @ run.X - np.eye(chain.orbitals)) < 1e-12, name


def test_impatience_is_seen_in_the_exit_code(tmp_path):
    figure = tmp_path / "figure.png"
    arguments = ["--points", "200", "--orbitals", "2", "--out", str(figure)]
    assert example.main([*arguments, "--enough", "1e-30", "--patience", "0.1"]) == 1


def test_the_table_and_the_figure(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    arguments = ["--points", "200", "--orbitals", "2", "--out", str(figure)]
    assert example.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "4 electrons on 200 points" in text
    assert all(name in text for name in example.CONTESTANTS)
    assert figure.stat().st_size > 10_000
