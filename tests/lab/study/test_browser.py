"""The report in a real browser: no complaint in its console, every figure visible, on a phone too.

With Debian's chromium, as it is: it prints its console to standard error and the page, as it
became, to standard output. A frame in a page of the test's own takes the measurements, so the
report itself is left as it is.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import replace
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ortholand_lab.study.records import Store
from ortholand_lab.study.report import stored_runs, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="the report was not opened in a browser: there is no chromium here"
)

MEASURE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe src="report.html" style="width: WIDTHpx; height: 800px; border: 0"></iframe>
<pre id="measured"></pre>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const box = (e) => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
  const drawn = (svg) => [...svg.querySelectorAll("path, use")].filter(
    (e) => { const b = e.getBoundingClientRect(); return b.width + b.height > 0; }).length;
  const targets = [...page.querySelectorAll("a[href^='#']")];
  document.getElementById("measured").textContent = JSON.stringify({
    width: page.documentElement.clientWidth,
    needed: page.documentElement.scrollWidth,
    figures: [...page.querySelectorAll("figure")].map(box),
    drawings: [...page.querySelectorAll("figure svg")].map(
      (svg) => ({ box: box(svg), drawn: drawn(svg) })),
    cards: [...page.querySelectorAll(".card svg use")].map(box),
    claims: [...page.querySelectorAll(".claims tbody tr")].map(box),
    dead: targets.filter((a) => !page.getElementById(a.hash.slice(1))).map((a) => a.hash),
  });
};
</script>
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def folder(smoke, tmp_path_factory) -> Path:
    """A report with two runs, of which one is not complete."""
    run, _ = smoke
    store = Store(tmp_path_factory.mktemp("browser"))
    for seed in (0, 1):
        for record in run.records.values():
            options = replace(record.request.options, seed=seed)
            store.save(replace(record, request=replace(record.request, options=options)))
    store.path(replace(record.request, options=options)).unlink()  # the timing of the second
    write_report(store, stored_runs(store, {run.study.name: run.study}))
    return store.root


@pytest.fixture
def served(folder) -> Generator[str, None, None]:
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def open_in_browser(url: str, profile: Path) -> tuple[str, list[str]]:
    """The page as it became, and what the browser's console says of it."""
    assert CHROMIUM is not None
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
    # No calls home, which would fail loudly without a network.
    options += " --disable-background-networking --disable-component-update --disable-sync"
    result = subprocess.run(
        [CHROMIUM, *options.split(), f"--user-data-dir={profile}", "--window-size=1280,900",
         "--enable-logging=stderr", "--dump-dom", url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def measure(folder: Path, served: str, width: int) -> dict:
    (folder / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)))
    page, console = open_in_browser(f"{served}/measure.html", folder / f"profile-{width}")
    assert console == []
    found = re.search(r'<pre id="measured">(.*?)</pre>', page)
    assert found is not None
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [1200, 360])
def test_every_figure_is_visible_and_nothing_sticks_out(folder, served, smoke, width):
    experiment = smoke[0].study
    claims, figures = len(experiment.claims), len(experiment.figures)
    found = measure(folder, served, width)
    assert found["width"] == width
    assert found["needed"] <= width  # no scrolling sideways
    assert found["dead"] == []
    # One of the run without the timing of textbook formulas: the others need it.
    assert len(found["figures"]) == len(found["drawings"]) == figures + 1
    assert len(found["cards"]) == 2  # both runs' first figures, small
    assert all(100 < w <= width and h > 60 for w, h in found["cards"])
    assert all(300 < w <= width and h > 100 for w, h in found["figures"])
    for drawing, (room, _) in zip(found["drawings"], found["figures"], strict=True):
        assert min(drawing["box"]) > 100
        assert drawing["box"][0] <= room  # no legend is cut off
        assert drawing["drawn"] > 20  # axes, curves, letters
    assert len(found["claims"]) == 2 * (claims + 1)  # with a heading for each run
    assert all(w > 300 and h > 15 for w, h in found["claims"])


def test_the_page_opened_as_a_file_has_nothing_to_complain_about(folder):
    page, console = open_in_browser((folder / "report.html").as_uri(), folder / "profile")
    assert console == []
    assert page.count("<svg") == page.count("<figure>") + page.count('class="card"') > 0


def test_a_complaint_would_be_noticed(folder, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<!doctype html><img src="nowhere.png"><script>console.error("no")</script>')
    _, console = open_in_browser(page.as_uri(), folder / "profile")
    assert any('"no"' in line for line in console)
