"""Memory for large messages that is used again.

The system fills every new page with zeros, which takes longer than to receive, hash or copy what goes there; in a
virtual machine several times as long. So memory that is not used any more is kept for the next message. The system may
take it back whenever it is short of memory (MADV_FREE).

>>> memory = room(1 << 22)
>>> len(memory), memory.readonly
(4194304, False)
"""

import mmap
import weakref
from contextlib import suppress

import numpy as np

Buffer = bytes | memoryview

SMALL = 1 << 20  # bytes; less than that is not worth keeping
PAGE = 2 << 20  # bytes of a large page, to whose multiple sizes are rounded up
MAX_KEPT = 2 << 30  # bytes of all memory that is kept
WASTE = 1.25  # of memory that is used again: its size, relative to the size that is needed

_kept: list[mmap.mmap] = []


class _Lease(np.ndarray):
    """An array in memory that is kept after the array and all views of it are gone."""


def room(size: int) -> memoryview:
    """Return writable memory of ``size`` bytes with undefined content."""
    if size < SMALL:
        return memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
    memory = _used_again(size) or _new(size)
    lease = _Lease(size, np.uint8, memory)  # views keep it alive: its base is no array, to which NumPy would shorten
    weakref.finalize(lease, _keep, memory).atexit = False
    # the garbage collector cannot see through a plain array, so it never takes the lease for garbage: otherwise the
    # memory would be given away before the finalizers of other garbage have run, which may still use it
    return memoryview(lease.view(np.ndarray))  # type: ignore[arg-type]


def _new(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, -(-size // PAGE) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory, "MADV_HUGEPAGE")
    return memory


def _used_again(size: int) -> mmap.mmap | None:
    for memory in list(_kept):  # another thread, or the garbage collector, may change it meanwhile
        if size <= len(memory) <= max(WASTE * size, size + PAGE):
            try:
                _kept.remove(memory)
            except ValueError:
                continue
            return memory
    return None


def _keep(memory: mmap.mmap) -> None:
    if len(memory) + sum(map(len, list(_kept))) <= MAX_KEPT:
        _advise(memory, "MADV_FREE")
        _kept.append(memory)


def _advise(memory: mmap.mmap, name: str) -> None:
    option = getattr(mmap, name, None)  # Linux has both, other systems have one or none
    if option is not None:
        with suppress(OSError):  # a kernel without it
            memory.madvise(option)
