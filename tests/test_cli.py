import subprocess
import sys
import types
from dataclasses import dataclass, replace

import pytest
from typer.testing import CliRunner

import ortholand
from ortholand import cli
from ortholand.experiments.procrustes import PROCRUSTES, Settings

SETTINGS = Settings(p=3, iterations=8, extra_iterations=4, warm_up=1, repetitions=2)
TINY = replace(PROCRUSTES, settings={"smoke": SETTINGS}, figures=())


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def tiny(monkeypatch):
    """The Procrustes experiment at a size that takes no time."""
    changed = replace(TINY, settings={**PROCRUSTES.settings, **TINY.settings})
    monkeypatch.setitem(cli.EXPERIMENTS, "procrustes", changed)


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


@pytest.mark.usefixtures("tiny")
def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ortholand.experiments.records.write_atomically", full)
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
    monkeypatch.setitem(sys.modules, "ortholand.experiments.errata", module)


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


def test_importing_the_library_imports_no_tools_of_the_command():
    code = (
        "import sys, ortholand; "
        "sys.exit(any(m in sys.modules for m in ('matplotlib', 'rich', 'typer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
