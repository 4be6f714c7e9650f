"""The heart beat of an unborn child, from eight electrodes on its mother's skin.

    python examples/foetal_ecg.py foetal_ecg.dat --out foetal_ecg.png

The electrodes record a mixture of independent sources: the mother's heart, her breathing,
noise, and, much weaker, the heart of the child. Independent component analysis finds the sources:
whiten the signals, then minimise a likelihood over orthogonal matrices.

The file has one line per sample: a time stamp, which is not used, and 8 numbers. The classic
recording (L. De Lathauwer, DaISy database of the KU Leuven, "cutaneous potential recordings of a
pregnant woman") comes with a paper in the Journal of Statistical Software, volume 76, issue 2:
https://www.jstatsoft.org/index.php/jss/article/downloadSuppFile/v076i02/foetal_ecg.dat

Needs matplotlib: pip install . ./lab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult
from torch import Tensor

from ortholand_lab import problems
from ortholand_lab.problems import ICA, whiten

ELECTRODES = 8
SAMPLING_RATE = 250.0  # of the classic recording, in Hz: it is known to last 10 s
MOTHER, CHILD = (50.0, 110.0), (110.0, 180.0)  # beats per minute
REGULAR = 0.2  # autocorrelation from which on a source is said to beat

Signal = NDArray[np.float64]


# --- reading


def read_recording(path: Path) -> tuple[Signal, Signal]:
    """Time stamps ``(samples,)`` and signals ``(8, samples)``."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file.") from None
    numbers = [_numbers(path, k, line) for k, line in enumerate(lines, start=1)]
    if len(numbers) < 2 * SAMPLING_RATE:
        raise ValueError(
            f"{path} has {len(numbers)} samples: too few to find a heart beat in. "
            f"At least {2 * SAMPLING_RATE:.0f} are needed, two seconds."
        )
    columns = np.array(numbers).T
    return columns[0], columns[1:]


def _numbers(path: Path, k: int, words: list[str]) -> list[float]:
    rule = f"a line must hold {1 + ELECTRODES} numbers, a time stamp and {ELECTRODES} electrodes"
    if len(words) != 1 + ELECTRODES:
        raise ValueError(f"{path}, line {k} with text: {rule}, got {len(words)} columns.")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [np.nan]
    if not np.isfinite(numbers).all():
        raise ValueError(f"{path}, line {k} with text: {rule}, got {' '.join(words)!r}.")
    return numbers


# --- separating


@dataclass(frozen=True)
class Separation:
    """Independent sources, and how they were found."""

    sources: Tensor  # (8, samples), of mean 0 and variance 1
    unmixing: Tensor  # the orthogonal matrix that makes them from white signals
    signs: Tensor  # 1 for a super-Gaussian source, -1 for a sub-Gaussian one
    contrast: float  # how far from Gaussian the sources are
    result: OptimizeResult  # of the solver


def separate(Z: Tensor, seed: int = 0, starts: int = 10) -> Separation:
    """Unmix white signals: the least Gaussian sources found from several random starts.

    There are several stationary points: a source that is nearly Gaussian hardly tells where it
    belongs. With the classic recording one start in five ends at another than the best.
    """
    found = [separate_from(Z, seed + k) for k in range(starts)]
    return max(found, key=lambda each: (each.result.success, each.contrast))


def separate_from(Z: Tensor, seed: int) -> Separation:
    """Unmix from one random start, each source with the sign of the likelihood that suits it."""
    problem = ICA(Z)
    result = problems.separate(problem, problem.start(seed))
    X = result.x
    return Separation(X @ Z, X, result.signs, float(problem.contrast(X)), result)


# --- heart beats


@dataclass(frozen=True)
class Rhythm:
    """The most regular rhythm of a signal."""

    rate: float  # beats per minute
    regularity: float  # autocorrelation after one beat: 1 for a clock, about 0 for noise

    def beats(self, rates: tuple[float, float]) -> bool:
        """Whether this is a heart beat of such a rate."""
        return self.regularity >= REGULAR and rates[0] <= self.rate < rates[1]


def find_rhythm(source: Signal, sampling_rate: float) -> Rhythm:
    """The lag at which the energy of the steep parts of a signal is most like itself.

    A beat is a steep spike of either sign; drifts are not steep. Energies are cut off where only
    one sample in fifty is higher, so that a few strong beats do not hide the others.
    """
    window = max(1, round(0.04 * sampling_rate))  # about the duration of a spike
    energy = np.convolve(np.diff(source) ** 2, np.ones(window), "same")
    energy = np.minimum(energy, np.quantile(energy, 0.98))
    correlations = autocorrelation(energy - energy.mean())
    shortest, longest = 60 * sampling_rate / CHILD[1], 60 * sampling_rate / MOTHER[0]
    lags = np.arange(int(shortest), min(int(longest), len(energy) // 2) + 1)
    lag = lags[correlations[lags].argmax()]
    return Rhythm(60 * sampling_rate / lag, float(correlations[lag]))


def autocorrelation(signal: Signal) -> Signal:
    """Of a centred signal, for each lag, by fast Fourier transforms."""
    samples = len(signal)
    power = np.abs(np.fft.rfft(signal, 2 * samples)) ** 2
    products = np.fft.irfft(power)[:samples]
    pairs = np.arange(samples, 0, -1)
    return products / pairs / (products[0] / samples)


@dataclass(frozen=True)
class Finding:
    """Sources with spikes upwards: the child's first, then the mother's, then all others.

    Within each group the most regular comes first.
    """

    sources: Signal
    rhythms: list[Rhythm]
    child: int  # so many are the child's
    mother: int

    @property
    def kinds(self) -> list[str]:
        """What each source is."""
        others = len(self.rhythms) - self.child - self.mother
        return ["child"] * self.child + ["mother"] * self.mother + ["other"] * others


def find_hearts(sources: Signal, sampling_rate: float) -> Finding:
    """Whose heart beats in which source, by its rate."""
    upright = sources * np.sign((sources**3).mean(1, keepdims=True))
    rhythms = [find_rhythm(source, sampling_rate) for source in upright]
    child = [rhythm.beats(CHILD) for rhythm in rhythms]
    mother = [rhythm.beats(MOTHER) for rhythm in rhythms]
    order = sorted(
        range(len(rhythms)), key=lambda i: (not child[i], not mother[i], -rhythms[i].regularity)
    )
    return Finding(upright[order], [rhythms[i] for i in order], sum(child), sum(mother))


# --- telling and drawing


def summary(
    stamps: Signal, separation: Separation, finding: Finding, sampling_rate: float
) -> list[str]:
    """What was found, in a few lines."""
    samples, result = len(stamps), separation.result
    flat = int((separation.signs < 0).sum())
    lines = [
        f"{samples} samples of {ELECTRODES} electrodes: "
        f"{samples / sampling_rate:.1f} s at {sampling_rate:g} Hz.",
        f"Separated, best of several starts: {result.nit} iterations, "
        f"gradient {result.grad_norm:.0e}, {ELECTRODES - flat} super-Gaussian sources, "
        f"{flat} sub-Gaussian.",
    ]
    if not result.success:
        lines.append(f"The solver did not converge: {result.message}")
    hearts = [_heart(kind, finding) for kind in ("mother", "child")]
    return [*lines, *hearts, *_doubts(stamps, finding, sampling_rate)]


def _heart(kind: str, finding: Finding) -> str:
    numbers = [i for i, other in enumerate(finding.kinds) if other == kind]
    if not numbers:
        return f"{kind.capitalize()}: no heart beat found."
    first, *others = numbers
    rhythm = finding.rhythms[first]
    also = f"; also in {', '.join(str(i + 1) for i in others)}" if others else ""
    return (
        f"{kind.capitalize()}: {rhythm.rate:.0f} beats per minute in source {first + 1} "
        f"(regularity {rhythm.regularity:.2f}){also}."
    )


def _doubts(stamps: Signal, finding: Finding, sampling_rate: float) -> list[str]:
    """What the time stamps say, if they say something else."""
    step = float(np.median(np.diff(stamps)))
    if not finding.child or step <= 0 or abs(step * sampling_rate - 1) < 0.01:
        return []
    rate = finding.rhythms[0].rate / (step * sampling_rate)
    plausible = CHILD[0] <= rate < CHILD[1]
    verdict = "plausible as well: check --rate" if plausible else "not plausible, so --rate stands"
    return [
        f"The time stamps mean {1 / step:.0f} Hz, and {rate:.0f} beats per minute of the child: "
        f"{verdict}."
    ]


COLOURS = {"mother": "#0072B2", "child": "#D55E00", "other": "#7F7F7F"}


def draw(signals: Signal, finding: Finding, sampling_rate: float, path: Path) -> None:
    """Electrodes on the left, sources on the right, the child's in a colour of its own."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(len(signals), 2, sharex=True)
    seconds = np.arange(signals.shape[1]) / sampling_rate
    for i, (left, right) in enumerate(axes):
        _draw_row(left, i, seconds, signals[i], "black")
        _draw_source(right, i, seconds, finding)
    axes[0, 0].set_title("what the electrodes record")
    axes[0, 1].set_title("independent sources, in standard deviations")
    for ax in axes[-1]:
        ax.set_xlabel("seconds")
        ax.spines["bottom"].set_visible(True)
        ax.tick_params(bottom=True)
    figure.savefig(path, dpi=150)


def _draw_source(ax: Axes, i: int, seconds: Signal, finding: Finding) -> None:
    """A source and whose it is; the child's most regular one stands apart."""
    kind, main = finding.kinds[i], i == 0 and finding.child > 0
    colour = COLOURS[kind]
    _draw_row(ax, i, seconds, finding.sources[i], colour, width=1.1 if main else 0.7)
    if kind != "other":
        label = f"{kind}\n{finding.rhythms[i].rate:.0f} / min"
        weight = "bold" if main else "normal"
        place = dict(transform=ax.transAxes, va="center")
        ax.text(1.01, 0.5, label, color=colour, weight=weight, **place)
    if main:
        ax.set_facecolor("#FFF3E6")


def _draw_row(
    ax: Axes, i: int, seconds: Signal, signal: Signal, colour: str, width: float = 0.7
) -> None:
    ax.plot(seconds, signal, color=colour, linewidth=width)
    ax.text(-0.11, 0.5, str(i + 1), transform=ax.transAxes, va="center", ha="right")
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.tick_params(labelsize=7, bottom=False)
    ax.set_xlim(seconds[0], seconds[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; 1 if a file could not be used, or no child's heart was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="the recording: a time stamp and 8 numbers a line")
    parser.add_argument("--out", type=Path, default=Path("foetal_ecg.png"), help="the figure")
    parser.add_argument("--rate", type=float, default=SAMPLING_RATE, help="samples per second")
    parser.add_argument("--seed", type=int, default=0, help="of the random starts")
    options = parser.parse_args(arguments)
    if not 20 <= options.rate <= 1e5:
        parser.error(f"--rate must be from 20 to 100000 samples per second, got {options.rate:g}.")
    try:
        return run(options.path, options.out, options.rate, options.seed)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(path: Path, out: Path, sampling_rate: float, seed: int) -> int:
    """Read, separate, tell, draw."""
    stamps, signals = read_recording(path)
    Z, _ = whiten(torch.from_numpy(signals))
    separation = separate(Z, seed)
    finding = find_hearts(separation.sources.numpy(), sampling_rate)
    print("\n".join(summary(stamps, separation, finding, sampling_rate)))
    draw(signals, finding, sampling_rate, out)
    print(f"Figure: {out}")
    return 0 if finding.child else 1


if __name__ == "__main__":
    sys.exit(main())
