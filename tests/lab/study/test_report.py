import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import pytest
import torch

from ortholand_lab.datasets import Dataset, Source
from ortholand_lab.study.records import Records, Store
from ortholand_lab.study.report import rerun_command, stored_runs, tally, write_report
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import Claim, Finding, Verdict

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
    run = run_study(toy.experiment(), options, store, watcher)
    return write_report(store, [run]).read_text()


def test_the_page_is_well_formed_and_complete(html):
    page = Page(html)
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert tags.index("svg") < tags.index("table")  # the paper's figures on top
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


def test_the_page_has_a_dark_mode_that_redefines_every_colour(html):
    style = html[html.index("<style>") : html.index("</style>")]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    names = r"(--\w+): (#\w+)"
    assert "color-scheme: light dark" in light
    assert "@media screen and (prefers-color-scheme: dark)" in style  # paper stays white
    assert dict(re.findall(names, light)).keys() == dict(re.findall(names, dark)).keys()
    # All other colours are these, or are seen on both.
    rest = re.sub(r":root \{.*?\}", "", style, flags=re.DOTALL)
    assert set(re.findall(r"#[0-9a-f]{3,6}\b", rest)) == {"#e69f00"}


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
    store = Store(store.root)
    [run] = stored_runs(store, {"toy": toy.experiment()})
    page = Page(write_report(store, [run]).read_text())
    assert "Not all runs are recorded" in page.text
    assert "power-1: damaged record" in page.text
    assert "No figure toy-line" in page.text


def test_two_presets_in_one_folder_are_both_shown(toy, options, store, watcher):
    for preset in ("smoke", "paper"):
        run_study(toy.experiment(), replace(options, preset=preset), store, watcher)
    runs = stored_runs(store, {"toy": toy.experiment()})
    page = Page(write_report(store, runs).read_text())
    assert [tag for tag, _ in page.tags].count("figure") == 2
    assert [tag for tag, _ in page.tags].count("svg") == 4  # and each small, on top
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(ids)) == len(ids)


STAND_IN = "digits of scikit-learn"


def source(identity):
    empty = torch.zeros(0)
    return Source(identity, "", lambda: Dataset("digits", empty, empty, empty, empty))


def test_data_that_stand_in_are_told_on_top_and_in_the_section(toy, options, store, watcher):
    experiment, options = toy.experiment(dataset="mnist"), replace(options, data=STAND_IN)
    run_study(experiment, options, store, watcher, source(STAND_IN))

    def never(*_):
        raise AssertionError("a report needs no data")

    runs = stored_runs(store, {"toy": replace(experiment, run=never)})
    html = write_report(store, runs).read_text()
    notice = "Not MNIST: the digits of scikit-learn stand in for it"
    assert html.count(notice) == 2
    assert html.index(notice) < html.index('id="claims"')
    assert html.rindex(notice) > html.index("<section")
    assert f"data: {STAND_IN}." in Page(html).text


def test_the_real_data_are_named_without_a_notice(toy, options, store, watcher):
    experiment, options = toy.experiment(dataset="mnist"), replace(options, data="MNIST")
    run = run_study(experiment, options, store, watcher, source("MNIST"))
    html = write_report(store, [run]).read_text()
    assert 'class="notice"' not in html
    assert "data: MNIST." in Page(html).text


def test_the_contents_lead_to_every_run_with_its_verdicts_and_time(toy, options, store, watcher):
    for preset in ("smoke", "paper"):
        run_study(toy.experiment(), replace(options, preset=preset), store, watcher)
    runs = stored_runs(store, {"toy": toy.experiment()})
    html = write_report(store, runs).read_text()
    contents = html[html.index("<nav>") : html.index("</nav>")]
    for preset in ("smoke", "paper"):
        assert f'href="#toy-{preset}-seed7"' in contents
        assert f'<section id="toy-{preset}-seed7">' in html
        assert f'<tbody id="claims-toy-{preset}-seed7">' in html
    assert contents.count('✓</span> <span class="hidden">holds: </span>1') == 2
    assert "✗" not in contents  # no zeros there
    assert len(re.findall(r"\d\.\d s</td>", contents)) == 3  # two runs and the sum


def test_the_tally_counts_every_verdict(toy, options, store, watcher):
    records = run_study(toy.experiment(), options, store, watcher)
    claim = toy.experiment().claims[0]
    for verdicts in ([Verdict.HOLDS] * 2 + [Verdict.FAILS], [Verdict.OPEN]):
        claims = [
            replace(claim, check=lambda _, verdict=verdict: Finding("so", verdict))
            for verdict in verdicts
        ]
        run = replace(records, study=toy.experiment(claims=claims))
        html = write_report(store, [run]).read_text()
        top = re.search(r'<p class="tally">(.*)</p>', html)
        assert top is not None
        shown = re.findall(r"</span> ([a-z ]+): (\d+)</span>", top[1])
        assert shown == [(v.value, str(verdicts.count(v))) for v in Verdict]
    assert tally([Verdict.HOLDS] * 2 + [Verdict.FAILS]) == "3 claims; holds: 2, does not hold: 1."
    assert tally([Verdict.OPEN]) == "1 claim; not decided: 1."


def test_all_runs_are_listed_with_their_time_but_folded(html):
    details = html[html.index("<details>") : html.index("</details>")]
    assert "<summary>3 runs, 0.0 s</summary>" in details
    assert re.findall(r"<tr><td>(power-\d)</td>", details) == ["power-1", "power-2", "power-3"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"),
     (3600, "1 h 0 min"), (90_061, "25 h 1 min")],
)  # fmt: skip
def test_durations_are_written_as_people_do(toy, options, store, watcher, seconds, text):
    run = run_study(toy.experiment(), options, store, watcher)
    record = replace(run.records["power-1"], seconds=seconds)
    html = write_report(store, [replace(run, records=Records({"power-1": record}))]).read_text()
    assert f"1 run, {text}</summary>" in html


def test_threads_do_not_make_another_machine(toy, options, store, watcher):
    for preset, threads in (("smoke", 1), ("paper", 2)):
        changed = replace(options, preset=preset, threads=threads)
        run_study(toy.experiment(), changed, store, watcher)
    html = write_report(store, stored_runs(store, {"toy": toy.experiment()})).read_text()
    assert html.count("cpu count") == 1
    assert "1 thread." in html
    assert "2 threads." in html


def test_settings_are_written_as_people_do(toy, options, store, watcher):
    @dataclass(frozen=True)
    class Settings:
        length: int = 12_000
        rates: tuple[float, ...] = (1.0, 0.25)
        by_name: tuple[tuple[str, int], ...] = (("a", 1),)

    experiment = toy.experiment(settings=dict.fromkeys(("quick", "paper"), Settings()))
    experiment = replace(experiment, plan=lambda _: [], figures=())
    page = Page(write_report(store, [run_study(experiment, options, store, watcher)]).read_text())
    for part in ("12,000", "1.0, 0.25", "a, 1", "by name"):
        assert part in page.text


def test_an_experiment_beyond_the_paper_says_so(toy, options, store, watcher):
    for figure, text in (("Figure 4", "The paper’s Figure 4."), ("", "Beyond the paper.")):
        run = run_study(toy.experiment(paper_figure=figure), options, store, watcher)
        assert text in Page(write_report(store, [run]).read_text()).text


def test_the_rerun_command_names_every_option(toy, options, store, watcher):
    run = run_study(toy.experiment(), options, store, watcher)
    assert rerun_command(run) == (
        "ortholand reproduce toy --preset quick --seed 7 --device cpu --threads 1 --out results"
    )


def test_the_papers_figures_come_first_small_with_links_and_verdicts(html):
    gallery = html[html.index('<div class="gallery">') : html.index("<nav>")]
    assert 'href="#toy-quick-seed7"' in gallery
    assert "Figure 0: Toys" in gallery
    assert "holds: </span>1" in gallery
    (shown,) = re.findall(r'<use href="#([^"]*)"', gallery)
    assert f'id="{shown}"' in html[html.index("<section") :]


def test_a_study_beyond_the_paper_is_not_among_its_figures(toy, options, store, watcher):
    run = run_study(toy.experiment(paper_figure=""), options, store, watcher)
    assert '<div class="gallery">' not in write_report(store, [run]).read_text()


def test_the_papers_claims_and_ours_are_counted_apart(toy, options, store, watcher):
    run = run_study(toy.experiment(), options, store, watcher)
    no, yes = (lambda _, v=v: Finding("", v) for v in (Verdict.FAILS, Verdict.HOLDS))
    claims = [
        Claim.of_paper("A.", "a", no, yes, erratum="flow"),
        Claim.of_paper("B.", "b", yes),
        Claim.beyond("C.", no),
    ]
    html = write_report(store, [replace(run, study=toy.experiment(claims=claims))]).read_text()
    paper, ours = (Page(p).text for p in re.findall(r'<p class="tally">.*?</p>', html))
    assert "holds: 1" in paper
    assert "does not hold: 1" in paper
    assert "1 are errata: flow." in paper
    assert "holds: 0" in ours
    assert "does not hold: 1" in ours
    assert "With our own, more careful baselines" in html
