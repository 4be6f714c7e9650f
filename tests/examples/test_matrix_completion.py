"""Low-rank completion as a product: gradients, and that all ways lead to one matrix."""

import numpy as np
import pytest

import ortholand as ol
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
pytest.importorskip("rich")

example = load_example("matrix_completion", "showing")


def made(seed=0, noise=0.0, ridge=1e-6):
    """A matrix of rank 2 with 60 % of its entries seen."""
    random = np.random.default_rng(100 + seed)
    data = random.standard_normal((40, 2)) @ random.standard_normal((2, 30))
    data -= data.mean(0)
    data += noise * random.standard_normal(data.shape)
    return example.hide(data, 0.6, 2, ridge, seed)


def slopes_agree(fun, x, d, gradient):
    difference = (fun(x + 1e-5 * d) - fun(x - 1e-5 * d)) / 2e-5
    assert difference == pytest.approx(np.vdot(gradient, d), rel=1e-6)


@pytest.mark.parametrize("form", [np.copy, np.diag], ids=["diagonal", "full"])
@pytest.mark.parametrize("block", ["U", "S", "V"])
def test_the_product_has_the_gradient_it_says(block, form):
    problem, x = made(ridge=0.3)
    x = {**x, "S": form(x["S"])}
    d = np.random.default_rng(0).standard_normal(x[block].shape)
    # The ridge takes U and V for orthonormal, so it is a function of S alone.
    gradient = problem.cost(x)[1][block]
    assert gradient.shape == x[block].shape
    slopes_agree(lambda z: problem.cost({**x, block: z})[0], x[block], d, gradient)


def test_the_twin_has_the_same_cost_and_the_gradient_it_says():
    problem, x = made(ridge=0.3)
    root = np.sqrt(x["S"])
    numbers = np.concatenate([(x[name] * root).ravel() for name in "UV"])
    value, gradient = problem.free_cost(numbers)
    assert value == pytest.approx(problem.cost(x)[0], rel=1e-12)
    d = np.random.default_rng(0).standard_normal(numbers.shape)
    slopes_agree(lambda z: problem.free_cost(z)[0], numbers, d, gradient)


@pytest.mark.parametrize("seed", [0, 1])
def test_all_ways_lead_to_one_matrix(seed):
    problem, start = made(seed, noise=0.1, ridge=0.01)
    if not example.find_spec("pymanopt"):
        pytest.skip("needs pymanopt")
    runs = {name: way(problem, start) for name, way in example.CONTESTANTS.items()}
    best = min(run.costs[-1] for run in runs.values())
    for name, run in runs.items():
        assert run.reached(best) is not None, name
        np.testing.assert_allclose(run.M, runs["U S Vᵀ, any S"].M, atol=1e-3, err_msg=name)
        assert np.linalg.matrix_rank(run.M) == 2
        assert run.error is None or run.error < 1e-12


def test_hidden_entries_of_a_matrix_of_low_rank_are_found():
    random = np.random.default_rng(0)
    data = random.standard_normal((60, 2)) @ random.standard_normal((2, 50))
    problem, start = example.hide(data, 0.6, 3, 1e-9, seed=0)  # the mean of what is seen is a third
    run = example.by_landing_full(problem, start)
    assert problem.hidden_error(run.M) < 1e-3 * problem.hidden_error(0 * run.M)


def test_the_table_and_the_figure(tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert example.main(["--quick", "--out", str(figure)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Hidden pixels filled in" in text
    assert "A Bᵀ, free (SciPy)" in text
    assert figure.stat().st_size > 10_000


def test_without_pymanopt_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    assert example.main(["--quick", "--out", str(tmp_path / "figure.png")]) == 0
    assert "(pymanopt)" not in capsys.readouterr().out


def test_a_vector_in_a_product_is_free_and_matrices_are_not():
    problem, start = made(noise=0.1, ridge=0.01)
    x = ol.minimize(problem.cost, start, jac=True).x
    assert abs(np.linalg.norm(x["S"]) - 1) > 0.1
    assert np.linalg.norm(x["V"].T @ x["V"] - np.eye(2)) < 1e-12
