"""What a terminal of 80 columns shows."""

from io import StringIO

import pytest

from polysite.cli.base import say

SENTENCE = "The label maps hold 0 and 255, which are read as one label; name it by labels in [data] of the study."


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def test_lines_are_broken_between_words_in_a_terminal_only(screen, capsys):
    say(SENTENCE, hang=2, file=screen)
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2 and lines[1].startswith("  ") and max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == SENTENCE
    say(SENTENCE)
    assert capsys.readouterr().out == SENTENCE + "\n"


def test_a_command_and_a_path_stay_whole_so_that_they_can_be_copied(screen):
    command = "polysite data scan scans --labels 'WT=1,2,4; TC=1,4; ET=4' --out a-long-name-of-a-manifest.csv"
    path = "/data/" + "x" * 100
    say(f"44 cases of 4 hospitals in scans. Next: {command}", f"Send it to the coordinator: {path}", file=screen)
    lines = screen.getvalue().splitlines()
    assert lines[:2] == ["44 cases of 4 hospitals in scans. Next:", f"  {command}"] and path in "".join(lines[2:])
