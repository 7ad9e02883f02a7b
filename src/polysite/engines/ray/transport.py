"""The server's half of the Ray engine: a transport whose sites are in the workers of a cluster.

Memories live at the workers. The server has a copy of the last one of every site in its host memory (for SCAFFOLD or a
personalised method about one model per site; nothing for FedAvg), from which a lost worker goes on. Models cross as
plain arrays; a model that several sites receive crosses once to every node.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from polysite.engines.phase_sites import Reply, Served
from polysite.engines.ray.cluster import Call, Seat, Workers
from polysite.engines.ray.worker import NOTHING, At, Packed, pack
from polysite.engines.record import Incident
from polysite.payload import Payload, SiteId
from polysite.site import Cases, CaseScore, Examined, Fit, Scores
from polysite.tree import Tree

_numbers = count(NOTHING + 1)  # of memories and of models that phases began from


class RaySites:
    """A transport to the workers of a cluster, in one phase of a study.

    Args:
        workers: The workers, shared by all phases.
        phase: Number of the phase.
        names: Sites that train.
        audience: Sites that score models.
        cases: Names of the cases of every site, by split.
    """

    can_cross = True

    def __init__(
        self,
        workers: Workers,
        phase: int,
        names: Collection[SiteId],
        audience: Collection[SiteId],
        cases: Mapping[SiteId, Mapping[str, Cases]],
    ):
        self.workers, self.phase, self._cases = workers, phase, cases
        self._names, self._audience = tuple(sorted(names)), tuple(sorted(audience))
        self._memories = {i: (NOTHING, Packed()) for i in self._names}  # with their numbers, as last settled
        self._new: dict[SiteId, tuple[int, Packed]] = {}  # memories of this round, kept if the reply is merged
        self._starts: dict[SiteId, tuple[int, int, Tree]] = {}  # number, first round and model of this phase

    @property
    def names(self) -> tuple[SiteId, ...]:
        """Sites that train."""
        return self._names

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """Sites that score models."""
        return self._audience

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Let the sites take their turns in parallel; yield the replies in the order of the sites."""
        new = {name: next(_numbers) for name in sent}
        calls = self._calls("train", round, sent, lambda name: {"new": new[name]})
        for name, (reply, memory, fits, seconds) in zip(sent, self.workers.results(calls), strict=True):
            self._new[name] = new[name], _copied(memory)
            payload = Payload(**reply)
            yield name, Reply(payload, tuple(Fit({}, *each) for each in fits), seconds, payload.nbytes)

    def settle(self, heard: Collection[SiteId]) -> None:
        """Commit the new memories of the sites in ``heard``; their next turns begin with them."""
        self._memories.update({i: m for i, m in self._new.items() if i in heard})
        self._new = {}

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Have every site score the model that it is served, in parallel."""
        calls = self._calls("score", round, sent, lambda _: {"split": split})
        scores = zip(sent, self.workers.results(calls), strict=True)
        return {name: {case: CaseScore(**s) for case, s in each.items()} for name, each in scores}

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """Return the models that every site is served; a model that was sent does not come back."""
        found = self._serve(round, sent, {i: [self._cases[i]["validation"]] for i in sent})
        return Served({i: tuple(model for model, _ in groups) for i, (groups,) in found.items()})

    def examine(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float, others: bool
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Examine the model that every site is served on its own cases; with ``others``, on the cases of all sites."""
        if others:
            yield from self._examine_others(round, sent, split, tolerance)
            return
        calls = self._calls("examine", round, sent, lambda _: {"split": split, "tolerance": tolerance})
        for name, cases in zip(sent, self.workers.results(calls), strict=True):
            yield from ((name, name, _examined(each)) for each in cases)

    def begin(self, round: int, served: Served) -> None:
        """Start a phase from the models that the sites were served; each is sent with the site's next turn."""
        shared, number = served.shared, next(_numbers)
        for name in {*self._names, *self._audience}:
            if models := served.models.get(name, shared):
                self._starts[name] = number, round, models[0]

    def memories(self) -> Mapping[SiteId, Payload]:
        """Return the memories of all sites."""
        return {i: Payload(**memory) for i, (_, memory) in self._memories.items()}

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Restore memories."""
        self._memories |= {i: (next(_numbers) if m else NOTHING, pack(m)) for i, m in memories.items()}

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Do nothing: only the current memories are kept here."""

    def incidents(self) -> Sequence[Incident]:
        """Return the workers that were lost since the last call."""
        return self.workers.incidents()

    def lift(self, params: Tree) -> Tree:
        """Return the parameters on the CPU, where the server computes."""
        return {k: v.cpu() if isinstance(v, torch.Tensor) else torch.tensor(v) for k, v in params.items()}

    def _calls(
        self, method: str, round: int, sent: Mapping[SiteId, Payload], more: Callable[[SiteId], Mapping[str, Any]]
    ) -> list[Call]:
        """Return a call per site, with its payload, and with its memory and its start where the worker lacks them."""
        store = _Store(self.workers)
        calls = []
        for name, payload in sent.items():
            leaves = tuple(id(x) for v in payload.values() for x in (v.values() if isinstance(v, Mapping) else (v,)))
            got = store.put(leaves, lambda payload=payload: pack(payload))  # type: ignore[misc]
            number = self._memories.get(name, (NOTHING, {}))[0]
            options = {"at": At(self.phase, name, round, number), **more(name)}
            calls.append(Call(name, method, partial(self._arguments, store, got, name, options), options))
        return calls

    def _arguments(
        self, store: "_Store", got: Any, name: SiteId, options: Mapping[str, Any], seat: Seat
    ) -> tuple[Any, ...]:
        """Return payload, memory and start for a worker; None for a memory or start that it has."""
        key, number = options["at"].place, options["at"].number
        known = seat.memories.setdefault(key, {NOTHING})
        memory = None if number in known else self._memories[name][1]
        seat.memories[key] = {NOTHING, number, options["new"]} if "new" in options else {*known, number}
        began, first, model = self._starts.get(name, (NOTHING, 0, {}))
        start = None
        if seat.starts.get(key, NOTHING) != began:
            start, seat.starts[key] = store.put((id(model),), lambda: (first, _arrays(model))), began
        return got, memory, start

    def _serve(
        self, round: int, sent: Mapping[SiteId, Payload], cases: Mapping[SiteId, Sequence[Cases]]
    ) -> dict[SiteId, list[list[tuple[Tree, Cases]]]]:
        """Return the models that every site uses for each of its lists of cases; equal models are one object."""
        calls = self._calls("serve", round, sent, lambda name: {"cases": cases[name]})
        found: dict[SiteId, list[list[tuple[Tree, Cases]]]] = {}
        for name, lists in zip(sent, self.workers.results(calls), strict=True):
            models = {_key(model): model for groups in lists for model, _ in groups}
            trees = {k: self.lift(sent[name][m] if isinstance(m, str) else m) for k, m in models.items()}
            found[name] = [[(trees[_key(model)], chosen) for model, chosen in groups] for groups in lists]
        return found

    def _examine_others(
        self, round: int, sent: Mapping[SiteId, Payload], split: str, tolerance: float
    ) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """Examine every site's model on the cases of all sites, one model after the other, all sites in parallel."""
        hosts = sorted({*self._names, *self._audience})
        served = self._serve(round, sent, {owner: [self._cases[host][split] for host in hosts] for owner in sent})
        for owner, lists in served.items():
            store, calls = _Store(self.workers), []
            for host, groups in zip(hosts, lists, strict=True):
                for model, cases in groups:
                    stored = store.put((id(model),), lambda model=model: _arrays(model))  # type: ignore[misc]
                    given = stored, cases, tolerance, owner == host, self.phase, host, round
                    calls.append(Call(host, "examine_model", partial(_constant, given)))
            for call, examined in zip(calls, self.workers.results(calls), strict=True):
                yield from ((owner, call.site, _examined(each)) for each in examined)


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
        (found,) = self.workers.results([Call(self.name, method, partial(_constant, (self.name, *given)))])
        return np.array(found)


class _Store:
    """Values that several calls of one exchange use, stored once in Ray."""

    def __init__(self, workers: Workers):
        self._workers, self._stored = workers, dict[tuple[int, ...], Any]()

    def put(self, key: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Return the reference to a value; it is made and stored on first use."""
        if key not in self._stored:
            self._stored[key] = self._workers.put(make())
        return self._stored[key]


def _constant(given: tuple[Any, ...], seat: Seat) -> tuple[Any, ...]:
    return given


def _key(model: str | Tree) -> str | int:
    return model if isinstance(model, str) else id(model)


def _arrays(params: Tree) -> Tree:
    return pack(Payload(model=params))["model"]  # type: ignore[no-any-return]


def _copied(packed: Packed) -> Packed:
    """Return a copy in the server's own memory; arrays that Ray returns stay in its store as long as they are used."""
    return {k: v if isinstance(v, float) else {n: np.array(x) for n, x in v.items()} for k, v in packed.items()}


def _examined(given: Mapping[str, Any]) -> Examined:
    return Examined(**{**given, "score": CaseScore(**given["score"])})
