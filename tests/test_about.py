"""What a report of a bug needs: complete, without any extra, and never an error of its own."""

import pwd
import subprocess
import sys

import numpy as np
import pytest
import torch

import ortholand
from ortholand import __main__, about, native
from ortholand.native import library_folder

NAMES = {
    "ortholand",
    "Python",
    "torch",
    "numpy",
    "platform",
    "processor",
    "threads",
    "torch's vectors",
    "compiled code",
    "cache folder",
}


@pytest.fixture(autouse=True)
def _switched_off(monkeypatch):
    """Nothing is compiled for these tests; those of compiled code: native/test_prebuilt.py."""
    monkeypatch.setenv("ORTHOLAND_NATIVE", "0")
    native.forget()
    yield
    native.forget()


def test_all_facts_are_there():
    facts = about.facts()
    assert set(facts) == NAMES
    assert all(value and "\n" not in value for value in facts.values())
    assert facts["ortholand"] == ortholand.__version__
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["threads"].startswith(f"{torch.get_num_threads()} of torch")
    assert facts["cache folder"] == str(library_folder())
    assert native.SWITCHED_OFF in facts["compiled code"]


def test_one_line_for_each(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    width = len("torch's vectors") + 2
    rows = [(line[:width].strip(), line[width:]) for line in about.table().splitlines()]
    assert rows == list(about.facts().items())


def test_narrow_lines_where_they_are_asked_for_but_no_broken_words(monkeypatch):
    whole = about.table()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = about.table()
    words = [line.split() for line in narrow.splitlines()]
    margin = len("torch's vectors") + 2
    assert [word for line in words for word in line] == whole.split()
    for line, (name, *rest) in zip(narrow.splitlines(), words, strict=True):
        assert len(line) <= 40 or line[margin:] in (name, *rest)  # a word that is too long
        assert line[:margin].strip() in (*NAMES, "")


def test_without_a_home(monkeypatch):
    def unknown(_):
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "ORTHOLAND_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert about.facts()["cache folder"].startswith("none: ")


@pytest.mark.parametrize("content", [None, b"", b"flags: a\n", b"\xff\xfe", b"model name\t:\n"])
def test_a_processor_without_a_name(monkeypatch, tmp_path, content):
    path = tmp_path / "cpuinfo"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(about, "CPUINFO", path)
    assert about.facts()["processor"]


@pytest.mark.parametrize("arguments", [[], ["info"]])
@pytest.mark.thorough
def test_the_module_prints_them_without_extras(arguments):
    hidden = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib')))\n"
    code = f"{hidden}sys.argv[1:] = {arguments}\nfrom ortholand.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["ortholand", ortholand.__version__]


def test_python_m(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it
    command = [sys.executable, "-m", "ortholand"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("ortholand ")
    assert native.SWITCHED_OFF in said


def test_other_arguments_are_the_command_s(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ortholand", "--version"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 0
    assert capsys.readouterr().out == f"ortholand {ortholand.__version__}\n"


@pytest.mark.parametrize("missing", ["ortholand_lab", "typer"])
@pytest.mark.thorough
def test_without_the_laboratory_one_line_says_how_to_install_it(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['reproduce', 'plam']\n"
    code += "from ortholand.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"'reproduce' is a command of the laboratory, but {missing}")
    assert line.endswith("is not installed. In a clone of ortholand run: pip install ./lab")
