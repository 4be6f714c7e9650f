import re

from matplotlib import rcParams
from matplotlib.figure import Figure

from ortholand_lab.study.figures import (
    METHOD_STYLES,
    house_style,
    inline_svg,
    plot_method,
    save_figure,
)


def make_figure() -> Figure:
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot([1, 2], [3, 4], clip_on=True)
    return figure


def test_every_method_has_a_look_of_its_own():
    for part in ("label", "colour", "dashes"):
        looks = [getattr(style, part) for style in METHOD_STYLES.values()]
        assert len(set(looks)) == len(looks)


def test_a_curve_has_the_look_of_its_method():
    axes = Figure().subplots()
    for method, style in METHOD_STYLES.items():
        plot_method(axes, method, [1, 2], [3, 4])
        line = axes.get_lines()[-1]
        assert line.get_label() == style.label
        assert line.get_color() == style.colour
        assert line.get_linewidth() == style.width
        assert line.is_dashed() == (style.dashes != "-")


def test_a_figure_is_saved_in_three_formats_and_always_the_same(tmp_path):
    for folder in ("a", "b"):
        with house_style():
            save_figure(make_figure(), tmp_path / folder, "line")
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    for kind, start in starts.items():
        first, second = (tmp_path / folder / f"line.{kind}" for folder in ("a", "b"))
        assert first.read_bytes().startswith(start)
        assert first.read_bytes() == second.read_bytes()


def test_the_style_leaves_the_users_settings_alone():
    before = dict(rcParams)
    with house_style():
        assert rcParams["legend.frameon"] is False
    assert dict(rcParams) == before


def test_inlined_figures_share_no_ids_and_refer_to_their_own(tmp_path):
    svg = save_figure(make_figure(), tmp_path, "line")
    ids = []
    for name in ("one", "two"):
        element = inline_svg(svg, name, "A line.")
        own = re.findall(r'\bid="([^"]*)"', element)
        assert own
        references = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', element)
        assert references
        assert {a or b for a, b in references} <= set(own)
        ids += own
    assert len(set(ids)) == len(ids)


def test_an_inlined_figure_takes_the_width_of_the_page(tmp_path):
    element = inline_svg(save_figure(make_figure(), tmp_path, "line"), "one", "A line.")
    tag = element[: element.index(">")]
    assert "viewBox" in tag
    assert 'aria-label="A line."' in tag
    assert not re.search(r'\s(width|height)="', tag)
