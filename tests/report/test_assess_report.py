"""The report of an assessment: a page that stands alone, figures in files, and a table for the terminal."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from html import escape
from unittest.mock import patch

import numpy as np
import pytest
from PIL import Image

from hospitals import Host, ask, assess, host
from polysite.heterogeneity.analysis import analyse
from polysite.heterogeneity.exchange import Assess
from polysite.heterogeneity.verdict import judge
from polysite.payload import Payload
from polysite.report import assess_figures, assess_page, figure_files, tables

LONG = "Sankt-Marien-Krankenhaus der Barmherzigen Schwestern"
ODD = ("<b>&", "$x_1$ [red]", LONG, "東京")
LOOKS = Assess(permutations=99, resamples=100, projections=4)
NUMBERS = replace(LOOKS, projections=0)  # metadata alone


def federation(count, names=()):
    """So many hospitals, the last of them unlike the others."""
    names = [*names, *(f"hospital {k}" for k in range(count))][:count]
    made = {n: host(12 + 5 * (k % 4), k, volume=30, look=2) for k, n in enumerate(names)}
    return {**made, names[-1]: host(12, count, volume=130, look=3.5)}


def written(folder, found, about=None, files=False):
    """The text of the page; its figures are written to files, which takes half of the time, only where asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if files else patch.object(assess_page, "write_figures"):
        page = assess_page.write(folder, found, judge(found), about or {"polysite": "0", "seed": 0})
    assert page == folder / "index.html"
    return page.read_text(encoding="utf-8")


def figures(found):
    """The names of all figures."""
    turned = [f"angles-{name.replace(' ', '-')}" for name in found.angles]
    drawn = [f"tree-{n}" for n in ("emd", "euclidean") if n in found.distances]
    return sorted([*(f"distances-{n}" for n in found.distances), *drawn, "distributions", *turned])


@pytest.mark.parametrize(("count", "settings"), [(2, NUMBERS), (4, LOOKS)])
def test_the_page_stands_alone_and_holds_everything(tmp_path, count, settings):
    found = assess({**federation(count, ODD), "hamlet": host(2, 9)}, settings)
    (tmp_path / "assessment.json").write_text("{}")
    text, verdict = written(tmp_path, found, {"note": "<script>alert(1)</script>"}, files=True), judge(found)
    # nothing is fetched, and names are letters, never markup
    assert all(link.startswith(("#", "data:image/png", "assessment.json")) for link in
               re.findall(r'(?:src|href|action)="([^"]*)"', text))  # fmt: skip
    assert not re.search("<(script|link|iframe)", text)
    assert set(re.findall(r'https?://[^"]*', text)) <= set(re.findall(r'xmlns(?::xlink)?="(https?://[^"]*)"', text))
    assert "<b>&" not in text and all(escape(name) in text for name in ODD[:count])
    identities = re.findall(r'\sid="([^"]*)"', text)
    assert len(identities) == len(set(identities))  # the figures do not borrow from one another
    # every figure is in the page and in files
    drawn, files = figures(found), tmp_path / "figures"
    assert text.count("<svg") == len(drawn) == (8 if settings is LOOKS else 3)
    expected = [f"{n}.{kind}" for n in drawn for kind in ("pdf", "png", "svg")]
    assert sorted(p.name for p in files.iterdir()) == sorted([*expected, "captions.json"])
    assert sorted(json.loads((files / "captions.json").read_text(encoding="utf-8"))) == drawn
    for name in drawn:
        assert (files / f"{name}.svg").read_text(encoding="utf-8") in text
        with Image.open(files / f"{name}.png") as picture:
            assert min(picture.size) > 50 and picture.info["dpi"] == pytest.approx((figure_files.DPI,) * 2, abs=0.1)
    assert "$x_1$ [red]" in re.sub(r"<[^>]+>", "", (files / "distances-emd.svg").read_text("utf-8"))
    # the verdict, what left the hospitals, and who could not be described
    said = [verdict.summary, *verdict.cautions, *(f.text for f in verdict.findings)]
    said += [words for s in verdict.strategies for words in (s.title, s.goal, f"strategies/{s.file}", *s.reasons)]
    said += [words for _, words in found.left.values()]
    assert all(escape(words, quote=False).replace("'", "&#39;") in text for words in said)
    assert "Too few cases to be described:</b> hamlet" in text
    # sums of the distances, the largest with a star
    rows = re.findall(r'<tr class="total"><td>Sum</td>(.*?)</tr>', text)
    for row, name in zip(rows, [n for n in ("emd", "euclidean") if n in found.distances], strict=True):
        shown = [float(cell) for cell in re.findall(r"<td[^>]*>([0-9.]+)</td>", row)]
        assert shown == pytest.approx(list(found.distances[name].sums.values()), abs=0.01)
        assert row.count('class="best"') == 1 or count == 2


def test_a_large_federation_has_lists_of_fixed_size(tmp_path):
    """Of 45 hospitals, heat map and tree name all; the page lists the most distant pairs and what was limited."""
    found = assess(federation(45, [f"{LONG} {k:02}" for k in range(44)]), NUMBERS)
    text, distance = written(tmp_path, found), found.distances["emd"]
    heatmap, tree = assess_figures.heatmap(found, distance).axes[0], assess_figures.dendrogram(found, distance).axes[0]
    for axes in (heatmap, tree):
        assert len({t.get_text() for t in axes.get_yticklabels()}) == 45
        assert [t.get_fontweight() for t in axes.get_yticklabels()].count("bold") == 1
    assert all(escape(words).replace("&#x27;", "&#39;") in text for words in found.limits)
    assert len(re.findall(r"<td[^>]*>[^<]+ – [^<]+</td>", text)) == 30  # the most distant pairs alone
    left = text[text.index('<h2 id="left">') : text.index('<h2 id="made">')]
    sent = {(found.cases[site], *words) for site, words in found.left.items()}  # hospitals that sent the same share it
    assert left.count('<td class="words">') == len(sent) < len(found.left)
    assert all(site in left for site in found.left)


def test_alike_hospitals_classes_and_refused_replies_are_shown_and_always_the_same(tmp_path, capsys):
    rng = np.random.default_rng(3)
    quantities = {"intensity t1": rng.normal(100, 10, 12), "class tumour": (rng.random(12) < 0.3).astype(float)}
    replies = ask(dict.fromkeys("abcd", Host(quantities, rng.normal(0, 1, (12, 2, 8, 2)))), LOOKS)
    odd = Payload(**{**replies["d"], "quantiles": {"volume <i>": np.arange(17.0)}})
    found = analyse({**replies, "d": odd}, LOOKS)
    text = written(tmp_path, found)
    assert not any(d.matrix.any() for d in found.distances.values()) and set(found.refused) == {"d"}
    assert "share of the cases" in text and "Bars are shares" in text and "nan" not in text.lower()
    assert "Replies that were not used" in text and "<i>" not in text
    assert written(tmp_path / "again", found) == text
    tables.show_assessment(found, judge(found))
    shown = capsys.readouterr().out
    assert "share of tumour" in shown and "the reply of d was not used" in shown


@pytest.mark.parametrize(("count", "settings"), [(4, LOOKS), (13, NUMBERS)])
def test_the_terminal_shows_it_within_its_width_and_names_are_never_markup(capsys, monkeypatch, count, settings):
    monkeypatch.setenv("COLUMNS", "100")
    found = assess(federation(count, ["<b>&", "[red]x[/red]", "[/]"]), settings)
    verdict = judge(found)
    tables.show_assessment(found, verdict)
    shown = capsys.readouterr().out
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 100 and (count != 4 or len(lines) <= 100)
    assert all(name in shown for name in found.sites)
    assert "most distant" in shown and ("Sum " in shown) == (count <= 8)  # the matrices of a few hospitals
    flat = re.sub(r"\s+", " ", shown)
    assert all(strategy.title in flat and strategy.file in flat for strategy in verdict.strategies)


@pytest.mark.parametrize("count", [2, 3, pytest.param(64, marks=pytest.mark.soak)])
def test_figures_fit_any_number_of_hospitals(count):
    found = assess({f"{k} {LONG * (k % 3 == 0)}": host(5 + k % 4, k, look=0.1 * k) for k in range(count)}, LOOKS)
    draw, distance = assess_figures, found.distances["emd"]
    turned = replace(found, case_angles=found.angles)
    made = [draw.heatmap(found, distance),
            draw.dendrogram(found, distance), draw.distributions(found), draw.angles(found, "component 1"),
            draw.angles(turned, "component 1", True)]  # fmt: skip
    for k, figure in enumerate(made):
        assess_figures.drawing(figure, str(k), "title")
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()  # around all that is drawn
        assert box.x0 > -0.05 and box.y0 > -0.05 and box.x1 < width + 0.05 and box.y1 < height + 0.05, k


def test_a_star_marks_what_is_more_than_chance_and_bold_the_outlier():
    found = assess(federation(4), NUMBERS)
    distance = found.distances["emd"]
    axes = assess_figures.heatmap(found, distance).axes[0]
    starred = {(t.get_position()[1] - 0.5, t.get_position()[0] - 0.5) for t in axes.texts if "★" in t.get_text()}
    assert starred == {(i, j) for i, j in np.argwhere(distance.adjusted <= 0.05)}
    bold = [t.get_text() for t in axes.get_yticklabels() if t.get_fontweight() == "bold"]
    assert bold == [distance.outlier] == ["hospital 3"] and len(axes.texts) == 12
