"""The command ``ortholand``: run the paper's experiments and draw their report."""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import torch

import ortholand
from ortholand.datasets import DatasetError, Source, dataset_title, find_dataset

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ortholand.experiments import EXPERIMENTS
    from ortholand.experiments.environment import check_device
    from ortholand.experiments.progress import make_console, make_progress
    from ortholand.experiments.records import Options, Store, write_atomically
    from ortholand.experiments.report import stored_runs, tally, write_report
    from ortholand.experiments.runner import Run, run_experiment, steps_to_do
    from ortholand.experiments.spec import PRESETS, AnyExperiment, Verdict
except ModuleNotFoundError as missing:
    sys.exit(
        f"The ortholand command needs {missing.name}, which is not installed. "
        "Run: pip install 'ortholand[experiments]'"
    )

WRONG_USE = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C
USUAL_SECONDS = 60.0  # that an experiment takes which does not say how long it does
VERDICT_STYLES = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.OPEN: "yellow"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Names = Annotated[list[str] | None, typer.Argument(help="Which ones; all if none is given.")]
Preset = Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")]
Out = Annotated[Path, typer.Option(help="Folder for records, figures and report.")]
Seed = Annotated[int, typer.Option(help="Seed of all random data.")]
Device = Annotated[str, typer.Option(help="Where torch computes.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads of torch; if not given, what suits the experiment.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with MNIST (idx) and CIFAR-10 (binary); if not given, $ORTHOLAND_DATA, the "
        "cache folder or a download."
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Download nothing.")]


def main() -> None:
    """Entry point."""
    app()


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """The landing algorithm: the paper's experiments, with claims, figures and a report."""
    if version:
        typer.echo(f"ortholand {ortholand.__version__}")
        raise typer.Exit


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    table = Table("name", "title", "paper", "data")
    for experiment in EXPERIMENTS.values():
        cells = (
            experiment.name,
            experiment.title,
            experiment.paper_figure,
            _data_title(experiment),
        )
        table.add_row(*map(Text, cells))
    make_console().print(table)


@app.command()
def reproduce(
    names: Names = None,
    preset: Preset = "quick",
    out: Out = Path("results"),
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    data: Data = None,
    offline: Offline = False,
) -> None:
    """Run experiments, judge their claims and write the report.

    What is recorded in the folder already is not run again, so after an interruption the same
    command resumes.
    """
    _check_options(preset, seed, device, threads)
    common = Options(preset, seed, device, threads or 0)
    _run_and_report(_chosen(names), EXPERIMENTS, common, out, data=data, offline=offline)


@app.command()
def bench(
    preset: Preset = "quick",
    out: Out = Path("results/bench"),
    seed: Seed = 0,
) -> None:
    """Time and memory of one step, against every peer that is installed.

    Writes records, a report with figures, and the times as JSON and as a table.
    """
    from ortholand.bench import BENCH, bench_json, markdown_table  # here: nothing else needs it

    _check_options(preset, seed, "cpu", None)
    common = Options(preset, seed, "cpu", 0)
    (run,) = _run_and_report([BENCH], {BENCH.name: BENCH}, common, out)
    write_atomically(out / "bench.json", bench_json(run.records).encode())
    table = markdown_table(run.records)
    write_atomically(out / "bench.md", table.encode())
    typer.echo(table)


def _run_and_report(
    experiments: Sequence[AnyExperiment],
    registry: Mapping[str, AnyExperiment],
    common: Options,
    out: Path,
    *,
    data: Path | None = None,
    offline: bool = False,
) -> Sequence[Run]:
    """Run experiments, print what the claims come to, write the report of all in the folder."""
    store, console = Store(_usable_folder(out)), make_console()
    try:
        sources = _find_data(experiments, data, offline, console)
        jobs = [_job(experiment, common, sources) for experiment in experiments]
        runs = _run(jobs, store, console)
        _print_claims(console, runs)
        report = write_report(store, stored_runs(store, registry))
    except KeyboardInterrupt:
        console.print("Interrupted. What is done is recorded: the same command resumes.")
        raise typer.Exit(INTERRUPTED) from None
    except DatasetError as error:
        _fail(str(error))
    except BrokenPipeError:  # `| head`: nothing is wrong with the folder
        raise
    except OSError as error:
        _fail(f"The results must be written to {out}, but: {error}. Free it or change --out.")
    console.print(f"Report: {report}", soft_wrap=True)
    return runs


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder that `reproduce` has filled.")],
) -> None:
    """Draw figures and report again, from the records in a folder alone."""
    store, console = Store(folder), make_console()
    runs = stored_runs(store, EXPERIMENTS)
    if not runs:
        _fail(
            f"A report needs records, but there are no whole ones in {folder}. "
            f"Run: ortholand reproduce --out {folder}"
        )
    _print_claims(console, runs)
    try:
        path = write_report(store, runs)
    except OSError as error:
        _fail(f"The report must be written to {folder}, but: {error}.")
    console.print(f"Report: {path}", soft_wrap=True)


@app.command()
def errata(names: Names = None) -> None:
    """Measure the statements of the paper that need a correction."""
    from ortholand.experiments.errata import ERRATA  # here: nothing else needs it

    for name in names or ():
        if name not in ERRATA:
            _fail(f"An erratum must be one of {', '.join(ERRATA)}; got {name!r}.", code=1)
    table = Table("name", "paper", "corrected", "measured", "agrees", show_lines=True)
    measured = [ERRATA[name]() for name in names or ERRATA]
    for e in measured:
        agrees = Text("yes", "green") if e.agrees else Text("NO", "red")
        table.add_row(Text(e.name), Text(e.paper), Text(e.corrected), Text(e.measured), agrees)
    make_console().print(table)
    if not all(e.agrees for e in measured):
        raise typer.Exit(1)


def _print_claims(console: Console, runs: Sequence[Run]) -> None:
    for run in runs:
        table = Table("claim", "measured", "verdict", show_lines=True, title=run.label)
        for claim, finding in run.findings():
            statement = Text.assemble(claim.statement, (f" ({claim.source})", "dim"))
            verdict = Text(finding.verdict.value, VERDICT_STYLES[finding.verdict])
            table.add_row(statement, Text(finding.measured), verdict)
        console.print(table)
        _print_notice(console, run.notice)
    _print_line(console, tally(verdict for run in runs for verdict in run.verdicts()))


def _chosen(names: Sequence[str] | None) -> list[AnyExperiment]:
    for name in names or ():
        if name not in EXPERIMENTS:
            _fail(f"An experiment must be one of {', '.join(EXPERIMENTS)}; got {name!r}.")
    # In the order of the registry, and each once.
    return [e for e in EXPERIMENTS.values() if not names or e.name in names]


def _check_options(preset: str, seed: int, device: str, threads: int | None) -> None:
    if preset not in PRESETS:
        _fail(f"--preset must be one of {', '.join(PRESETS)}; got {preset!r}.")
    if not 0 <= seed < 2**63:
        _fail(f"--seed must be at least 0 and below 2^63; got {seed}. Take 0, for example.")
    if threads is not None and threads < 1:
        _fail(f"--threads must be at least 1; got {threads}. Leave it out for a sensible number.")
    try:
        check_device(device)
    except ValueError as error:
        _fail(str(error))


class Job(NamedTuple):
    """What is to be run: with which options and data."""

    experiment: AnyExperiment
    options: Options
    source: Source | None


def _find_data(
    experiments: Sequence[AnyExperiment], folder: Path | None, offline: bool, console: Console
) -> dict[str, Source]:
    """Every data set that an experiment needs, looked up once; notices are told right away."""
    sources: dict[str, Source] = {}
    for name in dict.fromkeys(e.dataset for e in experiments if e.dataset):
        tell = partial(_print_line, console)
        sources[name] = find_dataset(name, folder, offline=offline, tell=tell)
        _print_notice(console, sources[name].notice)
    return sources


def _job(experiment: AnyExperiment, common: Options, sources: Mapping[str, Source]) -> Job:
    threads = common.threads or experiment.threads or torch.get_num_threads()
    source = sources[experiment.dataset] if experiment.dataset else None
    identity = source.identity if source else ""
    return Job(experiment, replace(common, threads=threads, data=identity), source)


def _run(jobs: Sequence[Job], store: Store, console: Console) -> list[Run]:
    work = {job.experiment.name: _seconds_to_do(job, store) for job in jobs}
    with make_progress(console, work) as progress:
        return [
            run_experiment(job.experiment, job.options, store, progress, job.source) for job in jobs
        ]


def _seconds_to_do(job: Job, store: Store) -> float:
    """About how long a job will take, for the estimate of the time left."""
    experiment, preset = job.experiment, job.options.preset
    steps = sum(unit.steps for unit in experiment.units(preset))
    to_do = steps_to_do(experiment, job.options, store)
    return experiment.seconds.get(preset, USUAL_SECONDS) * to_do / max(1, steps)


def _print_notice(console: Console, notice: str) -> None:
    if notice:
        console.print(Text(f"Note: {notice}", "yellow"), soft_wrap=True)


def _print_line(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)


def _data_title(experiment: AnyExperiment) -> str:
    return dataset_title(experiment.dataset) if experiment.dataset else ""


def _usable_folder(out: Path) -> Path:
    """The folder, created if need be; found out now and not after an hour of computing."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        _fail(f"--out must be a folder to write in; got {out} ({error.strerror}). Choose another.")


def _fail(message: str, code: int = WRONG_USE) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
