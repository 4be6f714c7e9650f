"""The estimators of ortholand_lab.estimators compared with those of scikit-learn and picard.

    python examples/estimators.py --ecg foetal_ecg.dat --out estimators.png

Independent components of a recording of 8 electrodes (the file of foetal_ecg.py), each method from
the same starts; principal components of digits, all at once and as a stream; and canonical
correlations of the left and right halves of digits. For each method: processor seconds, and how far
the answer is from the best one.

MNIST is read from the folder that ORTHOLAND_DATA names, or downloaded; if neither works, the digits
of scikit-learn replace it, with a notice. Without --ecg that part is left out.
Needs pip install . ./lab python-picard.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray
from picard import picard
from rich.console import Console
from scipy.linalg import polar
from sklearn.cross_decomposition import CCA
from sklearn.decomposition import PCA, FastICA, IncrementalPCA
from sklearn.exceptions import ConvergenceWarning

from ortholand_lab.datasets import DatasetError, find_dataset
from ortholand_lab.estimators import LandingCCA, LandingICA, LandingPCA
from ortholand_lab.problems import ICA, amari_distance
from showing import LOOKS, make_table, two_panels

Array = NDArray[Any]
SMALLEST = 1e-16  # shown in place of what is smaller, or less than nothing by rounding
RIDGE = 1e-2  # of the covariances of the halves, in parts of their mean variance


class Outcome(NamedTuple):
    """What a method gave: how far from the best, and in how many seconds of the processor."""

    seconds: float
    error: float
    score: float  # non-Gaussianity, variance or correlation, all in parts of the best


Outcomes = dict[str, list[Outcome]]  # by method; one for each seed


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, and what the action returns."""
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the error tells
        result = action()
    return time.process_time() - begin, result


def batches(rows: Array, size: int) -> Iterator[Array]:
    """All rows, in order; none is left over alone."""
    yield from np.array_split(rows, max(1, len(rows) // size))


# --- independent components


def by_landing_ica(X: Array, start: Array) -> Array:
    """LandingICA's unmixing matrix."""
    return LandingICA(w_init=start).fit(X).components_


def by_fastica(X: Array, start: Array) -> Array:
    """FastICA's, with a tolerance that makes it comparable."""
    ica = FastICA(w_init=start, whiten="unit-variance", tol=1e-12, max_iter=2000)
    return ica.fit(X).components_


def by_picard(X: Array, start: Array) -> Array:
    """Picard-O's, for sources of both kinds."""
    options = dict(ortho=True, extended=True, tol=1e-8, max_iter=1000)
    K, W, _ = picard(X.T, w_init=polar(start)[0], **options)
    return W @ K


ICA_METHODS = {"LandingICA": by_landing_ica, "FastICA": by_fastica, "picard": by_picard}


def compare_ica(X: Array, seeds: Sequence[int]) -> tuple[Outcomes, float]:
    """Errors: Amari distances from the stationary point that a method is at.

    Also the largest distance between what LandingICA and picard find in the best of their runs.
    """
    outcomes: Outcomes = {name: [] for name in ICA_METHODS}
    best: dict[str, tuple[float, Array]] = {}
    for seed in seeds:
        start = np.random.RandomState(seed).normal(size=(X.shape[1], X.shape[1]))
        for name, method in ICA_METHODS.items():
            seconds, W = timed(lambda method=method, start=start: method(X, start))
            exact, contrast = polished(X, W)
            outcomes[name].append(Outcome(seconds, apart(W, exact), contrast))
            best[name] = max(best.get(name, (0.0, W)), (contrast, W), key=lambda each: each[0])
    most = max(contrast for contrast, _ in best.values())
    shares = {
        name: [each._replace(score=each.score / most) for each in found]
        for name, found in outcomes.items()
    }
    return shares, apart(best["LandingICA"][1], best["picard"][1])


def polished(X: Array, W: Array) -> tuple[Array, float]:
    """The stationary point that an unmixing matrix is at, and how non-Gaussian its sources are."""
    ica = LandingICA(tol=1e-12)
    whitening = ica.fit(X).whitening_
    ica.set_params(w_init=W @ np.linalg.inv(whitening)).fit(X)
    sources = torch.from_numpy(ica.transform(X)).mT
    contrast = ICA(sources).contrast(torch.eye(len(sources), dtype=sources.dtype))
    return ica.components_, float(contrast)


def apart(W: Array, other: Array) -> float:
    """Amari distance between two unmixing matrices."""
    return float(amari_distance(torch.from_numpy(W), torch.linalg.inv(torch.from_numpy(other))))


# --- principal components


def compare_pca(X: Array, components: int, batch: int, seeds: Sequence[int]) -> Outcomes:
    """Errors: parts of the variance that the best subspace keeps and this one does not."""
    C = np.cov(X, rowvar=False, dtype=np.float64)
    best = np.linalg.eigvalsh(C)[-components:].sum()

    def stream(estimator: Any) -> Any:
        for rows in batches(X, batch):
            estimator.partial_fit(rows)
        return estimator

    p = components
    methods: dict[str, Callable[[int], Any]] = {
        "LandingPCA": lambda seed: LandingPCA(p, random_state=seed).fit(X),
        "PCA": lambda _: PCA(p, svd_solver="covariance_eigh").fit(X),
        "PCA, randomized": lambda s: PCA(p, svd_solver="randomized", random_state=s).fit(X),
        "LandingPCA, stream": lambda seed: stream(LandingPCA(p, random_state=seed)),
        "IncrementalPCA, stream": lambda _: stream(IncrementalPCA(p)),
    }

    def share(pca: Any) -> float:
        V = np.linalg.qr(pca.components_.T.astype(np.float64))[0]
        return float(np.trace(V.T @ C @ V) / best)

    return compare(methods, share, seeds)


# --- canonical correlation


def compare_cca(X: Array, Y: Array, components: int, batch: int, seeds: Sequence[int]) -> Outcomes:
    """Errors: parts of the closed form's total correlation that are missing."""
    best = closed_form(X, Y, components)

    def stream(seed: int) -> LandingCCA:
        cca = LandingCCA(components, **options, random_state=seed)
        for x, y in zip(batches(X, batch), batches(Y, batch), strict=True):
            cca.partial_fit(x, y)
        return cca

    options: dict[str, Any] = dict(scale=False, ridge=RIDGE)
    methods: dict[str, Callable[[int], Any]] = {
        "LandingCCA": lambda s: LandingCCA(components, **options, random_state=s).fit(X, Y),
        "LandingCCA, stream": stream,
        "closed form": lambda _: closed_form(X, Y, components),
    }

    def share(found: Any) -> float:
        sums = found.correlations_.sum() if isinstance(found, LandingCCA) else found
        return float(sums / best)

    return compare(methods, share, seeds)


def closed_form(X: Array, Y: Array, components: int) -> float:
    """The sum of the canonical correlations, by Cholesky factors of all covariances."""
    n = X.shape[1]
    C = np.cov(np.hstack([X, Y]), rowvar=False, dtype=np.float64, bias=True)
    factors = []
    for block in (C[:n, :n], C[n:, n:]):
        ridge = RIDGE * block.diagonal().mean() * np.eye(len(block))
        factors.append(np.linalg.cholesky(block + ridge))
    whitened = np.linalg.solve(factors[0], np.linalg.solve(factors[1], C[n:, :n]).T)
    return float(np.linalg.svd(whitened, compute_uv=False)[:components].sum())


def correlation_of_scikit_learn(X: Array, Y: Array, components: int) -> tuple[float, float, float]:
    """Seconds of CCA; total correlations on the data, of CCA and of LandingCCA all but unridged."""
    seconds, theirs = timed(lambda: CCA(components).fit(X, Y))
    ours = LandingCCA(components, ridge=1e-9, random_state=0).fit(X, Y)
    sums = []
    for cca in (theirs, ours):
        x, y = cca.transform(X, Y)
        sums.append(sum(np.corrcoef(x[:, k], y[:, k])[0, 1] for k in range(components)))
    return seconds, float(sums[0]), float(sums[1])


# --- telling and drawing


def compare(
    methods: dict[str, Callable[[int], Any]], share: Callable[[Any], float], seeds: Sequence[int]
) -> Outcomes:
    """All methods with all seeds."""
    outcomes: Outcomes = {name: [] for name in methods}
    for seed in seeds:
        for name, method in methods.items():
            seconds, found = timed(lambda method=method, seed=seed: method(seed))
            part = share(found)
            outcomes[name].append(Outcome(seconds, 1 - part, part))
    return outcomes


def rows(outcomes: Outcomes) -> Iterator[tuple[str, ...]]:
    """Medians; in brackets the smallest and the largest error."""
    for name, found in outcomes.items():
        errors = sorted(each.error for each in found)
        seconds = float(np.median([each.seconds for each in found]))
        score = float(np.median([each.score for each in found]))
        spread = f"{np.median(errors):.1e} ({errors[0]:.1e} to {errors[-1]:.1e})"
        yield name, f"{seconds:.3g}", spread, f"{score:.4%}"


MARKERS = "os^DvPX*"  # one for each method of a panel


def draw(parts: dict[str, Outcomes], path: Path) -> None:
    """Error against time: signals on the left, digits on the right."""
    with two_panels(path, "Estimators: time and error") as (left, right):
        ecg = parts.get("ICA")
        scatter(left, ecg or parts["PCA"])
        left.set_title("sources of the ECG" if ecg else "principal components of digits")
        digits = {**(parts["PCA"] if ecg else {}), **parts["CCA"]}
        scatter(right, digits)
        right.set_title("digits: components, correlations")
        left.set_ylabel("distance from the stationary point" if ecg else "variance missed")
        right.set_ylabel("variance or correlation missed")


def scatter(axes: Axes, outcomes: Outcomes) -> None:
    """A marker for each run; ours are filled."""
    for k, (name, found) in enumerate(outcomes.items()):
        colour = LOOKS[0]["color"] if name.startswith("Landing") else LOOKS[1]["color"]
        seconds, errors, _ = zip(*found, strict=True)
        axes.scatter(
            seconds,
            np.maximum(errors, SMALLEST),
            marker=MARKERS[k % len(MARKERS)],
            facecolors=colour if name.startswith("Landing") else "none",
            edgecolors=colour,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="seconds of the processor")
    # Whole decades, which alone are labelled.
    low, high = np.log10(axes.get_xlim())
    axes.set_xlim(10 ** np.floor(low), 10 ** np.ceil(high))
    axes.xaxis.set_minor_formatter(NullFormatter())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 1 if a file could not be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ecg", type=Path, help="the recording: a time stamp and numbers a line")
    parser.add_argument("--out", type=Path, default=Path("estimators.png"), help="the figure")
    parser.add_argument("--images", type=int, default=10_000, help="so many digits")
    parser.add_argument("--batch", type=int, default=1000, help="rows of a batch of a stream")
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0 on")
    options = parser.parse_args(arguments)
    console, seeds = Console(), range(options.seeds)
    try:
        source = find_dataset("mnist")
        images = source.load().train_images[: options.images, 0].numpy() / np.float32(255)
        signals = None if options.ecg is None else np.loadtxt(options.ecg)[:, 1:]
    except (DatasetError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if source.notice:
        console.print(source.notice)
    parts: dict[str, Outcomes] = {}
    if signals is not None:
        parts["ICA"], agreement = compare_ica(signals, seeds)
        console.print(f"LandingICA and picard, best of {len(seeds)} starts: {agreement:.1e} apart.")
    middle = images.shape[2] // 2
    halves = [part.reshape(len(part), -1) for part in (images[..., :middle], images[..., middle:])]
    components = min(50, images.shape[1] ** 2 // 4)
    parts["PCA"] = compare_pca(images.reshape(len(images), -1), components, options.batch, seeds)
    parts["CCA"] = compare_cca(*halves, 5, options.batch, seeds)
    headings = ("method", "seconds", "error", "of the best")
    for title, outcomes in parts.items():
        console.print(make_table(title, headings, rows(outcomes)))
    seconds, theirs, ours = correlation_of_scikit_learn(*halves, 2)
    console.print(
        f"scikit-learn's CCA, 2 components, no ridge: {seconds:.1f} s, correlation {theirs:.4f}; "
        f"LandingCCA with ridge 1e-9: {ours:.4f}."
    )
    draw(parts, options.out)
    console.print(f"Figure: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
