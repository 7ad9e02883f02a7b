"""What the tests of benchmarks share."""

from importlib import import_module

import pytest

import tiny_bench


@pytest.fixture
def in_process(monkeypatch):
    """Let benchmarks run their jobs in this process, which has loaded its libraries; tables are wide."""
    monkeypatch.setattr(import_module("polysite.benchmark.run"), "work", tiny_bench.work_here)
    monkeypatch.setenv("COLUMNS", "200")
