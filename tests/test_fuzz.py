"""Damaged files and messages: every reader accepts them or refuses them with one sentence, soon, in little memory."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("fuzz")
    finally:
        sys.path.remove(str(SCRIPTS))


def test_damaged_inputs_are_refused_with_one_sentence(script):
    """The corpus of every reader, and a few new inputs."""
    lines = list(script.fuzz(inputs=40, seed=1))
    assert len(lines) > 30
    assert not [line for line in lines if line.startswith("FOUND")]


def test_the_corpus_belongs_to_readers(script, tmp_path):
    known = {script.place(reader) for reader in script.readers(tmp_path)}
    found = {folder.name for folder in CORPUS.iterdir()}
    assert found <= known and len(found) > 20
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < 600_000


class Fails:
    """Readers that fail in every way that the script must notice."""

    @staticmethod
    def error(content):
        raise KeyError(content[:1])

    @staticmethod
    def lines(content):
        from polysite.errors import PolysiteError

        problem = PolysiteError("")
        problem.args = ("one\ntwo",)
        raise problem

    @staticmethod
    def hang(content):
        while True:
            pass


@pytest.mark.parametrize("how, said", [("error", "KeyError"), ("lines", "no sentence"), ("hang", "a hang")])
def test_the_script_reports_a_reader_that_fails(script, monkeypatch, how, said):
    monkeypatch.setattr(script, "SECONDS", 0.05)
    reader = script.Reader("x", (b"abc",), getattr(Fails, how), accepts=False)
    monkeypatch.setattr(script, "readers", lambda folder: [reader])
    assert [line for line in script.fuzz(inputs=2, seed=0) if line.startswith("FOUND x") and said in line]


def test_new_outcomes_are_kept(script, monkeypatch, tmp_path):
    def read(content):
        if len(content) % 2:
            script.PolysiteError.__init__(problem := script.PolysiteError(), "odd")
            raise problem

    monkeypatch.setattr(script, "readers", lambda folder: [script.Reader("a b", (b"ab",), read)])
    list(script.fuzz(inputs=50, seed=0, corpus=tmp_path, write=True))
    assert {len(file.read_bytes()) % 2 for file in (tmp_path / "a-b").iterdir()} == {0, 1}


@pytest.mark.soak
def test_the_command_ends_well_within_its_memory():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "fuzz.py"), "--inputs", "200"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) MiB", done.stdout)[1]) < 1024
