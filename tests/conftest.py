"""What every test shares: a cache of its own, and where the real data lie."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("POLYSITE_CACHE", str(place))
    return place


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


@pytest.fixture
def shared():
    """The folder of real hospital data."""
    if not DATA.is_dir():
        pytest.skip(f"the real data are not here: {DATA}")
    return DATA
