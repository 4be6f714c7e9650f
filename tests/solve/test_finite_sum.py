"""SAGA converges where stochastic steps stall; both interfaces, both libraries, all failures."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import ortholand as ol
from ortholand.geometry import polar_projection, relative_gradient, riemannian_gradient
from ortholand.solve.batches import FiniteSum, GradientTable, generator
from ortholand.solve.finite_sum import minimize_finite_sum
from ortholand.solve.manifolds import one_matrix
from ortholand.solve.options import Status

N = 200


class PCA:
    """Mean of ``-|z_i^T X|^2`` over the rows of Z."""

    def __init__(self, dtype=torch.float64, n_rows=N, dimension=10):
        generator = torch.Generator().manual_seed(1)
        scales = torch.linspace(2, 0.2, dimension, dtype=torch.float64)
        scales[:2] += 1
        Z = torch.randn(n_rows, dimension, generator=generator, dtype=torch.complex128)
        self.Z = (Z * scales).to(dtype) if dtype.is_complex else (Z.real * scales).to(dtype)

    def fun(self, X, indices):
        return self.on_data(X, self.Z[indices])

    @staticmethod
    def on_data(X, Z):
        return -(Z @ X).abs().square().sum(1).mean()

    def numpy_fun(self, X, indices):
        return -np.square(self.Z.numpy()[indices] @ X).sum(1).mean()

    def numpy_jac(self, X, indices):
        Z = self.Z.numpy()[indices]
        return -2 * Z.T @ (Z @ X) / len(Z)

    def start(self, p=2):
        return ol.random_orthogonal(self.Z.shape[1], p, seed=0, dtype=self.Z.dtype)

    def best(self, p=2):
        return -float(torch.linalg.svdvals(self.Z)[:p].square().sum()) / len(self.Z)


def ica(n_rows=500, p=4):
    """Mean over samples of the log-cosh contrast of whitened mixtures of Laplace sources."""
    uniform = torch.rand(
        n_rows, p, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ).sub(0.5)
    Z = uniform.sign() * torch.log1p(-1.99 * uniform.abs())
    Z = Z - Z.mean(0)
    U, _, _ = torch.linalg.svd(Z, full_matrices=False)
    Z = U * math.sqrt(n_rows)

    def fun(X, indices):
        Y = (Z[indices] @ X).abs()
        return (Y + torch.nn.functional.softplus(-2 * Y) - math.log(2)).sum(1).mean()

    return fun, ol.random_orthogonal(p, p, seed=1, dtype=torch.float64), n_rows


def relative(result):
    norms = np.array(result.history["grad_norm"])
    return norms / norms[0]


def riemannian_norm(fun, X, n_terms):
    Y = X.clone().requires_grad_()
    (G,) = torch.autograd.grad(fun(Y, torch.arange(n_terms)), Y)
    return float(torch.linalg.vector_norm(riemannian_gradient(X, G)))


def problems():
    problem = PCA()
    return {"pca": (problem.fun, problem.start(), N), "ica": ica()}


@pytest.mark.parametrize("name", ["pca", "ica"])
def test_saga_converges_linearly_where_constant_steps_stall(name):
    fun, x0, n = problems()[name]
    saga = minimize_finite_sum(fun, x0, n_terms=n, batch_size=10, gtol=1e-8)
    assert saga.success, saga.message
    norms = relative(saga)
    assert norms[-1] <= 1e-8
    # The second half of the digits takes about as many epochs as the first: a linear rate.
    half = int(np.argmax(norms < 1e-4))
    assert (len(norms) - 1 - half) < 2 * half + 3
    constant = minimize_finite_sum(
        fun,
        x0,
        n_terms=n,
        batch_size=10,
        method="sgd",
        lr=saga.lr,
        epochs=20,
        options={"decay": 0.0},
    )
    assert not constant.success
    assert relative(constant)[10:].min() > 1e-3


def test_the_minimum_is_the_known_one_and_the_result_is_true():
    problem = PCA()
    result = minimize_finite_sum(problem.fun, problem.start(), n_terms=N, batch_size=10)
    assert result.success
    assert result.fun == pytest.approx(problem.best(), rel=1e-12)
    assert result.distance <= 100 * 2.2e-16 * math.sqrt(2)
    assert float(ol.distance(result.x)) == pytest.approx(result.distance, abs=1e-15)
    assert riemannian_norm(problem.fun, result.x, N) == pytest.approx(result.grad_norm, rel=1e-4)
    assert result.grad_norm <= 1.5e-8 * result.history["grad_norm"][0]
    assert len(result.history["fun"]) == result.nit + 1


@pytest.mark.thorough
def test_shrinking_steps_get_further_than_constant_ones():
    problem, x0 = PCA(), PCA().start()
    runs = {
        decay: minimize_finite_sum(
            problem.fun,
            x0,
            n_terms=N,
            batch_size=10,
            method="sgd",
            epochs=40,
            options={"decay": decay},
        )
        for decay in (0.0, 0.5)
    }
    assert relative(runs[0.5])[-5:].max() < relative(runs[0.0])[-5:].min()
    assert "saga" in runs[0.5].message
    # The lowest point is returned, not the last.
    history = runs[0.0].history["fun"]
    assert runs[0.0].fun == min(history) < history[-1]
    assert not any(run.success for run in runs.values())


def test_momentum_averages_the_noise_without_changing_where_it_leads():
    problem, x0 = PCA(), PCA().start()
    result = minimize_finite_sum(
        problem.fun,
        x0,
        n_terms=N,
        batch_size=10,
        method="sgd",
        epochs=30,
        options={"momentum": 0.9},
    )
    assert result.fun == pytest.approx(problem.best(), rel=1e-3)


def test_the_estimate_is_unbiased():
    """Its mean over batches, each with its weight, is the full gradient, whatever is remembered."""
    problem = PCA(n_rows=10)
    start = one_matrix(problem.start()).start
    batches = torch.arange(10).split(4)  # 4, 4 and 2 terms
    weights = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)

    def gradient(X, batch):
        Z = problem.Z[batch]
        return -2 * Z.mT @ (Z @ X) / len(Z)

    points = [ol.random_orthogonal(10, 2, seed=s, dtype=torch.float64) for s in range(4)]
    table = GradientTable(3, start)
    table.gradients = torch.stack(
        [gradient(X, batch) for X, batch in zip(points, batches, strict=False)]
    )
    table.weights = weights
    table.mean = torch.einsum("k,knp->np", weights, table.gradients)
    X = points[-1]
    estimates = []
    for k, batch in enumerate(batches):
        copy = GradientTable(3, start)
        copy.gradients, copy.mean, copy.weights = table.gradients.clone(), table.mean, weights
        estimates.append(copy.estimate(k, gradient(X, batch)))
        # What is remembered afterwards is the new gradient, and the mean fits the table.
        torch.testing.assert_close(copy.gradients[k], gradient(X, batch))
        torch.testing.assert_close(copy.mean, torch.einsum("k,knp->np", weights, copy.gradients))
    mean = sum(w * E for w, E in zip(weights, estimates, strict=True))
    torch.testing.assert_close(mean, gradient(X, torch.arange(10)))


def hermitian(p, seed=0, dtype=torch.float64, count=()):
    """Random Hermitian matrices of norm 1."""
    random = torch.Generator().manual_seed(seed)
    C = torch.randn(*count, p, p, generator=random, dtype=dtype)
    C = C + C.mH
    return C / torch.linalg.matrix_norm(C, keepdim=True)


def with_multipliers(fun, C):
    """The terms plus ``tr(X^H X C_i) / 2``, whose mean is constant on the manifold."""

    def changed(X, indices):
        wide = X.shape[0] < X.shape[1]
        S = X @ X.mH if wide else X.mH @ X
        return fun(X, indices) + (S * C[indices].mean(0).conj()).sum().real / 2

    return changed


def multipliers(n_terms, p, dtype=torch.float64):
    """Matrices ``C_i``, one for each term: the same for all, or different ones with mean 0 or C."""
    eye = torch.eye(p, dtype=dtype).expand(n_terms, p, p)
    common = hermitian(p, 1, dtype).expand(n_terms, p, p)
    own = hermitian(p, 2, dtype, (n_terms,))
    own = own - own.mean(0)
    return {"-1000 I": -1000 * eye, "C_i": 1000 * own, "C + C_i": 1000 * (common + own)}


def shapes():
    """Costs of the span alone and others; tall, wide, square, complex: (fun, x0, terms, lr)."""
    problem, unitary = PCA(), PCA(torch.complex128)
    weights = torch.tensor([2.0, 1.0], dtype=torch.float64)
    contrast, y0, n = ica(300)
    return {
        "span": (problem.fun, problem.start(), N, 0.05),
        "vector": (problem.fun, problem.start(1), N, 0.05),
        "weighted": (lambda X, i: problem.fun(X * weights.sqrt(), i), problem.start(), N, 0.05),
        "wide": (lambda X, i: problem.fun(X.mT, i), problem.start().mT, N, 0.05),
        "square": (contrast, y0, n, 2.0),
        "complex": (unitary.fun, unitary.start(), N, 0.05),
    }


class TestMultipliers:
    """What is constant on the manifold changes no step, whatever it is off the manifold."""

    @pytest.mark.parametrize("name", shapes())
    @pytest.mark.thorough
    def test_the_number_of_epochs_stays(self, name):
        fun, x0, n, _ = shapes()[name]
        options = {"n_terms": n, "batch_size": 15, "gtol": 1e-5}
        plain = minimize_finite_sum(fun, x0, **options)
        assert plain.success
        for which, C in multipliers(n, min(x0.shape), x0.dtype).items():
            run = minimize_finite_sum(with_multipliers(fun, C), x0, **options)
            assert run.success, which
            assert abs(run.nit - plain.nit) <= 0.1 * plain.nit, which

    @pytest.mark.thorough
    def test_the_example_of_the_documentation(self):
        random = torch.Generator().manual_seed(0)
        scales = torch.linspace(1, 0.1, 20, dtype=torch.float64) + (torch.arange(20) < 3)
        Z = torch.randn(1000, 20, generator=random, dtype=torch.float64) * scales
        x0 = ol.random_orthogonal(20, 3, seed=0, dtype=torch.float64)
        eye = torch.eye(3, dtype=torch.float64).expand(1000, 3, 3)
        cases = multipliers(1000, 3) | {f"{c} I": c * eye for c in (0, 10, 100, 1000)}
        for which, C in cases.items():
            fun = with_multipliers(lambda X, i: PCA.on_data(X, Z[i]), C)
            run = minimize_finite_sum(fun, x0, n_terms=1000, batch_size=20, epochs=11)
            assert run.success, which
            assert 8 <= run.nit <= 10, which

    @pytest.mark.parametrize("name", shapes())
    @pytest.mark.parametrize(
        "method",
        [
            {"method": "saga"},
            {"method": "sgd"},
            {"method": "sgd", "options": {"momentum": 0.9}},
        ],
        ids=["saga", "sgd", "momentum"],
    )
    @pytest.mark.parametrize("stretch", [1.0, 1.1], ids=["on", "off"])
    def test_the_iterates_stay(self, name, method, stretch):
        """The step is long: X leaves the manifold, where multipliers are hard to tell apart."""
        fun, x0, n, lr = shapes()[name]
        options = {"n_terms": n, "batch_size": 30, "epochs": 2, "lr": lr, "gtol": 0.0}
        farthest = [0.0]

        def watched(X, indices):
            farthest[0] = max(farthest[0], float(ol.distance(X.detach())))
            return fun(X, indices)

        plain = minimize_finite_sum(watched, stretch * x0, **options, **method)
        assert farthest[0] > 1e-3
        for which, C in multipliers(n, min(x0.shape), x0.dtype).items():
            run = minimize_finite_sum(with_multipliers(fun, C), stretch * x0, **options, **method)
            assert float(torch.linalg.vector_norm(run.x - plain.x)) < 1e-9, which

    @pytest.mark.parametrize("name", shapes())
    def test_the_chosen_step_stays(self, name):
        fun, x0, n, _ = shapes()[name]
        options = {"n_terms": n, "batch_size": 30, "epochs": 1, "method": "sgd"}
        plain = minimize_finite_sum(fun, x0, **options)
        for which, C in multipliers(n, min(x0.shape), x0.dtype).items():
            run = minimize_finite_sum(with_multipliers(fun, C), x0, **options)
            assert run.lr == pytest.approx(plain.lr, rel=1e-5), which
            assert run.lam == pytest.approx(plain.lam, rel=1e-5), which

    @pytest.mark.parametrize("p", [1, 3, 6])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
    def test_what_is_kept_of_a_gradient(self, p, dtype):
        """It is linear in G, represents the relative gradient, and has no multiplier at any X."""
        random = torch.Generator().manual_seed(p)
        G, E = (torch.randn(6, p, generator=random, dtype=dtype) for _ in range(2))
        X = ol.random_orthogonal(6, p, seed=0, dtype=dtype) + 0.05 * E
        C = 1000 * hermitian(p, 3, dtype)
        kept = generator(X, G)
        torch.testing.assert_close(generator(X, G + X @ C), kept, atol=1e-11, rtol=0)
        torch.testing.assert_close(generator(X, G + 2 * E), kept + 2 * generator(X, E))
        psi = kept if p == 6 else relative_gradient(X, kept)
        torch.testing.assert_close(psi, relative_gradient(X, G))

    def test_what_is_kept_leaves_the_estimate_unbiased(self):
        """The mean over batches, at X, of what is kept there is that of the full gradient."""
        problem = PCA(n_rows=10)
        X = 1.1 * problem.start()
        gradients = [torch.from_numpy(problem.numpy_jac(X.numpy(), [i])) for i in range(10)]
        mean = sum(generator(X, G) for G in gradients) / 10
        torch.testing.assert_close(mean, generator(X, sum(gradients) / 10))


def test_batches_are_drawn_in_proportion_to_their_terms():
    """Otherwise the estimate would be biased. 400 draws of a batch of 7 terms or one of 3."""
    counts = {7: 0, 3: 0}
    problem = PCA(n_rows=10)

    def fun(X, indices):
        counts[len(indices)] += 1
        return problem.fun(X, indices)

    minimize_finite_sum(
        fun, problem.start(), n_terms=10, batch_size=7, epochs=200, lr=1e-9, gtol=0.0
    )
    drawn = {size: count - 201 for size, count in counts.items()}  # less the passes over all
    assert sum(drawn.values()) == 400
    assert abs(drawn[7] - 280) < 4 * math.sqrt(400 * 0.7 * 0.3)


class Readable:
    """Neither a list nor a DataLoader, but it can be read again."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("method", ["saga", "sgd"])
def test_all_interfaces_take_the_same_steps(method):
    problem, x0 = PCA(), PCA().start()
    options = {"shuffle": False}
    by_index = minimize_finite_sum(
        problem.fun, x0, n_terms=N, batch_size=30, epochs=3, method=method, options=options
    )
    batches = list(problem.Z.split(30))  # the last has 10 rows
    loader = DataLoader(problem.Z, batch_size=30, shuffle=False)
    for data in (batches, loader, Readable(batches)):
        by_data = minimize_finite_sum(
            problem.on_data, x0, data=data, epochs=3, method=method, options=options
        )
        assert torch.equal(by_data.x, by_index.x)
        assert by_data.history["fun"].tolist() == by_index.history["fun"].tolist()
        assert by_data.nfev == by_index.nfev


@pytest.mark.parametrize("method", ["saga", "sgd"])
def test_numpy_and_torch_take_the_same_steps(method):
    problem, x0 = PCA(), PCA().start()
    options = {"n_terms": N, "batch_size": 10, "epochs": 3, "method": method}
    types = set()

    def jac(X, indices):
        types.add((type(X), type(indices), indices.dtype))
        return problem.numpy_jac(X, indices)

    by_torch = minimize_finite_sum(problem.fun, x0, lr=0.05, **options)
    by_numpy = minimize_finite_sum(problem.numpy_fun, x0.numpy(), jac=jac, lr=0.05, **options)
    assert types == {(np.ndarray, np.ndarray, np.dtype(np.int64))}
    assert isinstance(by_numpy.x, np.ndarray)
    np.testing.assert_allclose(by_numpy.x, by_torch.x.numpy(), atol=1e-12)
    np.testing.assert_allclose(by_numpy.history["fun"], by_torch.history["fun"], rtol=1e-13)
    by_numpy.x[0, 0] = 7  # the user's own

    def pair(X, indices):
        return problem.numpy_fun(X, indices), problem.numpy_jac(X, indices)

    paired = minimize_finite_sum(pair, x0.numpy(), jac=True, lr=0.05, **options)
    assert paired.history["fun"].tolist() == by_numpy.history["fun"].tolist()
    # lr comes from differences of gradients, which know about 11 digits.
    chosen = minimize_finite_sum(problem.fun, x0, **options)
    chosen_by_numpy = minimize_finite_sum(problem.numpy_fun, x0.numpy(), jac=jac, **options)
    assert chosen.lr == pytest.approx(chosen_by_numpy.lr, rel=1e-9)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("p", [1, 3, 10], ids=["vector", "tall", "square"])
def test_types_and_shapes(p, dtype):
    """Orthogonal regression: the mean of ``|z_i^T X - y_i^T|^2`` with noisy y."""
    Z = torch.randn(N, 10, generator=torch.Generator().manual_seed(3), dtype=dtype)
    Q = ol.random_orthogonal(10, p, seed=5, dtype=dtype)
    Y = Z @ Q + 0.1 * Z[:, :p].roll(1, 0)

    def fun(X, indices):
        return (Z[indices] @ X - Y[indices]).abs().square().sum(1).mean()

    x0 = polar_projection(Q + 0.5 * ol.random_orthogonal(10, p, seed=6, dtype=dtype))
    result = minimize_finite_sum(fun, x0, n_terms=N, batch_size=20, gtol=1e-3)
    assert result.success, result.message
    assert result.x.dtype == dtype
    assert float(ol.distance(result.x)) <= 100 * torch.finfo(dtype).eps * math.sqrt(p)
    if p == 10:
        return  # the transpose of a square matrix is another problem
    wide = minimize_finite_sum(
        lambda X, indices: fun(X.mT, indices), x0.mT, n_terms=N, batch_size=20, gtol=1e-3
    )
    assert wide.x.shape == (p, 10)
    torch.testing.assert_close(wide.x.mT, result.x)


@pytest.mark.parametrize("p", [2, 10], ids=["tall", "square"])
@pytest.mark.parametrize("method", ["saga", "sgd"])
@pytest.mark.parametrize("lr", [1.0, 1e6])
def test_wild_steps_stay_in_the_ball(method, lr, p):
    problem = PCA()
    weights, farthest = torch.linspace(1, 2, p, dtype=torch.float64), [0.0]

    def fun(X, indices):
        farthest[0] = max(farthest[0], float(ol.distance(X.detach(), spectral=True)))
        return 100 * problem.fun(X * weights, indices)

    x0 = problem.start(p)
    result = minimize_finite_sum(
        fun, x0, n_terms=N, batch_size=10, epochs=3, method=method, lr=lr, options={"eps": 0.3}
    )
    assert 0.1 < farthest[0] <= 0.3 + 1e-12
    assert result.distance <= 100 * 2.2e-16 * math.sqrt(p)
    assert not result.success


def test_the_scale_of_f_does_not_matter():
    problem, x0 = PCA(), PCA().start()
    runs = [
        minimize_finite_sum(
            lambda X, i, s=s: s * problem.fun(X, i), x0, n_terms=N, batch_size=20, gtol=1e-4
        )
        for s in (1.0, 2.0**-90, 2.0**90)
    ]
    for scale, run in zip((1.0, 2.0**-90, 2.0**90), runs, strict=True):
        assert run.success
        assert run.nit == runs[0].nit
        assert run.lr * scale == pytest.approx(runs[0].lr)
        assert run.lam / scale == pytest.approx(runs[0].lam)
        assert run.fun / scale == pytest.approx(runs[0].fun)
        assert run.grad_norm <= 1e-4 * run.history["grad_norm"][0]


def test_a_step_size_of_the_users_is_left_alone():
    problem, x0 = PCA(), PCA().start()
    result = minimize_finite_sum(problem.fun, x0, n_terms=N, batch_size=10, lr=0.02, epochs=2)
    assert (result.lr, result.lam) == (0.02, 12.5)
    result = minimize_finite_sum(
        problem.fun, x0, n_terms=N, batch_size=10, lr=0.02, lam=3.0, epochs=2
    )
    assert (result.lr, result.lam) == (0.02, 3.0)
    result = minimize_finite_sum(problem.fun, x0, n_terms=N, batch_size=10, epochs=2)
    assert result.lam == pytest.approx(1 / (4 * result.lr))


def test_a_step_size_of_ours_is_halved_when_an_epoch_raises_f():
    """A start where f is almost flat: the curvature there says little about the minimum's."""
    x0 = polar_projection(torch.eye(6, dtype=torch.float64)[:, -1:] + 0.02)

    def fun(X, indices):
        return -torch.exp(6 * (X[0, 0] - 1)) * (1 + indices.double()).mean() / 2.5

    first = minimize_finite_sum(fun, x0, n_terms=4, epochs=1)
    result = minimize_finite_sum(fun, x0, n_terms=4, gtol=1e-6)
    assert result.success
    assert result.fun == pytest.approx(-1)
    assert result.lr <= first.lr / 2
    assert result.lam == pytest.approx(1 / (4 * result.lr))
    assert (np.diff(result.history["fun"]) <= 0).all()
    fixed = minimize_finite_sum(fun, x0, n_terms=4, gtol=1e-6, lr=first.lr, lam=first.lam)
    assert (np.diff(fixed.history["fun"]) > 0).any()  # what halving is good for


def test_everything_is_counted():
    problem, calls = PCA(), [0]

    def fun(X, indices):
        calls[0] += 1
        return problem.fun(X, indices)

    result = minimize_finite_sum(fun, problem.start(), n_terms=N, batch_size=10, epochs=4)
    assert result.nfev == result.njev == calls[0]
    assert result.nhev == 0
    assert np.diff(result.history["nfev"]).tolist() == [40] * result.nit


def test_uneven_batches_weigh_by_their_rows():
    problem, x0 = PCA(n_rows=50), PCA().start()
    result = minimize_finite_sum(problem.fun, x0, n_terms=50, batch_size=7, gtol=1e-8)
    assert result.success
    assert result.fun == pytest.approx(problem.best(), rel=1e-12)
    batches = [{"z": Z, "unused": "text"} for Z in problem.Z.split([20, 25, 5])]
    by_data = minimize_finite_sum(
        lambda X, batch: problem.on_data(X, batch["z"]), x0, data=batches, epochs=300
    )
    assert by_data.success
    assert by_data.fun == pytest.approx(problem.best(), rel=1e-12)


def test_seeds():
    problem, x0 = PCA(), PCA().start()

    def run(seed):
        return minimize_finite_sum(problem.fun, x0, n_terms=N, batch_size=10, epochs=1, seed=seed).x

    assert torch.equal(run(3), run(3))
    assert torch.equal(run(3), run(torch.Generator().manual_seed(3)))
    assert not torch.equal(run(3), run(4))


def test_memory_is_one_gradient_per_batch():
    problem = PCA()
    variables = one_matrix(problem.start())
    batches = [problem.Z[:300], problem.Z[300:]]
    from ortholand.solve.batches import Batches

    source = Batches(batches, shuffle=False, random=torch.Generator())
    assert FiniteSum(problem.on_data, variables, source, remember=True).table.gradients.shape == (
        2,
        10,
        2,
    )
    assert FiniteSum(problem.on_data, variables, source).table is None


class TestData:
    def test_a_loader_that_shuffles_is_refused_by_saga_only(self):
        problem, x0 = PCA(), PCA().start()
        loaders = [
            DataLoader(problem.Z, batch_size=20, shuffle=True),
            DataLoader(problem.Z, batch_size=20, sampler=SubsetRandomSampler(range(N))),
        ]
        for loader in loaders:
            with pytest.raises(ValueError, match="shuffle=False"):
                minimize_finite_sum(problem.on_data, x0, data=loader)
            result = minimize_finite_sum(problem.on_data, x0, data=loader, method="sgd", epochs=10)
            assert result.fun < 0.9 * problem.best()

    def test_a_loader_of_pairs(self):
        problem, x0 = PCA(), PCA().start()
        labels = torch.arange(N)
        loader = DataLoader(TensorDataset(problem.Z, labels), batch_size=30)
        result = minimize_finite_sum(
            lambda X, batch: problem.on_data(X, batch[0]), x0, data=loader, gtol=1e-8
        )
        assert result.success
        assert result.fun == pytest.approx(problem.best(), rel=1e-12)

    def test_a_loader_without_batching(self):
        problem, x0 = PCA(), PCA().start()
        loader = DataLoader(list(problem.Z.split(40)), batch_size=None)
        result = minimize_finite_sum(problem.on_data, x0, data=loader, gtol=1e-8)
        assert result.fun == pytest.approx(problem.best(), rel=1e-12)

    def test_an_iterable_dataset_is_kept(self):
        problem, x0 = PCA(), PCA().start()

        class Rows(IterableDataset):
            def __iter__(self):
                return iter(problem.Z)

        result = minimize_finite_sum(
            problem.on_data, x0, data=DataLoader(Rows(), batch_size=20), gtol=1e-8
        )
        assert result.fun == pytest.approx(problem.best(), rel=1e-12)

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            ((batch for batch in [torch.ones(2, 10)]), TypeError, "read repeatedly"),
            (torch.ones(5, 10), TypeError, "split"),
            (7, TypeError, "iterable of batches"),
            ([], ValueError, "at least one batch"),
        ],
        ids=["generator", "tensor", "number", "empty"],
    )
    @pytest.mark.parametrize("method", ["saga", "sgd"])
    def test_bad_data(self, data, error, message, method):
        with pytest.raises(error, match=message):
            minimize_finite_sum(PCA.on_data, PCA().start(), data=data, method=method)


class TestEnds:
    def test_epochs_are_used_up(self):
        problem = PCA()
        result = minimize_finite_sum(
            problem.fun, problem.start(), n_terms=N, batch_size=10, epochs=2
        )
        assert result.status == Status.MAXITER
        assert not result.success
        assert "epochs=2" in result.message

    @pytest.mark.parametrize("way", ["true", "raise"])
    def test_a_callback_stops(self, way):
        problem, seen = PCA(), []

        def callback(intermediate_result):
            seen.append(intermediate_result)
            assert ol.distance(intermediate_result.x) < 1e-13
            if len(seen) == 2 and way == "raise":
                raise StopIteration
            return len(seen) == 2

        result = minimize_finite_sum(
            problem.fun, problem.start(), n_terms=N, batch_size=10, callback=callback
        )
        assert result.status == Status.CALLBACK
        assert result.nit == 2
        assert [r.nit for r in seen] == [1, 2]

    def test_time_is_up(self):
        problem = PCA()
        result = minimize_finite_sum(
            problem.fun, problem.start(), n_terms=N, batch_size=10, options={"maxtime": 0.0}
        )
        assert result.status == Status.MAXTIME
        assert not result.success

    @pytest.mark.parametrize("method", ["saga", "sgd"])
    def test_not_finite_at_the_start(self, method):
        problem = PCA()
        result = minimize_finite_sum(
            lambda X, indices: problem.fun(X, indices) * math.nan,
            problem.start(),
            n_terms=N,
            method=method,
        )
        assert result.status == Status.NON_FINITE
        assert not result.success
        torch.testing.assert_close(result.x, problem.start())

    @pytest.mark.parametrize("method", ["saga", "sgd"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("last", [180, 200], ids=["step", "pass"])
    def test_not_finite_later_returns_the_best_so_far(self, method, bad, last):
        problem, calls = PCA(), [0]

        def fun(X, indices):
            calls[0] += 1
            return problem.fun(X, indices) * (bad if calls[0] > last else 1.0)

        result = minimize_finite_sum(
            fun, problem.start(), n_terms=N, batch_size=10, method=method, gtol=1e-12
        )
        assert result.status == Status.NON_FINITE
        assert not result.success
        assert result.nit >= 1
        assert result.fun == min(result.history["fun"])
        assert float(problem.fun(result.x, torch.arange(N))) == pytest.approx(result.fun)

    def test_a_wrong_gradient_stalls(self):
        problem = PCA()
        result = minimize_finite_sum(
            problem.numpy_fun,
            problem.start().numpy(),
            n_terms=N,
            batch_size=50,
            jac=lambda X, indices: -problem.numpy_jac(X, indices),
        )
        assert result.status == Status.STALLED
        assert not result.success
        assert "check_gradient" in result.message

    def test_an_unreachable_tolerance_ends_without_success(self):
        problem = PCA()
        result = minimize_finite_sum(
            problem.fun, problem.start(), n_terms=N, batch_size=10, gtol=0.0, epochs=100
        )
        assert relative(result)[-1] < 1e-13
        assert result.nit < 100  # it notices
        size = float(torch.linalg.vector_norm(result.jac))
        assert result.success == (result.grad_norm <= 8 * 2.2e-16 * size)

    def test_a_critical_start_is_said_to_be_one(self):
        batches = list(torch.eye(4, dtype=torch.float64).split(1))
        x0 = torch.eye(4, dtype=torch.float64)[:, :2]
        result = minimize_finite_sum(PCA.on_data, x0, data=batches)
        assert result.success
        assert result.nit == 0
        assert "stationary already" in result.message


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, ValueError, "neither"),
            ({"n_terms": N, "data": [torch.ones(2, 10)]}, ValueError, "both"),
            ({"n_terms": 0}, ValueError, "n_terms must be"),
            ({"n_terms": 2.5}, ValueError, "n_terms must be"),
            ({"n_terms": N, "batch_size": 0}, ValueError, "batch_size must be"),
            ({"n_terms": N, "batch_size": N + 1}, ValueError, "batch_size must be"),
            ({"data": [torch.ones(2, 10)], "batch_size": 3}, ValueError, "its own batches"),
            ({"n_terms": N, "method": "adam"}, ValueError, "method must be one of"),
            ({"n_terms": N, "lr": 0.0}, ValueError, "lr must be"),
            ({"n_terms": N, "lr": math.nan}, ValueError, "lr must be"),
            ({"n_terms": N, "lam": -1.0}, ValueError, "lam must be"),
            ({"n_terms": N, "epochs": 0}, ValueError, "epochs must be"),
            ({"n_terms": N, "gtol": -1.0}, ValueError, "gtol must be"),
            ({"n_terms": N, "seed": "0"}, TypeError, "seed must be"),
            ({"n_terms": N, "callback": 3}, TypeError, "callback must be"),
            ({"n_terms": N, "options": {"momentum": 0.9}}, ValueError, "has the options"),
            (
                {"n_terms": N, "method": "sgd", "options": {"momentum": 1.0}},
                ValueError,
                "momentum",
            ),
            ({"n_terms": N, "method": "sgd", "options": {"decay": -1}}, ValueError, "decay"),
            ({"n_terms": N, "options": {"shuffle": 1}}, ValueError, "shuffle"),
            ({"n_terms": N, "options": {"eps": 1.0}}, ValueError, "eps"),
            ({"n_terms": N, "options": {"safe_step": "loose"}}, ValueError, "safe_step"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            minimize_finite_sum(PCA().fun, PCA().start(), **options)

    def test_a_start_far_away(self):
        with pytest.raises(ValueError, match="polar_projection"):
            minimize_finite_sum(PCA().fun, 2 * PCA().start(), n_terms=N, batch_size=10)

    def test_numpy_without_a_gradient(self):
        with pytest.raises(ValueError, match="needs its gradient"):
            minimize_finite_sum(PCA().numpy_fun, PCA().start().numpy(), n_terms=N, batch_size=10)

    def test_a_gradient_of_another_shape(self):
        problem = PCA()
        with pytest.raises(ValueError, match="must return a matrix like x0"):
            minimize_finite_sum(
                problem.fun, problem.start(), n_terms=N, batch_size=10, jac=lambda X, i: X.mT
            )

    def test_nothing_is_changed(self):
        problem, x0 = PCA(), PCA().start()
        before = x0.clone()
        minimize_finite_sum(problem.fun, x0, n_terms=N, batch_size=10, epochs=1)
        assert torch.equal(x0, before)


@pytest.mark.thorough
def test_a_logistic_cost():
    """The largest curvature of a batch is far above that of the whole: the step must grow."""
    generator = torch.Generator().manual_seed(0)
    Z = torch.randn(600, 12, generator=generator, dtype=torch.float64)
    Z = Z * torch.linspace(0.2, 3, 12, dtype=torch.float64)
    y = torch.sign(Z[:, 0] * Z[:, 1] + 0.3)

    def fun(X, i):
        return torch.nn.functional.softplus(-y[i] * (Z[i] @ X).prod(1)).mean()

    x0 = ol.random_orthogonal(12, 2, seed=0, dtype=torch.float64)
    result = minimize_finite_sum(fun, x0, n_terms=600, batch_size=20, epochs=60, gtol=1e-5)
    assert result.success, result.message


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_attraction_follows_the_scale_of_the_data(scale):
    """With lr / scale^2 the iterates are the same, and none sits at the edge of the ball."""
    problem, seen = PCA(), []
    problem.Z = problem.Z * scale
    result = minimize_finite_sum(
        problem.fun,
        problem.start(),
        n_terms=N,
        batch_size=20,
        lr=0.01 / scale**2,
        method="sgd",
        epochs=3,
        callback=seen.append,
    )
    assert result.lam == pytest.approx(25 * scale**2)
    assert result.shortened < 0.1


def test_steps_that_are_shortened_are_told():
    problem = PCA()
    result = minimize_finite_sum(
        problem.fun, problem.start(), n_terms=N, batch_size=20, lr=1e3, method="sgd", epochs=1
    )
    assert result.shortened > 0.9
