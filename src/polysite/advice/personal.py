"""Choose for every hospital: the strategy for all, another strategy of the tournament, or a model of its own.

An own model starts from a trained strategy (one model for all: from its first phase) and is fine-tuned at the hospital;
several shares of it, ALPHAS, are tried. ``exceptions.py`` says what is promising for a hospital, and what a second
training confirms. Beside own models, which cost little, at most one more strategy is trained again: the one with the
highest expected gain over all cases.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from polysite.advice.contenders import Contender
from polysite.advice.decide import Pair, mean_of
from polysite.advice.exceptions import Confirmation, Promise, confirm, promises
from polysite.advice.tournament import Played, Runs
from polysite.errors import RunError

ALPHAS = (0.5, 1.0)  # shares of the own model that are tried
OWN, AGAIN = "own", "again"  # folders of the runs of own models, and of strategies with another seed


@dataclass(frozen=True)
class Choice:
    """What a hospital uses, and the evidence."""

    promise: Promise | None = None  # what is expected to serve it best, by one training; None if nothing was tried
    confirmation: Confirmation | None = None  # what the second training showed; None without one

    @property
    def used(self) -> Contender | None:
        """Strategy or own model that the hospital uses instead of the strategy for all; None if it does not."""
        return self.promise.contender if self.promise and self.confirmation and self.confirmation.better else None


@dataclass
class Trainings:
    """Strategies by name that were trained with one seed, and those that were trained with another one, too.

    Own models are fine-tuned from another strategy with the same seed.
    """

    runs: Runs
    given: Contender  # FedAvg as the study has it, the first phase of one model for all
    reference: Contender  # one model for all
    one: dict[str, Played]
    two: dict[str, Played] = field(default_factory=dict)

    @property
    def strategies(self) -> dict[str, Played]:
        """The strategies and own models that are compared with one another."""
        return {name: each for name, each in self.one.items() if name != self.given.name}

    @property
    def sites(self) -> list[str]:
        """All hospitals."""
        return sorted({site for each in self.one.values() for site, _ in each.scores})

    def own(self, strategy: Contender) -> list[Contender]:
        """Train models of all hospitals from a strategy, with every share; return them."""
        self.runs.trainer.step("models of single hospitals", 0)
        found = [strategy.own(share, self.sites) for share in ALPHAS]
        self.one |= self.runs.play(found, OWN, self.one.values())
        return found

    def again(self, *wanted: Contender) -> None:
        """Train strategies with another seed, unless that is done; the first phase of one model for all with them."""
        roots = [self.given, *(c.start if c.share and c.start else c for c in wanted)]
        missing = {c.name: c for c in roots if c.name not in self.two}
        if missing:
            shown = [c.name for c in wanted if c.name in missing] or list(missing)
            self.runs.trainer.step(f"{' and '.join(shown)} again, with another seed", 0)
            self._with_another_seed(missing, AGAIN)
            lost = next((name for name in missing if name not in self.two), None)
            if lost is not None:
                place = self.runs.folder / AGAIN / "runs"
                raise RunError(f"{lost} failed with another seed, which shows the luck of a training; see {place}")
        self._with_another_seed({c.name: c for c in wanted if c.share and c.name not in self.two}, OWN)

    def _with_another_seed(self, missing: Mapping[str, Contender], place: str) -> None:
        if missing:
            other = [replace(c, study=replace(c.study, seed=c.study.seed + 1)) for c in missing.values()]
            self.two |= self.runs.play(other, place, self.two.values())

    def both(self, name: str) -> Played:
        """Return a strategy with the mean scores of its trainings."""
        return mean_of(self.one[name], self.two[name]) if name in self.two else self.one[name]

    def pairs(self, one: Contender, other: Contender) -> tuple[Pair, Pair]:
        """Return two strategies as they were trained with one seed, and with another one."""
        first, second = ((each[one.name], each[other.name]) for each in (self.one, self.two))
        return first, second


def choose(trained: Trainings, shared: Contender) -> dict[str, Choice]:
    """Choose for every hospital; train again what is promising.

    Args:
        trained: All strategies of the tournament.
        shared: The strategy for all.
    """
    tried = {name for name, each in trained.one.items() if each.contender.share}
    if shared.name not in {*tried, trained.reference.name}:
        tried = set() if shared.ends_in_clusters else {own.name for own in trained.own(shared)}
    start, inner = trained.one[shared.name], trained.runs.inner
    others = {name: each for name, each in trained.strategies.items() if name != shared.name}
    pool = {
        name: each
        for name, each in others.items()
        if len(each.scores) == len(start.scores) and (name in tried or not each.contender.share)
    }
    cheap = {name for name in pool if name in tried or name in trained.two}
    comparisons = len(trained.sites) * len(others)
    more = _worth_most(promises(pool.values(), start, inner, comparisons), pool.keys() - cheap)
    left = [each for name, each in pool.items() if name in cheap or name == more]
    promised = promises(left, start, inner, comparisons)
    hopes = {site: promise for site, promise in promised.items() if promise.promising}
    choices = {site: Choice(promised.get(site)) for site in trained.sites}
    if hopes:
        names = sorted({promise.contender.name for promise in hopes.values()})
        trained.again(shared, *(pool[name].contender for name in names))
    for site, promise in hopes.items():
        pairs = trained.pairs(promise.contender, shared)
        choices[site] = Choice(promise, confirm(site, *pairs, comparisons))
    return choices


def _worth_most(promised: Mapping[str, Promise], among: Collection[str]) -> str:
    """Return the strategy with the highest expected gain over the cases of hospitals that it is promising for."""
    worth: dict[str, float] = {}
    for promise in promised.values():
        name = promise.contender.name
        if promise.promising and name in among:
            worth[name] = worth.get(name, 0.0) + promise.expected.mean * promise.expected.cases
    return max(worth, key=lambda name: worth[name], default="")
