"""Atomic writes: a crash leaves a file or folder as it was before, or complete, never half-written.

What is made of patients' data is private: folders have mode 0700 and files 0600, whatever the umask is. A file in a
private folder is private, too.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from shutil import copyfile, rmtree
from typing import Any

from polysite.errors import RunError
from polysite.locks import held

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
        draft.unlink(missing_ok=True)
        raise RunError(f"{path} could not be written: {problem}; what was there before is untouched") from problem
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_private(path: Path, content: bytes | str, *, sync: bool = True) -> None:
    """Write a file that only its owner can read, at no moment with wider permissions."""
    data = content.encode() if isinstance(content, str) else content

    def fill(draft: Path) -> None:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
            file.write(data)

    write_file(path, fill, sync=sync)


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
