"""The command line, called in this process."""

import sys

import pytest

from polysite import cli


@pytest.fixture(autouse=True)
def no_pages_of_runs(monkeypatch):
    """Commands write an empty page: drawing takes seconds."""
    monkeypatch.setattr("polysite.report.publish.page", lambda path, *_, **__: path.touch())


@pytest.fixture
def polysite(capsys, monkeypatch, tmp_path):
    """Call the command line: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["polysite", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call
