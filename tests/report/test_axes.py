"""Methods over several federations: losses, distances, correlations, published distances, figures, and their page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from folders import cases as drawn
from folders import load, write
from polysite.engines.record import SiteValidation
from polysite.engines.run_folder import RunFolder
from polysite.report import axes, axes_figures, axes_page
from polysite.report.axes import FederationResult
from polysite.report.compare import compare
from polysite.report.grid import Grid, Line, name
from polysite.report.page import Options
from polysite.report.paper_figures import PAPER_FIGURES
from polysite.report.published import Paper
from polysite.report.runs import Method, read
from polysite.report.tables import show_grid

HOME = {f"c{k}": "east" if k < 4 else "west" for k in range(8)}  # hospital of every case in the data
DICE = {case: 0.5 + 0.05 * k for k, case in enumerate(HOME)}


def dealt(path, sites, shift=0.0, seed=0, **settings):
    """A run whose cases are at these sites, every Dice lower by a shift."""
    scores = {s: {c: {"WT": DICE[c.rpartition(".")[2]] - shift} for c in names} for s, names in sites.items()}
    write(path, scores, seed=seed, **settings)
    rows = [
        f"{c.rpartition('.')[2]},{HOME[c.rpartition('.')[2]]},test,{s}" for s, names in sites.items() for c in names
    ]
    (path / "split.csv").write_text("\n".join(["Subject_ID,Partition_ID,Split,Site", *rows]) + "\n")
    return read(path, path.parent.name)


NATURAL = {"east": ["c0", "c1", "c2", "c3"], "west": ["c4", "c5", "c6", "c7"]}
MIXED = {"mix-1": ["east.c0", "west.c4", "west.c5"], "mix-2": ["east.c1", "east.c2", "east.c3", "west.c6", "west.c7"]}


def federation(root, title, sites, shifts, distance, pooled=None):
    """FedAvg with one loss for every seed, beside pooled training that loses nothing."""
    runs = [dealt(root / title / "fedavg" / str(k), sites, shift, seed=k) for k, shift in enumerate(shifts)]
    methods = [Method("fedavg", tuple(runs))]
    if pooled:
        again = tuple(axes.regrouped(one, like) for one, like in zip(pooled, runs, strict=True))
        methods.insert(0, Method("centralised", again))
    return FederationResult(title, compare(methods), {"EMD": distance, "EUC": 1 - distance})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("axes")
    pooled = [dealt(root / "pooled" / str(k), NATURAL, seed=k, run={"pooled": True}) for k in range(2)]
    given = [
        ("natural", NATURAL, [0.1, 0.12], 0.3),
        ("mixed", MIXED, [0.02, 0.0], 0.1),
        ("far", MIXED, [0.3, 0.2], 0.8),
    ]
    return [federation(root, title, sites, shifts, far, pooled) for title, sites, shifts, far in given]


def test_cases_are_found_again_wherever_a_federation_puts_them(results):
    (run, _) = results[1].find("fedavg").runs
    assert axes.sources(run)["mix-1", "east.c0"] == ("east", "c0")
    pooled = results[1].find("centralised").first
    assert pooled.scores["mix-2"]["west.c7"].labels == {"WT": DICE["c7"]}  # it was trained as east and west
    assert set(pooled.evaluation.own) == set(run.evaluation.own)


def test_slices_of_a_case_belong_to_it(tmp_path):
    write(tmp_path / "run", {"mix": {"c0/z007": {"WT": 0.5}, "c0/z009": {"WT": 0.7}}})
    (tmp_path / "run" / "split.csv").write_text("Subject_ID,Partition_ID,Split,Site\nc0,east,test,mix\n")
    found = axes.sources(read(tmp_path / "run"))
    assert found == {("mix", "c0/z007"): ("east", "c0/z007"), ("mix", "c0/z009"): ("east", "c0/z009")}


def test_a_loss_is_the_mean_difference_to_pooled_training_on_the_same_cases(results):
    found = axes.losses(results)
    assert list(found) == ["fedavg"]
    assert found["fedavg"]["natural"] == pytest.approx([0.1, 0.12])
    assert found["fedavg"]["far"] == pytest.approx([0.3, 0.2])


def test_without_pooled_training_the_first_federation_is_the_reference(results):
    alone = [replace(r, comparison=compare([r.find("fedavg")])) for r in results]
    found = axes.losses(alone)["fedavg"]
    assert found["natural"] == [0, 0] and found["mixed"] == pytest.approx([-0.08, -0.12])
    assert "in the federation 'natural' minus" in axes.distance_table(alone).note


def test_distances_and_losses_are_correlated_over_the_federations(results):
    grid = axes.correlations(results)
    rows = {line.cells[1].text: line.cells for line in grid.lines}
    assert rows["EMD"][2].value == 3 and rows["EMD"][3].value == 1 and rows["EUC"][3].value == -1
    expected = np.corrcoef([0.3, 0.1, 0.8], [0.11, 0.01, 0.25])[0, 1]
    assert rows["EMD"][5].value == pytest.approx(expected) and rows["EMD"][6].text == "–"  # too few
    more = [replace(r, title=f"{r.title} {k}") for r in results for k in (1, 2)]
    assert " to " in axes.correlations(more).lines[0].cells[6].text
    assert axes.correlations(results[:2]) is None


def test_tables_have_a_line_per_federation_and_a_column_per_method(results):
    table, scores = axes.distance_table(results), axes.overview(results)
    assert table.head == ("federation", "sites", "EMD", "EUC", "Dice fedavg", "loss fedavg")
    assert table.lines[2].cells[2].value == 0.8 and table.lines[2].cells[5].value == pytest.approx(0.25)
    assert scores.head == ("method", "natural", "mixed", "far") and scores.lines[0].cells[2].best
    mean = sum(DICE.values()) / 8
    assert scores.lines[1].cells[1].value == pytest.approx(mean - 0.11)


def test_distances_of_an_assessment_are_means_over_pairs(tmp_path):
    square = [[0, 1, 2], [1, 0, 6], [2, 6, 0]]
    half = (np.array(square) / 2).tolist()
    quantities = {
        "intensity t1": {"kind": "intensity", "matrix": half}, "intensity t2": {"kind": "intensity", "matrix": square},
        "volume WT": {"kind": "volume", "matrix": half},
    }  # fmt: skip
    stored = {"quantities": quantities, "distances": {"emd": {"matrix": half}, "euclidean": {"matrix": square}}}
    (tmp_path / "assessment.json").write_text(json.dumps(stored))
    assert axes.distances([tmp_path]) == {"EMD_maxI": 3.0, "EMD_maxL": 1.5, "EMD": 1.5, "EUC": 3.0}
    assert axes.distances([]) == {}


def test_published_distances_stand_beside_the_measured_ones(results):
    settings = {"natural": ("Fed-KITS2019 Original",), "far": ("Fed-KITS2019 Kidney + Tumor",)}
    paper = Paper(("A_table1", "A_table3"), {"fedavg": ("FedAvg",), "centralised": ()}, settings=settings)
    named = [replace(r, distances={"EMD_maxI": r.distances["EMD"], "EMD_maxL": 9.0}) for r in results]
    grid = axes.published_distances(named, paper)
    assert grid.head[1:3] == ("EMD_maxI, published", "EMD_maxI, measured") and grid.head[-1] == "Dice fedavg, measured"
    natural, mixed, far = ([cell.text for cell in line.cells] for line in grid.lines)
    assert natural[1:6] == ["1.17", "0.30", "0.87", "9.00", "0.459"] and far[1] == "0.51" and far[3] == "11.62"
    assert mixed[1] == mixed[3] == "–"
    assert axes.published_distances(results, Paper(("A_table3",), settings={})) is None


def test_the_figure_has_a_panel_per_distance_and_a_point_per_federation(results):
    (picture,) = PAPER_FIGURES["distance"](results[0].comparison, Options(federations=tuple(results)))
    panels = picture.svg.figure.axes
    assert [a.get_xlabel() for a in panels] == ["EMD", "EUC"]
    points = panels[0].containers[0].lines[0]
    assert points.get_xdata().tolist() == [0.3, 0.1, 0.8]
    assert points.get_ydata() == pytest.approx([0.11, 0.01, 0.25])
    assert "1 natural; 2 mixed; 3 far" in picture.caption and "Spearman +1.00" in panels[0].get_title(loc="left")
    assert PAPER_FIGURES["distance"](results[0].comparison, Options()) == []


def test_swept_settings_are_those_in_which_methods_differ_alone(tmp_path):
    given = [(mu, lr) for mu in (0.0, 0.01, 1.0) for lr in (0.1, 0.4)]
    runs = []
    for k, (mu, lr) in enumerate(given):
        settings = {"algorithm": {"name": "fedprox", "mu": mu}, "train": {"lr": lr}}
        runs.append(write(tmp_path / f"fedprox, mu = {mu:g}, lr = {lr:g}", drawn(0.1 * lr, 0.01, k), **settings))
    runs.append(write(tmp_path / "fedavg", drawn()))
    methods = load(*runs)
    assert axes_figures.swept(methods) == ["algorithm.mu", "train.lr"]
    first, second = PAPER_FIGURES["sweep"](compare(methods), Options())
    assert (first.name, second.name) == ("sweep algorithm.mu", "sweep train.lr")
    (panel,) = first.svg.figure.axes
    labels = panel.get_legend_handles_labels()[1]
    assert sorted(labels) == ["fedavg", "fedprox, lr = 0.1", "fedprox, lr = 0.4"]
    assert panel.get_xscale() == "symlog" and panel.containers[0].lines[0].get_xdata().tolist() == [0.0, 0.01, 1.0]
    assert PAPER_FIGURES["sweep"](compare(load(runs[0], runs[-1])), Options()) == []


GOOD, FAIR = (8, 1, 1, 90), (5, 5, 5, 85)


def peeked(path, best, **settings):
    """A run of one site whose second round was the best on test cases."""
    rounds = [SiteValidation(1, 0.5, {"WT": 0.5}, {"background": c[::-1], "WT": c}) for c in (FAIR, best, FAIR)]
    counts = {"a": {"a-1": rounds[-1].counts}}
    return write(path, {"a": {"a-1": {"WT": 0.5}}}, counts=counts, peeked=[{"a": r} for r in rounds], **settings)


def test_best_means_are_swept_too_where_runs_peeked(tmp_path):
    runs = [
        peeked(tmp_path / f"fedprox, mu = {mu:g}", best, algorithm={"name": "fedprox", "mu": mu})
        for mu, best in ((0.0, FAIR), (1.0, GOOD))
    ]
    found = compare(load(*runs, write(tmp_path / "fedavg", {"a": {"a-1": {"WT": 0.5}}})))
    names = [f"sweep algorithm.mu{word}" for word in ("", " BMIoU", " BMDice", " BMSens", " BMSpec")]
    pictures = PAPER_FIGURES["sweep"](found, Options())
    assert [p.name for p in pictures] == names
    (panel,) = pictures[1].svg.figure.axes
    line = panel.containers[0].lines[0]
    assert line.get_xdata().tolist() == [0.0, 1.0]
    assert line.get_ydata() == pytest.approx([(85 / 95 + 5 / 15) / 2, (90 / 92 + 8 / 10) / 2])  # with background
    assert panel.get_legend_handles_labels()[1] == ["fedprox"] and "per client + bg" in pictures[1].caption
    assert [p.name for p in PAPER_FIGURES["sweep"](found, Options(published=Paper(("D_table3",))))] == names[:-1]


def test_the_page_links_every_federation_and_writes_every_table(results, tmp_path):
    grids = axes_page.tables(results, Paper())
    pages = {r.title: f"../federations/{r.title}/index.html" for r in results}
    axes_page.write(tmp_path / "page", "All", "Three federations.", results, grids, pages, ["A remark."])
    text = (tmp_path / "page" / "index.html").read_text()
    assert 'href="../federations/mixed/index.html"' in text and "Does distance predict loss?" in text
    assert "A remark." in text and "Swept settings" not in text
    written = {f.name for f in (tmp_path / "page").iterdir()}
    assert {"federations.csv", "correlation.csv", "distance.csv", "tables.md", "tables.tex", "figures"} <= written


def test_a_run_without_split_file_keeps_its_names(results, tmp_path):
    run = read(write(tmp_path / "run", {"east": {"c0": {"WT": 0.5}}}))
    assert RunFolder(run.path).split.count("\n") <= 1 and axes.sources(run) == {}


@pytest.mark.parametrize("columns", [3, 40])
def test_a_table_that_no_window_can_show_is_named_with_its_file(columns, capsys):
    head = tuple(f"column {k}" for k in range(columns))
    show_grid(Grid("distance", "Distances", head, (Line(tuple(map(name, head))),) * 2, "A note."), Path("distance.csv"))
    shown = capsys.readouterr().out
    assert ("A note." in shown) == (columns == 3)
    assert ("Distances: 40 columns, too wide to print; see the page or distance.csv" in shown) == (columns == 40)


def test_of_many_methods_the_page_shows_losses_and_says_how_many_are_drawn(tmp_path):
    titles = ["centralised", *(f"method {k}" for k in range(9))]
    results = []
    for f, federation in enumerate(("one", "two")):
        runs = [
            dealt(tmp_path / federation / m, NATURAL, 0.01 * k * (f + 1), run={"pooled": not k})
            for k, m in enumerate(titles)
        ]
        methods = [Method(m, (run,)) for m, run in zip(titles, runs, strict=True)]
        results.append(FederationResult(federation, compare(methods), {"EMD": 0.1 + f}))
    grids = axes_page.tables(results, Paper())
    axes_page.write(tmp_path / "page", "All", "Two federations.", results, grids, dict.fromkeys(("one", "two"), "x"))
    text = (tmp_path / "page" / "index.html").read_text()
    assert "7 of 9 methods are shown" in text
    assert ">loss method 8<" in text and ">Dice method 8<" not in text and ">EMD<" in text
    assert "Dice method 8" in (tmp_path / "page" / "distance.csv").read_text()  # the file has all
