"""The report of an assessment: a page that stands alone, figures in files, and a table for the terminal."""

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from html import escape
from html.parser import HTMLParser
from unittest.mock import patch

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from hospitals import spread_out
from polysite.heterogeneity.assessment import analyse
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.verdict import judge
from polysite.payload import Payload
from polysite.report import assess_figures, assess_page, figure_files, tables

ODD = ("<b>&", "$x_1$ [red]", "Sankt-Marien-Krankenhaus der Barmherzigen Schwestern", "東京")
QUICK = {"permutations": 99, "resamples": 100, "projections": 4}
EMBEDDED = ("euclidean", "energy", "mmd", "frechet")


@dataclass(frozen=True)
class Hospital:
    """A site that makes its numbers up."""

    size: int
    seed: int
    shift: float = 0.0
    classes: bool = False

    def features(self, kind):
        rng = np.random.default_rng(self.seed)
        if kind == "embedding":
            cases = rng.normal(2 + self.shift, 1.0, (self.size, 16, 2))
            return {"embedding": cases[:, None], "encoder": np.array(7.0)}
        if kind == "absent":
            return {k: v == 0 for k, v in self.features("metadata").items() if k != "metric"}
        values = {
            f"intensity {m}": rng.lognormal(6.5 + 0.2 * k, 0.25, self.size) for k, m in enumerate(("t1", "flair"))
        }
        if self.classes:
            values["class tumour"] = (rng.random(self.size) < 0.3 + self.shift / 5).astype(float)
        else:
            whole = rng.lognormal(3.5 + self.shift, 0.5, self.size)
            values |= {"volume WT": whole, "volume ET": whole * rng.uniform(0, 0.5, self.size)}
        return {**values, "metric": np.full(self.size, 3.0)}


def assess(sites, settings=None):
    settings = settings or Assess(**QUICK)
    replies = {name: settings.local(Payload(), Payload(), site)[0] for name, site in sites.items()}
    return analyse(replies, settings, "a network of 18 layers")


def federation(count, names=(), **more):
    """So many hospitals, the last of them unlike the others."""
    names = [*names, *(f"hospital {k}" for k in range(count))][:count]
    sizes = [12 + 5 * (k % 4) for k in range(count)]
    return {
        n: Hospital(s, k, 1.5 * (k == count - 1), **more) for k, (n, s) in enumerate(zip(names, sizes, strict=True))
    }


class Page(HTMLParser):
    """The tags of a page, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.identities = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.identities += [found["id"]] if "id" in found else []
        places = [found.get(k) for k in ("src", "href", "xlink:href", "action")]
        self.links += [v for v in places if v and not v.startswith(("#", "data:image/png"))]


def written(folder, found, about=None, files=False):
    """The text of the page; its figures are written to files, which takes half of the time, only where asked for."""
    if not files:
        folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if files else patch.object(assess_page, "write_figures"):
        page = assess_page.write(folder, found, judge(found), about or {"polysite": "0", "seed": 0})
    assert page == folder / "index.html"
    return page.read_text(encoding="utf-8")


def figures(found):
    first = [n for n in ("emd", "euclidean") if n in found.distances]
    turned = [f"angles-{name.replace(' ', '-')}" for name in found.angles]
    named = [f"distances-{n}" for n in found.distances]
    return sorted([*named, *(f"{kind}-{n}" for kind in ("map", "tree") for n in first), "distributions", *turned])


@pytest.mark.parametrize("projections", [0, 4], ids=["metadata", "embeddings"])
@pytest.mark.parametrize("count", [2, 4, 13])
def test_the_page_stands_alone_and_holds_every_figure(tmp_path, count, projections):
    found = assess(federation(count, ODD), Assess(**{**QUICK, "projections": projections}))
    text = written(tmp_path / "new" / "folder", found, files=True)
    page, drawn = Page(text), figures(found)
    assert page.tags.count("svg") == len(drawn) == (11 + 1 if projections else 4)
    assert page.links == [] and "script" not in page.tags and "link" not in page.tags and "iframe" not in page.tags
    assert set(re.findall(r'https?://[^"]*', text)) <= set(re.findall(r'xmlns(?::xlink)?="(https?://[^"]*)"', text))
    assert len(page.identities) == len(set(page.identities))  # the figures do not borrow from one another
    files = tmp_path / "new" / "folder" / "figures"
    expected = [f"{n}.{kind}" for n in drawn for kind in ("pdf", "png", "svg")]
    assert sorted(p.name for p in files.iterdir()) == sorted([*expected, "captions.json"])
    captions = json.loads((files / "captions.json").read_text(encoding="utf-8"))
    assert sorted(captions) == drawn and "How far the values" in captions["distances-emd"]["caption"]
    for name in drawn:
        assert (files / f"{name}.svg").read_text(encoding="utf-8") in text
        with Image.open(files / f"{name}.png") as picture:
            assert min(picture.size) > 50 and picture.info["dpi"] == pytest.approx((figure_files.DPI,) * 2, abs=0.1)


def test_names_are_letters_never_markup(tmp_path):
    text = written(tmp_path, assess(federation(4, ODD)), {"note": "<script>alert(1)</script>"}, files=True)
    assert "<b>&" not in text and "<script" not in text
    assert all(escape(name) in text for name in ODD)
    assert "$x_1$ [red]" in re.sub(r"<[^>]+>", "", (tmp_path / "figures" / "distances-emd.svg").read_text("utf-8"))


def test_the_page_says_everything_in_order(tmp_path):
    found = assess({**federation(4), "hamlet": Hospital(2, 9)})
    (tmp_path / "assessment.json").write_text("{}")
    text, verdict = written(tmp_path, found), judge(found)
    heads = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert heads[:5] == ["Strategies", "Findings", "Evidence", "Distances", "Data of the hospitals"]
    assert heads[5:] == ["Do the distances agree?", "Angles", "What left each hospital", "Settings and versions"]
    expected = [verdict.summary, *verdict.cautions, *(f.text for f in verdict.findings)]
    expected += [words for s in verdict.strategies for words in (s.title, s.goal, f"strategies/{s.file}", *s.reasons)]
    expected += [words for _, words in found.left.values()]
    assert all(escape(words, quote=False).replace("'", "&#39;") in text for words in expected)
    assert "Too few cases to be described:</b> hamlet" in text and "assessment.json" in text
    assert "distances.csv" not in text
    assert text.count("<td>hospital 0 – hospital 3</td>") == 3  # two distances, and the agreement


def test_the_page_has_a_row_of_sums(tmp_path):
    found = assess(federation(4))
    text = written(tmp_path, found)
    rows = re.findall(r"<tr><td><b>Sum</b></td>(.*?)</tr>", text)
    assert len(rows) == 2
    for row, name in zip(rows, ("emd", "euclidean"), strict=True):
        shown = [float(cell) for cell in re.findall(r"<td[^>]*>([0-9.]+)</td>", row)]
        assert shown == pytest.approx(list(found.distances[name].sums.values()), abs=0.01)
        assert row.count('class="star"') == 1


@pytest.mark.parametrize(
    ("scale", "other", "outlier", "another"), [("pooled", "first", "d", "a"), ("first", "pooled", "a", "d")]
)
def test_the_page_says_which_scale_would_name_another_outlier(tmp_path, scale, other, outlier, another):
    found = assess(spread_out(), Assess(**{**QUICK, "projections": 0, "scale": scale}))
    text = written(tmp_path, found)
    assert found.distances["emd"].outlier == outlier
    assert f"is {outlier}, but it would be {another} with assess.scale = &#34;{other}&#34;" in text
    assert f"of the resamples; {another} with assess.scale" in text


@pytest.mark.parametrize(
    ("scale", "combine", "words"),
    [
        ("pooled", "max", "in standard deviations over all cases"),
        ("first", "max", "of the hospital that comes first in the order of names"),
        ("none", "mean", "the mean over all 4 quantities, in units as stored"),
    ],
)
def test_the_page_says_how_metadata_are_scaled_and_combined(tmp_path, scale, combine, words):
    text = written(tmp_path, assess(federation(3), Assess(**QUICK, scale=scale, combine=combine)))
    assert words in text and (" to " in re.findall(r"<td>volume WT</td>.*?</tr>", text)[0]) == (scale == "first")


def test_many_hospitals_list_their_most_distant_pairs_alone(tmp_path):
    text = written(tmp_path, assess(federation(13)))
    assert text.count("<td>hospital") > 3 * 30 and "the 30 most distant pairs" in text
    assert len(re.findall(r"<td>hospital \d+ – hospital \d+</td>", text)) == 3 * 30


def test_a_large_federation_has_figures_and_lists_of_fixed_size(tmp_path):
    """Of 45 hospitals, a heat map has 30 rows, a tree 30 branches, a map ten names; the page says what was limited."""
    names = [f"Sankt-Marien-Krankenhaus der Barmherzigen Schwestern {k:02}" for k in range(44)]
    found = assess(federation(45, names), Assess(**{**QUICK, "projections": 0}))
    text, distance = written(tmp_path, found), found.distances["emd"]
    shown = assess_figures.rows_of(found.sites, distance.matrix)
    assert sorted(s for group in shown.members for s in group) == sorted(found.sites) and len(shown.names) == 30
    pairs = [[distance.matrix[found.index(a), found.index(b)] for a in shown.members[0] for b in shown.members[k]]
             for k in (0, 9)]  # fmt: skip
    assert shown.table[0, 9] == pytest.approx(np.mean(pairs[1])) and shown.table[0, 0] == pytest.approx(max(pairs[0]))
    heatmap, tree = assess_figures.heatmap(found, distance).axes[0], assess_figures.dendrogram(found, distance).axes[0]
    bold = [t.get_text() for axes in (heatmap, tree) for t in axes.get_yticklabels() if t.get_fontweight() == "bold"]
    assert len(heatmap.get_yticklabels()) == len(tree.get_yticklabels()) == 30 and len(bold) == 2
    assert not any("★" in t.get_text() for t in heatmap.texts)
    assert len(assess_figures.plane(found, distance).axes[0].texts) == 10 + 1  # and the ruler's
    assert all(escape(words).replace("&#x27;", "&#39;") in text for words in found.limits)
    assert "are set aside together" in text and "All 45 hospitals" in text and "the 30 most distant pairs" in text


def test_refused_replies_are_named_with_the_reason(tmp_path, capsys):
    sites, settings = federation(4), Assess(**QUICK)
    replies = {name: settings.local(Payload(), Payload(), site)[0] for name, site in sites.items()}
    odd = {**replies["hospital 1"], "quantiles": {"volume <i>": np.arange(17.0)}}
    found = analyse({**replies, "hospital 1": Payload(**odd)}, settings)
    text = written(tmp_path, found)
    assert "hospital 1" in found.refused and "Replies that were not used" in text and "<i>" not in text
    tables.show_assessment(found, judge(found))
    assert "the reply of hospital 1 was not used" in capsys.readouterr().out


def test_alike_hospitals_and_classes_are_shown(tmp_path, capsys):
    alike = {name: Hospital(12, 3, classes=True) for name in ("a", "b", "c")}  # not a single number differs
    found = assess(alike)
    text = written(tmp_path, found)
    assert not any(d.matrix.any() for d in found.distances.values())
    assert "share of the cases" in text and "Bars are shares" in text and "nan" not in text.lower()
    tables.show_assessment(found, judge(found))
    assert "share of tumour" in capsys.readouterr().out


@pytest.mark.parametrize("count", [2, 4, 13])
@pytest.mark.parametrize("projections", [0, 4])
def test_the_terminal_shows_it_within_its_width(capsys, monkeypatch, count, projections):
    monkeypatch.setenv("COLUMNS", "100")
    found = assess(federation(count, ODD[:1]), Assess(**{**QUICK, "projections": projections}))
    verdict = judge(found)
    tables.show_assessment(found, verdict)
    shown = capsys.readouterr().out
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 100 and (count != 4 or len(lines) <= 90)
    assert all(name in shown for name in (*found.sites, "EMD_maxI", "EMD_maxL", "Strategies", "What left"))
    flat = re.sub(r"\s+", " ", shown)
    assert all(strategy.title in flat and strategy.file in flat for strategy in verdict.strategies)
    assert ("* differ significantly" in shown) == (count <= 8)


def test_names_in_the_terminal_are_never_markup(capsys):
    found = assess(federation(3, ["[red]x[/red]", "[/]", "c"]))
    tables.show_assessment(found, judge(found))
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown and "[/]" in shown


@pytest.mark.parametrize("count", [2, 3, *(pytest.param(n, marks=pytest.mark.soak) for n in (30, 64))])
def test_figures_fit_any_number_of_hospitals(count):
    names = [f"{k} {'Sankt-Marien-Krankenhaus der Barmherzigen Schwestern' * (k % 3 == 0)}" for k in range(count)]
    found = assess({n: Hospital(5 + k % 4, k, 0.1 * k) for k, n in enumerate(names)})
    distance = found.distances["emd"]
    made = [
        assess_figures.heatmap(found, distance),
        assess_figures.heatmap(found, distance, small=True),
        assess_figures.plane(found, distance),
        assess_figures.dendrogram(found, distance),
        assess_figures.distributions(found),
        assess_figures.angles(found, "component 1"),
        assess_figures.case_angles(replace(found, case_angles=found.angles), "component 1"),
    ]
    for k, figure in enumerate(made):
        assert isinstance(figure, Figure)
        assess_figures.drawing(figure, str(k), "title")
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()  # around all that is drawn
        assert box.x0 > -0.05 and box.y0 > -0.05 and box.x1 < width + 0.05 and box.y1 < height + 0.05, k


def test_the_map_keeps_distances_that_a_plane_can_hold():
    points = np.random.default_rng(0).normal(size=(7, 2))
    matrix = np.linalg.norm(points[:, None] - points, axis=-1)
    at, share = assess_figures.places(matrix)
    assert np.linalg.norm(at[:, None] - at, axis=-1) == pytest.approx(matrix) and share == pytest.approx(1)
    assert at[np.abs(at).argmax(0), [0, 1]].min() > 0
    two, whole = assess_figures.places(np.array([[0, 3.0], [3, 0]]))
    assert abs(two[0, 0] - two[1, 0]) == pytest.approx(3) and whole == pytest.approx(1)
    cube = np.ones((8, 8)) - np.eye(8)  # needs seven axes, all alike
    assert assess_figures.places(cube)[1] == pytest.approx(2 / 7)
    assert assess_figures.places(np.zeros((3, 3)))[1] == 1


def test_a_star_marks_what_is_more_than_chance_and_bold_the_outlier():
    found = assess(federation(4))
    distance = found.distances["emd"]
    axes = assess_figures.heatmap(found, distance).axes[0]
    starred = {(t.get_position()[1] - 0.5, t.get_position()[0] - 0.5) for t in axes.texts if "★" in t.get_text()}
    assert starred == {(i, j) for i, j in np.argwhere(distance.adjusted <= 0.05)}
    bold = [t.get_text() for t in axes.get_yticklabels() if t.get_fontweight() == "bold"]
    assert bold == [distance.outlier] == ["hospital 3"] and len(axes.texts) == 12


def test_the_same_assessment_gives_the_same_page(tmp_path):
    found = assess(federation(3))
    assert written(tmp_path / "a", found) == written(tmp_path / "b", found)


def test_hospitals_that_sent_the_same_share_a_line(tmp_path):
    found = assess(federation(13, [f"hospital {k}" for k in range(13)]))
    text = written(tmp_path, found)
    part = text[text.index('<h2 id="left">') : text.index('<h2 id="made">')]
    sent = {(found.cases[site], *left) for site, left in found.left.items()}
    assert part.count('<td class="words">') == len(sent) < len(found.left)
    assert all(site in part for site in found.left)
