"""Memory for the answer of a site, whose chunks are received in the place where they belong.

A place is handed out once, to one request, or to one ``Arrival`` that several requests fill one after the other. If it
fails, its chunk is received elsewhere and the answer is joined by copying; so no request can write to bytes that were
verified or are in use.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from polysite.buffers import room
from polysite.deploy.flower.messages import Chunk
from polysite.deploy.flower.objects import MAX_SMALL

from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore  # isort: skip

if TYPE_CHECKING:
    from polysite.deploy.flower.port import Body

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


@dataclass(slots=True)
class Arrival:
    """A chunk of which a part has arrived in its place; the rest comes with later requests, one at a time."""

    place: Place
    arrived: int = 0  # bytes of requests that are over
    _body: "Body | None" = None  # of the request that is being received
    _front: int = 0  # bytes of that body that come before the data

    def __len__(self) -> int:
        return len(self.place.slots[0])

    @property
    def rest(self) -> memoryview:
        """Where the next bytes belong."""
        return self.place.slots[0][self.arrived :]

    def begin(self, body: "Body", front: int) -> None:
        """Count the bytes of a request, after ``front`` others."""
        self._body, self._front = body, front

    def pause(self) -> None:
        """End the request that is being received, if there is one: it cannot write here any more."""
        if self._body is not None:
            self.arrived += max(0, self._body.size - self._front)
            self._body.abandon()
            self._body = None

    def is_filled_by(self, body: "Body") -> bool:
        """Whether a request is the one that is being received."""
        return self._body is body


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
        self.arrivals: dict[str, Arrival] = {}  # chunks of which a part has arrived

    def take(self, name: str, size: int) -> Place | None:
        """Hand out the place of a chunk, for a request of ``size`` bytes; None if there is none that fits."""
        slots = self._free.get(name)
        if slots is None or not 0 < size - len(slots[0]) <= MAX_SMALL:
            return None
        slots = self._free.pop(name, None)  # handed out once, whatever comes
        return None if slots is None else Place(name, self, slots)

    def arrival(self, name: str, size: int) -> Arrival | None:
        """Return what has arrived of a chunk of ``size`` bytes, perhaps nothing; None if it has no place here."""
        if name not in self.arrivals and (slots := self._free.get(name)) and len(slots[0]) == size:
            self.arrivals[name] = Arrival(Place(name, self, self._free.pop(name)))
        found = self.arrivals.get(name)
        return found if found is not None and len(found) == size else None

    def complete(self, arrival: Arrival) -> bool:
        """End an arrival of which all bytes are there; return False if that was done before."""
        return self.arrivals.pop(arrival.place.name, None) is arrival

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

    def arrival(self, site: str, name: str, size: int) -> Arrival | None:
        """Return what has arrived of a chunk of ``size`` bytes, perhaps nothing; None if it has no place here."""
        landing = self._of.get(site)
        return None if landing is None else landing.arrival(name, size)

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
