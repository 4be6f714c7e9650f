"""The command ``ortholand``: run experiments and benchmarks, and draw their reports."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

import ortholand
from ortholand.about import table
from ortholand_lab.benchmarks import BENCHMARKS
from ortholand_lab.datasets import DatasetError, Source, dataset_title, find_dataset
from ortholand_lab.experiments import EXPERIMENTS
from ortholand_lab.study.environment import check_device
from ortholand_lab.study.pages import write_page
from ortholand_lab.study.progress import has_no_width, make_console, make_progress
from ortholand_lab.study.records import RunOptions, Store
from ortholand_lab.study.report import stored_runs, tally, write_report, write_tables
from ortholand_lab.study.runner import Job, Run, run_studies, steps_to_do
from ortholand_lab.study.spec import BENCHMARK_PRESETS, EXPERIMENT_PRESETS, AnyStudy, Verdict

WRONG_USE = 2
DAMAGED = 1
INTERRUPTED = 130  # what shells expect after Ctrl-C
USUAL_SECONDS = 60.0  # assumed for an experiment that does not say how long it takes
VERDICT_STYLES = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.OPEN: "yellow"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Names = Annotated[list[str] | None, typer.Argument(help="Which ones; all by default.")]
BenchmarkNames = Annotated[list[str] | None, typer.Argument(help="Which ones; `steps` by default.")]
Preset = Annotated[str, typer.Option(help=f"One of {', '.join(EXPERIMENT_PRESETS)}.")]
BenchmarkPreset = Annotated[str, typer.Option(help=f"One of {', '.join(BENCHMARK_PRESETS)}.")]
Out = Annotated[Path, typer.Option(help="Folder for records, figures and report.")]
Seed = Annotated[int, typer.Option(help="Seed of all random data.")]
Device = Annotated[str, typer.Option(help="The device on which torch computes.")]
Threads = Annotated[
    int | None, typer.Option(help="Number of torch threads; by default, what suits the study.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        help="How many untimed runs go on in parallel; by default, one per core. "
        "Results do not depend on it."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with MNIST (idx) and CIFAR-10 (binary); by default, $ORTHOLAND_DATA, the "
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


@app.command()
def info() -> None:
    """Show what a bug report needs: versions, machine, compiled code or why there is none."""
    typer.echo(table())


@app.command("list")
def list_studies() -> None:
    """List the experiments and the benchmarks."""
    console = make_console()
    experiments = Table(Column("name", no_wrap=True), "title", "paper", "data")
    experiments.title = "ortholand reproduce NAME ..."
    for study in EXPERIMENTS.values():
        cells = (study.name, study.title, study.paper_figure or "beyond it", _data_title(study))
        experiments.add_row(*map(Text, cells))
    benchmarks = Table(Column("name", no_wrap=True), "title", "data")
    benchmarks.title = "ortholand bench NAME ..."
    for study in BENCHMARKS.values():
        benchmarks.add_row(*map(Text, (study.name, study.title, _data_title(study))))
    console.print(experiments)
    console.print(benchmarks)


@app.command()
def reproduce(
    names: Names = None,
    preset: Preset = "quick",
    out: Out = Path("results"),
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
    jobs: Jobs = None,
    data: Data = None,
    offline: Offline = False,
) -> None:
    """Run experiments, judge their claims and write the report.

    Units already recorded in the folder are not run again, so after an interruption the same
    command resumes.
    """
    _check_options(EXPERIMENT_PRESETS, preset, seed, device, threads, jobs)
    common = RunOptions(preset, seed, device, threads or 0)
    chosen = _chosen(names, EXPERIMENTS, "An experiment")
    _run_and_report(chosen, EXPERIMENTS, common, out, jobs, data=data, offline=offline)


@app.command()
def bench(
    names: BenchmarkNames = None,
    preset: BenchmarkPreset = "quick",
    out: Out = Path("results/bench"),
    seed: Seed = 0,
    jobs: Jobs = None,
    data: Data = None,
    offline: Offline = False,
) -> None:
    """Run benchmarks against every installed peer: records, targets, tables, a report."""
    _check_options(BENCHMARK_PRESETS, preset, seed, "cpu", None, jobs)
    common = RunOptions(preset, seed, "cpu", 0)
    chosen = _chosen(names or ["steps"], BENCHMARKS, "A benchmark")
    _run_and_report(chosen, BENCHMARKS, common, out, jobs, data=data, offline=offline)


def _run_and_report(
    studies: Sequence[AnyStudy],
    registry: Mapping[str, AnyStudy],
    common: RunOptions,
    out: Path,
    jobs: int | None,
    *,
    data: Path | None,
    offline: bool,
) -> None:
    """Run studies, print their results, and write a report on everything in the folder."""
    store, console = Store(_usable_folder(out)), make_console()
    try:
        sources = _find_data(studies, data, offline, console)
        todo = [_job(study, common, sources) for study in studies]
        processes = jobs or _cores()
        runs = _run(todo, store, console, processes)
        _print_results(console, runs)
        write_tables(store, runs)
        report = write_report(store, stored_runs(store, registry), processes)
    except KeyboardInterrupt:
        console.print("Interrupted. Finished work is recorded: the same command resumes.")
        raise typer.Exit(INTERRUPTED) from None
    except DatasetError as error:
        _fail(str(error))
    except BrokenPipeError:  # `| head`: nothing is wrong with the folder
        raise
    except OSError as error:
        _fail(f"The results must be written to {out}, but: {error}. Free it or change --out.")
    _end(console, store, report)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A folder filled by `reproduce` or `bench`.")],
    page: Annotated[
        Path | None,
        typer.Option(help="A Markdown page whose marked parts are remade from the records."),
    ] = None,
) -> None:
    """Redraw figures and report from the records in a folder alone."""
    store, console = Store(folder), make_console()
    runs = stored_runs(store, {**EXPERIMENTS, **BENCHMARKS})
    if not runs:
        _tell_damage(store)
        _fail(
            f"A report needs records, but there are no whole ones in {folder}. "
            f"Run: ortholand reproduce --out {folder}"
        )
    _print_results(console, runs)
    try:
        write_tables(store, runs)
        path = write_report(store, runs, _cores())
        if page:
            write_page(page, store, runs)
    except OSError as error:
        _fail(f"The report must be written to {folder}, but: {error}.")
    except ValueError as error:
        _fail(str(error))
    _end(console, store, path)


@app.command()
def errata(names: Names = None) -> None:
    """Measure the statements of the paper that need correction."""
    from ortholand_lab.errata import ERRATA  # here: nothing else needs it

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


def _end(console: Console, store: Store, report: Path) -> None:
    """Say where the report is, and fail if some records could not be used."""
    console.print(f"Report: {report}", soft_wrap=True)
    if _tell_damage(store):
        raise typer.Exit(DAMAGED)


def _tell_damage(store: Store) -> bool:
    """Name each damaged record of the folder on standard error; return whether there are any."""
    damaged = store.damaged()
    for path, reason in damaged.items():
        typer.echo(f"Error: {path}: {reason}.", err=True)
    if damaged:
        typer.echo("Their units count as not run: run them again, or delete the files.", err=True)
    return bool(damaged)


def _print_results(console: Console, runs: Sequence[Run]) -> None:
    """Print tables, and every claim with its verdict."""
    for run in runs:
        for spec, (head, *rows) in run.tables():
            table = Table(title=spec.title)
            for heading in head:
                table.add_column(Text(heading), overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            unlimited = has_no_width(console)
            if unlimited:
                wide = console.options.update(width=10_000)
                table.width = Measurement.get(console, wide, table).maximum
            console.print(table, soft_wrap=unlimited)
        table = Table("claim", "measured", "verdict", show_lines=True, title=run.label)
        for claim, finding in run.findings():
            statement = Text.assemble(claim.statement, (f" ({claim.source})", "dim"))
            verdict = Text(finding.verdict.value, VERDICT_STYLES[finding.verdict])
            table.add_row(statement, Text(finding.measured), verdict)
        if run.study.claims:
            console.print(table)
        _print_notice(console, run.notice)
    _print_line(console, tally(verdict for run in runs for verdict in run.verdicts()))


def _chosen(
    names: Sequence[str] | None, registry: Mapping[str, AnyStudy], what: str
) -> list[AnyStudy]:
    for name in names or ():
        if name not in registry:
            _fail(f"{what} must be one of {', '.join(registry)}; got {name!r}.")
    # In the order of the registry, and each once.
    return [study for study in registry.values() if not names or study.name in names]


def _check_options(
    presets: Sequence[str],
    preset: str,
    seed: int,
    device: str,
    threads: int | None,
    jobs: int | None,
) -> None:
    if preset not in presets:
        _fail(f"--preset must be one of {', '.join(presets)}; got {preset!r}.")
    if not 0 <= seed < 2**63:
        _fail(f"--seed must be at least 0 and below 2^63; got {seed}. Take 0, for example.")
    for name, number in (("threads", threads), ("jobs", jobs)):
        if number is not None and number < 1:
            _fail(f"--{name} must be at least 1; got {number}. Leave it out for a sensible number.")
    try:
        check_device(device)
    except ValueError as error:
        _fail(str(error))


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find_data(
    studies: Sequence[AnyStudy], folder: Path | None, offline: bool, console: Console
) -> dict[str, Source]:
    """Every data set that a study needs, looked up once; notices are printed right away."""
    sources: dict[str, Source] = {}
    for name in dict.fromkeys(e.dataset for e in studies if e.dataset):
        tell = partial(_print_line, console)
        sources[name] = find_dataset(name, folder, offline=offline, tell=tell)
        _print_notice(console, sources[name].notice)
    return sources


def _job(study: AnyStudy, common: RunOptions, sources: Mapping[str, Source]) -> Job:
    source = sources[study.dataset] if study.dataset else None
    identity = source.identity if source else ""
    threads = common.threads or study.threads
    return Job(study, replace(common, threads=threads, data=identity), source)


def _run(todo: Sequence[Job], store: Store, console: Console, processes: int) -> list[Run]:
    work = {job.study.name: _seconds_to_do(job, store) for job in todo}
    with make_progress(console, work) as progress:
        return run_studies(todo, store, progress, processes)


def _seconds_to_do(job: Job, store: Store) -> float:
    """About how long a job will take, for the estimate of the time left."""
    study, preset = job.study, job.options.preset
    steps = sum(unit.steps for unit in study.units(preset))
    to_do = steps_to_do(study, job.options, store)
    return study.seconds.get(preset, USUAL_SECONDS) * to_do / max(1, steps)


def _print_notice(console: Console, notice: str) -> None:
    if notice:
        console.print(Text(f"Note: {notice}", "yellow"), soft_wrap=True)


def _print_line(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)


def _data_title(study: AnyStudy) -> str:
    return dataset_title(study.dataset) if study.dataset else ""


def _usable_folder(out: Path) -> Path:
    """The folder, created if necessary; better to fail now than after an hour of computing."""
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
