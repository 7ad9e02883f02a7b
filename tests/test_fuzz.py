"""Damaged files and messages: every reader accepts them or refuses them with one sentence, soon, in little memory."""

import importlib
from pathlib import Path

import pytest

from polysite.errors import PolysiteError

SCRIPTS = Path(__file__).parents[1] / "scripts"
CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("fuzz")


def test_damaged_inputs_are_refused_with_one_sentence(script, tmp_path):
    """The corpus of every reader, and a few new inputs."""
    lines = list(script.fuzz(inputs=40, seed=1))
    assert len(lines) > 30
    assert not [line for line in lines if line.startswith("FOUND")]
    known, found = {script.place(reader) for reader in script.readers(tmp_path)}, {f.name for f in CORPUS.iterdir()}
    assert found <= known and len(found) > 20


def lines(content):
    problem = PolysiteError("")
    problem.args = ("one\ntwo",)
    raise problem


def hang(content):
    while True:
        pass


@pytest.mark.parametrize("fails, said", [(lines, "no sentence"), (hang, "a hang")])
def test_the_script_reports_a_reader_that_fails(script, monkeypatch, fails, said):
    monkeypatch.setattr(script, "SECONDS", 0.05)
    monkeypatch.setattr(script, "readers", lambda folder: [script.Reader("x", (b"abc",), fails, accepts=False)])
    assert [line for line in script.fuzz(inputs=2, seed=0) if line.startswith("FOUND x") and said in line]
