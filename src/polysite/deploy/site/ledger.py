"""The audit log of a hospital: JSON lines that are only ever appended to, each tied to all before it.

A line has its number ``n``, the ``time`` in UTC, ``previous`` and what the caller says. ``previous`` is the SHA-256 of
the line before, or of all bytes since the former entry began, should a crash have cut something there. Next to the log
lies its head, the number and the SHA-256 of the last entry, without which nobody would miss the end of the log. The
line is on disk before the head is, so that a crash leaves the head one entry behind at most.

This shows mistakes, lost lines and clumsy changes. Who may write here can also write a new log from its beginning;
against that, keep a copy of the head elsewhere.

An entry about a request has ``kind``, ``study`` and either ``bytes``, those that leave, or ``refused``, the reason. It
is written before anything leaves: where ``write`` raises RunError, since the disk is full or somebody changed the log,
nothing may be sent.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from polysite.errors import DataError, RunError
from polysite.storage import write_file

OURS = ("n", "time", "previous")
CUT = "cut"  # the kind of what stands for a line that a crash cut


@dataclass(frozen=True)
class Head:
    """The last entry of a log."""

    n: int = -1
    digest: str = ""


@dataclass
class Chain:
    """A log as far as it was followed."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # with those that stand for cut lines
    heads: list[Head] = field(default_factory=lambda: [Head()])  # after every entry
    block: bytes = b""  # all since the last entry began, but for the end of its line
    cut: int = 0  # the first line after the last entry that is none; 0: there is none


class Ledger:
    """A log to write to; it is made with its first line."""

    def __init__(self, path: Path):
        self.path = path
        self._known: tuple[Any, ...] = ()  # which file, and how long it was, when this process last saw it
        self._chain = Chain()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry; when this returns, it is on disk. One process at a time."""
        own = next((key for key in OURS if key in entry), None)
        if own:
            raise RunError(f"an entry of the audit log {self.path} has its own {own!r}, which the log writes itself")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _locked(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, fcntl.LOCK_EX) as handle:
                self._follow(handle)
                self._append(handle, entry)
        except DataError as problem:
            raise RunError(f"{problem}; nothing leaves before that") from problem
        except (OSError, TypeError, ValueError) as problem:
            raise RunError(
                f"the audit log {self.path} could not be written: {problem}; nothing leaves before it can be"
            ) from problem

    def _follow(self, handle: int) -> None:
        """Know the log up to its end, whoever wrote it."""
        if self._known == _state(handle):
            return
        head = _read_head(self.path)
        self._chain = _verified(self.path, _read(handle), head)
        if self._chain.heads[-1] != head:  # a crash came between
            _write_head(self.path, self._chain.heads[-1])

    def _append(self, handle: int, entry: Mapping[str, Any]) -> None:
        self._known = ()  # until all of it is done
        n, previous = self._chain.heads[-1].n + 1, sha256(self._chain.block).hexdigest()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"n": n, "time": now, "previous": previous, **entry}, allow_nan=False).encode()
        start = b"" if _ends(handle) else b"\n"  # what a crash cut becomes a line of its own
        whole = start + line + b"\n"
        if (count := os.write(handle, whole)) < len(whole):
            raise OSError(f"{count} of {len(whole)} bytes were written; is the disk full?")
        os.fsync(handle)
        last = Head(n, sha256(line).hexdigest())
        _write_head(self.path, last)
        self._chain, self._known = Chain(heads=[last], block=line), _state(handle)


def check(path: Path) -> list[dict[str, Any]]:
    """The entries of a log, in order, or a DataError that names the first line that is not as it was written.

    A line that a crash cut is no entry: ``{"kind": "cut", "line": 7}`` stands in its place.
    """
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as handle:
            return _verified(path, _read(handle), _read_head(path)).entries
    except OSError as problem:
        raise DataError(f"the audit log {path} cannot be read: {problem}") from problem


@dataclass(frozen=True)
class Total:
    """What was asked in one way for one study."""

    study: str
    kind: str
    requests: int = 0
    bytes: int = 0  # that left
    refusals: int = 0


def summary(entries: Iterable[Mapping[str, Any]]) -> list[Total]:
    """What was asked and what left, for every study and kind of request, in alphabetical order.

    >>> summary([{"kind": "train", "study": "a", "bytes": 5}, {"kind": "train", "study": "a", "refused": "too late"}])
    [Total(study='a', kind='train', requests=2, bytes=5, refusals=1)]
    """
    found: dict[tuple[str, str], Total] = {}
    for entry in entries:
        if "study" not in entry:
            continue  # no request: a start, an end, a cut line
        key = str(entry["study"]), str(entry.get("kind", ""))
        so_far = found.get(key, Total(*key))
        sent, refused = int(entry.get("bytes", 0)), bool(entry.get("refused"))
        found[key] = Total(*key, so_far.requests + 1, so_far.bytes + sent, so_far.refusals + refused)
    return [found[key] for key in sorted(found)]


def _verified(path: Path, data: bytes, head: Head) -> Chain:
    """Follow the chain from its beginning to its head."""
    lines, chain = data.split(b"\n"), Chain()
    if not lines[-1]:
        lines.pop()
    parsed = [_entry(line) for line in lines]
    for k, (line, entry) in enumerate(zip(lines, parsed, strict=True)):
        if entry is None:
            chain.block += b"\n" + line
            chain.cut = chain.cut or k + 1
            chain.entries.append({"kind": CUT, "line": k + 1})
            continue
        expected = chain.heads[-1].n + 1
        if (entry["n"], entry["previous"]) != (expected, sha256(chain.block).hexdigest()):
            following = next((e["previous"] for e in parsed[k + 1 :] if e), head.digest)
            raise _broken(path, k + 1, expected, entry["n"], chain.cut, sha256(line).hexdigest() == following)
        chain.heads.append(Head(expected, sha256(line).hexdigest()))
        chain.entries.append(entry)
        chain.block, chain.cut = line, 0
    _end(path, chain, len(lines), head)
    return chain


def _end(path: Path, chain: Chain, lines: int, head: Head) -> None:
    """Refuse a log that does not end where its head says, or one entry later, which a crash explains."""
    if head in chain.heads[-2:]:
        return
    last = chain.heads[-1].n
    if head.n > last:
        what = f"line {chain.cut} was changed" if chain.cut else f"what came after line {lines} was removed"
    elif head.n == last:
        what = f"line {chain.cut - 1 if chain.cut else lines} was changed (or {_head(path).name} was)"
    else:
        what = f"{_head(path).name}, which goes with it, is missing or does not know its last lines"
    raise _altered(path, what)


def _broken(path: Path, line: int, expected: int, n: int, cut: int, intact: bool) -> DataError:
    """Which line came first of those that are not as they were, seen from one that does not fit to what is before it.
    It is ``intact`` where what comes after still fits to it; then something before it is wrong."""
    if cut:
        return _altered(path, f"line {cut} was changed or inserted")
    if not intact:
        return _altered(path, f"line {line} was changed, inserted or moved")
    if n > expected:
        return _altered(path, f"before line {line}, entry {expected} was removed")
    return _altered(path, f"line {line} was inserted" if n < expected or line == 1 else f"line {line - 1} was changed")


def _altered(path: Path, what: str) -> DataError:
    return DataError(
        f"the audit log {path} is not as it was written: {what}; find out why, and move it aside together with "
        f"{_head(path).name} to begin a new one"
    )


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says, if it is a whole entry."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and type(found.get("n")) is int and isinstance(found.get("previous"), str)
    return found if whole else None


def _head(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _read_head(path: Path) -> Head:
    try:
        n, digest = _head(path).read_text(encoding="ascii").split()
        return Head(int(n), digest)
    except (FileNotFoundError, ValueError):
        return Head()


def _write_head(path: Path, head: Head) -> None:
    def fill(temporary: Path) -> None:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"{head.n} {head.digest}\n")

    write_file(_head(path), fill)


@contextmanager
def _locked(path: Path, flags: int, lock: int) -> Iterator[int]:
    """The file, for this process alone or for readers alone; a killed process lets go by itself."""
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, lock)
        yield handle
    finally:
        os.close(handle)


def _read(handle: int) -> bytes:
    with os.fdopen(os.dup(handle), "rb") as file:
        file.seek(0)
        return file.read()


def _ends(handle: int) -> bool:
    """Whether the file is empty or ends with a whole line."""
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"


def _state(handle: int) -> tuple[Any, ...]:
    state = os.fstat(handle)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
