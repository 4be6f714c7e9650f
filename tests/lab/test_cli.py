import sys
import types
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ortholand
from ortholand_lab import cli
from ortholand_lab.datasets import find_dataset, mnist, search
from ortholand_lab.experiments.procrustes import PROCRUSTES, ProcrustesSettings
from ortholand_lab.study.records import RunOptions, Store
from ortholand_lab.study.spec import TableSpec

SETTINGS = ProcrustesSettings(p=3, iterations=8, extra_iterations=4, warm_up=1, repetitions=2)
TINY = replace(PROCRUSTES, settings={"smoke": SETTINGS}, figures=())


def invoke(*arguments):
    """The command in this process; runs too, where a test has changed what is run."""
    if arguments[:1] == ("reproduce",) and "--jobs" not in arguments and "--help" not in arguments:
        arguments = (*arguments, "--jobs", 1)
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def tiny(monkeypatch):
    """The Procrustes experiment at a size that takes no time, and no other."""
    changed = replace(TINY, settings={**PROCRUSTES.settings, **TINY.settings})
    monkeypatch.setattr(cli, "EXPERIMENTS", {"procrustes": changed})


@pytest.fixture
def with_data(monkeypatch, tmp_path):
    """Two experiments with the same data set and one without, which take no time either."""

    def run(task, context):
        assert (context.data is not None) == task.method.startswith("l")
        return TINY.run(task, context)

    def plan(initial, settings):
        units = PROCRUSTES.plan(settings)
        return [u for u in units if getattr(u.task, "method", " ")[0] == initial]

    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)
    monkeypatch.setattr(search, "cache_folder", lambda: tmp_path / "cache")
    settings = {**PROCRUSTES.settings, **TINY.settings}
    base = replace(TINY, settings=settings, run=run, claims=PROCRUSTES.claims[:1])
    experiments = {
        name: replace(base, name=name, plan=partial(plan, initial), dataset=dataset)
        for name, initial, dataset in (("p", "p", None), ("l1", "l", "mnist"), ("l2", "l", "mnist"))
    }
    monkeypatch.setattr(cli, "EXPERIMENTS", experiments)


def assert_one_line_error(result, *parts):
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_version():
    assert invoke("--version").stdout == f"ortholand {ortholand.__version__}\n"


def test_without_a_command_there_is_help():
    output = invoke().output
    for command in ("list", "reproduce", "report", "errata"):
        assert command in output


def test_list_names_every_experiment():
    output = invoke("list").stdout
    for experiment in cli.EXPERIMENTS.values():
        assert experiment.name in output
        assert experiment.paper_figure in output


@pytest.mark.usefixtures("with_data")
def test_list_names_the_data():
    lines = {line.split()[1]: line for line in invoke("list").stdout.splitlines() if "Fig" in line}
    assert ["MNIST" in lines[name] for name in ("p", "l1", "l2")] == [False, True, True]


def test_wrong_use_is_told_in_one_line(tmp_path):
    file = tmp_path / "file"
    file.touch()
    out = ("--out", tmp_path / "out")
    assert_one_line_error(invoke("reproduce", "speeed", *out), "procrustes", "'speeed'")
    assert_one_line_error(invoke("reproduce", "--preset", "slow", *out), "quick", "'slow'")
    assert_one_line_error(invoke("reproduce", "--device", "abacus", *out), "'abacus'", "cpu")
    assert_one_line_error(invoke("reproduce", "--threads", 0, *out), "at least 1", "got 0")
    assert_one_line_error(invoke("reproduce", "--seed", -1, *out), "at least 0", "got -1")
    assert_one_line_error(invoke("reproduce", "--out", file), str(file))
    assert_one_line_error(invoke("reproduce", "--out", file / "below"), "Not a directory")
    assert not (tmp_path / "out").exists()


def test_a_report_needs_records(tmp_path):
    assert_one_line_error(invoke("report", tmp_path), "records", str(tmp_path))
    assert_one_line_error(invoke("report", tmp_path / "nowhere"), "reproduce")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", ["60", "100"])
def test_every_name_that_can_be_typed_is_listed_whole(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = invoke("list").stdout
    assert max(map(len, text.splitlines())) <= int(columns)
    names = [line.split()[1] for line in text.splitlines() if line.startswith("│ ")]
    assert {*cli.EXPERIMENTS, *cli.BENCHMARKS} <= set(names)


@pytest.mark.usefixtures("tiny")
def test_reproduce_and_report(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # standard output is no terminal all the same
    arguments = ("procrustes", "procrustes", "--preset", "smoke", "--seed", 5, "--out", tmp_path)
    result = invoke("reproduce", *arguments, "--threads", 1)
    assert result.exit_code == 0
    assert result.stdout.count("procrustes 1/15") == 1
    for verdict in ("holds", "not decided"):
        assert verdict in result.stdout
    assert not [c for c in result.stdout if c != "\n" and ord(c) < 32]
    page = (tmp_path / "report.html").read_bytes()
    (tmp_path / "report.html").unlink()
    assert invoke("report", tmp_path).exit_code == 0
    assert (tmp_path / "report.html").read_bytes() == page


@pytest.mark.usefixtures("tiny")
def test_damaged_records_are_named_and_fail(tmp_path):
    arguments = ("reproduce", "--preset", "smoke", "--out", tmp_path)
    assert invoke(*arguments).exit_code == 0
    folder = tmp_path / "records/procrustes/smoke-seed0"
    damaged = [folder / "landing-float32.json", folder / "timing.json"]
    for path in damaged:
        path.write_text(path.read_text()[:-9])
    report = invoke("report", tmp_path)
    assert report.exit_code == 1
    assert "Report: " in report.stdout  # of what is whole
    assert [
        path for path in damaged if f"Error: {path}: damaged record" in report.stderr
    ] == damaged
    assert "run them again" in report.stderr
    redone = invoke(*arguments)
    assert redone.exit_code == 0
    assert redone.stdout.count("redone (damaged record: ") == 2
    assert invoke("report", tmp_path).exit_code == 0


@pytest.mark.usefixtures("tiny")
def test_damaged_records_of_other_runs_in_the_folder_are_named_too(tmp_path):
    arguments = ("reproduce", "--preset", "smoke", "--out", tmp_path)
    assert invoke(*arguments, "--seed", 1).exit_code == 0
    path = tmp_path / "records/procrustes/smoke-seed1/timing.json"
    path.write_text("{")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert str(path) in result.stderr


@pytest.mark.usefixtures("tiny")
def test_a_folder_of_damaged_records_alone(tmp_path):
    path = tmp_path / "records/procrustes/smoke-seed0/timing.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = invoke("report", tmp_path)
    assert result.exit_code == 2
    assert str(path) in result.stderr


@pytest.mark.usefixtures("tiny", "errata")
@pytest.mark.parametrize("columns", [60, 100])
def test_every_table_respects_the_width_that_is_asked_for(tmp_path, columns, monkeypatch):
    wide = TableSpec("wide", "Wide", lambda _: [[f"column {i}" for i in range(20)]] * 3)
    experiment = replace(cli.EXPERIMENTS["procrustes"], tables=(wide,))
    monkeypatch.setitem(cli.EXPERIMENTS, "procrustes", experiment)
    arguments = ("reproduce", "--preset", "smoke", "--out", tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it
    widest = max(map(len, invoke(*arguments).stdout.splitlines()))
    assert widest > 200  # a file has room for it
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (("report", tmp_path), ("errata", "good"), ("list",)):
        lines = invoke(*command).stdout.splitlines()
        tables = [line for line in lines if line and line[0] in "┏┃┡│├└"]
        assert tables
        assert max(map(len, tables)) <= columns


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_says_how_to_resume(tmp_path, monkeypatch):
    def run(task, context):
        if task.method == "landing-momentum":
            raise KeyboardInterrupt
        return TINY.run(task, context)

    interrupted = replace(cli.EXPERIMENTS["procrustes"], run=run)
    arguments = ("reproduce", "--preset", "smoke", "--out", tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(cli.EXPERIMENTS, "procrustes", interrupted)
        result = invoke(*arguments)
    assert result.exit_code == 130
    assert result.stdout.endswith("the same command resumes.\n")
    assert result.stdout.count("procrustes 1/15") == 1
    resumed = invoke(*arguments)
    assert resumed.exit_code == 0
    assert resumed.stdout.count("recorded already") == 1


@pytest.mark.usefixtures("with_data")
def test_data_are_looked_up_once_and_a_stand_in_is_told(tmp_path, monkeypatch):
    asked = []

    def watched(name, *arguments, **options):
        asked.append(name)
        return find_dataset(name, *arguments, **options)

    monkeypatch.setattr(cli, "find_dataset", watched)
    arguments = ("reproduce", "--preset", "smoke", "--out", tmp_path)
    result = invoke(*arguments, "--offline")
    assert result.exit_code == 0
    assert asked == ["mnist"]
    first, *rest = result.stdout.splitlines()
    assert first.startswith("Note: MNIST was not found, and was not looked for on the network.")
    assert sum("Note: Not MNIST: the digits" in line for line in rest) == 2  # under their claims
    assert "Not MNIST: the digits of scikit-learn" in (tmp_path / "report.html").read_text()
    again = invoke(*arguments, "--offline")
    units = sum(len(e.units("smoke")) for e in cli.EXPERIMENTS.values())
    assert again.stdout.count("recorded already") == result.stdout.count(" s\n") == units
    monkeypatch.setattr(cli, "find_dataset", None)  # a report looks for no data
    report = invoke("report", tmp_path)
    assert report.exit_code == 0
    assert report.stdout.count("Note: Not MNIST: the digits") == 2


@pytest.mark.usefixtures("with_data")
def test_without_need_no_data_are_looked_up(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "find_dataset", None)
    arguments = ("--preset", "smoke", "--out", tmp_path, "--data", tmp_path / "nowhere")
    assert invoke("reproduce", "p", *arguments).exit_code == 0


@pytest.mark.usefixtures("with_data")
def test_a_folder_without_the_data_is_told_in_one_line(tmp_path):
    arguments = ("--preset", "smoke", "--out", tmp_path / "out", "--data", tmp_path)
    result = invoke("reproduce", *arguments)
    assert_one_line_error(result, "MNIST is not in", str(tmp_path / "mnist"), "idx3-ubyte")
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.usefixtures("with_data")
def test_a_damaged_file_is_told_in_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "mnist"
    folder.mkdir(parents=True)
    for known in mnist.FILES:
        (folder / known.name).write_bytes(b"too short")
    result = invoke("reproduce", "--preset", "smoke", "--out", tmp_path / "out")
    assert_one_line_error(result, str(folder / mnist.FILES[0].name), "ends after 9", "Delete it")


@pytest.mark.usefixtures("tiny")
def test_the_time_left_counts_what_is_not_recorded(tmp_path):
    experiment = replace(cli.EXPERIMENTS["procrustes"], seconds={"smoke": 8.0})
    job, store = cli._job(experiment, RunOptions("smoke", 0, "cpu", 1), {}), Store(tmp_path)
    assert cli._seconds_to_do(job, store) == 8.0
    assert invoke("reproduce", "--preset", "smoke", "--out", tmp_path).exit_code == 0
    store = Store(tmp_path)
    assert cli._seconds_to_do(job, store) == 0.0
    store = Store(tmp_path)
    (tmp_path / "records/procrustes/smoke-seed0/timing.json").unlink()
    assert 0.0 < cli._seconds_to_do(job, store) < 8.0


@pytest.mark.usefixtures("with_data")
def test_ctrl_c_during_a_download(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "find_dataset", interrupted)
    result = invoke("reproduce", "--preset", "smoke", "--out", tmp_path)
    assert result.exit_code == 130
    assert result.stdout.startswith("Interrupted.")


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ortholand_lab.study.records.write_atomically", full)
    result = invoke("reproduce", "--preset", "smoke", "--out", tmp_path)
    assert_one_line_error(result, "No space left", "--out")


@dataclass(frozen=True)
class Erratum:
    name: str
    agrees: bool
    paper: str = "[bold]two"
    corrected: str = "three"
    measured: str = "3.01"


@pytest.fixture
def errata(monkeypatch):
    """Errata that take no time: one that agrees, one that does not."""
    module = types.ModuleType("errata")
    module.ERRATA = {"good": lambda: Erratum("good", True), "bad": lambda: Erratum("bad", False)}
    monkeypatch.setitem(sys.modules, "ortholand_lab.errata", module)


@pytest.mark.usefixtures("errata")
def test_errata_are_measured_and_must_agree():
    good = invoke("errata", "good")
    assert good.exit_code == 0
    for part in ("good", "[bold]two", "three", "3.01", "yes"):
        assert part in good.stdout
    assert "bad" not in good.stdout
    everything = invoke("errata")
    assert everything.exit_code == 1
    assert "NO" in everything.stdout
    unknown = invoke("errata", "ugly")
    assert unknown.exit_code == 1
    assert "good, bad" in unknown.stderr
    assert "'ugly'" in unknown.stderr


def test_info_is_what_the_library_says(monkeypatch):
    monkeypatch.setattr(cli, "table", lambda: "torch  [bold]1")
    result = invoke("info")
    assert result.exit_code == 0
    assert result.stdout == "torch  [bold]1\n"


def test_one_command_reproduces_the_figures_that_need_a_gpu(tmp_path, monkeypatch):
    """As far as it goes without one: a stand-in for the device, and nothing is run."""
    command = ("reproduce", "speed", "cifar", "--preset", "paper", "--device", "cuda", "--offline")
    page = Path(__file__).parents[2] / "docs" / "results" / "index.md"
    assert f"ortholand {' '.join(command[:-1])}" in page.read_text()
    if not torch.cuda.is_available():
        assert_one_line_error(invoke(*command, "--out", tmp_path), "cuda", "--device cpu")
    monkeypatch.setattr(cli, "check_device", torch.device)
    monkeypatch.delenv("ORTHOLAND_DATA", raising=False)
    monkeypatch.setattr(search, "cache_folder", lambda: tmp_path / "cache")
    jobs = []

    def stand_in(todo, *_):
        jobs.extend(todo)
        return []

    monkeypatch.setattr(cli, "_run", stand_in)
    assert invoke(*command, "--out", tmp_path).exit_code == 0
    assert [job.study.name for job in jobs] == ["speed", "cifar"]
    assert {(job.options.device, job.options.preset) for job in jobs} == {("cuda", "paper")}
    trained = {unit.task.method for unit in jobs[1].study.units("paper") if not unit.timed}
    assert {"exponential-textbook", "trivialization-momentum-identity"} < trained
