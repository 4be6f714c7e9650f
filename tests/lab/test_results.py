"""The committed records are whole and of the present studies; docs/results/paper.md shows them."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from ortholand_lab.benchmarks import BENCHMARKS
from ortholand_lab.experiments import EXPERIMENTS
from ortholand_lab.experiments.classification import best_rates
from ortholand_lab.experiments.mnist import BEST_RATES
from ortholand_lab.study.pages import filled
from ortholand_lab.study.records import Store
from ortholand_lab.study.report import stored_runs

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = {**EXPERIMENTS, **BENCHMARKS}
MEGABYTE = 2**20


@pytest.fixture(scope="module")
def store():
    return Store(DOCS / "results")


@pytest.fixture(scope="module")
def runs(store):
    return stored_runs(store, STUDIES)


def test_every_committed_record_is_whole_and_used(store, runs):
    files = set((store.root / "records").rglob("*.json"))
    assert {path: store.read(path).reason for path in files if not store.read(path).record} == {}
    used = {store.path(record.request) for run in runs for record in run.records.values()}
    unknown = {path.stem for path in files - used}
    absent = [
        name for name, kind in {"pogo": "pogo", "aoc": "orthogonium"}.items() if not find_spec(kind)
    ]
    assert all(any(name in unit for name in absent) for unit in unknown), unknown
    assert sum(path.stat().st_size for path in files) < 5 * MEGABYTE


def test_every_experiment_is_recorded_at_the_papers_size(runs):
    recorded = {run.study.name for run in runs if run.options.preset == "paper"}
    assert recorded == set(EXPERIMENTS)


@pytest.mark.skipif(not find_spec("pogo"), reason="its rows are of POGO too")
def test_the_page_says_what_the_records_say(runs):
    page = (DOCS / "results" / "paper.md").read_text()
    assert filled(page, runs, "figures") == page


def test_marks_of_pages_name_studies():
    for page in (DOCS / "results").glob("*.md"):
        marks = re.findall(r"<!-- records: (\S+) -->", page.read_text())
        assert set(marks) <= {*STUDIES, "summary"}, page


def test_the_rates_of_mnists_finals_are_those_that_the_search_found_best(runs):
    [run] = [run for run in runs if run.study.name == "mnist"]
    searched = [m for m in BEST_RATES if not any(u.startswith(f"{m}-lr") for u in run.missing)]
    assert searched
    found = {method: best_rates(run.records, (method,))[method].lr for method in searched}
    assert found == {method: BEST_RATES[method] for method in searched}


@pytest.mark.skipif(not find_spec("pogo"), reason="its rows are of POGO too")
def test_the_table_of_attractions_is_of_recorded_rows(runs):
    page = (DOCS / "attractions.md").read_text().split("## Measured")[1]
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    [run] = [run for run in runs if run.study.name == "orthogonality"]
    (_, (head, *rows)), _ = run.tables()
    recorded = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    columns, _, *shown = table
    assert len(shown) == 7
    for name, *cells in shown:
        assert cells == [recorded[name][column] for column in columns], name
