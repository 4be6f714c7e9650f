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
from ortholand_lab.study.report import (
    FIGURES,
    duration,
    markdown_table,
    of_paper,
    rerun_command,
)
from ortholand_lab.study.runner import Run
from ortholand_lab.study.spec import Claim, Finding, Verdict

SUMMARY = "summary"
COLUMNS = ("claims of the paper", "our corrections, and claims beyond it")
MOST_NAMED = 8  # units that are missing
SHORT = {Verdict.HOLDS: "hold", Verdict.FAILS: "fail", Verdict.OPEN: "open"}
LONG = {**SHORT, Verdict.FAILS: "do not hold"}
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
    """How many claims of the paper hold, and of ours; then a row for each study.

    The paper's are judged on the paper's baselines, and on ours beside them.
    """
    rows = [["", *COLUMNS, "time, one thread"]]
    for run in runs:
        if run.study.claims:
            name = f"[{run.study.name}](#{run.study.name})"
            rows.append([name, *_cells(run.findings()), duration(run.seconds)])
    everything = [pair for run in runs for pair in run.findings()]
    total = duration(sum(run.seconds for run in runs if run.study.claims))
    return f"{_counted(runs)}\n\n{markdown_table([*rows, ['all', *_cells(everything), total]])}"


def _counted(runs: Sequence[Run]) -> str:
    """The claims of the paper in words: how many fail, and which of these are errata."""
    found = [(run, *pair) for run in runs for pair in of_paper(run)]
    verdicts = [finding.verdict for *_, finding in found]
    failing = [(run, claim) for run, claim, finding in found if finding.verdict is Verdict.FAILS]
    errata = [f"[{c.erratum}](errata.md#{c.erratum})" for _, c in failing if c.erratum]
    others = [f"[{claim_heading(c)}](#{slug(c)})" for _, c in failing if not c.erratum]
    counts = ", ".join(f"{verdicts.count(v)} {LONG[v]}" for v in Verdict)
    lines = [f"**{len(verdicts)} claims of the paper, on its own baselines: {counts}.**"]
    if errata:
        lines.append(f"Of those that do not hold, {len(errata)} are errata: {', '.join(errata)}.")
    if others:
        lines.append(f"Not as the paper says: {'; '.join(others)}.")
    return " ".join(lines)


def _cells(findings: Sequence[tuple[Claim, Finding]]) -> list[str]:
    paper = [f.verdict for c, f in findings if c.source == "paper"]
    ours = [f.verdict for c, f in findings if c.source != "paper"]
    return [_counts(paper), _counts(ours)]


def _counts(verdicts: Sequence[Verdict]) -> str:
    return ", ".join(f"{verdicts.count(v)} {SHORT[v]}" for v in Verdict if v in verdicts)


def section(run: Run, figures: str) -> str:
    """A heading for each claim of the paper, our claims, tables and figures, and their origin."""
    parts = [_paper_claim(run, claim, finding) for claim, finding in of_paper(run)]
    claims = [_claim_row(c, finding) for c, finding in run.findings() if c.source != "paper"]
    if claims and parts:
        parts.append("### Our own claims\n")
    parts += [markdown_table([["claim", "of", "measured", "verdict"], *claims])] if claims else []
    parts += [f"{spec.title}:\n\n{markdown_table(rows)}" for spec, rows in run.tables()]
    parts.append(_origin(run))
    parts += [_figure(run, name, caption, figures) for name, caption in _drawn(run)]
    return "\n".join(parts)


def _paper_claim(run: Run, claim: Claim, finding: Finding) -> str:
    """The paper's words, its setting, and the verdicts: on the paper's baselines and on ours."""
    careful = claim.judge_careful(run.records)
    rows = [["baselines", "verdict", "measured"], ["the paper's", *_verdict(finding)]]
    rows += [["ours, more careful", *_verdict(careful)]] if careful else []
    words = f"> {claim.words}\n\n" if claim.words else ""
    erratum = f" An [erratum](errata.md#{claim.erratum})." if claim.erratum else ""
    where = run.study.paper_figure or "beyond its figures"
    command = f"`{rerun_command(run)}`"
    return (
        f"### {claim_heading(claim)}\n\n{words}{markdown_table(rows)}\n"
        f"Checked: {claim.statement}{erratum} {where}; {command}\n"
    )


def _verdict(finding: Finding) -> list[str]:
    return [f"**{finding.verdict.value}**", _cell(finding.measured)]


def claim_heading(claim: Claim) -> str:
    """A claim in a few words: what its statement says before a colon or brackets."""
    return re.split(r":| \(|, by more than", claim.statement)[0].rstrip(".")


def slug(claim: Claim) -> str:
    """The anchor that a claim's heading has in Markdown."""
    kept = re.sub(r"[^a-z0-9 _-]", "", claim_heading(claim).lower())
    return kept.replace(" ", "-")


def _claim_row(claim: Claim, finding: Finding) -> list[str]:
    return [_cell(claim.statement), claim.source, _cell(finding.measured), _verdict(finding)[0]]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


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
