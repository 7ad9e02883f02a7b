"""The audit log: whatever happens to a line is found, and a crash or a full disk does not break it."""

import json
import os
import subprocess
import sys
from hashlib import sha256
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.deploy.site import ledger as ledgers
from polysite.deploy.site.ledger import Ledger, check
from polysite.errors import DataError, RunError

ENTRIES = [{"kind": "train", "study": "s", "bytes": k, "to": "Köln\n"} for k in range(6)]
JUNK = [b"", b"junk", b"\xff", b"[1]", b"[" * 9999, b'{"n": 3}']


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "audit.jsonl"


def written(path, *entries):
    ledger = Ledger(path)
    for entry in entries:
        ledger.write(entry)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of six lines: its path and its lines."""
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    written(path, *ENTRIES)
    return path, path.read_bytes().splitlines(keepends=True)


def found(log, *lines):
    """What is said of the log when it has these lines."""
    log[0].write_bytes(b"".join(lines))
    with pytest.raises(DataError, match="not as it was written") as problem:
        check(log[0])
    return str(problem.value)


def test_lines_are_tied_together(path):
    written(path, *ENTRIES)
    lines = path.read_bytes().splitlines()
    entries = check(path)
    assert entries == [json.loads(line) for line in lines]
    assert [e["n"] for e in entries] == list(range(6)) and entries[2]["to"] == "Köln\n"
    assert [e["previous"] for e in entries] == [sha256(line).hexdigest() for line in (b"", *lines[:-1])]
    assert all(e["time"].endswith("+00:00") for e in entries)
    modes = {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
    assert modes == {"audit.jsonl": 0o600, "audit.jsonl.head": 0o600}


def test_a_log_of_a_later_version_is_refused(path, monkeypatch):
    with pytest.raises(DataError, match="cannot be read"):
        check(path)
    with monkeypatch.context() as later:
        later.setattr(ledgers, "FORMAT", 3)
        written(path, {"kind": "train"})
    with pytest.raises(DataError, match="entries of format 3, and this polysite reads up to 2"):
        check(path)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_changed_byte_is_found(log, data):
    whole = b"".join(log[1])
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[at]))
    line = whole[:at].count(b"\n") + 1
    said = found(log, whole[:at], bytes([byte]), whole[at + 1 :])
    assert f"line {line} was" in said or (byte == 10 and f"line {line + 1}" in said)


@given(start=st.integers(0, 5), count=st.integers(1, 6))
def test_removed_lines_are_found(log, start, count):
    said = found(log, *log[1][:start], *log[1][start + count :])
    inner = f"before line {start + 1}, entry {start} was removed"
    assert (inner if start + count < 6 else f"after line {start} was removed") in said


@given(order=st.permutations(range(6)).filter(lambda order: order != list(range(6))))
def test_moved_lines_are_found(log, order):
    first = next(k for k, n in enumerate(order) if n != k) + 1
    assert f"line {first}" in found(log, *(log[1][k] for k in order))


@given(at=st.integers(0, 5), new=st.sampled_from([*JUNK, *range(6)]))
def test_an_inserted_line_is_found(log, at, new):
    """Also one that is there already; beside it, the second of the two is named."""
    line = new + b"\n" if isinstance(new, bytes) else log[1][new]
    assert f"line {at + 1 + (new == at)} was" in found(log, *log[1][:at], line, *log[1][at:])


@pytest.mark.parametrize("size", [2, 20])
def test_an_end_cut_off_is_no_crash(log, size):
    assert "line 6 was changed" in found(log, b"".join(log[1])[:-size])


@pytest.mark.parametrize("head", [None, "garbage", f"3 {'0' * 64}", f"5 {'0' * 64}", f"6 {'0' * 64}"])
def test_a_head_that_does_not_fit_is_found(path, head):
    written(path, *ENTRIES)
    file = path.with_name("audit.jsonl.head")
    file.unlink()
    if head is not None:
        file.write_text(head)
    with pytest.raises(DataError, match=r"audit\.jsonl\.head"):
        check(path)


def test_nothing_is_added_to_a_log_that_was_changed(path):
    written(path, *ENTRIES)
    changed = path.read_bytes().replace(b'"bytes": 4', b'"bytes": 3')
    path.write_bytes(changed)
    with pytest.raises(RunError, match=r"line 5 was changed.*nothing leaves"):
        Ledger(path).write({})
    assert path.read_bytes() == changed


@pytest.mark.parametrize("same", [True, False], ids=["same process", "after a restart"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("size, cuts", [(0, 0), (1, 1), (30, 2), (-2, 2), (-1, 0), (None, 0)])
def test_a_crash_at_any_byte_is_reported_and_the_log_goes_on(path, monkeypatch, before, same, size, cuts):
    ledger, write = Ledger(path), os.write
    for entry in ENTRIES[:before]:
        ledger.write(entry)
    with monkeypatch.context() as crash:
        crash.setattr(os, "write", lambda handle, data: write(handle, data[:size]) and 0)
        for _ in range(2):  # once more, behind what the first one left
            with pytest.raises(RunError, match=r"could not be written.*nothing leaves before it can be"):
                ledger.write({"kind": "train"})
    for _ in range(2):
        (ledger if same else Ledger(path)).write({"kind": "score"})
    entries = check(path)
    cut = [e["line"] for e in entries if e["kind"] == "cut"]
    whole = [e for e in entries if e["kind"] != "cut"]
    assert len(cut) == cuts
    assert [e["n"] for e in whole] == list(range(len(whole))) and [e["kind"] for e in whole[-2:]] == ["score"] * 2
    data = path.read_bytes()
    for line in (*cut, len(entries) - 1):  # what was cut is tied to what comes after it, too
        lines = data.split(b"\n")
        lines[line - 1] = lines[line - 1].replace(b"score", b"scare") if line not in cut else b"x" + lines[line - 1]
        path.write_bytes(b"\n".join(lines))
        with pytest.raises(DataError, match=f"line {cut[0] if line in cut else line} was changed"):
            check(path)


def test_a_crash_within_the_last_line_or_before_the_head_is_mended(path):
    written(path, *ENTRIES[:2])
    head = path.with_name("audit.jsonl.head")
    before = head.read_bytes()
    written(path, ENTRIES[2])
    head.write_bytes(before)
    assert len(check(path)) == 3
    written(path, ENTRIES[3])
    assert len(check(path)) == 4 and head.read_text().startswith("3 ")
    with path.open("ab") as file:
        file.write(b'{"n": 4, "ti')
    assert check(path)[-1] == {"kind": "cut", "line": 5}


@pytest.mark.parametrize("broken", ["fsync", "write"])
def test_what_is_not_surely_on_disk_is_an_error(path, monkeypatch, broken):
    monkeypatch.setattr(os, broken, Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(RunError, match="No space left"):
        Ledger(path).write({})


def test_a_line_is_one_write_and_on_disk_before_its_head(path, monkeypatch):
    calls, head = [], path.with_name("audit.jsonl.head")

    def noted(name):
        real = getattr(os, name)
        return lambda handle, *data: calls.append((name, handle, head.exists())) or real(handle, *data)

    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, noted(name))
    Ledger(path).write({"kind": "train"})
    handle = calls[0][1]
    assert calls[:2] == [("write", handle, False), ("fsync", handle, False)]
    assert [name for name, *_ in calls].count("write") == 1


def test_several_processes_take_turns(path):
    code = (
        "import sys; from pathlib import Path; from polysite.deploy.site.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "for k in range(25): ledger.write({'who': sys.argv[2], 'k': k, 'long': 'x' * 5000})"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "abc"]
    assert [p.wait() for p in processes] == [0, 0, 0]
    entries = check(path)
    assert [e["n"] for e in entries] == list(range(75))
    assert {who: [e["k"] for e in entries if e["who"] == who] for who in "abc"} == {who: [*range(25)] for who in "abc"}
