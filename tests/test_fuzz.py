"""Damaged files and messages: every reader accepts them or refuses them with one sentence."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_damaged_inputs_are_refused_with_one_sentence(script):
    lines = list(script.fuzz(inputs=60, seed=1))
    assert len(lines) > 20
    assert not [line for line in lines if line.startswith("FOUND")]


def test_the_script_reports_a_reader_that_fails(script, monkeypatch):
    def broken(content):
        raise KeyError(content[:1])

    monkeypatch.setattr(script, "readers", lambda folder: [script.Reader("split", (b"abc",), broken)])
    assert [line for line in script.fuzz(inputs=5, seed=0) if line.startswith("FOUND split: KeyError")]
