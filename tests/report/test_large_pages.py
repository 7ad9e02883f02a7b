"""Pages of 23 hospitals with long names and 13 methods: all text of their figures can be read."""

import numpy as np
import pytest

import readable
from browser import browse
from folders import load, row, write
from polysite.report import page
from polysite.report.figure_files import Drawing

HOSPITALS = [
    "Universitätsklinikum Hamburg-Eppendorf", "Charité Berlin, Campus Virchow-Klinikum",
    "Massachusetts General Hospital",
    "Centre Hospitalier Universitaire de Toulouse", "Hospital Universitario La Paz, Madrid",
    "Azienda Ospedaliera Universitaria Integrata Verona", "Karolinska University Hospital Huddinge",
    "St. Olavs hospital, Trondheim", "Rigshospitalet Copenhagen", "Erasmus MC Rotterdam",
    "University College London Hospitals", "The Royal Marsden, Sutton", "Tata Memorial Centre, Mumbai",
    "National Cancer Center Hospital East, Kashiwa", "Seoul National University Bundang Hospital",
    "Peter MacCallum Cancer Centre", "Princess Margaret Cancer Centre, Toronto", "Hospital das Clínicas São Paulo",
    "Groote Schuur Hospital, Cape Town", "King Hussein Cancer Center, Amman", "Hadassah Medical Center, Ein Kerem",
    "Universitätsspital Zürich", "AKH Wien, Medizinische Universität",
]  # fmt: skip
METHODS = [
    "fedavg", "fedprox", "scaffold", "fednova", "fedadam", "feddyn", "fedavg ω 0.3 (Earth Mover's distance)",
    "clusters (Earth Mover's distance)", "ditto", "fedper", "lg_fedavg", "local", "centralised",
]  # fmt: skip


def runs(folder, hospitals, methods, own=False):
    """Methods that were run at these hospitals."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(methods):
        cases = {
            s: {f"{s}-{c}": {"WT": row(float(rng.uniform(0.5, 0.9)), float(rng.uniform(1, 9)))} for c in range(2)}
            for s in hospitals
        }
        write(folder / name, cases, own=own, rounds=12, algorithm={"name": "fedprox", "mu": 0.001 * k})
    return load(*(folder / name for name in methods))


@pytest.mark.parametrize(
    ("hospitals", "methods"),
    [(23, 13), (23, 3), (23, 1), (4, 13), (4, 3), (8, 8), (7, 6)],
)
def test_no_text_is_clipped_or_overlaps(tmp_path, hospitals, methods):
    made = page.build("Compared", runs(tmp_path, HOSPITALS[:hospitals], METHODS[:methods]))
    drawn = [p for p in made.pictures if isinstance(p.svg, Drawing)]
    assert len(drawn) >= 4
    found = {p.name: bad for p in drawn if (bad := readable.problems(p.svg.figure))}
    assert not found


def test_models_of_all_hospitals_on_all_cases_can_be_read(tmp_path):
    from polysite.report import figures

    table = {a: {b: 0.5 + 0.01 * (k - j) for j, b in enumerate(HOSPITALS)} for k, a in enumerate(HOSPITALS)}
    assert not readable.problems(figures.matrix(table).figure)


def test_many_hospitals_and_methods_are_a_heat_map_with_every_number(tmp_path):
    made = page.build("Compared", runs(tmp_path, HOSPITALS, METHODS))
    figure = next(p.svg.figure for p in made.pictures if p.name.startswith("gets"))
    numbers = [t for t in figure.axes[0].texts if t.get_text()]
    assert len(numbers) == (len(HOSPITALS) + 1) * len(METHODS)
    assert figure.axes[1].get_ylabel().startswith("Dice")  # the colour bar


def test_a_reader_can_hide_methods_in_tables_and_figures(tmp_path):
    made = page.build("Compared", runs(tmp_path, HOSPITALS[:3], METHODS[:6]))
    assert 'class="methods"' in made and 'id="method:scaffold"' in made
    assert 'class="methods"' not in page.build("Compared", runs(tmp_path / "few", HOSPITALS[:3], METHODS[:2]))


def test_no_table_of_a_desktop_page_scrolls(tmp_path):
    """23 long names and 13 methods, in a window of 1280 pixels."""
    file = tmp_path / "page.html"
    file.write_text(page.build("Compared", runs(tmp_path, HOSPITALS, METHODS)), encoding="utf-8")
    script = """return [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth + 1)
      .map((e) => `${e.ariaLabel}: ${e.scrollWidth} in ${e.clientWidth}`)"""
    assert browse(file, script).result == []
