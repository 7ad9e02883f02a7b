"""The site's half of the Ray engine: one process that holds several sites, their network and their memories.

Models arrive and leave as plain arrays. A memory has a number: the server names the one that a turn begins with, and
sends it along only if this worker does not have it, as after the loss of another worker. A repeated turn therefore
begins where the first one began.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from polysite.algorithms.base import Algorithm
from polysite.engines.site_turn import OutgoingStep, take_turn
from polysite.payload import Payload, SiteId, plain
from polysite.site import Cases, CaseScore, Examined, Site
from polysite.tree import Tree

Packed = dict[str, Any]  # fields of a payload: numbers, or arrays by name
Start = tuple[int, Tree]  # first round of a phase and the model that it starts from
Group = tuple[str | Tree, Cases]  # a model, or the field of the payload that is the model, and its cases
NOTHING = 0  # number of the empty memory


@dataclass(frozen=True, slots=True)
class At:
    """Where a call to a site belongs: phase, site and round, and the number of the memory that the site has."""

    phase: int
    name: SiteId
    round: int
    number: int

    @property
    def place(self) -> tuple[int, SiteId]:
        """Phase and site, by which a worker keeps sites and memories."""
        return self.phase, self.name


class Holding(Protocol):
    """Sites of a study that a worker process has loaded."""

    def load(self, names: Sequence[SiteId]) -> None:
        """Load the cases of more sites."""
        ...

    def phase(self, index: int) -> tuple[Algorithm[Any], Sequence[OutgoingStep]]:
        """Return the algorithm and the outgoing steps of a phase."""
        ...

    def site(self, index: int, name: SiteId) -> Site:
        """Return a site with the settings of a phase."""
        ...

    def describe(self, name: SiteId) -> Mapping[str, Any]:
        """Return facts about a site's cases as plain values."""
        ...

    def shares(self, name: SiteId, case: str) -> Any:
        """Return the shares of the labels in a case."""
        ...


def pack(payload: Payload) -> Packed:
    """Return a payload as plain arrays and numbers."""
    return {k: v if isinstance(v, float) else {n: plain(x) for n, x in v.items()} for k, v in payload.items()}


class SiteWorker:
    """Turns and scores of several sites, one at a time.

    Args:
        opener: Function that opens a recipe, as ``module:function``; it returns a ``Holding``.
        recipe: Text from which the sites are built.
        device: Device of the network.
        threads: Threads of a CPU computation; results depend on their number in the last bits.
        environ: Environment variables of the server that hold here, too.
    """

    def __init__(self, opener: str, recipe: str, device: str, threads: int, environ: Mapping[str, str]):
        from polysite import own_process

        os.environ.update(environ)
        own_process.begin()
        import torch

        torch.set_num_threads(threads)
        self._opener, self._recipe, self._device = opener, recipe, device
        self._begun: dict[tuple[int, SiteId], Site] = {}
        self._memories: dict[tuple[int, SiteId], dict[int, Packed]] = {}

    def load(self, names: Sequence[SiteId]) -> dict[SiteId, Mapping[str, Any]]:
        """Load the cases of more sites; returns facts about them."""
        self._holding.load(names)  # errors of the constructor would reach the server without their kind
        return {name: self._holding.describe(name) for name in names}

    def train(
        self,
        got: Packed,
        memory: Packed | None,
        start: Start | None,
        *,
        at: At,
        new: int,
    ) -> tuple[Packed, Packed, list[tuple[float, int, float, float]], float]:
        """Take a site's turn; returns its reply, its new memory, the effort of every fit, and seconds."""
        site, received, remembered = self._arrived(got, memory, start, at)
        algorithm, steps = self._holding.phase(at.phase)
        turn = take_turn(algorithm, received, remembered, site, steps)
        kept = self._memories.setdefault(at.place, {})
        fresh = pack(turn.memory)
        self._memories[at.place] = {**{k: m for k, m in kept.items() if k == at.number}, new: fresh}
        fits = [(f.loss, f.steps, f.lr_sum, f.reach) for f in turn.fits]
        return pack(turn.reply), fresh, fits, turn.seconds

    def score(
        self,
        got: Packed,
        memory: Packed | None,
        start: Start | None,
        *,
        at: At,
        split: str,
    ) -> dict[str, Packed]:
        """Return the scores of a site's own cases with the model that it is served."""
        site, received, remembered = self._arrived(got, memory, start, at)
        groups = self._holding.phase(at.phase)[0].serve(received, remembered, site, site.cases(split))
        return {case: _score(s) for params, cases in groups for case, s in site.score(params, cases).items()}

    def serve(
        self,
        got: Packed,
        memory: Packed | None,
        start: Start | None,
        *,
        at: At,
        cases: Sequence[Cases],
    ) -> list[list[Group]]:
        """Return the models that a site uses for each of these lists of cases."""
        site, received, remembered = self._arrived(got, memory, start, at)
        algorithm, _ = self._holding.phase(at.phase)
        sendable = _once(lambda params: _field_of(received, params) or _packed(params))
        served = (algorithm.serve(received, remembered, site, each) for each in cases)
        return [[(sendable(params), group) for params, group in each] for each in served]

    def examine(
        self,
        got: Packed,
        memory: Packed | None,
        start: Start | None,
        *,
        at: At,
        split: str,
        tolerance: float,
    ) -> list[Packed]:
        """Return all measures of a site's own cases with the model that it is served."""
        site, received, remembered = self._arrived(got, memory, start, at)
        groups = self._holding.phase(at.phase)[0].serve(received, remembered, site, site.cases(split))
        return [_examined(e, True) for params, cases in groups for e in site.examine(params, cases, tolerance)]

    def examine_model(
        self, model: Tree, cases: Cases, tolerance: float, pictures: bool, phase: int, name: SiteId, round: int
    ) -> list[Packed]:
        """Return all measures of a site's cases with a given model."""
        site = self._site(phase, name).at(round)
        return [_examined(e, pictures) for e in site.examine(site.lift(model), cases, tolerance)]

    @cached_property
    def _holding(self) -> Holding:
        module, _, name = self._opener.partition(":")
        holding: Holding = getattr(import_module(module), name)(self._recipe, self._device)
        return holding

    def radiomics(self, name: SiteId, cases: Cases, bin_width: float) -> Any:
        """Return the radiomic features of cases, one row per case."""
        return self._holding.site(0, name).radiomics(cases, bin_width)

    def shares(self, name: SiteId, case: str) -> Any:
        """Return the shares of the labels in a case."""
        return self._holding.shares(name, case)

    def _arrived(
        self,
        got: Packed,
        memory: Packed | None,
        start: Start | None,
        at: At,
    ) -> tuple[Site, Payload, Payload]:
        """Return the site in a round, the payload and the memory, both on its device."""
        if start:
            first, model = start
            site = self._holding.site(*at.place)
            self._begun[at.place] = site.begin(first, site.lift(model))
        known = self._memories.setdefault(at.place, {})
        if memory is not None:
            known[at.number] = memory
        site = self._site(*at.place).at(at.round)
        remembered = Payload() if at.number == NOTHING else Payload(**known[at.number])
        return site, Payload(**got).each(site.lift), remembered.each(site.lift)

    def _site(self, phase: int, name: SiteId) -> Site:
        if (phase, name) not in self._begun:
            self._begun[phase, name] = self._holding.site(phase, name)
        return self._begun[phase, name]


def _packed(params: Tree) -> Tree:
    return {name: plain(x) for name, x in params.items()}


def _once(f: Callable[[Tree], str | Tree]) -> Callable[[Tree], str | Tree]:
    """Return a function that makes one result of trees with the same arrays, so that it is sent once."""
    made: dict[tuple[int, ...], tuple[Tree, str | Tree]] = {}  # with the tree, so that the identities stay its own

    def first(params: Tree) -> str | Tree:
        key = tuple(id(x) for x in params.values())
        if key not in made:
            made[key] = params, f(params)
        return made[key][1]

    return first


def _field_of(got: Payload, params: Tree) -> str:
    """Return the field of a payload that holds exactly these arrays, or an empty text."""
    for field, value in got.items():
        same = not isinstance(value, float) and value.keys() == params.keys()
        if same and all(value[k] is params[k] for k in params):
            return field
    return ""


def _score(score: CaseScore) -> Packed:
    return {
        "labels": dict(score.labels),
        "loss": score.loss,
        "predicted": score.predicted,
        "true": score.true,
        "counts": dict(score.counts),
    }


def _examined(e: Examined, picture: bool) -> Packed:
    return {
        "case": e.case,
        "score": _score(e.score),
        "measures": {label: dict(values) for label, values in e.measures.items()},
        "prediction": plain(e.prediction) if picture and e.prediction is not None else None,
        "unit": e.unit,
    }
