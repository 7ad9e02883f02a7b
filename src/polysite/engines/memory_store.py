"""Where a simulation keeps the memories of its sites between their turns: on the device, in main memory, or on disk.

A memory stays on the device on which it was made while all memories there take at most half of the device memory that
was free when the first one came. Others go to main memory, again up to half of what was free, and the rest to files in
a temporary folder (``TMPDIR`` chooses where), which are memory-mapped when they are read. So the personal models of
hundreds of sites do not fill the GPU. Moving changes no bit.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Literal

from polysite import machine
from polysite.payload import STORED, Payload, SiteId, decode, encode
from polysite.storage import map_file, write_file

Where = Literal["device", "host", "disk"]
SHARE = 0.5  # of the free memory of the device, and of the machine, that memories may take


class Stored:
    """A payload that is kept somewhere; its place is free again when nothing refers to it."""

    __slots__ = ("__weakref__", "_kept", "where")

    def __init__(self, where: Where, kept: Payload | Path):
        self.where, self._kept = where, kept

    def get(self) -> Payload:
        """Return the payload; arrays on disk are memory-mapped."""
        return decode(map_file(self._kept), STORED) if isinstance(self._kept, Path) else self._kept


class Memories(Mapping[SiteId, Payload]):
    """Memories of sites as they were at one time, read when they are asked for."""

    def __init__(self, stored: Mapping[SiteId, Stored]):
        self._stored = dict(stored)

    def __getitem__(self, site: SiteId) -> Payload:
        return self._stored[site].get()

    def __iter__(self) -> Iterator[SiteId]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class MemoryStore:
    """Keeps payloads where they fit.

    Args:
        device: Bytes that payloads may take on the device; None for half of what is free when the first one comes.
        host: The same for main memory.
    """

    def __init__(self, device: int | None = None, host: int | None = None):
        self._limits: dict[Where, int | None] = {"device": device, "host": host}
        self.used: dict[Where, int] = {"device": 0, "host": 0, "disk": 0}
        self.spilled = False  # whether a payload has left the place where it was made
        self._folder: Path | None = None
        self._count = 0

    def put(self, payload: Payload) -> Stored:
        """Keep a payload in the first place that has room."""
        made: Where = "device" if _device(payload) is not None else "host"
        size = payload.nbytes
        places: list[tuple[Where, Callable[[], int]]] = [("host", lambda: machine.memory().free)]
        if made == "device":
            places.insert(0, ("device", partial(_free_on, payload)))
        for where, free in places:
            limit = self._limits[where]
            if limit is None:
                limit = self._limits[where] = int(SHARE * free())
            if self.used[where] + size <= limit or not size:
                kept = payload if where == made else payload.each(to_host)
                return self._store(where, kept, size, made)
        return self._store("disk", self._write(payload), size, made)

    def _store(self, where: Where, kept: Payload | Path, size: int, made: Where) -> Stored:
        stored = Stored(where, kept)
        self.used[where] += size
        self.spilled = self.spilled or where != made
        weakref.finalize(stored, self._release, where, size, kept if isinstance(kept, Path) else None)
        return stored

    def _release(self, where: Where, size: int, file: Path | None) -> None:
        self.used[where] -= size
        if file is not None:
            file.unlink(missing_ok=True)

    def _write(self, payload: Payload) -> Path:
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="polysite-memories-"))
            weakref.finalize(self, rmtree, self._folder, ignore_errors=True)
        self._count += 1
        path, content = self._folder / f"{self._count}.safetensors", encode(payload)
        write_file(path, lambda draft: draft.write_bytes(content), sync=False)  # a restart reads checkpoints instead
        return path


def _device(payload: Payload) -> Any:
    """Return the GPU that holds arrays of a payload; None if all are in main memory."""
    leaves = (x for tree in payload.values() if not isinstance(tree, float) for x in tree.values())
    return next((x.device for x in leaves if getattr(x, "is_cuda", False)), None)


def _free_on(payload: Payload) -> int:
    """Return the free bytes of the GPU that holds a payload, with those that torch has reserved and does not use."""
    import torch

    device = _device(payload)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def to_host(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with all arrays in main memory."""
    return {k: x.detach().cpu() if getattr(x, "is_cuda", False) else x for k, x in tree.items()}
