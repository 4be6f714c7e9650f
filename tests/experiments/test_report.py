import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ortholand.experiments.report import rerun_command, stored_runs, write_report
from ortholand.experiments.runner import run_experiment

VOID = {"meta", "link", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """Collects tags, attributes and text, and sees that elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def html(toy, options, store, watcher):
    run = run_experiment(toy.experiment(), options, store, watcher)
    return write_report(store, [run]).read_text()


def test_the_page_is_well_formed_and_complete(html):
    page = Page(html)
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert tags.index("table") < tags.index("svg")  # claims on top
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        page.tags
    )
    for part in ("last is 729 & more", "holds", "cpu count", "Settings", "Figure 0"):
        assert part in page.text


def test_everything_is_escaped(html):
    assert not {"script", "b", "i", "here"} & {tag for tag, _ in Page(html).tags}
    for text in (
        "Toys <b>& more</b>",
        "<script>alert(1)</script>",
        "<i>occur</i>",
        '"line" <here>',
    ):
        assert text in Page(html).text


def test_nothing_is_fetched(html):
    for tag, attributes in Page(html).tags:
        assert tag not in {"script", "iframe", "object", "embed", "img"}
        for name, value in attributes.items():
            if name in {"src", "href", "xlink:href", "style"}:
                assert "//" not in (value or "")
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_reductions_are_named(html):
    reduced = re.findall(r'<tr class="reduced"><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>', html)
    assert reduced == [("length", "3", "5")]


def test_links_to_figure_files_lead_somewhere(html, store):
    links = [a.get("href") or "" for tag, a in Page(html).tags if tag == "a"]
    files = [link for link in links if not link.startswith("#")]
    assert len(files) == 3
    assert all((store.root / link).is_file() for link in files)
    ids = {a.get("id") for _, a in Page(html).tags}
    assert {link[1:] for link in links if link.startswith("#")} <= ids


def test_the_report_is_redrawn_from_records_alone(html, toy, store):
    def never(*_):
        raise AssertionError("a report runs nothing")

    first = (store.root / "report.html").read_bytes()
    (store.root / "report.html").unlink()
    experiments = {"toy": toy.experiment(run=never)}
    write_report(store, stored_runs(store, experiments))
    assert (store.root / "report.html").read_bytes() == first
    assert html.encode() == first


def test_missing_runs_are_told(html, toy, store):
    assert "Not all runs are recorded" not in html
    [run] = stored_runs(store, {"toy": toy.experiment()})
    store.path(run.records["power-1"].request).write_text("{")
    [run] = stored_runs(store, {"toy": toy.experiment()})
    page = Page(write_report(store, [run]).read_text())
    assert "Not all runs are recorded" in page.text
    assert "power-1: damaged record" in page.text
    assert "No figure toy-line" in page.text


def test_two_presets_in_one_folder_are_both_shown(toy, options, store, watcher):
    for preset in ("smoke", "paper"):
        run_experiment(toy.experiment(), replace(options, preset=preset), store, watcher)
    runs = stored_runs(store, {"toy": toy.experiment()})
    page = Page(write_report(store, runs).read_text())
    assert [tag for tag, _ in page.tags].count("svg") == 2
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)


def test_the_rerun_command_names_every_option(toy, options, store, watcher):
    run = run_experiment(toy.experiment(), options, store, watcher)
    assert rerun_command(run) == (
        "ortholand reproduce toy --preset quick --seed 7 --device cpu --threads 1 --out results"
    )
