"""The command ``ortholand``: run the paper's experiments and draw their report."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import torch

import ortholand

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ortholand.experiments import EXPERIMENTS
    from ortholand.experiments.environment import check_device
    from ortholand.experiments.progress import make_console, make_progress
    from ortholand.experiments.records import Options, Store
    from ortholand.experiments.report import stored_runs, write_report
    from ortholand.experiments.runner import Run, run_experiment
    from ortholand.experiments.spec import PRESETS, AnyExperiment, Verdict
except ModuleNotFoundError as missing:
    sys.exit(
        f"The ortholand command needs {missing.name}, which is not installed. "
        "Run: pip install 'ortholand[experiments]'"
    )

WRONG_USE = 2
INTERRUPTED = 130  # what shells expect after Ctrl-C
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
    table = Table("name", "title", "paper")
    for experiment in EXPERIMENTS.values():
        table.add_row(Text(experiment.name), Text(experiment.title), Text(experiment.paper_figure))
    make_console().print(table)


@app.command()
def reproduce(
    names: Names = None,
    preset: Preset = "quick",
    out: Out = Path("results"),
    seed: Seed = 0,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """Run experiments, judge their claims and write the report.

    What is recorded in the folder already is not run again, so after an interruption the same
    command resumes.
    """
    experiments = _chosen(names)
    _check_options(preset, seed, device, threads)
    store, console = Store(_usable_folder(out)), make_console()
    try:
        with make_progress(console) as progress:
            runs = [
                run_experiment(e, _options_for(e, preset, seed, device, threads), store, progress)
                for e in experiments
            ]
        _print_claims(console, runs)
        report = write_report(store, stored_runs(store, EXPERIMENTS))
    except KeyboardInterrupt:
        console.print("Interrupted. What is done is recorded: the same command resumes.")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `| head`: nothing is wrong with the folder
        raise
    except OSError as error:
        _fail(f"The results must be written to {out}, but: {error}. Free it or change --out.")
    console.print(f"Report: {report}", soft_wrap=True)


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


def _options_for(
    experiment: AnyExperiment, preset: str, seed: int, device: str, threads: int | None
) -> Options:
    threads = threads or experiment.threads or torch.get_num_threads()
    return Options(preset, seed, device, threads)


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
