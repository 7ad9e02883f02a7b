"""The page of a run or a comparison, in a real browser; of a run that goes on; of 23 hospitals with long names."""

import json
import re

import numpy as np
import pytest

import readable
from browser import browse
from folders import cases, load, row, write
from polysite.report import figures, publish
from polysite.report.figure_files import Drawing
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


def test_the_page_works_in_a_browser_stands_alone_and_is_the_same_every_time(comparison, tmp_path):
    for width in (1280, 390):  # a desktop, a phone
        seen, errors = browse(comparison, LOOK, width)
        assert errors == []
        assert seen["sorted"] and all(seen["sorted"]) and not seen["hidden"]
        assert seen["before"] != seen["after"] == 0
        assert seen["first"] == ["fedavg", "fedexp", "local"] and seen["up"] == ["local", "fedavg", "fedexp"]
        assert seen["down"] == ["fedexp", "fedavg", "local"]
        assert len(seen["figures"]) >= 8 and min(seen["figures"]) > 100
        assert seen["wide"] <= width and seen["links"] == len(seen["sections"]) and not seen["broken"]
    text = comparison.read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert "default-src 'none'" in text
    assert build("Three ways", load(tmp_path / "fedavg", tmp_path / "fedexp", tmp_path / "local")) == text


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
    (tmp_path / "run" / "evaluation" / "test" / "about.json").unlink()
    text = build("bare", load(tmp_path / "run"))  # nothing but Dice is known
    assert "HD95" not in text and "Dice hospital by hospital" in text


def test_the_page_of_a_run_tells_refusals_and_reloads_until_the_run_ends(tmp_path):
    run = write(tmp_path / "run", cases())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lines[1] |= {"absent": ["island"], "refused": {"north": "3 values are not finite"}}
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = (run / "result.json").rename(tmp_path / "result.json")
    page = publish.page(run / "index.html", load(run))
    text, reload = page.read_text(), '<meta http-equiv="refresh" content="30">'
    assert reload in text and "round 3 of 30" in text and "What every hospital gets" not in text
    result.rename(run / "result.json")
    text = publish.page(page, load(run)).read_text()
    assert reload not in text and "round 3 of 30" not in text and "What every hospital gets" in text
    assert "3 values are not finite (round 2)" in text


def test_the_page_of_a_guarded_run_counts_every_hospital_once_and_shows_alarms(tmp_path):
    found = {s: {str(k): {"WT": 0.5} for k in range(2)} for s in ("north", "south")}
    found["island"] = {str(k): {"WT": 0.999} for k in range(200)}
    believed, text = (
        build("run", load(write(tmp_path / use, found, run={"guard": {"use": use}})), Options(scans=False))
        for use in ("off", "on")
    )
    assert "mean Dice of 0.989 on 204 test cases" in believed and "0.989 ±" in believed and "0.989 ±" not in text
    assert "mean Dice of 0.666 over 3 hospitals, each of which counts once (204 test cases by their own" in text
    assert "island reports 200 of the 204 cases" in text
    records = tmp_path / "on" / "rounds.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    bad = {"lengths": {"model": 20.0}, "longest": {"model": 2.0}, "clipped": {"model": 0.1}, "standing": 1.0}
    records.write_text("".join(json.dumps({**line, "guard": {"north": bad}}) + "\n" for line in lines))
    assert "Alarm: changes of north were shortened" in build("run", load(tmp_path / "on"), Options(scans=False))


NAMES = (
    "Universitätsklinikum Hamburg-Eppendorf", "Charité Berlin, Campus Virchow-Klinikum", "Rigshospitalet Copenhagen",
    "Centre Hospitalier Universitaire de Toulouse", "Azienda Ospedaliera Universitaria Integrata Verona",
    "National Cancer Center Hospital East, Kashiwa", "Seoul National University Bundang Hospital", "AKH Wien",
)  # fmt: skip
HOSPITALS = [f"{name}{f', {k // 8}' * (k > 7)}" for k, name in enumerate((*NAMES, *NAMES, *NAMES[:7]))]
METHODS = [
    "fedavg", "fedprox", "scaffold", "fednova", "fedadam", "feddyn", "fedavg ω 0.3 (Earth Mover's distance)",
    "clusters (Earth Mover's distance)", "ditto", "fedper", "lg_fedavg", "local", "centralised",
]  # fmt: skip


def runs(folder, hospitals, methods):
    """Methods that were run at these hospitals."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(methods):
        scores = [(float(rng.uniform(0.5, 0.9)), float(rng.uniform(1, 9))) for _ in hospitals for _ in "01"]
        cases = {s: {f"{s}-{c}": {"WT": row(*scores[2 * n + c])} for c in (0, 1)} for n, s in enumerate(hospitals)}
        write(folder / name, cases, rounds=12, algorithm={"name": "fedprox", "mu": 0.001 * k})
    return load(*(folder / name for name in methods))


@pytest.mark.parametrize(("hospitals", "methods"), [(23, 13), (4, 13), (7, 6)])
def test_all_text_of_a_page_of_many_hospitals_and_methods_can_be_read(tmp_path, hospitals, methods):
    """A heat map of many has every number; no table scrolls in a window of 1280 pixels; methods can be hidden."""
    made = build("Compared", runs(tmp_path, HOSPITALS[:hospitals], METHODS[:methods]))
    drawn = [p for p in made.pictures if isinstance(p.svg, Drawing)]
    assert len(drawn) >= 4 and not {p.name: bad for p in drawn if (bad := readable.problems(p.svg.figure))}
    assert 'class="methods"' in made and 'id="method:fednova"' in made
    if hospitals == 23:
        figure = next(p.svg.figure for p in drawn if p.name.startswith("gets"))
        assert len([t for t in figure.axes[0].texts if t.get_text()]) == (len(HOSPITALS) + 1) * len(METHODS)
        assert figure.axes[1].get_ylabel().startswith("Dice")  # the colour bar
        (tmp_path / "page.html").write_text(made, encoding="utf-8")
        script = """return [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1)
          .map((e) => `${e.ariaLabel}: ${e.scrollWidth} in ${e.clientWidth}`)"""
        assert browse(tmp_path / "page.html", script).result == []


def test_models_of_all_hospitals_on_all_cases_can_be_read():
    table = {a: {b: 0.5 + 0.01 * (k - j) for j, b in enumerate(HOSPITALS)} for k, a in enumerate(HOSPITALS)}
    assert not readable.problems(figures.matrix(table).figure)
