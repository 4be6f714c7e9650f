"""A Markdown page that shows what records say: claims, figures, and the commands that made them.

Hand-written text stays; text between two marks is made from the records::

    <!-- records: procrustes -->
    <!-- end -->

A mark names a study, or ``summary`` for the table of all studies.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortholand_lab.study.records import MissingRecordError, Store, write_atomically
from ortholand_lab.study.report import FIGURES, duration, markdown_table, rerun_command
from ortholand_lab.study.runner import Run
from ortholand_lab.study.spec import Claim, Finding, Verdict

SUMMARY = "summary"
SOURCES = ("paper", "correction", "beyond the paper")  # in the order of the summary's columns
MOST_NAMED = 8  # units that are missing
SHORT = {Verdict.HOLDS: "hold", Verdict.FAILS: "fail", Verdict.OPEN: "open"}
_BLOCK = re.compile(r"(<!-- records: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_page(page: Path, store: Store, runs: Sequence[Run]) -> None:
    """Remake the marked parts of a page.

    Raises:
        ValueError: if the page has no marks, or one that names nothing recorded.
    """
    figures = os.path.relpath(store.root / FIGURES, page.parent)
    write_atomically(page, filled(page.read_text(), runs, figures).encode())


def filled(text: str, runs: Sequence[Run], figures: str) -> str:
    """The text of a page with its marked parts made from the records.

    Args:
        text: the text of the page.
        runs: the recorded runs.
        figures: the folder of the figures, as seen from the page.
    """
    parts = {SUMMARY: summary(runs)}
    for run in runs:
        parts[run.study.name] = parts.get(run.study.name, "") + section(run, figures)
    marked = [name for _, name, _ in _BLOCK.findall(text)]
    _check_marks(marked, parts)
    return _BLOCK.sub(lambda block: f"{block[1]}\n{parts[block[2]]}\n{block[3]}", text)


def _check_marks(marked: Sequence[str], parts: Mapping[str, str]) -> None:
    unknown = [name for name in marked if name not in parts]
    if unknown or not marked:
        raise ValueError(
            f"A page's marks '<!-- records: NAME --> <!-- end -->' must name one of "
            f"{', '.join(parts)}; got {', '.join(unknown) or 'none'}."
        )


def summary(runs: Sequence[Run]) -> str:
    """A row for each study: how many claims of each kind got each verdict, and the time it took."""
    rows = [["", *SOURCES, "time, one thread"]]
    for run in runs:
        findings = run.findings()
        if findings:
            name = f"[{run.study.name}](#{run.study.name})"
            cells = [_counts([f.verdict for c, f in findings if c.source == s]) for s in SOURCES]
            rows.append([name, *cells, duration(run.seconds)])
    everything = [pair for run in runs for pair in run.findings()]
    cells = [_counts([f.verdict for c, f in everything if c.source == s]) for s in SOURCES]
    total = duration(sum(run.seconds for run in runs if run.study.claims))
    return markdown_table([*rows, ["all", *cells, total]])


def _counts(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(f"{verdicts.count(v)} {SHORT[v]}" for v in Verdict if v in verdicts)


def section(run: Run, figures: str) -> str:
    """Claims, tables and figures of a run, and how it was made."""
    claims = [_claim_row(claim, finding) for claim, finding in run.findings()]
    parts = [markdown_table([["claim", "of", "measured", "verdict"], *claims])] if claims else []
    parts += [f"{spec.title}:\n\n{markdown_table(rows)}" for spec, rows in run.tables()]
    parts.append(_origin(run))
    parts += [_figure(run, name, caption, figures) for name, caption in _drawn(run)]
    return "\n".join(parts)


def _claim_row(claim: Claim, finding: Finding) -> list[str]:
    cells = (claim.statement, claim.source, finding.measured, f"**{finding.verdict.value}**")
    return [cell.replace("|", "\\|") for cell in cells]


def _origin(run: Run) -> str:
    """The command, the time it took, and what is still missing."""
    finished = max(record.finished for record in run.records.values())[:10]
    units = f"{len(run.records)} of {len(run.records) + len(run.missing)} units"
    made = f"{units}, {duration(run.seconds)}, {finished}"
    few = [f"`{unit}`" for unit in run.missing] if len(run.missing) <= MOST_NAMED else []
    named = ", ".join(few) or f"{len(run.missing)} units"
    missing = f" Not run yet: {named}." if run.missing else ""
    data = f" Data: {run.options.data}." if run.options.data else ""
    return f"`{rerun_command(run)}` ({made}).{data}{missing}\n"


def _drawn(run: Run) -> list[tuple[str, str]]:
    """Names and captions of the figures for which there are enough records."""
    drawn = []
    for spec in run.study.figures:
        try:
            spec.draw(run.records)
        except MissingRecordError:
            continue
        drawn.append((spec.name, spec.caption))
    return drawn


def _figure(run: Run, name: str, caption: str, figures: str) -> str:
    path = f"{figures}/{name}-{run.options.preset}-seed{run.options.seed}.png"
    return f"![{name}]({path})\n\n*{caption}*\n"
