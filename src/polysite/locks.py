"""Locks between processes, on every operating system: the system releases them when their process ends or is killed."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

PRIVATE = 0o600


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Hold the lock of an empty file, which is made if it is not there; BlockingIOError if another process has it."""
    lock = FileLock(file, mode=PRIVATE)
    try:
        lock.acquire(timeout=0)
    except Timeout as problem:
        raise BlockingIOError(errno.EAGAIN, "another process holds it", str(file)) from problem
    except NotImplementedError as problem:  # a file system without locks
        raise OSError(errno.ENOLCK, "no locks are possible here", str(file)) from problem
    try:
        yield
    finally:
        lock.release()
