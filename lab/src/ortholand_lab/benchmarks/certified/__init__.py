"""Networks with certificates: accuracy that no perturbation up to some size can take away."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev

from matplotlib.figure import Figure

from ortholand_lab.benchmarks.certified.contenders import (
    AOC,
    CAYLEY,
    CONTENDERS,
    FREE,
    LANDING,
    MUON,
    RESHAPED,
)
from ortholand_lab.benchmarks.certified.training import (
    ATTACKED_RADII,
    RADII,
    TrainingTask,
    run_training,
)
from ortholand_lab.study.figures import add_legend
from ortholand_lab.study.records import MissingRecordError, Record, Records
from ortholand_lab.study.spec import Claim, FigureSpec, Finding, Study, TableSpec, Unit

SEARCH_SEED = 100
OURS = (LANDING, MUON)
TABLE_RADII = (36, 72, 108)  # of 255


@dataclass(frozen=True)
class CertifiedSettings:
    """What is trained, and for how long.

    Args:
        best: the rate of each method's final runs, which its search found best.
        epochs: of final runs; searches take half as many.
        batch_size: images of a step.
        temperature: of the cross-entropy.
        seeds: how many final runs of each method.
        images: training images at most.
        held_out: training images by which rates are chosen.
        judged: test images at most.
        attacked: test images attacked at their certified radii, and at fixed ones, in each run.
        attack_steps: steps of an attack.
        batches: steps of an epoch, for the progress bar.
    """

    best: tuple[tuple[str, float], ...]
    epochs: int
    batch_size: int
    temperature: float
    seeds: int
    images: int
    held_out: int
    judged: int
    attacked: tuple[int, int]
    attack_steps: int
    batches: int


def plan(settings: CertifiedSettings) -> list[Unit[TrainingTask]]:
    """A short run for each method and rate, and final ones with several seeds."""
    there = [(m, lr) for m, lr in settings.best if CONTENDERS[m].installed]
    searches = [
        task(settings, method, lr, SEARCH_SEED, max(1, settings.epochs // 2), settings.held_out)
        for method, _ in there
        for lr in CONTENDERS[method].rates
    ]
    finals = [
        task(settings, method, lr, seed, settings.epochs, 0)
        for seed in range(settings.seeds)
        for method, lr in there
    ]
    return [Unit(name(t), t, t.epochs * settings.batches) for t in (*searches, *finals)]


def task(
    settings: CertifiedSettings, method: str, lr: float, seed: int, epochs: int, held_out: int
) -> TrainingTask:
    """A training run; a search attacks nothing."""
    return TrainingTask(
        *(method, lr, seed, epochs, settings.batch_size, settings.temperature),
        *(settings.images, held_out, settings.judged),
        *((1, 1) if held_out else settings.attacked, settings.attack_steps),
    )


def name(task: TrainingTask) -> str:
    """The name of a unit."""
    if task.held_out:
        return f"search-{task.method}-lr{task.lr:g}"
    return f"{task.method}-seed{task.seed}"


# What the records say.


def finals(records: Records, method: str) -> list[Record]:
    """The final runs of a method."""
    found = [records[unit] for unit in records if unit.startswith(f"{method}-seed")]
    if not found:
        raise MissingRecordError(f"the runs of {method} are missing")
    return found


def our_finals(records: Records) -> list[Record]:
    """The final runs of the library's methods."""
    return [run for m in methods(records) if m in OURS for run in finals(records, m)]


def methods(records: Records) -> list[str]:
    """The methods with final runs."""
    there = [m for m in CONTENDERS if any(unit.startswith(f"{m}-seed") for unit in records)]
    if not there:
        raise MissingRecordError("no final run is recorded")
    return there


def chosen_rates(records: Records) -> dict[str, float]:
    """The rate with the largest score on the images held out, of each method searched whole."""
    found = {}
    for method, contender in CONTENDERS.items():
        units = {lr: f"search-{method}-lr{lr:g}" for lr in contender.rates}
        if all(unit in records for unit in units.values()):
            found[method] = max(units, key=lambda lr, units=units: _score(records[units[lr]]))
    return found


def _score(search: Record) -> float:
    """What the method says that it certifies at 36/255; accuracy, if it says nothing."""
    if not CONTENDERS[search.configuration["method"]].believed:
        return search.value("accuracy")
    return at(search, "said", TABLE_RADII[0])


def at(record: Record, series: str, radius: int) -> float:
    """A share at a radius, given in units of 1/255."""
    return record.series(series)[RADII.index(radius / 255)]


def as_certified(method: str, rival: str, records: Records) -> Finding:
    """Certified accuracies of a method and a rival, and their spread over seeds."""
    shares = {m: [at(r, "certified", 36) for r in finals(records, m)] for m in (method, rival)}
    words = "; ".join(f"{CONTENDERS[m].label} {spread(values)}" for m, values in shares.items())
    few = min(map(len, shares.values())) < 2
    if few:
        return Finding.of(words, False, "to tell, it takes 2 seeds")
    ours, theirs = shares[method], shares[rival]
    return Finding.of(words, fmean(ours) >= fmean(theirs) - max(map(stdev, shares.values())))


def nothing_changes(records: Records) -> Finding:
    """How many predictions an attack changed within the certified radius."""
    runs = our_finals(records)
    attacked, changed = (sum(r.value(n) for r in runs) for n in ("attacked", "changed"))
    doubt = "" if attacked >= 10_000 else "it takes 10,000 samples"
    return Finding.of(f"{changed:,.0f} of {attacked:,.0f} samples", changed == 0, doubt)


def bound_holds(records: Records) -> Finding:
    """The bound of the library against the measured norms of the layers."""
    runs = our_finals(records)
    excess = [r.value("said_bound") / r.value("bound") - 1 for r in runs]
    return Finding.of(
        f"{min(excess):.1e} to {max(excess):.1e} above the product of the measured norms",
        min(excess) >= 0 and max(excess) < 1e-3,
    )


def step_is_cheaper(method: str, rival: str, records: Records) -> Finding:
    """The time of a step of training, relative to a rival's."""
    ours, theirs = (fmean(r.value("step") for r in finals(records, m)) for m in (method, rival))
    words = f"{1e3 * ours:.1f} ms against {1e3 * theirs:.1f} ms"
    return Finding.of(f"{ours / theirs:.2f}: {words}", ours <= 0.8 * theirs)


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, in percent."""
    percent = [100 * value for value in values]
    return f"{fmean(percent):.1f}" + (f" ± {stdev(percent):.1f}" if len(percent) > 1 else "")


def make_table(records: Records) -> list[list[str]]:
    """A row for each method: accuracies in percent, mean and standard deviation over seeds."""
    certified = [f"certified {r}/255" for r in TABLE_RADII]
    attacked = [f"attacked {r}/255" for r in TABLE_RADII]
    head = [*("method", "lr", "seeds", "clean", *certified, *attacked)]
    rows = [[*head, "bound said", "bound measured", "changed", "step, ms", "parameters"]]
    for method in methods(records):
        runs = finals(records, method)
        rows.append([CONTENDERS[method].label, f"{runs[0].configuration['lr']:g}", str(len(runs))])
        rows[-1] += [spread([run.value("accuracy") for run in runs])]
        rows[-1] += [spread([at(run, "certified", r) for run in runs]) for r in TABLE_RADII]
        rows[-1] += [spread([run.value(f"robust_{r}") for run in runs]) for r in TABLE_RADII]
        rows[-1] += [f"{fmean(r.value(n) for r in runs):.4g}" for n in ("said_bound", "bound")]
        attacked, changed = (sum(r.value(n) for r in runs) for n in ("attacked", "changed"))
        rows[-1] += [f"{changed:,.0f} of {attacked:,.0f}"]
        rows[-1] += [f"{1e3 * fmean(r.value('step') for r in runs):.1f}"]
        rows[-1] += [f"{runs[0].value('parameters'):,.0f}"]
    return rows


def search_table(records: Records) -> list[list[str]]:
    """What each rate of each method gave on the images held out."""
    rows = [["method", "lr", "clean", "said to be certified at 36/255"]]
    for unit in (unit for unit in records if unit.startswith("search-")):
        run = records[unit]
        label, lr = CONTENDERS[run.configuration["method"]].label, run.configuration["lr"]
        said = f"{100 * at(run, 'said', 36):.1f}"
        rows.append([label, f"{lr:g}", f"{100 * run.value('accuracy'):.1f}", said])
    return rows


def draw(records: Records) -> Figure:
    """Certified accuracy against the radius: solid if proved; what is only said, dotted."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    x = [255 * r for r in RADII]
    for method in methods(records):
        contender, runs = CONTENDERS[method], finals(records, method)
        look = dict(color=contender.colour, linewidth=1.8)
        axes.plot(x, _means(runs, "certified"), label=contender.label, **look)
        if method == RESHAPED:
            axes.plot(x, _means(runs, "said"), ":", label="its wrong certificate", **look)
        attacked = [
            fmean(run.value(f"robust_{255 * r:.0f}") for run in runs) for r in ATTACKED_RADII
        ]
        axes.plot([255 * r for r in ATTACKED_RADII], attacked, "o", **look, markersize=5)
    axes.set(xlabel="radius, units of 1/255", ylabel="certified accuracy (dots: under attack)")
    shown = [255 * r for m in methods(records) for r in _radii_above(finals(records, m), 0.005)]
    axes.set_xlim(0, max(shown, default=1.0))
    axes.set_ylim(bottom=0)
    add_legend(figure, axes, 3)
    return figure


def _radii_above(runs: Sequence[Record], share: float) -> list[float]:
    return [r for r, y in zip(RADII, _means(runs, "certified"), strict=True) if y > share]


def _means(runs: Sequence[Record], series: str) -> list[float]:
    return [fmean(values) for values in zip(*(run.series(series) for run in runs), strict=True)]


def claims(rival: str) -> tuple[Claim, ...]:
    """What is claimed of the library's methods, and of each beside a rival."""
    theirs, beside = CONTENDERS[rival].label, []
    for method in OURS:
        ours = CONTENDERS[method].label
        accurate = f"{ours}: certified accuracy at 36/255 is that of {theirs}, or more, less one "
        cheap = f"{ours}: a step of training takes at most 0.8 of the processor time of {theirs}."
        beside += [
            Claim.beyond(accurate + "standard deviation.", partial(as_certified, method, rival)),
            Claim.beyond(cheap, partial(step_is_cheaper, method, rival)),
        ]
    return (
        *beside,
        Claim.beyond(
            "No prediction changes within its certified radius, in 10,000 attacked samples.",
            nothing_changes,
        ),
        Claim.beyond(
            "The bound holds, and is less than 0.1 % above the product of the measured norms.",
            bound_holds,
        ),
    )


WHOLE = CertifiedSettings(
    best=((LANDING, 0.03), (MUON, 0.05), (AOC, 0.03), (RESHAPED, 0.003), (FREE, 0.003)),
    epochs=4,
    batch_size=64,
    temperature=4.0,
    seeds=3,
    images=60_000,
    held_out=1_000,
    judged=10_000,
    attacked=(3_334, 300),
    attack_steps=10,
    batches=156,
)
PERCEPTRONS = replace(
    WHOLE,
    best=((LANDING, 0.1), (MUON, 0.05), (CAYLEY, 0.003), (FREE, 0.003)),
    epochs=2,
    batch_size=128,
    batches=468,
)


def presets(whole: CertifiedSettings) -> dict[str, CertifiedSettings]:
    """The whole study, after smaller ones."""
    quick = replace(whole, epochs=2, seeds=1, images=2_000, judged=1_000, attacked=(10, 10))
    smoke = replace(quick, epochs=1, images=200, held_out=50, judged=20, batch_size=50)
    return {"smoke": smoke, "quick": quick, "full": whole}


CERTIFIED = Study(
    name="certified",
    title="Networks with certificates on CIFAR-10: landing, AOC, reshaped kernels, no constraint",
    summary=(
        "Four convolutions with circular padding and two linear layers, MaxMin between them. All "
        "are trained alike, except for how weights keep norms. Each method takes the best of three "
        "rates of a search with half the epochs, judged on 1,000 training images held out. Bounds "
        "of other methods are the products of the measured norms of their layers. The attack is "
        "projected gradient descent on the margin."
    ),
    settings=presets(WHOLE),
    plan=plan,
    run=run_training,
    claims=claims(AOC),
    figures=[FigureSpec("certified", "Certified accuracy on CIFAR-10 against the radius", draw)],
    tables=(
        TableSpec("certified", "Accuracy, certificates and attacks, in percent", make_table),
        TableSpec("certified-rates", "Learning rates", search_table),
    ),
    dataset="cifar10",
    seconds={"smoke": 30, "quick": 150, "full": 900},
)

CERTIFIED_MNIST = replace(
    CERTIFIED,
    name="certified-mnist",
    title="Fully connected networks with certificates on MNIST: landing and Cayley layers",
    summary=(
        "Three linear layers, 784-128-128-10, trained and judged as in the study certified. The "
        "Cayley layers are written after Trockman and Kolter (2021)."
    ),
    settings=presets(PERCEPTRONS),
    claims=claims(CAYLEY),
    figures=[FigureSpec("certified-mnist", "Certified accuracy on MNIST against the radius", draw)],
    tables=(
        TableSpec("certified-mnist", "Accuracy, certificates and attacks, in percent", make_table),
        TableSpec("certified-mnist-rates", "Learning rates", search_table),
    ),
    dataset="mnist",
    seconds={"smoke": 10, "quick": 60, "full": 300},
)
