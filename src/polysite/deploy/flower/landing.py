"""Memory for the answer of a site, whose chunks are received in the place where they belong.

A place is handed out once, to one request. If that request fails, its chunk is received elsewhere and the answer is
joined by copying; so no request can write to bytes that were verified or are in use.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from polysite.buffers import room
from polysite.deploy.flower.messages import Chunk
from polysite.deploy.flower.objects import MAX_SMALL

from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore  # isort: skip

Places = Mapping[str, Sequence[slice]]  # where each chunk of an array belongs


@dataclass(frozen=True, slots=True)
class Place:
    """Where the data of a chunk belong: in all ``slots``, of equal length. They are received in the first one."""

    name: str
    landing: "Landing"
    slots: tuple[memoryview, ...]

    def settle(self) -> Chunk | None:
        """Return the chunk that was received here, which then counts as arrived; None if it is not the one of this
        name."""
        chunk = Chunk(self.slots[0])
        if chunk.object_id != self.name:
            return None
        for other in self.slots[1:]:
            other[:] = self.slots[0]
        self.landing.missing.discard(self.name)
        return chunk


class Landing:
    """Memory for the one array of an answer.

    Args:
        reply: Name of the answer.
        array: Name of the array.
        size: Bytes of the array.
        places: Where each chunk belongs in the array.
    """

    def __init__(self, reply: str, array: str, size: int, places: Places):
        self.reply, self.array, self.whole = reply, array, room(size)
        self.names = tuple(places)
        self.missing = set(places)  # chunks that have not arrived here
        self._free = {name: tuple(self.whole[place] for place in each) for name, each in places.items()}

    def take(self, name: str, size: int) -> Place | None:
        """Hand out the place of a chunk, for a request of ``size`` bytes; None if there is none that fits."""
        slots = self._free.get(name)
        if slots is None or not 0 < size - len(slots[0]) <= MAX_SMALL:
            return None
        slots = self._free.pop(name, None)  # handed out once, whatever comes
        return None if slots is None else Place(name, self, slots)

    def leave(self, store: InMemoryObjectStore) -> None:
        """Copy chunks in the store that another message shares: this memory is left to the owner of the answer."""
        with store.lock_store:
            for name in self.names:
                if (entry := store.store.get(name)) is None:
                    continue
                chunk = cast(object, entry.content)
                if isinstance(chunk, Chunk) and chunk.data.obj is self.whole.obj:
                    entry.content = cast(bytes, Chunk(memoryview(bytes(chunk.data))))


class Landings:
    """The memory of each site's answer: one array per site at a time."""

    def __init__(self, store: InMemoryObjectStore):
        self._store, self._lock = store, threading.Lock()
        self._of: dict[str, Landing] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, site: str) -> Landing:
        return self._of[site]

    def reserve(self, site: str, reply: str, array: str, size: int, places: Places) -> bool:
        """Reserve memory for an array of an answer; return False if the site has one, or if there is no memory."""
        with self._lock, suppress(OSError, MemoryError):
            if site not in self._of:
                self._of[site] = Landing(reply, array, size, places)
                return True
        return False

    def take(self, site: str, name: str, size: int) -> Place | None:
        """Hand out the place of a chunk, for a request of ``size`` bytes; None if there is none that fits."""
        landing = self._of.get(site)
        return None if landing is None else landing.take(name, size)

    def joined(self, site: str, reply: str) -> dict[str, memoryview]:
        """Return the array of an answer by its name, if all its chunks were received in place."""
        landing = self._of.get(site)
        if landing is None or landing.reply != reply or landing.missing:
            return {}
        return {landing.array: landing.whole}

    def drop(self, reply: str) -> None:
        """Forget the memory of an answer that was deleted from the store."""
        with self._lock:
            gone = [self._of.pop(site) for site, each in list(self._of.items()) if each.reply == reply]
        for landing in gone:
            landing.leave(self._store)

    def rest(self, site: str) -> None:
        """Forget the memory of a site from which no answer is expected."""
        with self._lock:
            self._of.pop(site, None)
