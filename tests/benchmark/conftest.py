"""What the tests of benchmarks share."""

import pytest

import tiny_bench
from polysite.benchmark import Workers


@pytest.fixture
def in_process(monkeypatch):
    """Let benchmarks run their jobs in this process, which has loaded its libraries; tables are wide."""
    monkeypatch.setattr(Workers, "train", tiny_bench.train_here)
    monkeypatch.setenv("COLUMNS", "200")
