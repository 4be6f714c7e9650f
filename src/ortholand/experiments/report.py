"""One HTML file with claims, figures, settings and machine: no network, from the records alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from ortholand.experiments.figures import FORMATS, house_style, inline_svg, save_figure
from ortholand.experiments.records import MissingRecordError, Store, write_atomically
from ortholand.experiments.runner import Run, collect
from ortholand.experiments.spec import AnyExperiment, FigureSpec, Verdict

FILE_NAME = "report.html"
FIGURES = "figures"

# A mark besides the words and the colour: verdicts are read at a glance, on paper too.
MARKS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.OPEN: "?"}
CLASSES = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.OPEN: "open"}


@dataclass(frozen=True)
class Drawn:
    """A figure in the report: its SVG element, or why there is none."""

    spec: FigureSpec
    stem: str
    svg: str
    missing: str = ""


def stored_runs(store: Store, experiments: Mapping[str, AnyExperiment]) -> list[Run]:
    """All runs of which a folder has records, in the order of the experiments.

    Of whatever versions: a record need not be redone to be drawn.
    """
    return [
        collect(experiment, options, store, any_versions=True)
        for experiment in experiments.values()
        for options in store.last_options(experiment.name)
        if options.preset in experiment.settings
    ]


def write_report(store: Store, runs: Sequence[Run]) -> Path:
    """Draw the figures of the runs, as files and in the report; return where the report is."""
    sections = []
    with house_style():
        for run in runs:
            drawn = [_draw(run, spec, store.root / FIGURES) for spec in run.experiment.figures]
            sections.append(_section(run, drawn))
    path = store.root / FILE_NAME
    write_atomically(path, _page(runs, sections).encode())
    return path


def _draw(run: Run, spec: FigureSpec, folder: Path) -> Drawn:
    stem = f"{spec.name}-{run.options.preset}-seed{run.options.seed}"
    try:
        figure = spec.draw(run.records)
    except MissingRecordError as missing:
        return Drawn(spec, stem, "", str(missing))
    svg = save_figure(figure, folder, stem)
    return Drawn(spec, stem, inline_svg(svg, stem, escape(spec.caption)))


# The page, from the outside in. Whatever is not markup goes through escape().


def _page(runs: Sequence[Run], sections: Sequence[str]) -> str:
    claims = "".join(_claims(run) for run in runs)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ortholand: the paper's experiments</title>
<link rel="icon" href="data:,">
<style>{CSS}</style>
</head>
<body>
<main>
<h1>The landing algorithm: the paper’s experiments</h1>
<p>P. Ablin and G. Peyré, <em>Fast and accurate optimization on the orthogonal manifold without
retraction</em>, 2022, run again with ortholand. {_tally(runs)}</p>
<h2 id="claims">Claims</h2>
<table class="claims">
<thead><tr><th>Claim</th><th>Measured</th><th>Verdict</th></tr></thead>
{claims}
</table>
{"".join(sections)}
<h2 id="machine">Machine</h2>
{_machines(runs)}
</main>
</body>
</html>
"""


def _tally(runs: Sequence[Run]) -> str:
    verdicts = [finding.verdict for run in runs for _, finding in run.findings()]
    counts = ", ".join(f"{v.value}: {verdicts.count(v)}" for v in Verdict)
    return f"{len(verdicts)} claims; {counts}."


def _claims(run: Run) -> str:
    heading = f'<a href="#{_anchor(run)}">{escape(run.label)}</a>'
    rows = "".join(
        f'<tr><td>{escape(claim.statement)} <span class="source">{escape(claim.source)}</span></td>'
        f'<td data-label="Measured">{escape(finding.measured)}</td>'
        f'<td class="{CLASSES[finding.verdict]}"><span aria-hidden="true">'
        f"{MARKS[finding.verdict]}</span> {finding.verdict.value}</td></tr>\n"
        for claim, finding in run.findings()
    )
    return f'<tbody>\n<tr><th class="group" colspan="3">{heading}</th></tr>\n{rows}</tbody>\n'


def _section(run: Run, figures: Iterable[Drawn]) -> str:
    experiment = run.experiment
    return f"""<section id="{_anchor(run)}">
<h2>{escape(experiment.title)}</h2>
<p class="where">{escape(run.label)}. The paper’s {escape(experiment.paper_figure)}.</p>
<p>{escape(experiment.summary)}</p>
{_missing(run)}
{"".join(_figure(drawn) for drawn in figures)}
<h3>Settings</h3>
{_settings(run)}
<h3>Run it again</h3>
<pre><code>{escape(rerun_command(run))}</code></pre>
</section>
"""


def _figure(drawn: Drawn) -> str:
    if drawn.missing:
        return f'<p class="notice">No figure {escape(drawn.stem)}: {escape(drawn.missing)}.</p>\n'
    files = ", ".join(
        f'<a href="{FIGURES}/{escape(drawn.stem)}.{kind}">{kind.upper()}</a>' for kind in FORMATS
    )
    return (
        f"<figure>\n{drawn.svg}\n<figcaption>{escape(drawn.spec.caption)} "
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
    """The settings beside the paper's, so that every reduction is named."""
    here = asdict(run.experiment.settings[run.options.preset])
    paper = asdict(run.experiment.settings["paper"])
    rows = "".join(
        f'<tr class="{"" if here[name] == paper[name] else "reduced"}">'
        f"<th>{escape(name.replace('_', ' '))}</th>"
        f"<td>{escape(_plain(here[name]))}</td><td>{escape(_plain(paper[name]))}</td></tr>\n"
        for name in here
    )
    options = f"seed {run.options.seed}, device {run.options.device}, {_threads(run)}"
    return (
        f'<table class="settings">\n<thead><tr><th></th><th>here, {escape(run.options.preset)}</th>'
        f"<th>paper preset</th></tr></thead>\n<tbody>{rows}</tbody>\n</table>\n"
        f"<p>{escape(options)}.</p>\n"
    )


def _machines(runs: Sequence[Run]) -> str:
    """Every machine on which a run was made; usually one."""
    machines: list[Mapping[str, Any]] = []
    for run in runs:
        for record in run.records.values():
            facts = {**record.machine, **record.request.versions}
            if facts not in machines:
                machines.append(facts)
    return "".join(
        '<table class="settings"><tbody>'
        + "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in m.items())
        + "</tbody></table>\n"
        for m in machines
    )


def rerun_command(run: Run) -> str:
    """The command that gives this run."""
    o = run.options
    return (
        f"ortholand reproduce {run.experiment.name} --preset {o.preset} --seed {o.seed} "
        f"--device {o.device} --threads {o.threads} --out results"
    )


def _anchor(run: Run) -> str:
    return escape(f"{run.experiment.name}-{run.options.preset}-seed{run.options.seed}")


def _threads(run: Run) -> str:
    n = run.options.threads
    return f"{n} thread" if n == 1 else f"{n} threads"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


CSS = """
:root { --ink: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9; --link: #005a8c; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
  padding-top: 1.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
a { color: var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { text-align: left; vertical-align: top; padding: .45rem .7rem .45rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { font-weight: 600; }
.claims td:first-child { width: 48%; }
.claims td:last-child { white-space: nowrap; font-weight: 600; padding-right: 0; }
.group { background: #f4f4f4; padding-left: .5rem; }
.source { color: var(--soft); font-size: .8rem; border: 1px solid var(--line);
  border-radius: 1rem; padding: 0 .5rem; white-space: nowrap; }
.holds { color: #00694c; }
.fails { color: #a63c00; }
.open, .where, .files, figcaption { color: var(--soft); }
.settings { width: auto; min-width: 18rem; }
.settings th { padding-right: 2rem; }
.reduced td { font-weight: 600; }
.notice { background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem 1rem; }
figure { margin: 1.5rem 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; margin-top: .4rem; }
pre { background: #f4f4f4; padding: .7rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  figure { overflow-x: auto; }
  figure svg { min-width: 36rem; }
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
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .files { display: none; }
}
"""
