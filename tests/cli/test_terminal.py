"""What a terminal of 80 columns shows."""

import fcntl
import os
import pty
import struct
import termios

import pytest

from polysite.cli.base import say
from polysite.report.progress import progress

END = "<end>"
SENTENCE = "The label maps hold 0 and 255, which are read as one label; name it by labels in [data] of the study."


@pytest.fixture
def terminal():
    """A terminal of 80 columns and what it has shown."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    with os.fdopen(inside, "w") as screen:

        def shown():
            screen.write(END)
            screen.flush()
            read = b""
            while not read.endswith(END.encode()):  # a terminal hands its text over in pieces
                read += os.read(outside, 65536)
            return read.decode().removesuffix(END).replace("\r\n", "\n")

        yield screen, shown
    os.close(outside)


@pytest.fixture(autouse=True)
def eighty(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_lines_are_broken_between_words_in_a_terminal_only(terminal, capsys):
    screen, shown = terminal
    say(SENTENCE, hang=2, file=screen)
    lines = shown().splitlines()
    assert len(lines) == 2 and lines[1].startswith("  ") and max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == SENTENCE
    say(SENTENCE)
    assert capsys.readouterr().out == SENTENCE + "\n"


def test_a_command_stays_whole_so_that_it_can_be_copied(terminal):
    screen, shown = terminal
    command = "polysite data scan scans --labels 'WT=1,2,4; TC=1,4; ET=4' --out a-long-name-of-a-manifest.csv"
    say(f"44 cases of 4 hospitals in scans. Next: {command}", "Next: polysite train manifest.csv", file=screen)
    assert shown().splitlines() == [
        "44 cases of 4 hospitals in scans. Next:", f"  {command}", "Next: polysite train manifest.csv",
    ]  # fmt: skip


def test_a_path_stays_whole(terminal):
    screen, shown = terminal
    path = "/data/" + "x" * 100
    say(f"Send it to the coordinator: {path}", file=screen)
    assert path in shown()


def test_a_long_note_leaves_room_for_the_name_and_the_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress() as watch:
        watch.begin("second", 3, 0, 0.0)
        watch.bars.update(
            watch.task, note="does not take part: 'ditto' may not train here: policy.toml allows fedavg only"
        )
        watch.bars.refresh()
    line = next(line for line in capsys.readouterr().err.splitlines() if "does not take part" in line)
    assert "second" in line and "━" in line
