"""The wire to the workers of a Ray cluster.

The server has a copy of the memory of every site (for SCAFFOLD or a personalised method about one model per site;
nothing for FedAvg), from which a lost worker goes on: its sites connect anew, begin the phases again, and are asked
again. A payload that several sites receive crosses once to every node.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from polysite.engines.messages import Answer, Begin, Join, Models, Request, Response, Trained
from polysite.engines.ray.cluster import LostWorker, Seat, Workers
from polysite.engines.ray.worker import packed
from polysite.payload import Payload, SiteId, likeness
from polysite.site import Cases
from polysite.tree import Tree


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
        stored: dict[Any, Any] = {}
        jobs = {site: self._sent(site, request, stored) for site, request in requests.items()}
        for site, request in requests.items():
            seat, job = jobs.pop(site)
            try:
                found = self.workers.result(site, seat, job)
            except LostWorker:
                continue
            finally:
                del job
            yield site, request, _received(request, found)
            del found

    def _sent(self, site: SiteId, request: Request, stored: dict[Any, Any]) -> tuple[Seat, Any]:
        """Send a request to the worker of a site; what several sites receive is stored in Ray once."""
        assert not isinstance(request, Join)  # sites of a simulation are known
        seat = self.workers.seat(site)
        start = request.start if isinstance(request, Begin) else None
        got, model = likeness(request.payload), likeness(Payload(start=start)) if start else None
        if got not in stored:
            stored[got] = self.workers.put(request.payload)
        if start and model not in stored:
            stored[model] = self.workers.put(packed(start))
        bare = replace(request, payload=Payload(), memory=None)
        if isinstance(bare, Begin):
            bare = replace(bare, start=None)
        return seat, seat.actor.answer.remote(site, bare, stored[got], request.memory, stored.get(model))


def _received(request: Any, found: Response) -> Response:
    """Return a response as the server uses it: a memory in its own main memory, as arrays that Ray returns stay in its
    store as long as they are used."""
    if isinstance(found, Models):
        return Models(tuple(request.payload[m] if isinstance(m, str) else m for m in found.models), found.groups)
    if isinstance(found, Trained) and found.turn:
        memory = found.turn.memory.each(lambda tree: {name: np.array(x) for name, x in tree.items()})
        return replace(found, turn=replace(found.turn, memory=memory))
    return found


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
