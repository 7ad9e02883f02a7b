"""Methods over several federations: losses, distances, correlations, published distances, figures, and their page."""

from dataclasses import replace

import numpy as np
import pytest

from folders import load, write
from polysite.engines.record import SiteValidation
from polysite.report import axes, axes_figures, axes_page
from polysite.report.axes import FederationResult
from polysite.report.compare import compare
from polysite.report.page import Options
from polysite.report.paper_figures import PAPER_FIGURES
from polysite.report.runs import Method, read

HOME = {f"c{k}": "east" if k < 4 else "west" for k in range(8)}  # hospital of every case in the data
DICE = {case: 0.5 + 0.05 * k for k, case in enumerate(HOME)}
NATURAL = {"east": ["c0", "c1", "c2", "c3"], "west": ["c4", "c5", "c6", "c7"]}
MIXED = {"mix-1": ["east.c0", "west.c4", "west.c5"], "mix-2": ["east.c1", "east.c2", "east.c3", "west.c6", "west.c7"]}


def dealt(path, sites, shift=0.0, seed=0, **settings):
    """A run whose cases are at these sites, every Dice lower by a shift."""
    own = {c: c.rpartition(".")[2] for names in sites.values() for c in names}  # the names in the data
    scores = {s: {c: {"WT": DICE[own[c]] - shift} for c in names} for s, names in sites.items()}
    write(path, scores, seed=seed, **settings)
    rows = [f"{own[c]},{HOME[own[c]]},test,{s}" for s, names in sites.items() for c in names]
    (path / "split.csv").write_text("\n".join(["Subject_ID,Partition_ID,Split,Site", *rows]) + "\n")
    return read(path, path.parent.name)


def federation(root, title, sites, shifts, distance, pooled):
    """FedAvg with one loss for every seed, beside pooled training that loses nothing."""
    runs = [dealt(root / title / "fedavg" / str(k), sites, shift, seed=k) for k, shift in enumerate(shifts)]
    again = tuple(axes.regrouped(one, like) for one, like in zip(pooled, runs, strict=True))
    methods = [Method("centralised", again), Method("fedavg", tuple(runs))]
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


def test_cases_and_their_slices_are_found_again_wherever_a_federation_puts_them(results, tmp_path):
    (run, _) = results[1].find("fedavg").runs
    assert axes.sources(run)["mix-1", "east.c0"] == ("east", "c0")
    pooled = results[1].find("centralised").first
    assert pooled.scores["mix-2"]["west.c7"].labels == {"WT": DICE["c7"]}  # it was trained as east and west
    assert set(pooled.evaluation.own) == set(run.evaluation.own)
    write(tmp_path / "run", {"mix": {"c0/z007": {"WT": 0.5}, "c0/z009": {"WT": 0.7}}})
    assert axes.sources(read(tmp_path / "run")) == {}  # a run without a split file keeps its names
    (tmp_path / "run" / "split.csv").write_text("Subject_ID,Partition_ID,Split,Site\nc0,east,test,mix\n")
    found = axes.sources(read(tmp_path / "run"))
    assert found == {("mix", f"c0/{z}"): ("east", f"c0/{z}") for z in ("z007", "z009")}


def test_a_loss_is_the_mean_difference_to_pooled_training_on_the_same_cases(results):
    found = axes.losses(results)
    assert list(found) == ["fedavg"]
    assert found["fedavg"]["natural"] == pytest.approx([0.1, 0.12])
    assert found["fedavg"]["far"] == pytest.approx([0.3, 0.2])
    alone = [replace(r, comparison=compare([r.find("fedavg")])) for r in results]
    found = axes.losses(alone)["fedavg"]  # without pooled training the first federation is the reference
    assert found["natural"] == [0, 0] and found["mixed"] == pytest.approx([-0.08, -0.12])


def test_distances_and_losses_are_correlated_over_the_federations(results):
    grid = axes.correlations(results)
    rows = {line.cells[1].text: line.cells for line in grid.lines}
    assert rows["EMD"][2].value == 3 and rows["EMD"][3].value == 1 and rows["EUC"][3].value == -1
    expected = np.corrcoef([0.3, 0.1, 0.8], [0.11, 0.01, 0.25])[0, 1]
    assert rows["EMD"][5].value == pytest.approx(expected) and rows["EMD"][6].text == "–"  # too few
    more = [replace(r, title=f"{r.title} {k}") for r in results for k in (1, 2)]
    assert " to " in axes.correlations(more).lines[0].cells[6].text
    assert axes.correlations(results[:2]) is None


def test_the_figure_has_a_panel_per_distance_and_a_point_per_federation(results):
    (picture,) = PAPER_FIGURES["distance"](results[0].comparison, Options(federations=tuple(results)))
    panels = picture.svg.figure.axes
    assert [a.get_xlabel() for a in panels] == ["EMD", "EUC"]
    points = panels[0].containers[0].lines[0]
    assert points.get_xdata().tolist() == [0.3, 0.1, 0.8]
    assert points.get_ydata() == pytest.approx([0.11, 0.01, 0.25])
    assert PAPER_FIGURES["distance"](results[0].comparison, Options()) == []


GOOD, FAIR = (8, 1, 1, 90), (5, 5, 5, 85)


def test_swept_settings_are_those_in_which_methods_differ_and_best_means_are_swept_too_where_runs_peeked(tmp_path):
    runs = []
    for mu, lr, best in ((0.0, 0.1, FAIR), (1.0, 0.1, GOOD), (0.0, 0.4, FAIR), (1.0, 0.4, FAIR)):
        seen = [SiteValidation(1, 0.5, {"WT": 0.5}, {"background": c[::-1], "WT": c}) for c in (FAIR, best, FAIR)]
        given = {"counts": {"a": {"a-1": seen[-1].counts}}, "peeked": [{"a": each} for each in seen]}
        given |= {"algorithm": {"name": "fedprox", "mu": mu}, "train": {"lr": lr}}
        runs.append(write(tmp_path / f"fedprox, mu = {mu:g}, lr = {lr:g}", {"a": {"a-1": {"WT": 0.5}}}, **given))
    methods = load(*runs, write(tmp_path / "fedavg", {"a": {"a-1": {"WT": 0.5}}}))
    assert axes_figures.swept(methods) == ["algorithm.mu", "train.lr"]
    pictures = {p.name: p for p in PAPER_FIGURES["sweep"](compare(methods), Options())}
    words = ("", " BMIoU", " BMDice", " BMSens", " BMSpec")
    assert list(pictures) == [f"sweep {key}{word}" for key in ("algorithm.mu", "train.lr") for word in words]
    (panel,) = pictures["sweep algorithm.mu"].svg.figure.axes
    assert sorted(panel.get_legend_handles_labels()[1]) == ["fedavg", "fedprox, lr = 0.1", "fedprox, lr = 0.4"]
    (panel,) = pictures["sweep algorithm.mu BMIoU"].svg.figure.axes
    line = panel.containers[0].lines[0]
    assert panel.get_xscale() in ("linear", "symlog") and line.get_xdata().tolist() == [0.0, 1.0]
    assert line.get_ydata() == pytest.approx([(85 / 95 + 5 / 15) / 2, (90 / 92 + 8 / 10) / 2])  # with background
    assert PAPER_FIGURES["sweep"](compare([methods[0], methods[-1]]), Options()) == []


def test_tables_have_a_line_per_federation_and_the_page_links_every_one(results, tmp_path):
    table, scores = axes.distance_table(results), axes.overview(results)
    assert table.head == ("federation", "sites", "EMD", "EUC", "loss fedavg")
    assert table.lines[2].cells[2].value == 0.8 and table.lines[2].cells[4].value == pytest.approx(0.25)
    assert scores.head == ("method", "natural", "mixed", "far") and scores.lines[0].cells[2].best
    assert scores.lines[1].cells[1].value == pytest.approx(sum(DICE.values()) / 8 - 0.11)
    grids, pages = axes_page.tables(results), {r.title: f"../{r.title}/index.html" for r in results}
    axes_page.write(tmp_path / "page", "All", "Three federations.", results, grids, pages, ["A <b>remark."])
    text = (tmp_path / "page" / "index.html").read_text()
    assert 'href="../mixed/index.html"' in text and "A &lt;b&gt;remark." in text
    written = {f.name for f in (tmp_path / "page").iterdir()}
    assert {"federations.csv", "correlation.csv", "distance.csv", "tables.md", "tables.tex", "figures"} <= written
