"""One HTML file with claims, figures, settings and machine: no network, from the records alone."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ortholand_lab.study.figures import FORMATS, house_style, inline_svg, save_figure
from ortholand_lab.study.records import (
    MissingRecordError,
    Record,
    Records,
    Store,
    write_atomically,
)
from ortholand_lab.study.runner import Run, collect
from ortholand_lab.study.spec import AnyStudy, Claim, FigureSpec, Finding, TableSpec, Verdict
from ortholand_lab.study.workers import do_side_by_side

FILE_NAME = "report.html"
FIGURES = "figures"
TABLES = "tables"

# A mark besides word and colour: verdicts can be read at a glance, on paper too.
MARKS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.OPEN: "?"}
CLASSES = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.OPEN: "open"}


@dataclass(frozen=True)
class Drawn:
    """A figure in the report: its SVG element, or why there is none."""

    spec: FigureSpec
    stem: str
    svg: str
    missing: str = ""


def stored_runs(store: Store, studies: Mapping[str, AnyStudy]) -> list[Run]:
    """All runs of which a folder has records, in the order of the studies.

    Versions do not matter: a record need not be redone to be drawn.
    """
    return [
        collect(study, options, store, any_versions=True)
        for study in studies.values()
        for options in store.last_options(study.name)
        if options.preset in study.settings
    ]


def tally(verdicts: Iterable[Verdict]) -> str:
    """How many claims there are, and how many of them hold."""
    verdicts = list(verdicts)
    claims = "1 claim" if len(verdicts) == 1 else f"{len(verdicts)} claims"
    counts = [f"{v.value}: {verdicts.count(v)}" for v in Verdict if v in verdicts]
    return f"{claims}; {', '.join(counts)}." if counts else f"{claims}."


@dataclass(frozen=True)
class Drawing:
    """A figure to be drawn, here or in a worker."""

    spec: FigureSpec
    records: Records
    folder: Path
    stem: str
    source: None = None  # of data: it needs none

    def do(self, *_: object) -> Drawn:
        """Draw it, as files and for the report."""
        try:
            with house_style():
                svg = save_figure(self.spec.draw(self.records), self.folder, self.stem)
        except MissingRecordError as missing:
            return Drawn(self.spec, self.stem, "", str(missing))
        return Drawn(self.spec, self.stem, inline_svg(svg, self.stem, escape(self.spec.caption)))


def write_report(store: Store, runs: Sequence[Run], processes: int = 1) -> Path:
    """Draw the figures of the runs, as files and in the report; return the report's path."""
    folder = store.root / FIGURES
    drawings = [
        Drawing(spec, run.records, folder, _stem(spec, run))
        for run in runs
        for spec in run.study.figures
    ]
    drawn: dict[str, Drawn] = {}
    if min(processes, len(drawings)) > 1:
        do_side_by_side(
            drawings, processes, lambda *_: None, lambda i, d: drawn.update({drawings[i].stem: d})
        )
    else:
        drawn = {drawing.stem: drawing.do() for drawing in drawings}
    figures = [[drawn[_stem(spec, run)] for spec in run.study.figures] for run in runs]
    path = store.root / FILE_NAME
    write_atomically(path, _page(runs, figures).encode())
    return path


def write_tables(store: Store, runs: Sequence[Run]) -> None:
    """Write each table of the runs as a Markdown file."""
    for run in runs:
        for spec, rows in run.tables():
            path = store.root / TABLES / f"{_stem(spec, run)}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, markdown_table(rows).encode())


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with the first row as its head."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _stem(spec: FigureSpec | TableSpec, run: Run) -> str:
    """The name of a figure's or a table's file, without its extension."""
    return f"{spec.name}-{run.options.preset}-seed{run.options.seed}"


# The page, from the outside in. Everything that is not markup goes through escape().


def _page(runs: Sequence[Run], figures: Sequence[Sequence[Drawn]]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ortholand: the paper’s experiments</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body>
<main>
<header>
<h1>The landing algorithm: the paper’s experiments</h1>
<p>P. Ablin and G. Peyré, <em>Fast and accurate optimization on the orthogonal manifold without
retraction</em>, 2022, run again with ortholand.</p>
{_tallies(runs)}{_data_notices(runs)}
</header>
{_gallery(runs, figures)}
{_contents(runs)}
<h2 id="claims">Claims</h2>
<table class="claims">
<thead><tr><th>Claim</th><th>Measured</th><th>Verdict</th></tr></thead>
{"".join(_claims(run) for run in runs)}</table>
{"".join(map(_section, runs, figures))}
<h2 id="machine">Machine</h2>
{_machines(runs)}
</main>
</body>
</html>
"""


def of_paper(run: Run) -> list[tuple[Claim, Finding]]:
    """The claims of the paper among those of a run."""
    return [(claim, finding) for claim, finding in run.findings() if claim.source == "paper"]


def _tallies(runs: Sequence[Run]) -> str:
    """The paper's claims, with the errata among those that do not hold; and apart, ours."""
    paper = [pair for run in runs for pair in of_paper(run)]
    ours = [f.verdict for run in runs for c, f in run.findings() if c.source != "paper"]
    errata = [c.erratum for c, f in paper if c.erratum and f.verdict is Verdict.FAILS]
    named = f"Of those that do not hold, {len(errata)} are errata: {', '.join(errata)}."
    lines = [
        ("The paper’s claims, on its own baselines", [f.verdict for _, f in paper]),
        ("Corrections of it, and claims beyond it", ours),
    ]
    return "".join(
        f'<p class="tally"><span class="what">{what}</span> {_chips(verdicts, words=True)}'
        f"{f'<br>{escape(named)}' if errata and verdicts is not ours else ''}</p>\n"
        for what, verdicts in lines
        if verdicts
    )


def _gallery(runs: Sequence[Run], figures: Sequence[Sequence[Drawn]]) -> str:
    """The paper's figures, small, with the verdicts on what it says of them; each is a link."""
    cards = [
        _card(run, next((figure for figure in drawn if figure.svg), drawn[0]))
        for run, drawn in zip(runs, figures, strict=True)
        if run.study.paper_figure and drawn
    ]
    return f'<div class="gallery">\n{"".join(cards)}</div>' if cards else ""


def _card(run: Run, drawn: Drawn) -> str:
    """The figure further down again, without a copy of it."""
    box = re.search(r'viewBox="[^"]*"', drawn.svg)
    picture = (
        f'<svg {box[0]} aria-hidden="true"><use href="#{drawn.stem}-figure_1"/></svg>'
        if box
        else '<span class="undrawn">not drawn: runs are missing</span>'
    )
    verdicts = _chips([finding.verdict for _, finding in of_paper(run)])
    return (
        f'<a class="card" href="#{_anchor(run)}">{picture}\n'
        f"<span>{escape(run.study.paper_figure)}: {escape(run.study.title)}</span> "
        f'<span class="where">{escape(_options(run))}</span> {verdicts}</a>\n'
    )


def _chips(verdicts: Sequence[Verdict], *, words: bool = False) -> str:
    """How many claims got each verdict, as marks with numbers; zeros only with ``words``."""
    chips = []
    for verdict in Verdict:
        count, word = verdicts.count(verdict), verdict.value
        if count or words:
            mark = f'<span aria-hidden="true">{MARKS[verdict]}</span>'
            shown = f"{word}: " if words else f'<span class="hidden">{word}: </span>'
            chips.append(f'<span class="chip {CLASSES[verdict]}">{mark} {shown}{count}</span>')
    return " ".join(chips)


def _data_notices(runs: Sequence[Run]) -> str:
    """What a reader must know about the data before anything else."""
    concerned: dict[str, list[Run]] = {}
    for run in runs:
        if run.notice:
            concerned.setdefault(run.notice, []).append(run)
    return "".join(
        f'<p class="notice">{escape(notice)} ({", ".join(_link(run) for run in where)})</p>\n'
        for notice, where in concerned.items()
    )


def _contents(runs: Sequence[Run]) -> str:
    rows = "".join(
        f'<tr><td>{_link(run)} <span class="where">{escape(_options(run))}</span><br>'
        f"{escape(run.study.title)}</td>"
        f"<td>{_chips(run.verdicts())}</td>"
        f'<td class="time">{duration(run.seconds)}</td></tr>\n'
        for run in runs
    )
    total = duration(sum(run.seconds for run in runs))
    return f"""<nav>
<h2 id="contents">Contents</h2>
<table class="contents">
<thead><tr><th>Experiment</th><th>Claims</th><th class="time">Time</th></tr></thead>
<tbody>
{rows}<tr class="total"><td>in all (<a href="#machine">machine</a>)</td>
<td></td><td class="time">{total}</td></tr>
</tbody>
</table>
</nav>"""


def _claims(run: Run) -> str:
    rows = "".join(
        f'<tr><td>{escape(claim.statement)} <span class="source">{escape(claim.source)}</span></td>'
        f'<td data-label="Measured">{escape(finding.measured)}{_careful(run, claim)}</td>'
        f'<td class="{CLASSES[finding.verdict]}"><span aria-hidden="true">'
        f"{MARKS[finding.verdict]}</span> {finding.verdict.value}</td></tr>\n"
        for claim, finding in run.findings()
    )
    options = f'<span class="where">{escape(_options(run))}</span>'
    heading = f"{_link(run)} {options} {_chips(run.verdicts())}"
    return (
        f'<tbody id="claims-{_anchor(run)}">\n'
        f'<tr><th class="group" colspan="3" scope="rowgroup">{heading}</th></tr>\n'
        f"{rows}</tbody>\n"
    )


def _careful(run: Run, claim: Claim) -> str:
    """What is measured with our own baselines, below what is with the paper's."""
    finding = claim.judge_careful(run.records)
    if finding is None:
        return ""
    return (
        f'<br><span class="where">With our own, more careful baselines: '
        f'<b class="{CLASSES[finding.verdict]}">{finding.verdict.value}</b>. '
        f"{escape(finding.measured)}</span>"
    )


def _section(run: Run, figures: Iterable[Drawn]) -> str:
    study = run.study
    notice = f'<p class="notice">{escape(run.notice)}</p>\n' if run.notice else ""
    return f"""<section id="{_anchor(run)}">
<h2>{escape(study.title)}</h2>
<p class="where">{escape(run.label)}. {escape(_origin(study))}
<a href="#claims-{_anchor(run)}">Its claims</a>.</p>
{notice}<p>{escape(study.summary)}</p>
{_missing(run)}
{"".join(_figure(drawn) for drawn in figures)}
{"".join(_table(spec, rows) for spec, rows in run.tables())}
<h3>Settings</h3>
{_settings(run)}
{_units(run)}
<h3>Run it again</h3>
<pre><code>{escape(rerun_command(run))}</code></pre>
<p class="up"><a href="#contents">Contents</a></p>
</section>
"""


def _origin(study: AnyStudy) -> str:
    """Which figure of the paper; nothing for a study that is not the paper's."""
    where = study.paper_figure
    return f"The paper’s {where}." if where else "Beyond the paper."


def _table(spec: TableSpec, rows: Sequence[Sequence[str]]) -> str:
    head, *others = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>\n" for row in others)
    head = head.replace("<td>", "<th>").replace("</td>", "</th>")
    return (
        f'<h3>{escape(spec.title)}</h3>\n<div class="scroll" tabindex="0">\n<table class="data">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table>\n</div>\n"
    )


def _figure(drawn: Drawn) -> str:
    if drawn.missing:
        return f'<p class="notice">No figure {escape(drawn.stem)}: {escape(drawn.missing)}.</p>\n'
    files = ", ".join(
        f'<a href="{FIGURES}/{escape(drawn.stem)}.{kind}">{kind.upper()}</a>' for kind in FORMATS
    )
    # Where the page is narrow the figure is small but whole, and its files are large.
    return (
        f"<figure>\n{drawn.svg}\n"
        f"<figcaption>{escape(drawn.spec.caption)} "
        f'<span class="files">{files}</span></figcaption>\n</figure>\n'
    )


def _missing(run: Run) -> str:
    if not run.missing:
        return ""
    items = "".join(f"<li>{escape(u)}: {escape(why)}</li>" for u, why in run.missing.items())
    return (
        '<div class="notice"><p>Not all runs are recorded. The command below runs those that are '
        f"missing:</p><ul>{items}</ul></div>\n"
    )


def _settings(run: Run) -> str:
    """The settings next to those of the whole study, so that every reduction shows."""
    here = asdict(run.study.settings[run.options.preset])
    whole, name_of_whole = asdict(run.study.whole), list(run.study.settings)[-1]
    rows = "".join(
        f'<tr class="{"" if here[name] == whole[name] else "reduced"}">'
        f"<th>{escape(name.replace('_', ' '))}</th>"
        f"<td>{escape(_plain(here[name]))}</td><td>{escape(_plain(whole[name]))}</td></tr>\n"
        for name in here
    )
    o = run.options
    options = [f"seed {o.seed}", f"device {o.device}", _count(o.threads, "thread")]
    options += [f"data: {o.data}"] if o.data else []
    return (
        f'<table class="settings">\n<thead><tr><th></th><th>here, {escape(o.preset)}</th>'
        f"<th>{escape(name_of_whole)} preset</th></tr></thead>\n<tbody>{rows}</tbody>\n</table>\n"
        f"<p>{escape(', '.join(options))}.</p>\n"
    )


def _units(run: Run) -> str:
    """What was run, collapsed: few will want to know."""
    rows = "".join(_unit_row(name, record) for name, record in run.records.items())
    count = f"{_count(len(run.records), 'run')}, {duration(run.seconds)}"
    return (
        f"<details>\n<summary>{escape(count)}</summary>\n"
        '<table class="units">\n<thead><tr><th>run</th><th class="time">time</th>'
        f"<th>finished, UTC</th></tr></thead>\n<tbody>{rows}</tbody>\n</table>\n</details>\n"
    )


def _unit_row(name: str, record: Record) -> str:
    finished = record.finished[:16].replace("T", " ")
    return (
        f'<tr><td>{escape(name)}</td><td class="time">{duration(record.seconds)}</td>'
        f"<td>{escape(finished)}</td></tr>\n"
    )


def _machines(runs: Sequence[Run]) -> str:
    """Every machine on which a run was made; usually one."""
    machines: list[Mapping[str, Any]] = []
    for run in runs:
        for record in run.records.values():
            facts = {**record.machine, **record.request.versions}
            facts.pop("threads", None)  # an option, named with each experiment's settings
            if facts not in machines:
                machines.append(facts)
    return "".join(
        '<table class="settings"><tbody>'
        + "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in m.items())
        + "</tbody></table>\n"
        for m in machines
    )


def rerun_command(run: Run) -> str:
    """The command that makes this run."""
    o = run.options
    if "paper" not in run.study.settings:
        return f"ortholand bench {run.study.name} --preset {o.preset} --seed {o.seed}"
    return (
        f"ortholand reproduce {run.study.name} --preset {o.preset} --seed {o.seed} "
        f"--device {o.device} --threads {o.threads} --out results"
    )


def _anchor(run: Run) -> str:
    return escape(f"{run.study.name}-{run.options.preset}-seed{run.options.seed}")


def _link(run: Run) -> str:
    return f'<a href="#{_anchor(run)}">{escape(run.study.name)}</a>'


def _options(run: Run) -> str:
    return f"{run.options.preset}, seed {run.options.seed}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(_plain(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9;
  --pale: #f5f6f7; --link: #005a8c; --holds: #00694c; --fails: #a63c00; --open: #5c5c5c;
  --notice: #fff6e0; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; color: var(--ink); background: var(--paper); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.3rem; line-height: 1.3; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
a { color: var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .93rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .45rem .7rem .45rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 600; }
th.time, td.time { text-align: right; white-space: nowrap; padding-right: 0; }
.contents td:nth-child(2) { white-space: nowrap; }
.total td { border-bottom: 0; font-weight: 600; }
.claims td:first-child { width: 48%; }
.claims td:last-child { white-space: nowrap; font-weight: 600; padding-right: 0; }
.claims .group { background: var(--pale); padding: .5rem; }
.claims .group a { margin-right: .3rem; }
.claims .group .where { font-weight: 400; margin-right: .6rem; }
.contents .where { font-size: .85rem; margin-left: .3rem; }
.source { color: var(--soft); font-size: .8rem; border: 1px solid var(--line);
  border-radius: 1rem; padding: 0 .5rem; white-space: nowrap; }
.chip { font-weight: 600; white-space: nowrap; margin-right: .3rem; }
.tally .chip { display: inline-block; border: 1px solid currentColor; border-radius: .4rem;
  padding: .15rem .7rem; margin: 0 .4rem .4rem 0; }
.holds { color: var(--holds); }
.fails { color: var(--fails); }
.open { color: var(--open); }
.where, .files, .up, figcaption, summary { color: var(--soft); }
.up { font-size: .88rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
.settings { width: auto; min-width: 18rem; }
.settings th { padding-right: 2rem; overflow-wrap: normal; }
.reduced td { font-weight: 600; }
.data { width: auto; font-size: .85rem; }
.data td:not(:first-child), .data th:not(:first-child) { text-align: right; }
.units { width: auto; min-width: 24rem; font-size: .85rem; }
.units th.time, .units td.time { padding-right: 2rem; }
summary { cursor: pointer; }
.notice { background: var(--notice); border-left: 4px solid #e69f00; padding: .5rem 1rem; }
figure { margin: 1.5rem 0; }
figure svg { display: block; width: 100%; height: auto; }
.tally .what { font-weight: 600; margin-right: .6rem; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem;
  margin: 1.5rem 0; }
.card { display: block; border: 1px solid var(--line); border-radius: .4rem; padding: .6rem;
  color: inherit; text-decoration: none; font-size: .88rem; }
.card:hover { border-color: var(--link); }
.card svg, .undrawn { display: block; width: 100%; height: 11rem; margin-bottom: .4rem; }
.undrawn { color: var(--soft); height: auto; }
figcaption { font-size: .88rem; margin-top: .4rem; }
pre { background: var(--pale); padding: .7rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #15181b; --ink: #e4e6e8; --soft: #a3a9af; --line: #3a4046; --pale: #1f2428;
    --link: #7cc4f4; --holds: #5fd3a6; --fails: #ff9d66; --open: #a3a9af; --notice: #332a12; }
  /* White becomes the page's colour and black light, while hues stay those of the methods. */
  figure svg, .card svg { filter: invert(.93) hue-rotate(180deg) brightness(1.25);
    mix-blend-mode: lighten; }
}
@media (max-width: 640px) {
  .settings, .units { width: 100%; min-width: 0; }
  .settings th { padding-right: .7rem; }
  .claims thead { display: none; }
  .claims tr, .claims td, .claims th { display: block; border: 0; }
  .claims td:first-child { width: auto; }
  .claims tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .claims td, .claims th { padding: .1rem 0; }
  .claims .group { padding: .3rem .5rem; }
  .claims td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); }
}
@media print {
  main { max-width: none; padding: 0; }
  a { color: inherit; text-decoration: none; }
  figure, tr, pre { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  section { break-before: page; }
  .files, .up, details { display: none; }
}
"""
