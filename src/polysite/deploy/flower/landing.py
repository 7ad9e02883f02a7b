"""Memory for the answer of a site, whose chunks are received in the place where they belong.

A place is handed out once, to one request. If that request fails, its chunk is received elsewhere and the answer is
joined by copying; so no request can write to bytes that were verified or are in use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polysite.buffers import room
from polysite.deploy.flower.messages import Chunk
from polysite.deploy.flower.objects import MAX_SMALL


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

    def __init__(self, reply: str, array: str, size: int, places: Mapping[str, Sequence[slice]]):
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

    def holds(self, chunk: object) -> bool:
        """Return whether an object of a message is a chunk that lies in this memory."""
        return isinstance(chunk, Chunk) and chunk.data.obj is self.whole.obj
