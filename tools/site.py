"""What the documentation site needs beyond MkDocs: hooks of mkdocs.yml.

- Pages whose text lives outside of docs/ (the changelog, the examples' table) and the tutorial
  notebook, with its stored outputs.
- Links to source files lead to the repository, links to such pages to the page.
- Formulas become MathML when the site is built, so that no script has to draw them.
- Figures link to themselves, for readers whose screen shows them small.
- Nothing is loaded from the network when a page is read: what would be is a warning, and ends a
  strict build.
- The navigation is shown on screens of 1200 pixels and more.
"""

import base64
import html
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
# Where the text of a page is, if not in docs/.
OUTSIDE = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "results/examples.md": "examples/README.md",
}
NOTEBOOKS = {"tutorial.md": "docs/tutorial.ipynb"}
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s]+)(\))")
FENCE = re.compile(r"^(?:```.*?^```|~~~.*?^~~~)", flags=re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', flags=re.DOTALL)
CELL = re.compile(r"<td>(.*?)</td>", flags=re.DOTALL)
FIGURE = re.compile(r'<img [^>]*src="([^"]*figures/[^"]*)"[^>]*>')
# Where the theme begins to show the navigation, 1220 pixels, and where this site does.
BREAKPOINTS = {"76.25em": "75em", "76.234375em": "74.984375em"}
# The theme's only script from elsewhere, for the search in pages that are opened as files.
SHIM, OUR_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/iframe-worker.js"
LOADS = re.compile(
    r"<(?:script|link|img|iframe|source|video)\b[^>]*?(?:src|href)=\"?(https?://[^\"\s>]+)"
)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """The pages that are not in docs/."""
    for page, source in OUTSIDE.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, source in NOTEBOOKS.items():
        if (ROOT / source).exists():
            text, pictures = notebook_as_markdown(ROOT / source)
            files.append(File.generated(config, page, content=text))
            for name, data in pictures.items():
                files.append(File.generated(config, name, content=data))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of docs/ lead to the page made of that file, or to the repository."""
    uri = page.file.src_uri
    source = OUTSIDE.get(uri, NOTEBOOKS.get(uri, f"docs/{uri}"))
    folder, repository = Path(source).parent, config.extra["repository"]

    def follow(link: re.Match) -> str:
        target, _, anchor = link[2].partition("#")
        address = address_of(os.path.normpath(folder / target), uri, repository, files)
        return f"{link[1]}{address}{'#' + anchor if anchor else ''}{link[3]}"

    return outside_of_fences(markdown, lambda text: LINK.sub(follow, text))


def address_of(path: str, uri: str, repository: str, files: Files) -> str:
    """Where a link from the page `uri` to a file of the repository leads on the site."""
    pages = {source: page for page, source in (OUTSIDE | NOTEBOOKS).items()}
    page = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is not None and files.get_file_from_path(page) is not None:
        return os.path.relpath(page, Path(uri).parent)
    if not (ROOT / path).exists():
        return f"missing:{path}"  # MkDocs warns of it, and a strict build ends
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository}/{kind}/main/{path}"


def on_page_content(html: str, **_: Any) -> str:
    """TeX becomes MathML; cells with sentences are marked, to be wider; figures become links."""
    html = FIGURE.sub(r'<a href="\1">\g<0></a>', html)
    return CELL.sub(as_cell, FORMULA.sub(as_mathml, html))


def as_cell(cell: re.Match) -> str:
    """One cell of a table, marked if there is much to read in it."""
    words = re.sub(r"<[^>]*>", "", cell[1])
    return f'<td class="long">{cell[1]}</td>' if len(words) > 60 else cell[0]


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's script comes from the site; a page that loads from elsewhere is a warning."""
    output = output.replace(SHIM, get_relative_url(OUR_SHIM, page.url))
    for address in loaded_from_elsewhere(output):
        log.warning(f"{page.file.src_uri} loads {address}")
    return output


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of what is not found."""
    return output_content.replace(SHIM, "/" + OUR_SHIM)


def on_post_build(config: Any, **_: Any) -> None:
    """The theme's sheets and script show the navigation on somewhat narrower screens too."""
    folder, found = Path(config.site_dir) / "assets", set()
    for path in [*folder.glob("stylesheets/*.css"), *folder.glob("javascripts/*.js")]:
        text = path.read_text()
        found |= {point for point in BREAKPOINTS if point in text}
        for theirs, ours in BREAKPOINTS.items():
            text = text.replace(theirs, ours)
        path.write_text(text)
    if found != set(BREAKPOINTS):
        log.warning(f"The theme has no breakpoint {set(BREAKPOINTS) - found}: give it another.")


def loaded_from_elsewhere(page: str) -> list[str]:
    """Addresses that a browser fetches when it opens the page; links are not among them."""
    canonical = re.compile(r"<link[^>]*rel=\"?canonical[^>]*>")
    return LOADS.findall(canonical.sub("", page))


def as_mathml(formula: re.Match) -> str:
    """One formula, as arithmatex has left it."""
    display = "block" if formula[2] == "[" else "inline"
    return convert(html.unescape(formula[3]).strip(), display=display)


def outside_of_fences(markdown: str, change: Any) -> str:
    """Applies a function to all text that is not in a block of code."""
    parts, start = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*parts, change(markdown[start:])])


def notebook_as_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and stored outputs as a page, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"figures/{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
