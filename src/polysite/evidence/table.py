"""The local table of the evidence bank, and the one that comes with polysite.

The local table is ``evidence.jsonl`` in the folder ``$POLYSITE_EVIDENCE``, or else in ``~/.local/share/polysite``. Only
its owner can read it. Several processes may add lines at once. A line that cannot be read is skipped with a warning.
``POLYSITE_EVIDENCE=off`` writes and reads no local table.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from secrets import token_bytes

from polysite.errors import ConfigError
from polysite.evidence.lines import AnyLine, from_json, to_json
from polysite.locks import held

VARIABLE, OFF = "POLYSITE_EVIDENCE", "off"
FILE, KEY = "evidence.jsonl", "evidence.key"
KEY_BYTES = 32
PATIENCE = 20.0  # seconds to wait for other processes


def is_off() -> bool:
    """Return whether the user wants no local table."""
    return os.environ.get(VARIABLE, "").strip().lower() == OFF


def place() -> Path:
    """Return the folder of the local table."""
    try:
        return Path(os.environ.get(VARIABLE) or Path.home() / ".local" / "share" / "polysite")
    except RuntimeError as problem:
        raise ConfigError(
            f"there is no home folder here; set {VARIABLE} to a folder for the evidence bank, or to {OFF}"
        ) from problem


def append(line: AnyLine) -> None:
    """Add a line to the local table; OSError if it cannot be written."""
    with _locked(place()) as folder, _opened(folder / FILE, os.O_RDWR | os.O_APPEND) as file:
        size = os.fstat(file).st_size
        if size:
            os.lseek(file, size - 1, os.SEEK_SET)
        cut = size and os.read(file, 1) != b"\n"  # a process died while it wrote
        content = ("\n" * bool(cut) + to_json(line) + "\n").encode()
        while content:
            content = content[os.write(file, content) :]


def read() -> list[AnyLine]:
    """Return the lines of the local table; none if there is no table."""
    if is_off():
        return []
    file = place() / FILE
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return list(_parsed(lines, str(file)))
    except FileNotFoundError:
        return []
    except OSError as problem:
        _log().warning("the evidence bank %s cannot be read: %s; only polysite's own results are used", file, problem)
        return []


@cache
def shipped() -> tuple[AnyLine, ...]:
    """Return the lines of the table that comes with polysite."""
    file = resources.files("polysite").joinpath("evidence", "shipped.jsonl")
    return tuple(from_json(line) for line in file.read_text(encoding="utf-8").splitlines())


def secret() -> bytes:
    """Return the key of the digests in the local table, made on first use.

    The key is not in the table, so the table alone does not show whether it contains a given list of cases.
    """
    with _locked(place()) as folder:
        file = folder / KEY
        try:
            found = file.read_bytes()
        except FileNotFoundError:
            found = b""
        if len(found) != KEY_BYTES:
            found = token_bytes(KEY_BYTES)
            with _opened(file, os.O_WRONLY | os.O_TRUNC) as opened:
                os.write(opened, found)
        return found


def _parsed(lines: Iterable[str], where: str) -> Iterator[AnyLine]:
    damaged = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield from_json(line)
        except ValueError:
            damaged.append(number)
    if damaged:
        few = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        plural = "s" * (len(damaged) > 1)
        _log().warning("%s: line%s %s cannot be read and %s skipped", where, plural, few, "are" if plural else "is")


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Make the folder and hold its lock, which a killed process releases."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with ExitStack() as stack:
        try:  # a line takes a millisecond, but a process may be stopped meanwhile
            stack.enter_context(held(folder / ".evidence.lock", PATIENCE))
        except BlockingIOError as problem:
            raise TimeoutError(f"another process has held {folder} for {PATIENCE:.0f} seconds") from problem
        yield folder


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    """Open a file that only its owner can read; made if it is not there."""
    handle = os.open(file, flags | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def _log() -> logging.Logger:
    return logging.getLogger("polysite")
