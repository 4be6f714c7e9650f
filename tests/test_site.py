"""The documentation site: complete, and without a need for the network."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ortholand as ol

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()


def test_every_page_is_in_the_navigation():
    navigation = CONFIGURATION.split("\nnav:\n")[1]
    written_by_reports = DOCS / "results" / "tables"  # left out of the site and of the repository
    for page in DOCS.rglob("*.md"):
        if page.is_relative_to(written_by_reports):
            continue
        assert re.search(rf"\s{page.relative_to(DOCS)}$", navigation, flags=re.MULTILINE), page


def reference() -> list[str]:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    return re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)


def test_the_reference_has_every_public_name():
    shown = {name.rpartition(".")[2] for name in reference()}
    assert shown >= set(ol.__all__)
    page = (DOCS / "api.md").read_text()
    for module, names in re.findall(r"^\| `(ortholand[\w.]+)` \| (.*) \|$", page, re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", names)) <= shown, module


@pytest.mark.parametrize("name", reference())
def test_what_the_reference_names_is_there(name):
    module, _, attribute = name.rpartition(".")
    host = module.rpartition(".")[2]
    if host in ("lightning", "peft", "transformers"):
        pytest.importorskip(host, reason="needs pip install 'ortholand[ecosystem]'")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="needs pip install 'ortholand[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.docs
def test_the_site_builds_strictly_and_loads_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = (
        r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)"
    )
    for page in pages:
        assert re.findall(loads, page.read_text()) == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()[\s\"']*(?:https?:)?//", sheet.read_text()), sheet


@pytest.mark.docs
def test_the_reference_shows_functions_not_the_modules_of_their_names(site):
    for page in (site / "api").glob("*.html"):
        assert "doc-symbol-module" not in page.read_text(), page


@pytest.mark.docs
def test_formulas_are_rendered(site):
    page = (site / "maths.html").read_text()
    assert page.count("<math") > 50
    assert "arithmatex" not in page
    assert not re.search(r"\\(?:top|psi|lambda|mathrm)", re.sub(r"<[^>]*>", "", page))


@pytest.mark.docs
def test_the_tutorial_shows_its_figures(site):
    page = (site / "tutorial.html").read_text()
    for source in re.findall(r'src="([^"]*tutorial-\d+\.png)"', page):
        assert (site / source).exists()
    assert len(re.findall(r"tutorial-\d+\.png", page)) >= 2


@pytest.mark.docs
def test_figures_lead_to_themselves(site):
    page = (site / "which.html").read_text()
    assert re.search(r'<a href="?figures/which\.png"?><img ', page)


@pytest.mark.docs
def test_the_navigation_is_shown_from_1200_pixels_on(site):
    assets = [*(site / "assets").rglob("*.css"), *(site / "assets").rglob("bundle*.js")]
    text = "".join(path.read_text() for path in assets)
    assert "(min-width:75em)" in text
    assert "76.2" not in text
