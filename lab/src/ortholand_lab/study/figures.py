"""One style for all figures, and one colour for each method, everywhere."""

import io
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ortholand_lab.study.records import Record, write_atomically


class MethodStyle(NamedTuple):
    """How a method looks. Its dashes distinguish it in greyscale prints too."""

    label: str
    colour: str
    dashes: str | tuple[int, tuple[int, ...]] = "-"
    width: float = 1.6


# Okabe and Ito's colours, which readers with any colour vision can tell apart. All are used except
# the yellow, too pale on white; the methods below them have other shades.
METHOD_STYLES: dict[str, MethodStyle] = {
    "landing": MethodStyle("landing", "#0072B2", width=2.6),  # seen between the dashes
    "landing-momentum": MethodStyle("landing with momentum", "#D55E00", (0, (5, 2))),
    "landing-unscaled": MethodStyle("landing, f without 1/p", "#000000", (0, (1, 1))),
    "exponential": MethodStyle("exponential", "#E69F00", (0, (6, 3))),
    "polar": MethodStyle("polar", "#009E73", (0, (4, 2, 1, 2))),
    "cayley": MethodStyle("Cayley", "#CC79A7", (0, (3, 2))),
    "qr": MethodStyle("QR", "#56B4E9", (0, (1, 2))),
    "plam": MethodStyle("PLAM", "#B2182B", (0, (5, 1, 1, 1))),
    "trivialization-sgd": MethodStyle("trivialization, SGD", "#7F7F7F", (0, (2, 1))),
    "trivialization-momentum": MethodStyle("trivialization, momentum", "#5E3C99", (0, (4, 1))),
    "trivialization-adam": MethodStyle("trivialization, Adam", "#A6611A", (0, (3, 1, 1, 1))),
    "trivialization-rmsprop": MethodStyle("trivialization, RMSprop", "#8A8A00", (0, (2, 2, 1, 2))),
}
# Variants have the colour of their method; anything that is not a method is black or grey.
VARIANT_STYLES: dict[str, MethodStyle] = {
    "landing-after": MethodStyle("landing: move, then land", "#0072B2", (0, (1, 1))),
    "landing-tight": MethodStyle("landing, tight rule", "#0072B2", (0, (5, 2)), 1.0),
    "landing-frobenius": MethodStyle("landing, Frobenius rule", "#0072B2", (0, (5, 1, 1, 1)), 1.0),
    "qr-householder": MethodStyle("QR by Householder", "#56B4E9", (0, (5, 1, 1, 1)), 1.0),
    "gradient-dense": MethodStyle("gradient, dense C", "#777777", "-", 0.8),
    "unconstrained": MethodStyle("no constraint, SGD", "#000000", (0, (1, 1)), 1.4),
}
# The paper's baselines look as ours do, which they replace.
BASELINE_STYLES = {
    f"{method}{form}": style._replace(label=f"{style.label} ({form[1:]})")
    for form, names in {
        "-textbook": ("exponential", "polar", "cayley", "qr"),
        "-identity": tuple(m for m in METHOD_STYLES if m.startswith("trivialization")),
    }.items()
    for method, style in ((m, METHOD_STYLES[m]) for m in names)
}
STYLES = METHOD_STYLES | VARIANT_STYLES | BASELINE_STYLES

STYLE = {
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "font.size": 10,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    # The same records give the same file.
    "svg.hashsalt": "ortholand",
}

DOTS = dict(marker="o", markersize=3)  # where a curve was measured
FORMATS = ("svg", "png", "pdf")


@contextmanager
def house_style() -> Generator[None, None, None]:
    """Draw in the style of the project, and leave the user's settings alone."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def plot_method(
    axes: Axes, method: str, x: Sequence[float], y: Sequence[float], **changes: Any
) -> None:
    """A curve in the method's own style, with optional changes."""
    style = STYLES[method]
    look: dict[str, Any] = dict(
        label=style.label, color=style.colour, linestyle=style.dashes, linewidth=style.width
    )
    axes.plot(x, y, **(look | changes))


def add_legend(figure: Figure, axes: Axes, columns: int | None = None) -> None:
    """The names of the curves of one panel, above all panels; by default in one row if it fits."""
    handles, labels = axes.get_legend_handles_labels()
    for n in range(columns or len(labels), 0, -1):
        legend = figure.legend(handles, labels, loc="outside upper center", ncols=n)
        if n == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def listed(numbers: Mapping[str, float], form: str, *, between: str = ", ") -> str:
    """Numbers with the names of their methods, as in the legends."""
    return between.join(f"{STYLES[method].label} {x:{form}}" for method, x in numbers.items())


def label_plainly(axis: Axis, form: str = "{:g}", factor: float = 1.0) -> None:
    """Label a logarithmic axis 1, 2, 5, 10, ...; over many decades with powers of 10 only."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: form.format(factor * x)))
    axis.set_minor_formatter(NullFormatter())


def draw_by_time_and_iteration(
    runs: Mapping[str, Sequence[Record]],
    seconds: Mapping[str, float],
    series: Mapping[str, str],
    *,
    height: float,
    legend_columns: int = 3,
) -> tuple[Figure, Any]:
    """A row of panels for each series: by time on the left, by iteration on the right.

    Several runs of a method are drawn as their median, with each of them behind it.

    Args:
        runs: records by method.
        seconds: seconds per iteration, by method.
        series: names, and labels of their axes.
        height: height of the figure.
        legend_columns: number of columns in the legend.

    Returns:
        The figure and its panels, for further drawing.
    """
    figure = Figure(figsize=(8, height))
    grid = figure.subplots(len(series), 2, sharex="col", sharey="row")
    for row, (name, label) in zip(grid, series.items(), strict=True):
        for axes, units in zip(row, (seconds, dict.fromkeys(seconds, 1.0)), strict=True):
            for method, trials in runs.items():
                # Without the start: a logarithmic axis cannot show time 0 and distance 0.
                x = [units[method] * k for k in trials[0].series("iteration")[1:]]
                curves = [run.series(name)[1:] for run in trials]
                for curve in curves if len(curves) > 1 else ():
                    axes.plot(x, curve, color=STYLES[method].colour, alpha=0.3, linewidth=0.8)
                plot_method(axes, method, x, [median(ys) for ys in zip(*curves, strict=True)])
            axes.set(xscale="log", yscale="log")
            axes.minorticks_off()
        row[0].set_ylabel(label)
    grid[-1, 0].set_xlabel("time, seconds")
    grid[-1, 1].set_xlabel("iterations")
    add_legend(figure, grid[0, 0], legend_columns)
    return figure, grid


def save_figure(figure: Figure, folder: Path, name: str) -> str:
    """Save a figure in all formats; return its SVG text for the report."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    for kind in FORMATS:
        buffer = io.BytesIO()
        # No dates: they would make equal figures differ.
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}[kind]
        figure.savefig(buffer, format=kind, metadata=undated)
        figure.set_layout_engine("none")  # keeps the layout just found: finding it is slow
        texts[kind] = buffer.getvalue()
        write_atomically(folder / f"{name}.{kind}", texts[kind])
    return texts["svg"].decode()


def inline_svg(svg: str, name: str, description: str) -> str:
    """An SVG element for an HTML page: with unique ids, and as wide as the page allows.

    Args:
        svg: text of an SVG file by matplotlib.
        name: prefix of the ids, which must differ between the figures of a page.
        description: for those who cannot see it, already escaped.
    """
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'\bid="', f'id="{name}-', element)
    element = re.sub(r'href="#', f'href="#{name}-', element)
    element = element.replace("url(#", f"url(#{name}-")
    # Only the first tag: what is inside has sizes of its own.
    head, rest = element.split(">", 1)
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{description}">{rest}'
