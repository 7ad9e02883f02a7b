"""The result of an advice: the strategy of every hospital, the comparisons behind it, and its numbers as JSON."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polysite import config
from polysite.advice.contenders import Contender
from polysite.advice.decide import Comparison, Gain, by_site, differences, gain_of
from polysite.advice.deliver import Delivered, Recipe
from polysite.advice.personal import Choice, Trainings
from polysite.advice.stages import Effort
from polysite.advice.tournament import Key, Played
from polysite.algorithms.clustered import Clustered
from polysite.heterogeneity.verdict import Verdict
from polysite.metrics.statistics import signed_rank


@dataclass(frozen=True)
class Advice:
    """A finished advice and its folder."""

    folder: Path
    verdict: Verdict
    trained: Trainings
    compared: Sequence[Comparison]  # all strategies against the reference
    hospitals: Mapping[str, Choice]  # what single hospitals use instead
    recipe: Recipe  # the advised study, with the scores of what every hospital uses
    exceptions: Sequence[Recipe]  # what only some hospitals should train
    effort: Effort  # of training on all cases
    trainings: float  # whole trainings of FedAvg that all stages took; without a budget, at most

    @property
    def one_model(self) -> Played:
        """One model for all hospitals, which all strategies are compared with."""
        return self.trained.both(self.trained.reference.name)

    @property
    def given(self) -> Played:
        """FedAvg as the study has it."""
        return self.trained.both(self.trained.given.name)

    @property
    def chosen(self) -> Contender:
        """The strategy for all."""
        return self.recipe.played.contender

    @property
    def final(self) -> Played:
        """The strategy for all, with the scores of what every hospital uses."""
        return self.recipe.played

    @cached_property
    def gains(self) -> dict[Key, float]:
        """Gain of every case over FedAvg as the study has it."""
        return differences(self.final, self.given)

    @cached_property
    def gain(self) -> Gain:
        """Mean gain over FedAvg as the study has it."""
        return gain_of(self.gains)

    @cached_property
    def sites(self) -> dict[str, Gain]:
        """The same for every hospital."""
        return by_site(self.gains)

    @property
    def p(self) -> float:
        """The probability of such gains by chance."""
        return signed_rank(list(self.gains.values()))

    @property
    def models(self) -> Delivered | None:
        """Models of the advised study; None if there are none."""
        return self.recipe.delivered

    @property
    def changes(self) -> bool:
        """Whether the strategy for all is another than one model."""
        return self.chosen.name != self.trained.reference.name

    @property
    def claims(self) -> bool:
        """Whether something was shown to be better than one model for all, for all hospitals or for one."""
        return self.changes or bool(self.strategies)

    def used(self, site: str) -> Contender:
        """Return what a hospital uses."""
        return self.hospitals[site].used or self.chosen

    @property
    def strategies(self) -> dict[str, Contender]:
        """Strategy of every hospital that uses another one than that for all."""
        return {site: choice.used for site, choice in self.hospitals.items() if choice.used}

    @property
    def family(self) -> str:
        """Family of the advice: ``own`` if most hospitals get models of their own, else that of the strategy for all;
        if that is one model, the most frequent family of exceptions from it."""
        if self.chosen.family in ("outlier", "groups") and 2 * len(self._single()) > len(self.hospitals):
            return "own"
        if self.changes:
            return self.chosen.family
        found = [c.family for c in self.strategies.values()]
        return max(found, key=found.count, default="one model")

    def _single(self) -> set[str]:
        """Return the hospitals with models of their own: fine-tuned ones, or those of a group of one."""
        last = config.phases(self.chosen.study)[-1].algorithm
        groups = last.groups.values() if isinstance(last, Clustered) else ()
        alone = {group[0] for group in groups if len(group) == 1} - set(self.strategies)
        return alone | {site for site in self.hospitals if self.used(site).share}


def plain(found: Advice) -> dict[str, Any]:
    """Return the decision with its numbers, ready for JSON."""
    return {
        "strategy": found.chosen.name,
        "family": found.family,
        "shown to be better than one model for all": found.claims,
        "trainings": found.trainings,
        "models": str(os.path.relpath(found.models.run.folder.path, found.folder)) if found.models else None,
        "trainings of the models": found.models.members if found.models else 0,
        "rounds of the models, times those compared": found.effort.times,
        "gain over fedavg as given": {"mean": found.gain.mean, "low": found.gain.low, "high": found.gain.high},
        "p": found.p,
        "strategies": {
            c.contender.name: {
                "gain": c.gain.mean,
                "low": c.gain.low,
                "high": c.gain.high,
                "p": c.p,
                "better": c.better,
            }
            for c in found.compared
        },
        "test": _tested(found),
        "hospitals": {site: _hospital(found, site) for site in found.sites},
    }


def _tested(found: Advice) -> dict[str, Any] | None:
    """Return the test scores of what every hospital uses; None without the models of all of them."""
    apart = {recipe.name: recipe.delivered for recipe in found.exceptions}
    places = {site: apart.get(c.name) for site, c in found.strategies.items()}
    if found.models is None or None in places.values():
        return None
    models = {s: places.get(s) or found.models for s in found.models.run.result.test}
    scores = {s: [x.mean for x in each.run.result.test[s].values()] for s, each in models.items()}
    every = [x for each in scores.values() for x in each]
    if not every:
        return None
    return {"mean": sum(every) / len(every), "hospitals": {s: sum(x) / len(x) for s, x in scores.items() if x}}


def _hospital(found: Advice, site: str) -> dict[str, Any]:
    """Return the numbers of a hospital."""
    gain, choice = found.sites[site], found.hospitals[site]
    numbers: dict[str, Any] = {
        "score": found.final.by_site()[site],
        "gain": gain.mean,
        "low": gain.low,
        "high": gain.high,
        "uses": found.used(site).name,
        "share of its own model": found.used(site).share,
    }
    if choice.promise:
        promise, expected = choice.promise, choice.promise.expected
        name = promise.contender.name
        numbers["promising after one training" if promise.promising else "best after one training"] = {
            "name": name, "expected gain": expected.mean, "probability": expected.positive,
        }  # fmt: skip
        if sure := choice.confirmation:
            numbers["after two trainings"] = {
                "name": name, "gain": sure.gain.mean, "low": sure.gain.low, "high": sure.gain.high, "p": sure.p,
                "better": sure.better,
            }  # fmt: skip
    return numbers
