"""What every test has: a cache of its own, runs that tests share, and where the real data lie."""

import gc
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import browser
from polysite import study
from polysite.config import dump
from polysite.data import phantom

DATA = Path(__file__).parents[2] / "shared" / "data"

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy
settings.load_profile("untimed")

_drawn = lru_cache(128)(phantom.draw)


def _draw(hospital, **given):
    """Draw a patient once: most studies of tests have the same ones."""
    case = _drawn(hospital, **given)
    return replace(case, image=case.image.copy(), label=case.label.copy())


phantom.draw = _draw


def pytest_collection_finish():
    """What was imported stays: let no garbage collection look at it again."""
    gc.freeze()


@pytest.fixture(scope="session")
def new_paths(tmp_path_factory):
    """Paths of new folders, without pytest's search for the next number, which takes longer with every test."""
    root = tmp_path_factory.mktemp("new")
    return (root / str(number) for number in count())


@pytest.fixture(scope="session", autouse=True)
def one_browser():
    """For all pages that tests look at."""
    yield
    browser.close()


@pytest.fixture(autouse=True)
def cache(new_paths, monkeypatch):
    place = next(new_paths)
    place.mkdir()
    monkeypatch.setenv("POLYSITE_CACHE", str(place))
    return place


@pytest.fixture(scope="session")
def trained(new_paths):
    """Train a study of phantoms on the simulator, once for all tests that only read its run."""
    runs = {}

    def run(chosen):
        key = dump(chosen)
        if key not in runs:
            runs[key] = study.train(chosen, next(new_paths))
        return runs[key]

    return run


@pytest.fixture(autouse=True)
def coarse_figures(request, monkeypatch):
    """Write PNG files with few pixels, except in tests of the files themselves: 300 dpi take seconds a page."""
    if request.node.get_closest_marker("full_resolution") is None:
        monkeypatch.setattr("polysite.report.figure_files.DPI", 60)


@pytest.fixture(scope="session", autouse=True)
def no_pages():
    """Let ps.train write no page: drawing takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polysite.study.training.with_page", lambda run, page: run)
        yield


@pytest.fixture(autouse=True)
def no_pages_of_assessments(request, monkeypatch):
    """Let ps.assess write no page either, except in tests of the page."""
    if request.node.get_closest_marker("page") is None:
        empty = SimpleNamespace(write=lambda folder, *_: (folder / "index.html").touch())
        monkeypatch.setattr("polysite.assessment.assess_page", empty)


@pytest.fixture
def shared():
    """The folder of real hospital data."""
    if not DATA.is_dir():
        pytest.skip(f"the real data are not here: {DATA}")
    return DATA
