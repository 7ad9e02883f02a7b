"""What the tests of benchmarks share."""

import pytest


@pytest.fixture
def one_thread(monkeypatch):
    """Let worker processes compute with one thread, and tables be wide."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "200")
