from dataclasses import replace

import pytest

from ortholand_lab.study.pages import filled, write_page
from ortholand_lab.study.records import Store
from ortholand_lab.study.report import stored_runs, write_report
from ortholand_lab.study.runner import run_study
from ortholand_lab.study.spec import Claim, Finding, Verdict

PAGE = """# By hand

<!-- records: summary -->
gone
<!-- end -->

Between.

<!-- records: toy -->
<!-- end -->
The end.
"""


@pytest.fixture
def runs(toy, options, store, watcher):
    run_study(toy.experiment(), options, store, watcher)
    return stored_runs(store, {"toy": toy.experiment()})


def test_marked_parts_are_made_and_others_stay(runs):
    text = filled(PAGE, runs, "figures")
    assert "gone" not in text
    for part in ("# By hand\n", "\nBetween.\n", "\nThe end.\n", "last is 729 & more", "**holds**"):
        assert part in text
    assert "(3 of 3 units" in text
    assert filled(text, runs, "figures") == text


def test_figures_are_where_the_page_says(runs, store):
    page = store.root / "pages" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    write_report(store, runs)
    write_page(page, store, runs)
    (path,) = [part.split(")")[0] for part in page.read_text().split("](") if ".png" in part]
    assert (page.parent / path).is_file()


def test_what_is_missing_is_named_and_not_drawn(runs, store, toy):
    store.path(runs[0].records["power-1"].request).unlink()
    [run] = stored_runs(Store(store.root), {"toy": toy.experiment()})
    text = filled(PAGE, [run], "figures")
    assert "(2 of 3 units" in text
    assert "Not run yet: `power-1`." in text
    assert ".png" not in text


def test_bars_in_a_claim_do_not_end_its_cell(runs, toy):
    [run] = runs
    claim = run.study.claims[0]
    barred = type(claim)("||X|| <= 1", "beyond the paper", claim.check)
    run = type(run)(toy.experiment(claims=(barred,)), run.options, run.records, run.missing)
    assert r"| \|\|X\|\| <= 1 | " in filled(PAGE, [run], "figures")


@pytest.mark.parametrize(
    ("text", "got"),
    [("no marks", "got none"), (PAGE.replace("records: toy", "records: ship"), "got ship")],
)
def test_marks_must_name_what_is_recorded(runs, text, got):
    with pytest.raises(ValueError, match=f"must name one of summary, toy; {got}"):
        filled(text, runs, "figures")


def test_a_claim_of_the_paper_has_a_heading_with_its_words_and_both_verdicts(runs, toy):
    [run] = runs
    claims = [
        Claim.of_paper(
            "Powers grow: always.",
            "they grow",
            lambda _: Finding("textbook 1", Verdict.FAILS),
            lambda _: Finding("careful 2", Verdict.HOLDS),
            erratum="flow",
        ),
        Claim.of_paper("Powers are even.", "all even", lambda _: Finding("3", Verdict.FAILS)),
        Claim.beyond("Ours.", lambda _: Finding("4", Verdict.HOLDS)),
    ]
    run = replace(run, study=toy.experiment(claims=claims))
    text = filled(PAGE, [run], "figures")
    for part in (
        "### Powers grow\n\n> they grow\n",
        "| the paper's | **does not hold** | textbook 1 |\n",
        "| ours, more careful | **holds** | careful 2 |\n",
        "An [erratum](errata.md#flow).",
        "| Ours. | beyond the paper | 4 | **holds** |",
        "**2 claims of the paper, on its own baselines: 0 hold, 2 do not hold, 0 open.**",
        "1 are errata: [flow](errata.md#flow).",
        "Not as the paper says: [Powers are even](#powers-are-even).",
    ):
        assert part in text, part


def test_a_claim_about_our_own_baselines_does_not_count_as_the_papers(runs, toy):
    [run] = runs
    claim = Claim.of_paper(
        "So.",
        "so",
        lambda _: Finding("", Verdict.HOLDS),
        lambda _: Finding("", Verdict.FAILS),
    )
    run = replace(run, study=toy.experiment(claims=[claim]))
    assert run.verdicts() == [Verdict.HOLDS]
    assert "1 hold, 0 do not hold" in filled(PAGE, [run], "figures")
