"""The audit log of a hospital: JSON lines that are only appended to, each tied to all lines before it by a hash.

A line has its number ``n``, the ``time`` in UTC, ``previous``, the ``format`` and the caller's fields. ``previous`` is
the SHA-256 of the line before, or of all bytes since the last entry began if a crash cut a line there. A second file,
the head, has the number and the SHA-256 of the last entry; without it, lines missing at the end would go unnoticed. The
line is on disk before the head is, so after a crash the head is at most one entry behind.

The log shows mistakes, lost lines and simple changes. A person with write access can also write a whole new log; to
notice that, keep a copy of the head elsewhere.

An entry about a request has ``kind``, ``study`` and either ``bytes``, the number that leaves, or ``refused``, the
reason. It is written before anything leaves: where ``write`` raises RunError, because the disk is full or the log was
changed, nothing may be sent. Entries of 0.1.0 have no ``format``; they are of format 1.
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
from polysite.storage import append_line, split_lines, write_private

FORMAT = 2  # of an entry; 0.1.0 wrote 1, without saying so
CUT = "cut"  # kind of the entry that stands for a line cut by a crash


@dataclass(frozen=True)
class Head:
    """Number and digest of the last entry of a log."""

    n: int = -1
    digest: str = ""


@dataclass
class Chain:
    """A log as far as it was verified."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # with entries that stand for cut lines
    heads: list[Head] = field(default_factory=lambda: [Head()])  # after every entry
    block: bytes = b""  # bytes since the last entry began, without the final line break
    cut: int = 0  # number of the first cut line after the last entry; 0 if there is none


class Ledger:
    """Writer of a log, which is created with its first line."""

    def __init__(self, path: Path):
        self.path = path
        self._known: tuple[Any, ...] = ()  # file and size when this process last saw it
        self._chain = Chain()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append an entry and wait until it is on disk. One process at a time."""
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
        """Verify the log up to its end, unless this process wrote its last entry."""
        if self._known == _state(handle):
            return
        head = _read_head(self.path)
        self._chain = _verified(self.path, _read(handle), head)
        if self._chain.heads[-1] != head:  # a crash came in between
            _write_head(self.path, self._chain.heads[-1])

    def _append(self, handle: int, entry: Mapping[str, Any]) -> None:
        self._known = ()  # until all of it is done
        n, previous = self._chain.heads[-1].n + 1, sha256(self._chain.block).hexdigest()
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps(
            {"n": n, "time": now, "previous": previous, "format": FORMAT, **entry}, allow_nan=False
        ).encode()
        append_line(handle, line)
        last = Head(n, sha256(line).hexdigest())
        _write_head(self.path, last)
        self._chain, self._known = Chain(heads=[last], block=line), _state(handle)


def check(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a log; DataError names the first line that is not as it was written.

    ``{"kind": "cut", "line": 7}`` stands for a line that a crash cut.
    """
    try:
        with _locked(path, os.O_RDONLY, fcntl.LOCK_SH) as handle:
            return _verified(path, _read(handle), _read_head(path)).entries
    except OSError as problem:
        raise DataError(f"the audit log {path} cannot be read: {problem}") from problem


@dataclass(frozen=True)
class Total:
    """Requests of one kind for one study."""

    study: str
    kind: str
    requests: int = 0
    bytes: int = 0  # that left
    refusals: int = 0


def summary(entries: Iterable[Mapping[str, Any]]) -> list[Total]:
    """Return the totals of every study and kind of request, in alphabetical order.

    >>> summary([{"kind": "train", "study": "a", "bytes": 5}, {"kind": "train", "study": "a", "refused": "too late"}])
    [Total(study='a', kind='train', requests=2, bytes=5, refusals=1)]
    """
    found: dict[tuple[str, str], Total] = {}
    for entry in entries:
        if "study" not in entry:
            continue  # not a request: a cut line
        key = str(entry["study"]), str(entry.get("kind", ""))
        so_far = found.get(key, Total(*key))
        sent, refused = int(entry.get("bytes", 0)), bool(entry.get("refused"))
        found[key] = Total(*key, so_far.requests + 1, so_far.bytes + sent, so_far.refusals + refused)
    return [found[key] for key in sorted(found)]


def _verified(path: Path, data: bytes, head: Head) -> Chain:
    """Verify the chain from its first line to its head."""
    lines, chain = split_lines(data), Chain()
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
    later = next((e["format"] for e in chain.entries if e.get("format", 1) not in range(1, FORMAT + 1)), None)
    if later is not None:
        raise DataError(
            f"the audit log {path} has entries of format {later!r:.20}, and this polysite reads up to {FORMAT}: "
            "install a newer polysite"
        )
    return chain


def _end(path: Path, chain: Chain, lines: int, head: Head) -> None:
    """Refuse a log that does not end at its head, or one entry later, as after a crash."""
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
    """Return the first altered line, traced back from a hash mismatch. ``intact``: the next line still matches this
    one, so the change lies before it."""
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
    """Parse a line; None if it is not a whole entry."""
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
    write_private(_head(path), f"{head.n} {head.digest}\n")


@contextmanager
def _locked(path: Path, flags: int, lock: int) -> Iterator[int]:
    """Open and lock the file; the lock of a killed process is released by the system."""
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


def _state(handle: int) -> tuple[Any, ...]:
    state = os.fstat(handle)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
