"""Figures of paper B: their panels, the order of sites and methods, and that long names are not clipped."""

import json
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest
from typer.testing import CliRunner

import polysite as ps
from folders import SITES, cases, load, write
from polysite.cli import app
from polysite.errors import ConfigError
from polysite.report import paper_figures
from polysite.report.compare import compare
from polysite.report.example_cases import named
from polysite.report.page import Options, build
from polysite.report.paper_figures import PAPER_FIGURES

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


def axes_of(picture):
    return picture.svg.figure.axes


def test_bars_are_means_with_one_standard_deviation_by_decreasing_size(few):
    (picture,) = PAPER_FIGURES["bars"](few, Options())
    (axes,) = axes_of(picture)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["north (6)", "south (5)", "island (2)", "all"]
    fedprox = axes.containers[3]  # every method has a container of errors, then one of bars
    values = few.find("fedprox").of("south", "dice")
    assert fedprox.patches[1].get_height() == pytest.approx(fmean(values))
    segment = fedprox.errorbar.lines[2][0].get_segments()[1]
    assert np.ptp(segment[:, 1]) / 2 == pytest.approx(stdev(values))
    assert "one standard deviation" in picture.caption and picture.name == "bars"


def test_many_methods_are_divided_into_panels_that_repeat_the_references(many):
    panels = paper_figures._panels(many)
    assert [len(p) for p in panels] == [6, 6, 5] and all(
        [m.name for m in p[:2]] == ["pooled", "fedavg"] for p in panels
    )
    assert {m.name for p in panels for m in p} == {m.name for m in many.methods}
    assert [p.name for p in PAPER_FIGURES["bars"](many, Options())] == ["bars-1", "bars-2", "bars-3"]


@pytest.mark.parametrize("name", ["bars", "boxes", "groups", "volumes"])
def test_nothing_is_clipped_with_23_long_names_and_13_methods(many, name):
    for picture in PAPER_FIGURES[name](many, Options()):
        figure = picture.svg.figure
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert box.x0 > -0.05 and box.y0 > -0.05 and box.x1 < width + 0.05 and box.y1 < height + 0.05
        for axes in figure.axes:
            named = [t for t in axes.get_xticklabels() if LONG[:8] in t.get_text()]
            feet = [t.get_window_extent().x1 / figure.dpi for t in named]  # slanted names end at their tick
            assert all(b - a > 0.12 for a, b in pairwise(feet))


def test_boxes_are_drawn_over_cases_for_the_mean_and_every_label(few):
    (picture,) = PAPER_FIGURES["boxes"](few, Options())
    mean, wt, et = axes_of(picture)
    assert [a.get_title(loc="left") for a in (mean, wt, et)] == ["mean over labels", "WT", "ET"]
    assert [t.get_text() for t in mean.get_yticklabels()] == ["fedprox", "fedavg"]  # from below: fedavg is on top
    medians = [line for line in wt.lines if line.get_linewidth() == 1.4]
    assert medians[1].get_xdata()[0] == pytest.approx(np.median(few.find("fedavg").of(None, "dice", label="WT")))


def test_groups_are_those_of_all_splits_by_decreasing_size(few, many):
    (picture,) = PAPER_FIGURES["groups"](few, Options())
    (axes,) = axes_of(picture)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["south", "north", "island"]
    heights = {c.get_label(): [p.get_height() for p in c.patches] for c in axes.containers}
    assert heights == {"HGG": [30, 20, 0], "LGG": [30, 0, 0], "not known": [0, 10, 10]}
    (bare,) = PAPER_FIGURES["groups"](many, Options())
    assert "name no groups" in bare.caption


def test_volumes_are_those_of_the_ground_truth(few, many):
    (picture,) = PAPER_FIGURES["volumes"](few, Options())
    wt, _ = axes_of(picture)
    medians = [line.get_ydata()[0] for line in wt.lines if line.get_linewidth() == 1.4]
    assert medians == pytest.approx([0.02] * 3) and wt.get_ylabel() == "mL"  # ten voxels of 2 mm³
    assert axes_of(PAPER_FIGURES["volumes"](many, Options())[0])[0].get_ylabel() == "voxels"


def test_a_chosen_case_shows_every_method_and_label(few):
    options = Options(cases=("north-1",))
    (picture,) = PAPER_FIGURES["cases"](few, options)
    assert picture.name == "cases north-1" and "north" in picture.caption
    assert len(axes_of(picture)) == 1 + 2 * 3  # one modality; two labels of the truth and two methods
    assert PAPER_FIGURES["cases"](few, Options(cases=("north-1",), scans=False)) == []
    page = build("page", list(few.methods), options)
    assert "cases north-1" in {p.name for p in page.pictures} and ">Figures<" in page
    for name, words in (("north-9", "no evaluated case 'north-9'"), ("-1", "may be any of island-1, north-1")):
        with pytest.raises(ConfigError, match=words):
            named(few.methods, [name])
    assert named(few.methods, ["rth-1"])[0].case == "north-1"


def test_any_case_of_the_data_can_be_shown(tmp_path):
    study = ps.Study(
        model=ps.UNet(filters=(2, 4, 4)),
        data=ps.Phantom(shape=(24, 24, 24), sites={"a": ps.Hospital(cases=14), "b": ps.Hospital(cases=4)}),
        train=ps.Train(patch=(24, 24, 24), batch=2, device="cpu", augment="none"),
        split=ps.Split(test=0.4),
        run=ps.Plan(rounds=1),
    )
    run = ps.train(study, tmp_path / "run").folder.path
    (method,) = load(run)
    evaluation = method.first.evaluation
    kept = {place["case"] for place in evaluation.about["shown"]}
    other = next(case for site, case in evaluation.own if case not in kept)
    (shown,) = named([method], [other])
    assert shown.case == other and shown.image.shape[1:] == shown.truth.shape == shown.predicted["run"].shape
    voxels = evaluation.own[shown.site, other]
    assert int((shown.truth & 1).sum()) == voxels[shown.labels[0]]["truth"]
    again = named([method], [next(iter(kept))])[0]
    assert again.truth.dtype == np.uint8
    assert sum(evaluation.about["groups"]["a"].values()) == 14 and method.sizes == {"a": 14, "b": 4}
    assert set(evaluation.about["voxel"]["a"]) == {case for site, case in evaluation.own if site == "a"}


def test_unknown_figures_are_refused_and_options_reach_the_page(few, tmp_path):
    with pytest.raises(ConfigError, match="no figure 'bar'"):
        build("page", list(few.methods), Options(figures=("bar",)))
    run = str(few.methods[0].first.path)
    done = CliRunner().invoke(
        app, ["report", run, "--out", str(tmp_path / "page.html"), "--figure", "boxes", "--case", "south-0"]
    )
    assert done.exit_code == 0, done.output
    names = {p.name for p in (tmp_path / "page_figures").iterdir()}
    assert {"boxes.svg", "boxes.png", "cases-south-0.svg", "captions.json"} <= names
    done = CliRunner().invoke(app, ["report", run, "--out", str(tmp_path / "x.html"), "--case", "a", "--no-scans"])
    assert "--no-scans" in str(done.exception)
