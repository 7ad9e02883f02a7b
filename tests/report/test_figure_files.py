"""Figures as files: the SVG of the page, a PDF, a PNG of 300 dpi, captions; names that do not depend on chance."""

import json

import pytest
from matplotlib.figure import Figure
from PIL import Image

from polysite.errors import RunError
from polysite.report.figure_files import Picture, draw, write_figures
from polysite.report.page import Section, layout


def line(height=1.0):
    figure = Figure((2.0, height))
    figure.add_subplot().plot([0, 1], [0, height])
    return draw(figure)


@pytest.mark.full_resolution
def test_every_figure_of_a_page_is_written_as_it_is_shown(tmp_path):
    sections = [
        Section("gets", "Scores", ("words", Picture("", line(), "first"), Picture("Dice / TC", line(2), "second"))),
        Section("look", "Elsewhere", (Picture("", line(3), "named", name="bars"), Picture("", "<img>", "no drawing"))),
        Section("gets", "Again", (Picture("", line(1.5), "third"),)),
    ]
    page = layout("title", "lead", sections, "1.0")
    page.write(tmp_path)
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == page
    folder = tmp_path / "figures"
    captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    assert {name: each["caption"] for name, each in captions.items()} == {
        "gets": "first", "gets-dice-tc": "second", "bars": "named", "gets-2": "third",
    }  # fmt: skip
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        ["captions.json", *(f"{name}.{kind}" for name in captions for kind in ("svg", "pdf", "png"))]
    )
    for name in captions:
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") in page
        pdf = (folder / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-") and b"/Type3" not in pdf  # journals refuse fonts of type 3
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1) and picture.width == 600


def test_the_same_figures_give_the_same_files_and_leave_others_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    first = {p.name: p.read_bytes() for p in write_figures(tmp_path, [Picture("a", line(), "")])}
    again = {p.name: p.read_bytes() for p in write_figures(tmp_path, [Picture("a", line(), "")])}
    assert first == again and (tmp_path / "mine.txt").read_text() == "kept"
    assert write_figures(tmp_path / "none", []) == [] and not (tmp_path / "none").exists()
    with pytest.raises(RunError, match="could not be written"):
        write_figures(tmp_path / "mine.txt", [Picture("a", line(), "")])


def test_bars_differ_without_colour_and_matrices_share_a_scale(tmp_path):
    from polysite.report import drawing, figures

    looks = [drawing.filling(k) for k in range(len(drawing.COLOURS))]
    assert len({look["hatch"] for look in looks}) == len(looks)
    tables = [
        {"a": {"a": 0.5, "b": 0.6}, "b": {"a": 0.55, "b": 0.5}},
        {"a": {"a": 0.8, "b": 0.9}, "b": {"a": 0.7, "b": 0.9}},
    ]
    drawn = [figures.matrix(table, (0.5, 0.9)).figure for table in tables]
    assert [figure.axes[0].images[0].get_clim() for figure in drawn] == [(0.5, 0.9)] * 2
