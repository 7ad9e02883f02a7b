"""Rehearsal: run an algorithm with stand-ins for the sites, to predict the work and traffic of every round.

A single number of its type represents each array of the model, so that rehearsing a large model at many sites takes no
memory. Bytes are counted at the real size of the arrays.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from polysite.algorithms.base import Algorithm, is_finished, serving_payloads
from polysite.costs.model import Load
from polysite.payload import LastPayload, Payload, SiteId
from polysite.site import Budget, Cases, CaseScore, Fit, Objective, Scores, Sketch
from polysite.tree import Tree

DIGEST = 32  # bytes by which a site says which model it begins from


@dataclass(frozen=True)
class Effort:
    """Settings of ``[train]`` that decide how long a site trains in a round."""

    batch: int = 4
    epochs: int = 1
    patches: int = 1
    steps: int | None = None

    def of(self, cases: int, epochs: int | None, steps: int | None) -> tuple[int, int]:
        """Return (steps, patches) of one fit. The arguments take precedence over the settings."""
        if epochs is None and steps is None:
            epochs, steps = self.epochs, self.steps
        if steps is not None:
            return steps, steps * self.batch
        patches, times = cases * self.patches, epochs or 0
        return times * math.ceil(patches / self.batch), times * patches


@dataclass
class Understudy:
    """A stand-in for a site: it reports the effort of training without training."""

    size: int
    start: Tree
    effort: Effort
    modalities: int = 1
    fits: list[Fit] = field(default_factory=list)
    patches: int = 0  # trained on so far

    @property
    def lr(self) -> float:
        """A learning rate of 0.1, as a stand-in; it has no effect on effort or traffic."""
        return 0.1

    @property
    def fresh(self) -> Tree:
        """The initial parameters; a real site would return different ones."""
        return self.start

    def cases(self, split: str) -> Cases:
        """Return invented names of the training cases; the other splits are empty."""
        return tuple(str(i) for i in range(self.size)) if split == "train" else ()

    def amount(self, channel: int) -> float:
        """Return the number of cases, as if all were of this class."""
        return float(self.size)

    def sketch(self, kind: Sketch, cases: Collection[str]) -> np.ndarray:
        """Return the number of cases, as a stand-in for the summary that a real site computes."""
        return np.array([float(len(cases))])

    def radiomics(self, cases: Collection[str], bin_width: float) -> np.ndarray:
        """Return random features that form two clusters of cases."""
        rng = np.random.default_rng(self.size)
        return rng.normal(size=(len(cases), 93 * self.modalities)) + 5 * (np.arange(len(cases)) % 2)[:, None]

    def lift(self, params: Tree) -> Tree:
        """Return the parameters unchanged."""
        return params

    def losses(self, params: Tree, *, augmented: bool = False) -> Mapping[str, float]:
        """Return a loss of 1 for every training case."""
        return dict.fromkeys(self.cases("train"), 1.0)

    def score(self, params: Tree, cases: Collection[str]) -> Scores:
        """Return a score of 0.5 for every case."""
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
        """Return parameters that differ between sites, with the steps that real training would take."""
        count, patches = self.effort.of(self.size if keep is None else len(keep), budget.epochs, budget.steps)
        own = 1 / (1 + self.size)  # sites differ, and values stay bounded in any number of rounds
        moved, twin, second = (
            {k: np.where(v > 0, v - own, v + own).astype(v.dtype) for k, v in model.items()}
            for model in (params, objective.mix.twin if objective.mix else {}, objective.personal or {})
        )
        self.fits.append(Fit(moved, 1.0, count, 1.0, 1.0, twin, second))
        self.patches += patches
        return self.fits[-1]


def rehearse(
    algorithm: Algorithm[Any],
    params: Tree,
    train: Mapping[SiteId, int],
    effort: Effort = Effort(),
    *,
    rounds: int,
    most: int | None = None,
    cohort: Callable[[int], Collection[SiteId]] | None = None,
    validation: Mapping[SiteId, int] | None = None,
    validate_every: int = 1,
    numbers: int = 0,
    handed: Mapping[SiteId, int] = MappingProxyType({}),
    final: bool = False,
    modalities: int = 1,
    look: Callable[[Any, Mapping[SiteId, Payload]], None] | None = None,
) -> Iterator[dict[SiteId, Load]]:
    """Yield the load of every site, round by round.

    No site drops out. Algorithms that decide by the results of training may decide otherwise here: CFL may split
    earlier or later, CFFT may fit other clusters in another number of exchanges.

    Args:
        algorithm: The algorithm to rehearse.
        params: A model; only names, shapes and types matter.
        train: Number of training cases of every site.
        effort: Settings of local training.
        rounds: Number of rounds.
        most: Rounds to rehearse; the others are assumed to be like the last of these. None rehearses all.
        cohort: Returns the sites that take part in a round; None for all sites with training cases.
        validation: Number of validation cases of every site.
        validate_every: Rounds between validations.
        numbers: Numbers in the score of a case.
        handed: Bytes by which every site gets the model that the first round begins from, in a later phase of a study.
        final: Whether the best model is evaluated after the last round.
        modalities: Modalities of an image.
        look: Called after every round with the server's state and the memories of the sites.
    """
    elements = {k: math.prod(v.shape) for k, v in params.items()}
    start = {k: np.ones((1,) * len(v.shape), str(v.dtype).rpartition(".")[2]) for k, v in params.items()}
    names = sorted(i for i, n in train.items() if n)
    state, memory = algorithm.init(start, names), {i: Payload() for i in names}
    validation = validation or {}
    kept = {i: LastPayload() for i in {*names, *validation}}
    for i in handed:
        kept[i].replace(Payload(model=start))
    trained: dict[SiteId, Load] = {}
    scored: dict[SiteId, Load] = {}
    served: Mapping[SiteId, Payload] = {}

    def crossing(site: SiteId, payload: Payload) -> int:
        return _nbytes(payload, elements) if kept[site].replace(payload) else 0

    for index in range(rounds):
        rehearsed = most is None or index < most
        if rehearsed:
            asked = names if cohort is None else cohort(index)
            sent = algorithm.send(state, [i for i in names if i in asked])
            replies, trained = {}, {}
            for i, got in sent.items():
                site: Any = Understudy(train[i], start, effort, modalities)  # an algorithm asks no more of it
                replies[i], memory[i] = algorithm.local(got, memory[i], site)
                steps = sum(f.steps for f in site.fits)
                trained[i] = Load(steps, 0, crossing(i, got), _nbytes(replies[i], elements), site.patches)
            state = algorithm.merge(state, replies) if replies else state
            if look:
                look(state, memory)
        ended = is_finished(algorithm, state)
        last = ended or index + 1 == rounds
        loads = dict(trained)
        if validation and (last or (index + 1) % validate_every == 0):
            if rehearsed or not scored:
                served = serving_payloads(algorithm, state, sorted(validation))
                scored = {i: Load(0, n, crossing(i, served[i]), 8 * numbers * n) for i, n in validation.items()}
            for i, load in scored.items():
                _add(loads, i, load.down + (_nbytes(served[i], elements) if last and final else 0), load.up)
                loads[i] = replace(loads[i], cases=load.cases)
        if not index:
            for i, size in handed.items():
                _add(loads, i, size, DIGEST)
        yield loads
        if ended:
            return


def _add(loads: dict[SiteId, Load], site: SiteId, down: int, up: int = 0) -> None:
    """Add bytes to the load of a site."""
    mine = loads.get(site, Load())
    loads[site] = replace(mine, down=mine.down + down, up=mine.up + up)


def _nbytes(payload: Payload, elements: Mapping[str, int]) -> int:
    """Return ``Payload.nbytes`` at the real size of the model's arrays; other arrays have their real size already."""
    return sum(
        Payload(number=value).nbytes
        if isinstance(value, float)
        else sum(int(x.nbytes) * elements.get(k, 1) for k, x in value.items())
        for value in payload.values()
    )
