"""The example on signals made up here; and on the real recording, if ORTHOLAND_DATA has it."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ortholand as ol
from ortholand.geometry import riemannian_gradient
from ortholand_lab.problems import ICA, amari_distance, whiten
from tests.examples.loading import load_example

pytest.importorskip("matplotlib")

foetal_ecg = load_example("foetal_ecg")


def heart(rate, *, seconds, sampling_rate, rng):
    """Spikes up and down, as steep as those of a heart, at intervals that vary by 2 %."""
    time = np.arange(round(seconds * sampling_rate)) / sampling_rate
    intervals = 60 / rate * (1 + 0.02 * rng.standard_normal(1000))
    beats = np.cumsum(intervals) - 0.7 * 60 / rate
    signal = np.zeros_like(time)
    for beat in beats[beats < seconds]:
        phase = (time - beat) / 0.012
        signal += (1 + 0.1 * rng.standard_normal()) * phase * np.exp(-(phase**2))
    return signal


def sources(child=140.0, mother=75.0, *, seconds=10, sampling_rate=250.0, seed=0):
    """Two hearts, breathing, hum, and noise of four kinds; of variance 1."""
    rng = np.random.default_rng(seed)
    options = dict(seconds=seconds, sampling_rate=sampling_rate, rng=rng)
    samples = round(seconds * sampling_rate)
    time = np.arange(samples) / sampling_rate
    S = np.stack(
        [
            heart(mother, **options),
            heart(child, **options) if child else rng.laplace(size=samples),
            np.sin(2 * np.pi * 0.23 * time),
            rng.uniform(-1, 1, samples),
            rng.laplace(size=samples),
            rng.standard_normal(samples),
            rng.standard_normal(samples) ** 3,
            rng.laplace(size=samples),
        ]
    )
    S -= S.mean(1, keepdims=True)
    return S / S.std(1, keepdims=True)


def mix(S, seed=1):
    """The mother is ten times as strong as everything else."""
    mixing = np.random.default_rng(seed).standard_normal((8, 8))
    mixing[:, 0] *= 10
    return mixing @ S


def write(path, signals, step=0.002):
    """In the format of the recording, with its time stamps."""
    stamps = step * np.arange(signals.shape[1])
    np.savetxt(path, np.vstack([stamps, signals]).T, fmt="%16.7e", delimiter="\t")
    return path


@pytest.fixture
def recording(tmp_path):
    return write(tmp_path / "recording.dat", mix(sources()))


def test_the_faster_heart_is_found_and_drawn(recording, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    assert foetal_ecg.main([str(recording), "--out", str(figure)]) == 0
    text = capsys.readouterr().out
    assert "2500 samples of 8 electrodes: 10.0 s at 250 Hz" in text
    assert "5 super-Gaussian" in text or "6 super-Gaussian" in text  # of one is Gaussian
    assert "Child: 14" in text or "Child: 13" in text
    assert "Mother: 7" in text
    assert "did not converge" not in text
    # The stamps mean 500 Hz, at which a heart would beat twice as fast.
    assert "time stamps mean 500 Hz" in text
    assert "not plausible" in text
    from matplotlib.image import imread

    picture = imread(figure)
    assert picture.shape[0] > 500
    assert 0.01 < (picture[..., :3].min(-1) < 0.5).mean() < 0.5  # neither empty nor full


@pytest.mark.parametrize(
    ("child", "mother", "sampling_rate"),
    [(140, 75, 250.0), (125, 90, 250.0), (155, 62, 500.0), (132, 81, 1000.0)],
)
def test_sources_and_rates_are_those_that_were_mixed(child, mother, sampling_rate):
    S = sources(child, mother, sampling_rate=sampling_rate)
    Z, _ = whiten(torch.from_numpy(mix(S)))
    separation = foetal_ecg.separate(Z)
    assert separation.result.success
    finding = foetal_ecg.find_hearts(separation.sources.numpy(), sampling_rate)
    assert finding.kinds[:2] == ["child", "mother"]
    assert abs(finding.rhythms[0].rate - child) < 3
    assert abs(finding.rhythms[finding.child].rate - mother) < 3
    for found, true in ((0, S[1]), (finding.child, S[0])):
        assert abs(np.corrcoef(finding.sources[found], true)[0, 1]) > 0.98


def test_all_sources_are_found_sub_gaussian_ones_too():
    S = sources(seconds=40)
    signals = mix(S)
    Z, K = whiten(torch.from_numpy(signals))
    separation = foetal_ecg.separate(Z)
    mixing = torch.linalg.lstsq(torch.from_numpy(S.T), torch.from_numpy(signals.T)).solution.mT
    assert amari_distance(separation.unmixing, K @ mixing) < 0.03
    assert (separation.signs < 0).sum() in (2, 3)  # sine, uniform noise, perhaps the Gaussian
    assert torch.equal(separation.signs, ICA(Z).signs_at(separation.unmixing))


def test_every_start_finds_signs_that_suit():
    Z, _ = whiten(torch.from_numpy(mix(sources())))
    for seed in range(5):
        separation = foetal_ecg.separate_from(Z, seed)
        assert separation.result.success
        problem = ICA(Z, separation.signs)
        X = separation.unmixing
        assert ol.distance(X) < 1e-12
        assert riemannian_gradient(X, problem.grad(X)).norm() < 1e-9
        assert problem.adapted(X) is problem


def test_without_a_child_none_is_found(tmp_path, capsys):
    path = write(tmp_path / "mother.dat", mix(sources(child=None)))
    assert foetal_ecg.main([str(path), "--out", str(tmp_path / "figure.png")]) == 1
    text = capsys.readouterr().out
    assert "Child: no heart beat found." in text
    assert "Mother: 7" in text
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_noise_does_not_beat():
    rng = np.random.default_rng(0)
    for noise in (rng.standard_normal(2500), rng.laplace(size=2500), rng.uniform(size=2500)):
        rhythm = foetal_ecg.find_rhythm(noise, 250.0)
        assert not rhythm.beats((0, np.inf))


def test_stamps_that_agree_with_the_rate_raise_no_doubts(tmp_path, capsys):
    path = write(tmp_path / "recording.dat", mix(sources()), step=1 / 250)
    assert foetal_ecg.main([str(path), "--out", str(tmp_path / "figure.png")]) == 0
    assert "time stamps" not in capsys.readouterr().out


def test_the_autocorrelation_is_that_of_its_definition():
    signal = np.random.default_rng(0).standard_normal(50)
    found = foetal_ecg.autocorrelation(signal)
    for lag in (0, 1, 7, 30):
        expected = np.mean(signal[: 50 - lag] * signal[lag:]) / np.mean(signal**2)
        assert abs(found[lag] - expected) < 1e-12


LINE = "0.0 1 2 3 4 5 6 7 8\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 samples"),
        (10 * LINE, "has 10 samples: too few"),
        (LINE + "0.0 1 2 3 4 5 6 7\n", "line 2 .* 9 numbers.*got 8 columns"),
        (LINE + "0.0 1 2 3 x 5 6 7 8\n", "line 2 .* 9 numbers.*got '0.0 1 2 3 x"),
        (LINE + "0.0 1 2 3 nan 5 6 7 8\n", "line 2 .* 9 numbers.*nan"),
        (600 * LINE, "only 0 independent signals"),
        (b"\xff\xfe\x00\x81", "not a text file"),
    ],
    ids=["empty", "short", "columns", "words", "nan", "constant", "binary"],
)
def test_files_that_cannot_be_used_are_an_error(content, message, tmp_path, capsys):
    path = tmp_path / "bad.dat"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert foetal_ecg.main([str(path), "--out", str(tmp_path / "figure.png")]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("error: ")
    assert streams.err.count("\n") == 1
    assert re.search(message, streams.err)
    assert not (tmp_path / "figure.png").exists()


def test_a_file_that_is_not_there_is_an_error(tmp_path, capsys):
    assert foetal_ecg.main([str(tmp_path / "nothing.dat")]) == 1
    assert "There is no file" in capsys.readouterr().err
    assert foetal_ecg.main([str(tmp_path)]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_figure_that_cannot_be_written_is_an_error(recording, tmp_path, capsys):
    for out in (tmp_path / "nowhere" / "figure.png", tmp_path / "figure.xyz"):
        assert foetal_ecg.main([str(recording), "--out", str(out)]) == 1
        assert "error: " in capsys.readouterr().err


def test_a_sampling_rate_that_makes_no_sense_is_an_error(recording, capsys):
    with pytest.raises(SystemExit):
        foetal_ecg.main([str(recording), "--rate", "0"])
    assert "--rate must be from 20" in capsys.readouterr().err


# --- the real recording, and those who separate it, too


@pytest.fixture(scope="module")
def real():
    path = Path(os.environ.get("ORTHOLAND_DATA", "")) / "foetal_ecg.dat"
    if "ORTHOLAND_DATA" not in os.environ or not path.exists():
        pytest.skip("ORTHOLAND_DATA names no folder with foetal_ecg.dat")
    return path


@pytest.fixture(scope="module")
def white(real):
    _, signals = foetal_ecg.read_recording(real)
    return whiten(torch.from_numpy(signals))[0]


def test_the_child_of_the_recording_is_found(real, tmp_path, capsys):
    assert foetal_ecg.main([str(real), "--out", str(tmp_path / "figure.png")]) == 0
    text = capsys.readouterr().out
    assert "Mother: 81 beats" in text
    assert "Child: 134 beats" in text


# The recording has three stationary points that somebody stops at. Of the first 30 starts we reach
# the one of largest contrast from 24, FastICA from 25, picard from 28; from the same start we end
# where FastICA does 19 times, where picard does 23 times, and these two agree 23 times. The worst
# point, without a sub-Gaussian source, only we stop at (3 times): it is a minimum for its signs,
# but FastICA moves on from it. So all get the same ten starts, and the largest contrast counts.
STARTS = range(10)


def by_fastica(white, start):
    from sklearn.decomposition import FastICA

    options = dict(algorithm="parallel", fun="logcosh", whiten=False, tol=1e-13, max_iter=2000)
    return FastICA(w_init=start, **options).fit(white.numpy().T).components_


def by_picard(white, start):
    picard = pytest.importorskip("picard").picard
    options = dict(ortho=True, whiten=False, centering=False, tol=1e-9, max_iter=2000)
    return picard(white.numpy(), w_init=start, **options)[1]


@pytest.mark.parametrize("peer", [by_fastica, by_picard])
def test_peers_find_the_same_sources_from_the_same_starts(white, peer):
    problem = ICA(white)
    theirs = [torch.from_numpy(peer(white, problem.start(k).numpy())) for k in STARTS]
    ours = [foetal_ecg.separate_from(white, k).unmixing for k in STARTS]
    for W in theirs:  # whatever they stop at is stationary for our cost, with signs that suit
        gradient = riemannian_gradient(W, problem.adapted(W).grad(W))
        assert gradient.norm() < 1e-6
    best, their_best = (max(found, key=problem.contrast) for found in (ours, theirs))
    assert torch.equal(best, foetal_ecg.separate(white, starts=len(STARTS)).unmixing)
    assert amari_distance(best, their_best.mT) < 1e-5
    same = [amari_distance(W, V.mT) < 1e-5 for W, V in zip(ours, theirs, strict=True)]
    assert sum(same) > len(STARTS) / 2


@pytest.mark.parametrize("peer", [by_fastica, by_picard])
def test_peers_stay_at_the_best_point(white, peer):
    X = foetal_ecg.separate(white).unmixing
    assert amari_distance(X, torch.from_numpy(peer(white, X.numpy())).mT) < 1e-5
