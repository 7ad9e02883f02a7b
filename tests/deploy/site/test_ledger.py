"""The audit log: whatever happens to a line is found, and a crash or a full disk does not break it."""

import errno
import json
import os
import resource
import subprocess
import sys
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polysite.deploy.site import ledger as ledgers
from polysite.deploy.site.ledger import Ledger, Total, check, summary
from polysite.errors import DataError, RunError

ENTRIES = [{"kind": "train", "study": "s", "bytes": k, "to": "Köln\n"} for k in range(6)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "audit.jsonl"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log of six lines, its path and its bytes."""
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    ledger = Ledger(path)
    for entry in ENTRIES:
        ledger.write(entry)
    return path, path.read_bytes()


def written(path, *entries):
    ledger = Ledger(path)
    for entry in entries:
        ledger.write(entry)


def found(log, data):
    """What is said of the log when it is these bytes."""
    path, _ = log
    path.write_bytes(data)
    with pytest.raises(DataError, match="not as it was written") as problem:
        check(path)
    return str(problem.value)


def test_lines_are_tied_together(path):
    written(path, *ENTRIES)
    lines = path.read_bytes().splitlines()
    entries = check(path)
    assert entries == [json.loads(line) for line in lines]
    assert [e["n"] for e in entries] == list(range(6)) and entries[2]["to"] == "Köln\n"
    assert [e["previous"] for e in entries] == [sha256(line).hexdigest() for line in (b"", *lines[:-1])]
    assert all(e["time"].endswith("+00:00") for e in entries)
    assert {p.name: p.stat().st_mode & 0o777 for p in path.parent.iterdir()} == {
        "audit.jsonl": 0o600,
        "audit.jsonl.head": 0o600,
    }


def test_a_log_of_a_later_version_is_refused_and_one_of_0_1_0_is_read(path, monkeypatch):
    monkeypatch.setattr(ledgers, "FORMAT", 3)
    written(path, {"kind": "train"})
    monkeypatch.undo()
    with pytest.raises(DataError, match="entries of format 3, and this polysite reads up to 2"):
        check(path)


def test_another_process_goes_on(path):
    first, second = Ledger(path), Ledger(path)
    for ledger in (first, second, second, first, second):
        ledger.write({})
    assert [e["n"] for e in check(path)] == [0, 1, 2, 3, 4]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_changed_byte_is_found(log, data):
    _, whole = log
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda b: b != whole[at]))
    line = whole[:at].count(b"\n") + 1
    said = found(log, whole[:at] + bytes([byte]) + whole[at + 1 :])
    assert f"line {line} was" in said or (byte == 10 and f"line {line + 1}" in said)


@given(k=st.integers(0, 5))
def test_a_removed_line_is_found(log, k):
    lines = log[1].splitlines(keepends=True)
    said = found(log, b"".join(lines[:k] + lines[k + 1 :]))
    assert (f"before line {k + 1}, entry {k} was removed" if k < 5 else "after line 5 was removed") in said


@given(start=st.integers(0, 5), count=st.integers(1, 6))
def test_removed_lines_are_found(log, start, count):
    lines = log[1].splitlines(keepends=True)
    found(log, b"".join(lines[:start] + lines[start + count :]))


@given(order=st.permutations(range(6)).filter(lambda order: order != list(range(6))))
def test_moved_lines_are_found(log, order):
    lines = log[1].splitlines(keepends=True)
    first = next(k for k, n in enumerate(order) if n != k) + 1
    assert f"line {first}" in found(log, b"".join(lines[k] for k in order))


@given(which=st.integers(0, 5), at=st.integers(0, 6))
def test_a_line_that_is_there_twice_is_found(log, which, at):
    lines = log[1].splitlines(keepends=True)
    said = found(log, b"".join([*lines[:at], lines[which], *lines[at:]]))
    assert f"line {at + 1 + (which == at)} was" in said


@given(at=st.integers(0, 5), junk=st.sampled_from([b"", b"junk", b"\xff", b"[1]", b"[" * 9999, b'{"n": 3}']))
def test_an_inserted_line_is_found(log, at, junk):
    lines = log[1].splitlines(keepends=True)
    assert f"line {at + 1} was" in found(log, b"".join([*lines[:at], junk + b"\n", *lines[at:]]))


@pytest.mark.parametrize(
    "head", [None, "", "garbage", "3 " + "0" * 64, "5 " + "0" * 64, "6 " + "0" * 64], ids=lambda h: repr(h)[:12]
)
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


def test_a_log_that_vanishes_is_noticed_by_the_next_line(path):
    ledger = Ledger(path)
    ledger.write({})
    ledger.write({})
    path.unlink()
    with pytest.raises(RunError, match="after line 0 was removed"):
        ledger.write({})


@pytest.mark.parametrize("same", [True, False], ids=["same process", "after a restart"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("size, cuts", [(0, 0), (1, 1), (30, 2), (100, 2), (-2, 2), (-1, 0), (None, 0)])
def test_a_crash_at_any_byte_is_reported_and_the_log_goes_on(path, monkeypatch, before, same, size, cuts):
    ledger, write = Ledger(path), os.write
    for entry in ENTRIES[:before]:
        ledger.write(entry)
    with monkeypatch.context() as crash:
        crash.setattr(os, "write", lambda handle, data: write(handle, data[:size]) and 0)
        for _ in range(2):  # once more, behind what the first one left
            with pytest.raises(RunError, match="could not be written"):
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


def test_a_cut_last_line_is_reported(path):
    written(path, *ENTRIES)
    with path.open("ab") as file:
        file.write(b'{"n": 6, "ti')
    assert check(path)[-1] == {"kind": "cut", "line": 7}


def test_an_end_cut_off_is_no_crash(log):
    _, whole = log
    for size in (len(whole) - 2, len(whole) - 20):
        assert "line 6 was changed" in found(log, whole[:size])


def test_a_crash_before_the_head_is_mended(path):
    written(path, *ENTRIES[:2])
    head = path.with_name("audit.jsonl.head")
    before = head.read_bytes()
    written(path, ENTRIES[2])
    head.write_bytes(before)
    assert len(check(path)) == 3
    written(path, ENTRIES[3])
    assert len(check(path)) == 4 and head.read_text().startswith("3 ")


def test_a_full_disk_is_said_and_leaves_the_log_sound(path):
    ledger = Ledger(path)
    ledger.write({"kind": "train"})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        for _ in range(3):
            with pytest.raises(RunError, match="nothing leaves before it can be"):
                ledger.write({"kind": "train"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ledger.write({"kind": "score"})
    assert [e["kind"] for e in check(path)] == ["train", "cut", "score"]


@pytest.mark.parametrize("broken", ["fsync", "write"])
def test_what_is_not_surely_on_disk_is_an_error(path, monkeypatch, broken):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, full)
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


@pytest.mark.parametrize("entry", [{"n": 1}, {"previous": ""}, {"time": ""}, {"x": object()}, {"x": float("nan")}])
def test_an_entry_that_cannot_be_written_is_refused(path, entry):
    with pytest.raises(RunError, match="audit log"):
        Ledger(path).write(entry)
    Ledger(path).write({})
    assert len(check(path)) == 1


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


def test_a_log_that_is_not_there(path):
    with pytest.raises(DataError, match="cannot be read"):
        check(path)


def test_the_summary_counts_what_left_and_what_was_refused():
    entries = [
        {"kind": "start"},
        {"kind": "train", "study": "b", "bytes": 10},
        {"kind": "train", "study": "b", "bytes": 5},
        {"kind": "train", "study": "b", "refused": "too late"},
        {"kind": "score", "study": "b", "bytes": 1, "refused": ""},
        {"kind": "hello", "study": "a"},
        {"kind": "cut", "line": 3},
    ]
    assert summary(entries) == [
        Total("a", "hello", 1, 0, 0),
        Total("b", "score", 1, 1, 0),
        Total("b", "train", 3, 15, 1),
    ]
