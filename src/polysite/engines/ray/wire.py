"""The wire to the workers of a Ray cluster.

The server has a copy of the memory of every site (for SCAFFOLD or a personalised method about one model per site;
nothing for FedAvg), from which a lost worker goes on: its sites connect anew, begin the phases again, and are asked
again. A memory, and a model that several sites receive, crosses once to every node.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from polysite.engines.messages import Answer, Begin, Join, MaskTaken, Models, Request, Response, Trained
from polysite.engines.ray.cluster import LostWorker, Seat, Workers
from polysite.engines.ray.worker import NOTHING, Packed, pack, packed
from polysite.engines.site_turn import Turn
from polysite.payload import Payload, SiteId
from polysite.site import Cases
from polysite.tree import Tree

_numbers = count(NOTHING + 1)  # of memories


class RayWire:
    """Asks the workers of a cluster, all at once, and yields their responses in the order of the requests.

    Args:
        workers: The workers.
    """

    def __init__(self, workers: Workers):
        self.workers = workers

    def online(self) -> Mapping[SiteId, str]:
        """Return all sites, each with the number of its worker."""
        return {site: str(seat.number) for seat in self.workers.seats for site in seat.place.sites}

    def ask(self, requests: Mapping[SiteId, Request], wait: float) -> Iterator[Answer]:
        """Yield the responses in order; the sites of a lost worker answer nothing and connect anew."""
        store = _Store(self.workers)
        sent = {site: self._sent(site, request, store) for site, request in requests.items()}
        for site, request in requests.items():
            seat, job, new, memory = sent.pop(site)
            try:
                found = self.workers.result(site, seat, job)
            except LostWorker:
                continue
            finally:
                del job
            yield site, request, self._received(site, seat, request, found, new, memory)
            del found

    def _sent(self, site: SiteId, request: Request, store: "_Store") -> tuple[Seat, Any, int, Payload | None]:
        """Send a request to the worker of a site, without what is there already."""
        assert not isinstance(request, Join)  # sites of a simulation are known
        seat, new = self.workers.seat(site), next(_numbers)
        known = seat.memories.setdefault((request.phase, site), [])
        memory = request.memory or None
        at = next((number for number, there in known if there is memory), None) if memory else NOTHING
        carried = None
        if at is None and memory is not None:
            at, carried = next(_numbers), pack(memory)
            known.append((at, memory))
        fields = [v.values() if isinstance(v, Mapping) else (v,) for v in request.payload.values()]
        got = store.put(tuple(id(x) for field in fields for x in field), lambda: pack(request.payload))
        start, bare = None, replace(request, payload=Payload(), memory=None)
        if isinstance(request, Begin) and request.start is not None:
            model, bare = request.start, replace(request, payload=Payload(), start=None)
            start = store.put((id(model),), lambda: packed(model))
        job = seat.actor.answer.remote(site, bare, got, carried, start, at, new)
        return seat, job, new, memory if at == NOTHING else next(there for number, there in known if number == at)

    def _received(
        self, site: SiteId, seat: Seat, request: Any, found: Any, new: int, memory: Payload | None
    ) -> Response:
        """Return a response as the server uses it; note the memories that the worker has."""
        if isinstance(found, Models):
            models = (request.payload[m] if isinstance(m, str) else m for m in found.models)
            return Models(tuple(models), found.groups)
        if isinstance(found, tuple) and found[0] == "mask":
            return MaskTaken(Payload(**found[1]))
        if isinstance(found, tuple):
            _, reply, fits, seconds, releases, fresh = found
            payload, made = Payload(**reply), Payload(**_copied(fresh))
            key = request.phase, site
            seat.memories[key] = [*((n, m) for n, m in seat.memories[key] if m is memory), (new, made)]
            return Trained(payload, fits, seconds, releases, Turn(payload, made, fits, seconds, {}))
        response: Response = found
        return response


def lift(params: Tree) -> Tree:
    """Return the parameters on the CPU, where the server computes."""
    return {k: v.cpu() if isinstance(v, torch.Tensor) else torch.tensor(v) for k, v in params.items()}


class RemoteSite:
    """The cases of a site in a worker, as the writer of an evaluation reads them.

    Args:
        name: Name of the site.
        workers: The workers.
        cases: Names of its cases, by split.
        labels: Labels, or classes.
    """

    def __init__(self, name: SiteId, workers: Workers, cases: Mapping[str, Cases], labels: Sequence[str]):
        self.name, self.workers, self._cases, self.labels = name, workers, cases, tuple(labels)

    @property
    def grids(self) -> Mapping[str, tuple[tuple[float, ...], str]]:
        """Voxel size and unit of every case."""
        grids: Mapping[str, tuple[tuple[float, ...], str]] = self.workers.facts[self.name]["grids"]
        return grids

    @property
    def size(self) -> int:
        """Number of training cases."""
        return len(self._cases["train"])

    def cases(self, split: str) -> Cases:
        """Return the names of the cases of a split."""
        return self._cases[split]

    def radiomics(self, cases: Collection[str], bin_width: float) -> np.ndarray:
        """Return the radiomic features of these cases, one row per case."""
        return self._ask("radiomics", tuple(cases), bin_width)

    def shares(self, case: str) -> np.ndarray:
        """Return the share of the head that every label occupies; in a classification, the one-hot class."""
        return self._ask("shares", case)

    def _ask(self, method: str, *given: Any) -> np.ndarray:
        return np.array(self.workers.ask(self.name, method, *given))


class _Store:
    """Values that several calls of one exchange use, stored once in Ray."""

    def __init__(self, workers: Workers):
        self._workers, self._stored = workers, dict[tuple[int, ...], Any]()

    def put(self, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Return the reference to a value; it is made and stored on first use."""
        if key not in self._stored:
            self._stored[key] = self._workers.put(make())
        return self._stored[key]


def _copied(given: Packed) -> Packed:
    """Return a copy in the server's own memory; arrays that Ray returns stay in its store as long as they are used."""
    return {k: v if isinstance(v, float) else {n: np.array(x) for n, x in v.items()} for k, v in given.items()}
