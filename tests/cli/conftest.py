"""The command line, called in this process."""

import sys

import pytest

from polysite import cli


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
