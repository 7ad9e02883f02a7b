"""Figures: those of paper B, whose long names are not clipped, and their files, whose names do not depend on chance."""

import json
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

from folders import SITES, cases, load, write
from polysite.cli import app
from polysite.errors import ConfigError, RunError
from polysite.report import paper_figures
from polysite.report.compare import compare
from polysite.report.example_cases import named
from polysite.report.figure_files import Picture, draw, write_figures
from polysite.report.page import Options, Section, build, layout
from polysite.report.paper_figures import PAPER_FIGURES
from studies import SMALL

LONG = "Sankt-Marien-Krankenhaus der Barmherzigen Schwestern"


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    root = tmp_path_factory.mktemp("few")
    runs = [write(root / n, cases(k / 20, 0.02, k), algorithm={"name": n}) for k, n in enumerate(("fedavg", "fedprox"))]
    for run in runs:
        path = run / "evaluation" / "test" / "about.json"
        about = json.loads(path.read_text())
        about["groups"] = {"north": {"HGG": 20, "": 10}, "south": {"HGG": 30, "LGG": 30}, "island": {"": 10}}
        about["voxel"] = {s: {f"{s}-{k}": 2.0 for k in range(n)} for s, n in SITES.items()}
        path.write_text(json.dumps(about))
    return compare(load(*runs))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    held = {f"{k:02d} {LONG}": {f"{k}-{i}": {"WT": float(rng.random())} for i in range(1 + k % 4)} for k in range(23)}
    names = ["pooled", "fedavg", *(f"method {k} with a long name" for k in range(11))]
    lr = [{"train": {"lr": 0.1 + 0.01 * k}, "run": {"pooled": n == "pooled"}} for k, n in enumerate(names)]
    return compare(load(*(write(root / n, held, **settings) for n, settings in zip(names, lr, strict=True))))


def axes_of(found, name):
    """The axes of the only picture of this name."""
    (picture,) = PAPER_FIGURES[name](found, Options())
    return picture.svg.figure.axes


def test_bars_are_means_with_one_standard_deviation_by_decreasing_size(few):
    (axes,) = axes_of(few, "bars")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["north (6)", "south (5)", "island (2)", "all"]
    fedprox = axes.containers[3]  # every method has a container of errors, then one of bars
    values = few.find("fedprox").of("south", "dice")
    assert fedprox.patches[1].get_height() == pytest.approx(fmean(values))
    segment = fedprox.errorbar.lines[2][0].get_segments()[1]
    assert np.ptp(segment[:, 1]) / 2 == pytest.approx(stdev(values))


@pytest.mark.parametrize("name", ["bars", "boxes", "groups", "volumes"])
def test_nothing_is_clipped_with_23_long_names_and_13_methods_in_panels_that_repeat_the_references(many, name):
    panels = paper_figures._panels(many)
    assert [len(p) for p in panels] == [6, 6, 5] and {m.name for p in panels for m in p} == {
        m.name for m in many.methods
    }
    assert all([m.name for m in p[:2]] == ["pooled", "fedavg"] for p in panels)
    pictures = PAPER_FIGURES[name](many, Options())
    assert len(pictures) == (3 if name == "bars" else 1)
    for picture in pictures:
        figure = picture.svg.figure
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 > -0.05 and box.y0 > -0.05 and box.x1 < width + 0.05 and box.y1 < height + 0.05
        for axes in figure.axes:
            ticks = [t for t in axes.get_xticklabels() if LONG[:8] in t.get_text()]
            feet = [t.get_window_extent().x1 / figure.dpi for t in ticks]  # slanted names end at their tick
            assert all(b - a > 0.12 for a, b in pairwise(feet))


def test_groups_are_those_of_all_splits_and_volumes_those_of_the_ground_truth(few):
    (axes,) = axes_of(few, "groups")
    assert [t.get_text() for t in axes.get_xticklabels()] == ["south", "north", "island"]  # by decreasing size
    heights = {c.get_label(): [p.get_height() for p in c.patches] for c in axes.containers}
    assert heights == {"HGG": [30, 20, 0], "LGG": [30, 0, 0], "not known": [0, 10, 10]}
    wt, _ = axes_of(few, "volumes")
    medians = [line.get_ydata()[0] for line in wt.lines if line.get_linewidth() == 1.4]
    assert medians == pytest.approx([0.02] * 3) and wt.get_ylabel() == "mL"  # ten voxels of 2 mm³


def test_a_chosen_case_shows_the_truth_and_every_method(few):
    (picture,) = PAPER_FIGURES["cases"](few, Options(cases=("north-1",)))
    assert picture.name == "cases north-1" and "north" in picture.caption
    assert len(picture.svg.figure.axes) == 1 + 1 + 2  # the scan, in its one modality; the truth; two methods
    assert PAPER_FIGURES["cases"](few, Options(cases=("north-1",), scans=False)) == []
    for name, words in (("north-9", "no evaluated case 'north-9'"), ("-1", "may be any of island-1, north-1")):
        with pytest.raises(ConfigError, match=words):
            named(few.methods, [name])
    assert named(few.methods, ["rth-1"])[0].case == "north-1"


def test_any_case_of_the_data_can_be_shown(trained):
    (method,) = load(trained(SMALL).folder.path)
    evaluation = method.first.evaluation
    name = evaluation.about["shown"][0]["case"]
    (kept,) = named([method], [name])
    del evaluation.about["shown"][0]  # so that the scan is prepared again
    (again,) = named([method], [name])
    assert again.case == name and np.array_equal(again.image, kept.image) and np.array_equal(again.truth, kept.truth)
    voxels = evaluation.own[again.site, name]
    assert int((again.truth & 1).sum()) == voxels[again.labels[0]]["truth"]
    assert method.sizes == dict.fromkeys(("east", "north", "west"), 5)
    assert set(evaluation.about["voxel"]["east"]) == {case for site, case in evaluation.own if site == "east"}


def test_unknown_figures_are_refused_and_options_reach_the_page(few, tmp_path):
    with pytest.raises(ConfigError, match="no figure 'bar'"):
        build("page", list(few.methods), Options(figures=("bar",)))
    words = ["report", str(few.methods[0].first.path), "--out", str(tmp_path / "page.html"), "--case", "south-0"]
    done = CliRunner().invoke(app, [*words, "--figure", "boxes"])
    assert done.exit_code == 0, done.output
    names = {p.name for p in (tmp_path / "page_figures").iterdir()}
    assert {"boxes.svg", "boxes.png", "cases-south-0.svg", "captions.json"} <= names
    done = CliRunner().invoke(app, [*words, "--no-scans"])
    assert "--no-scans" in str(done.exception)


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
    page, folder = layout("title", "lead", sections, "1.0"), tmp_path / "figures"
    page.write(tmp_path)
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == page
    captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    assert {name: each["caption"] for name, each in captions.items()} == {
        "gets": "first", "gets-dice-tc": "second", "bars": "named", "gets-2": "third",
    }  # fmt: skip
    files = {"captions.json", *(f"{name}.{kind}" for name in captions for kind in ("svg", "pdf", "png"))}
    assert {p.name for p in folder.iterdir()} == files
    with pytest.raises(RunError, match="could not be written"):
        write_figures(tmp_path / "index.html", [Picture("a", line(), "")])
    for name in captions:
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") in page
        pdf = (folder / f"{name}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-") and b"/Type3" not in pdf  # journals refuse fonts of type 3
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1) and picture.width == 600
