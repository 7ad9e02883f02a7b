"""A run without training: the algorithm as it is, with sites that answer at once. It tells what every round will move.

Every array of the model is stood in for by a single number of its type, so that a rehearsal of a large model on many
sites takes no memory; what crosses is counted at the size of the arrays themselves.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from polysite.costs.model import Load
from polysite.payload import Payload, SiteId
from polysite.site import Budget, Cases, CaseScore, Fit, Objective, Scores, Sketch
from polysite.tree import Tree


class Exchange(Protocol):
    """Of an algorithm, what decides who does what."""

    def init(self, params: Tree, sites: Sequence[SiteId]) -> Any: ...

    def send(self, state: Any, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]: ...

    def local(self, got: Payload, memory: Payload, site: Any) -> tuple[Payload, Payload]: ...

    def merge(self, state: Any, replies: Mapping[SiteId, Payload]) -> Any: ...


@dataclass(frozen=True)
class Effort:
    """How long sites train in a round, where the algorithm does not say otherwise: the keys of [train]."""

    batch: int = 4
    epochs: int = 1
    patches: int = 1
    steps: int | None = None

    def of(self, cases: int, epochs: int | None, steps: int | None) -> tuple[int, int]:
        """(Steps, patches) of one training; what is asked for comes before what is set."""
        if epochs is None and steps is None:
            epochs, steps = self.epochs, self.steps
        if steps is not None:
            return steps, steps * self.batch
        patches, times = cases * self.patches, epochs or 0
        return times * math.ceil(patches / self.batch), times * patches


@dataclass
class Understudy:
    """Stands in for a site: it says that it trained."""

    size: int
    start: Tree
    effort: Effort
    modalities: int = 1
    fits: list[Fit] = field(default_factory=list)
    patches: int = 0  # trained on so far

    @property
    def fresh(self) -> Tree:
        return self.start

    def cases(self, split: str) -> Cases:
        return tuple(str(i) for i in range(self.size)) if split == "train" else ()

    def amount(self, channel: int) -> float:
        return float(self.size)

    def sketch(self, kind: Sketch, cases: Collection[str]) -> np.ndarray:
        return np.array([float(len(cases))])

    def radiomics(self, cases: Collection[str], bin_width: float) -> np.ndarray:
        """Two kinds of cases, as good as any."""
        rng = np.random.default_rng(self.size)
        return rng.normal(size=(len(cases), 93 * self.modalities)) + 5 * (np.arange(len(cases)) % 2)[:, None]

    def lift(self, params: Tree) -> Tree:
        return params

    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        return dict.fromkeys(self.cases("train"), 1.0)

    def score(self, params: Tree, cases: Collection[str]) -> Scores:
        return {case: CaseScore({"label": 0.5}, loss=1.0) for case in cases}

    def fit(
        self,
        params: Tree,
        objective: Objective = Objective(),
        budget: Budget = Budget(),
        *,
        only: Collection[str] = ("*",),
        keep: Collection[str] | None = None,
    ) -> Fit:
        count, patches = self.effort.of(self.size if keep is None else len(keep), budget.epochs, budget.steps)
        own = 1 / (1 + self.size)  # so that sites differ, and nothing grows however long it goes on
        moved, twin, second = (
            {k: (v * 0.5 + own).astype(v.dtype) for k, v in model.items()}
            for model in (params, objective.mix.twin if objective.mix else {}, objective.personal or {})
        )
        self.fits.append(Fit(moved, 1.0, count, 1.0, 1.0, twin, second))
        self.patches += patches
        return self.fits[-1]


def rehearse(
    algorithm: Exchange,
    params: Tree,
    train: Mapping[SiteId, int],
    effort: Effort = Effort(),
    *,
    rounds: int,
    cohort: Callable[[int], Collection[SiteId]] | None = None,
    validation: Mapping[SiteId, int] | None = None,
    validate_every: int = 1,
    modalities: int = 1,
) -> Iterator[dict[SiteId, Load]]:
    """What every site will do, round by round, given the number of its training cases.

    Of the parameters only names, shapes and types count. ``cohort`` says who takes part in a round; without it all do
    that have training cases. ``validation``: how many cases judge, every so many rounds. Nobody drops out,
    and where an algorithm decides by what training finds, the rehearsal may decide otherwise: CFL splits, CFFT fits
    other clusters, in as many exchanges as these need.
    """
    elements = {k: math.prod(v.shape) for k, v in params.items()}
    start = {k: np.ones((1,) * len(v.shape), str(v.dtype).rpartition(".")[2]) for k, v in params.items()}
    names = sorted(i for i, n in train.items() if n)
    state, memory = algorithm.init(start, names), {i: Payload() for i in names}
    for index in range(rounds):
        asked = names if cohort is None else cohort(index)
        sent = algorithm.send(state, [i for i in names if i in asked])
        replies, loads = {}, {}
        for i, got in sent.items():
            site = Understudy(train[i], start, effort, modalities)
            replies[i], memory[i] = algorithm.local(got, memory[i], site)
            steps = sum(f.steps for f in site.fits)
            loads[i] = Load(steps, 0, _nbytes(got, elements), _nbytes(replies[i], elements), site.patches)
        state = algorithm.merge(state, replies) if replies else state
        ended = hasattr(algorithm, "is_finished") and algorithm.is_finished(state)
        if (index + 1) % validate_every == 0 or index + 1 == rounds or ended:
            loads.update({i: replace(loads.get(i, Load()), cases=n) for i, n in (validation or {}).items()})
        yield loads
        if ended:
            return


def traffic(algorithm: Exchange, params: Tree, sites: Sequence[SiteId]) -> dict[SiteId, tuple[int, int]]:
    """Bytes that go to every site and come back from it, in a round in which all have been heard before."""
    *_, loads = rehearse(algorithm, params, dict.fromkeys(sites, 1), rounds=2)
    return {i: (load.down, load.up) for i, load in loads.items()}


def _nbytes(payload: Payload, elements: Mapping[str, int]) -> int:
    """As ``Payload.nbytes``, had the arrays their real size; one that is no part of the model has it already."""
    return sum(
        Payload(number=value).nbytes
        if isinstance(value, float)
        else sum(int(x.nbytes) * elements.get(k, 1) for k, x in value.items())
        for value in payload.values()
    )
