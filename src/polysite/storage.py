"""Atomic writes: a crash leaves a file or folder as it was before, or complete, never half-written; and the journal, to
which lines are appended.

What is made of patients' data is private: folders have mode 0700 and files 0600, whatever the umask is. A file in a
private folder is private, too.
"""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from shutil import copyfile, rmtree
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from polysite.buffers import Buffer
from polysite.errors import RunError
from polysite.foreign import parse_json
from polysite.locks import held

T = TypeVar("T")
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def is_private(folder: Path) -> bool:
    """Return whether only its owner can open a folder."""
    return not folder.stat().st_mode & 0o077


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner can open, or close one that is there; return it."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    folder.chmod(PRIVATE_FOLDER)
    return folder


def write_file(path: Path, fill: Callable[[Path], Any], *, sync: bool = True) -> None:
    """Fill a temporary file, flush it to disk and rename it to ``path``. In a private folder the file is private.

    Args:
        path: The final file; replaced if it exists.
        fill: Writes the content to the path that it is given.
        sync: Wait until the content is on disk. A cache that can be rebuilt need not.
    """
    draft = path.with_name(f".{path.name}.{token_hex(6)}.partial")
    try:
        fill(draft)
        if is_private(path.parent):
            draft.chmod(PRIVATE_FILE)
        if sync:
            _sync(draft)
        draft.replace(path)
        if sync:
            _sync(path.parent)
    except OSError as problem:
        raise RunError(f"{path} could not be written: {problem}; what was there before is untouched") from problem
    finally:
        draft.unlink(missing_ok=True)  # of a file that was not finished


def write_private(path: Path, content: Buffer | str, *, sync: bool = True) -> None:
    """Write a file that only its owner can read, at no moment with wider permissions."""
    data = content.encode() if isinstance(content, str) else content

    def fill(draft: Path) -> None:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
            file.write(data)

    write_file(path, fill, sync=sync)


class Journal(Generic[T]):
    """A file of JSON lines, which only its owner can read. No line is changed; a line that a crash cut short stays a
    line of its own.

    Args:
        path: The file, made with its first line.
        entry: Makes an entry of a parsed line.
        skip: Lines that are passed over if they cannot be parsed: none, the last one (a crash, or a process that writes
            now, cut it short), or any.
    """

    def __init__(self, path: Path, entry: Callable[[Any], T], skip: Literal["none", "last", "any"] = "none"):
        self.path, self.entry, self.skip = path, entry, skip

    def read(self) -> list[T]:
        """Return all entries, none if there is no file; ValueError names a line that is damaged."""
        lines = split_lines(self.path.read_bytes()) if self.path.exists() else []
        found = []
        for number, line in enumerate(lines, 1):
            try:
                value = parse_json(line)
            except ValueError as problem:
                if self.skip == "any" or (self.skip == "last" and number == len(lines)):
                    continue
                raise ValueError(f"line {number} of {self.path} is damaged: {problem}") from problem
            try:
                found.append(self.entry(value))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as problem:
                raise ValueError(f"line {number} of {self.path} is damaged: {problem!r}") from problem
        return found

    def append(self, *lines: str, sync: bool = True) -> None:
        """Add lines; with ``sync``, wait until they are on disk."""
        if not lines:
            return
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        handle = os.open(self.path, flags, PRIVATE_FILE)
        try:
            append_line(handle, "\n".join(lines).encode(), sync=sync)
        finally:
            os.close(handle)

    def replace(self, lines: Iterable[str]) -> None:
        """Write all lines anew, in one step."""
        write_private(self.path, "".join(f"{line}\n" for line in lines))


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines of a journal, without their ends; the last one may have been cut short.

    >>> split_lines(b'{}\\n{"n": 1}\\n{"n"')
    [b'{}', b'{"n": 1}', b'{"n"']
    """
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def append_line(handle: int, line: bytes, *, sync: bool = True) -> None:
    """Add a line to a journal that is open to read and append, in one write; behind a line that was cut short, it is
    still a line of its own."""
    size = os.fstat(handle).st_size
    os.lseek(handle, max(size - 1, 0), os.SEEK_SET)
    whole = (b"" if os.read(handle, 1) in (b"", b"\n") else b"\n") + line + b"\n"
    if (count := os.write(handle, whole)) < len(whole):
        raise OSError(f"{count} of {len(whole)} bytes were written; is the disk full?")
    if sync:
        os.fsync(handle)


def link_file(source: Path, path: Path) -> None:
    """Let ``path`` be a second name of a file (a hard link), or a copy where the file system has no such links.

    Files are replaced and never changed in place, so that replacing or deleting one name leaves the other as it is.
    """

    def fill(draft: Path) -> None:
        try:
            os.link(source, draft)
        except OSError:  # no hard links here, or another file system
            copyfile(source, draft)

    if not (path.exists() and path.samefile(source)):  # renaming a link to another name of its file does nothing
        write_file(path, fill)


def set_aside(path: Path) -> None:
    """Rename a damaged file, so that it is out of the way but not lost; a missing file is no error."""
    with suppress(FileNotFoundError):
        path.replace(path.with_name(f"{path.name}.damaged"))


@contextmanager
def draft_folder(folder: Path, what: str, *, private: bool = True) -> Iterator[Path]:
    """Yield an empty folder that becomes ``folder`` when the block ends without an error.

    A folder that was there before is exchanged with the new one in one step and then removed, so that one of the two is
    there at any moment. Where the file system cannot exchange names, there is none for a moment. Drafts of the same
    folder that killed processes left behind are removed.

    Args:
        folder: The final folder.
        what: What it is, for the error.
        private: Only the owner can open it and everything in it; otherwise the umask decides.
    """
    draft = folder.with_name(f".{folder.name}.{token_hex(4)}.partial")
    old = draft.with_name(f"{draft.name}.old")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        with _held(draft):
            draft.mkdir(mode=PRIVATE_FOLDER if private else 0o777)
            yield draft
            for each in (draft, *draft.rglob("*")) if private else ():
                each.chmod(PRIVATE_FOLDER if each.is_dir() else PRIVATE_FILE)
            if not folder.exists():
                draft.rename(folder)
            elif not _exchange(draft, folder):
                folder.rename(old)
                draft.rename(folder)
    except OSError as problem:
        if old.exists():
            old.rename(folder)
        raise RunError(f"the {what} {folder} could not be written: {problem}") from problem
    finally:
        rmtree(draft, ignore_errors=True)
        rmtree(old, ignore_errors=True)


@contextmanager
def _held(draft: Path) -> Iterator[None]:
    """Hold the lock of a draft, a file beside it; a killed process releases it and leaves the file behind."""
    lock = _lock(draft)
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks: nothing is known of drafts there
            stack.enter_context(held(lock))
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink(missing_ok=True)


def _lock(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}.lock")


def _remove_abandoned(folder: Path) -> None:
    """Remove drafts of a folder that no process holds; their processes were killed."""
    drafts = f".{escape(folder.name)}.????????.partial"
    found = {*folder.parent.glob(drafts), *(p.with_suffix("") for p in folder.parent.glob(f"{drafts}.lock"))}
    for draft in found:
        with suppress(OSError), held(_lock(draft)):
            rmtree(draft, ignore_errors=True)
            _lock(draft).unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return whether the system can do that."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):  # of systems other than Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def vacant(path: Path, what: str) -> Path:
    """Return the path if it is free and its parent folder can be written to; refuse it otherwise, before any work."""
    if path.exists():
        raise RunError(f"{path} exists already; no {what} overwrites anything: choose another folder")
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise RunError(f"the {what} {path} could not be written: {above} is no folder that can be written to")
    return path


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # Windows keeps names by itself
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def map_file(path: Path) -> memoryview:
    """Map a file into memory; what is written there (torch demands writable memory) changes no file."""
    return memoryview(np.memmap(path, np.uint8, "c"))  # type: ignore[arg-type]
