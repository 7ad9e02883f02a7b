"""Choose for every hospital: the strategy for all, another strategy of the tournament, or a model of its own.

An own model starts from a trained strategy (one model for all: from its first phase) and is fine-tuned at the hospital;
several shares of it, ALPHAS, are tried. ``exceptions.py`` says what is promising for a hospital, and what a second
training confirms. Beside own models, which cost little, at most one more strategy is trained again: the one with the
highest expected gain over all cases.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from polysite import config
from polysite.advice.contenders import FAMILIES, REFERENCE, START, Family, ends_in_clusters, last_phase
from polysite.advice.decide import mean_of
from polysite.advice.exceptions import Confirmation, Promise, confirm, promises
from polysite.advice.tournament import Played, Runs
from polysite.config import Study
from polysite.errors import RunError

ALPHAS = (0.5, 1.0)  # shares of the own model that are tried
OWN = "own"  # folder of their runs; begins their names, before the share


@dataclass(frozen=True)
class Choice:
    """What a hospital uses, and the evidence."""

    promise: Promise | None = None  # what is expected to serve it best, by one training; None if nothing was tried
    confirmation: Confirmation | None = None  # what the second training showed; None without one

    @property
    def name(self) -> str:
        """Strategy or own model that the hospital uses instead of the strategy for all; empty if it does not."""
        return self.confirmation.name if self.confirmation and self.confirmation.better else ""


@dataclass
class Trainings:
    """Strategies that were trained with one seed, and those that were trained with another one, too.

    Own models are fine-tuned from another strategy with the same seed.
    """

    one: dict[str, Played]
    runs: Runs
    two: dict[str, Played] = field(default_factory=dict)
    starts: dict[str, str] = field(default_factory=dict)  # the strategy that own models begin from, by their name

    @property
    def sites(self) -> list[str]:
        """All hospitals."""
        return sorted({site for each in self.one.values() for site, _ in each.scores})

    def own(self, strategy: str) -> list[str]:
        """Train models of all hospitals from a strategy, with every share; return their names."""
        self.runs.step("models of single hospitals", 0)
        names = [f"{OWN} {a:g} after {strategy}" for a in ALPHAS]
        self.starts |= dict.fromkeys(names, strategy)
        self.one |= self._tuned(names, self.one[beginning(strategy)])
        return names

    def again(self, *names: str) -> None:
        """Train strategies with another seed, unless that is done; the first phase of one model for all with them."""
        wanted = dict.fromkeys([START, *(beginning(self.starts[n]) if n in self.starts else n for n in names)])
        missing = [name for name in wanted if name not in self.two]
        if missing:
            shown = [name for name in names if name in missing] or missing
            self.runs.step(f"{' and '.join(shown)} again, with another seed", 0)
            studies = {n: replace(self.one[n].study, seed=self.one[n].study.seed + 1) for n in missing}
            found = self.runs.play(studies, "again", self.two[START].jobs if START in self.two else ())
            lost = next((n for n in missing if n not in found), None)
            if lost is not None:
                place = self.runs.folder / "again" / "runs"
                raise RunError(f"{lost} failed with another seed, which shows the luck of a training; see {place}")
            self.two |= found
        for strategy in dict.fromkeys(self.starts.values()):
            own = [n for n in names if self.starts.get(n) == strategy and n not in self.two]
            self.two |= self._tuned(own, self.two[beginning(strategy)]) if own else {}

    def both(self, name: str) -> Played:
        """Return a strategy with the mean scores of its trainings."""
        return mean_of(self.one[name], self.two[name]) if name in self.two else self.one[name]

    def _tuned(self, names: list[str], start: Played) -> dict[str, Played]:
        studies = {n: with_own(start.study, dict.fromkeys(self.sites, alpha_of(n))) for n in names}
        return self.runs.play(studies, OWN, start.jobs)


def choose(
    trained: Trainings, shared: str, families: Mapping[str, Family]
) -> tuple[dict[str, Choice], dict[str, Played]]:
    """Choose for every hospital; train again what is promising.

    Args:
        trained: All strategies of the tournament.
        shared: The strategy for all.
        families: Family of every strategy, of which the simplest is taken where none is shown to be worse.

    Returns:
        The choice of every hospital, and what every exception uses, with the mean scores of both trainings.
    """
    own = list(trained.starts)
    if shared not in own and shared not in trained.starts.values():
        own = [] if ends_in_clusters(trained.one[shared].study) else trained.own(shared)
    start, inner = trained.one[shared], trained.runs.inner
    whole = {n for n, each in trained.one.items() if len(each.scores) == len(start.scores)} - {shared, START}
    pool = {n: trained.one[n] for n in trained.one if n in whole and (n in own or n not in trained.starts)}
    cheap = {n for n in pool if n in own or n in trained.two}
    comparisons = len(trained.sites) * len(trained.one.keys() - {shared, START})
    rank = ranks(pool, families)
    more = _worth_most(promises(pool, start, inner, comparisons, rank), [n for n in pool if n not in cheap])
    promised = promises({n: pool[n] for n in pool if n in cheap or n == more}, start, inner, comparisons, rank)
    hopes = {site: promise for site, promise in promised.items() if promise.promising}
    choices = {site: Choice(promised.get(site)) for site in trained.sites}
    if not hopes:
        return choices, {}
    trained.again(shared, *sorted({promise.name for promise in hopes.values()}))
    used = {}
    for site, promise in hopes.items():
        one, two = ((each[promise.name], each[shared]) for each in (trained.one, trained.two))
        choices[site] = Choice(promise, confirm(site, promise.name, one, two, comparisons))
        if choices[site].name:
            used[site] = trained.both(promise.name)
    return choices, used


def ranks(names: Iterable[str], families: Mapping[str, Family]) -> dict[str, int]:
    """Return how simple strategies and own models are; 0 for the simplest family.

    >>> ranks(["clustered", "own 1 after clustered"], {"clustered": "groups"})
    {'clustered': 2, 'own 1 after clustered': 3}
    """
    return {name: FAMILIES.index("own" if alpha_of(name) else families[name]) for name in names}


def alpha_of(name: str) -> float:
    """Return the share of the own model in a name; 0 for a strategy.

    >>> alpha_of("own 0.5 after fedavg"), alpha_of("local")
    (0.5, 0.0)
    """
    return float(name.split()[1]) if name.startswith(f"{OWN} ") else 0.0


def beginning(strategy: str) -> str:
    """Return the training that own models after a strategy begin from."""
    return START if strategy == REFERENCE else strategy


def with_own(shared: Study, alphas: Mapping[str, float]) -> Study:
    """Return a study with one more phase in which hospitals train models of their own, with given shares of them."""
    before = config.plain(shared).get("then", [])
    return config.vary(shared, {"then": [*before, last_phase(shared, {"name": "interpolated", "fixed": dict(alphas)})]})


def _worth_most(promised: Mapping[str, Promise], among: list[str]) -> str:
    """Return the strategy with the highest expected gain over the cases of hospitals that it is promising for."""
    worth = dict.fromkeys(among, 0.0)
    for promise in promised.values():
        if promise.promising and promise.name in worth:
            worth[promise.name] += promise.expected.mean * promise.expected.cases
    best = max(worth, key=lambda name: worth[name], default="")
    return best if worth.get(best) else ""
