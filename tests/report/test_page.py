"""The page of a run or a comparison, in a real browser; and that of a run that goes on."""

import json
import re

import pytest

from browser import browse
from folders import cases, load, row, write
from polysite.errors import RunError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.report import publish
from polysite.report.page import Options, build

LOOK = """
const sorted = [...document.querySelectorAll("table.sortable")].map((t) => t.tHead.querySelectorAll("button").length);
const view = document.querySelector(".viewer");
const stage = view.querySelector(".stage");
while (stage.ariaBusy !== "false") await new Promise((done) => setTimeout(done, 20));
const before = view.view.slice;
view.querySelector("input[type=range]").value = 0;
view.querySelector("input[type=range]").dispatchEvent(new Event("input", { bubbles: true }));
await new Promise((done) => setTimeout(done, 200));
const table = document.querySelector("#gets ~ .scroll table, section table.sortable");
const names = () => [...table.tBodies[0].rows].map((r) => r.cells[0].textContent);
const first = names();
table.tHead.querySelectorAll("button")[1].click();
const up = names();
table.tHead.querySelectorAll("button")[1].click();
return {
  sorted, before, after: view.view.slice, hidden: view.hidden, first, up, down: names(),
  figures: [...document.querySelectorAll("figure svg, figure img")].map((f) => f.getBoundingClientRect().width),
  sections: [...document.querySelectorAll("h2")].map((h) => h.textContent),
  wide: document.documentElement.scrollWidth, links: [...document.querySelectorAll("nav a")].length,
  broken: [...document.querySelectorAll("nav a")].filter((a) => !document.querySelector(a.getAttribute("href"))).length,
};
"""


@pytest.fixture
def comparison(tmp_path):
    """Three methods, one of them personal."""
    personal = write(tmp_path / "local", cases(-0.1), own=True, algorithm="local")
    runs = [write(tmp_path / n, cases(k / 20), algorithm=n) for k, n in enumerate(("fedavg", "fedexp"))]
    publish.comparison(tmp_path / "out", "Three ways", load(*runs, personal))
    return tmp_path / "out" / "index.html"


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_the_page_in_a_browser(comparison, width):
    seen, errors = browse(comparison, LOOK, width)
    assert errors == []
    assert seen["sorted"] and all(seen["sorted"]) and not seen["hidden"]
    assert seen["before"] != seen["after"] == 0
    assert seen["first"] == ["fedavg", "fedexp", "local"] and seen["up"] == ["local", "fedavg", "fedexp"]
    assert seen["down"] == ["fedexp", "fedavg", "local"]
    assert len(seen["figures"]) >= 8 and min(seen["figures"]) > 100
    assert seen["wide"] <= width and seen["links"] == len(seen["sections"]) and not seen["broken"]
    wanted = ["gets", "differences statistically significant?", "Fairness", "Surface", "Training curves", "Cost"]
    assert all(any(word in title for title in seen["sections"]) for word in wanted)


def test_the_page_stands_alone_and_is_the_same_every_time(comparison, tmp_path):
    text = comparison.read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert "default-src 'none'" in text
    runs = load(tmp_path / "fedavg", tmp_path / "fedexp", tmp_path / "local")
    assert build("Three ways", runs) == text


def test_names_are_never_taken_for_html(tmp_path):
    nasty = '<img src=x onerror="alert(1)">'
    run = write(tmp_path / "run", {nasty: cases()["north"], "</script><b>": cases()["south"]})
    path = publish.page(tmp_path / "page.html", load(run))
    seen, errors = browse(path, "return document.querySelectorAll('img[src=x], section b').length;")
    assert seen == 0 and errors == []


def test_without_scans_there_is_no_picture_of_a_patient(tmp_path):
    runs = load(write(tmp_path / "run", cases()))
    with_scans, without = (build("run", runs, Options(scans=scans)) for scans in (True, False))
    assert "data:image" in with_scans and "Example cases" in with_scans
    assert "data:image" not in without and "Example cases" not in without
    bare = write(tmp_path / "bare", cases())
    (bare / "evaluation" / "test" / "about.json").unlink()
    text = build("bare", load(bare))  # nothing but Dice is known
    assert "HD95" not in text and "Dice hospital by hospital" in text


def test_the_policy_is_named(tmp_path):
    runs = load(write(tmp_path / "run", {"a": {"1": {"WT": row(0.0, predicted=0.0)}, "2": {"WT": row(0.5, 3.0)}}}))
    assert "counts 373.13" in build("run", runs, Options(policy=EmptyMaskPolicy(penalty=373.13))).replace(
        "a distance of ", ""
    )
    assert "is left out of HD95" in build("run", runs, Options(policy=EmptyMaskPolicy("excluded")))


def test_an_assessment_goes_onto_the_page_and_a_wrong_one_is_refused(tmp_path):
    runs, folder = load(write(tmp_path / "run", cases())), tmp_path / "assess"
    (folder / "figures").mkdir(parents=True)
    (folder / "assessment.json").write_text(json.dumps({"verdict": {"summary": "Island differs & is far."}}))
    (folder / "figures" / "distances-emd.svg").write_text('<?xml version="1.0"?><svg id="far"></svg>')
    text = build("run", runs, Options(assessment=folder))
    assert (
        "Island differs &amp; is far." in text and "data:image/svg+xml;base64," in text and '<svg id="far">' not in text
    )
    with pytest.raises(RunError, match="is no assessment that can be read"):
        build("run", runs, Options(assessment=tmp_path))


def test_absences_and_refusals_are_told(tmp_path):
    run = write(tmp_path / "run", cases())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[1] |= {"absent": ["island"], "refused": {"north": "3 values are not finite"}}
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = build("run", load(run))
    assert "Absent sites, refused replies, incidents" in text and "3 values are not finite (round 2)" in text


def test_the_page_of_a_run_reloads_until_the_run_ends(tmp_path):
    run = write(tmp_path / "run", cases())
    result = (run / "result.json").rename(tmp_path / "result.json")
    page = publish.page(run / "index.html", load(run))
    text, reload = page.read_text(), '<meta http-equiv="refresh" content="30">'
    assert reload in text and "round 3 of 30" in text and "What every hospital gets" not in text
    result.rename(run / "result.json")
    text = publish.page(page, load(run)).read_text()
    assert reload not in text and "round 3 of 30" not in text and "What every hospital gets" in text
