"""The result of an advice: the strategy of every hospital, the comparisons behind it, and its numbers as JSON."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polysite import config
from polysite.advice.contenders import REFERENCE, START, Contender
from polysite.advice.decide import Comparison, Gain, by_site, differences, gain_of
from polysite.advice.deliver import Delivered
from polysite.advice.personal import Choice, alpha_of
from polysite.advice.tournament import Key, Played
from polysite.config import Study
from polysite.heterogeneity.verdict import Verdict
from polysite.metrics.statistics import signed_rank

MODELS = "models"  # folder of the models of the advised study


@dataclass(frozen=True)
class Advice:
    """A finished advice and its folder."""

    folder: Path
    verdict: Verdict
    most: float  # whole trainings of FedAvg that comparing takes, at most
    contenders: tuple[Contender, ...]
    played: Mapping[str, Played]
    compared: tuple[Comparison, ...]
    chosen: Contender  # the strategy for all
    hospitals: Mapping[str, Choice]  # what single hospitals use instead
    final: Played  # the advised study, with the scores of what every hospital uses
    study: Study
    studies: Mapping[str, Study]  # those of exceptions, by strategy
    times: float  # rounds of the advised study, as a multiple of those that were compared
    delivered: Mapping[str, Delivered]  # models by their folder, evaluated on the test cases
    spent: float | None  # whole trainings of FedAvg that all stages took; None without a budget

    @property
    def named(self) -> dict[str, Contender]:
        """The strategies by name."""
        return {c.name: c for c in self.contenders}

    @property
    def given(self) -> Played:
        """FedAvg as the study has it."""
        return self.played[START]

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
        return self.delivered.get(MODELS)

    @property
    def claims(self) -> bool:
        """Whether something was shown to be better than one model for all, for all hospitals or for one."""
        return self.chosen.name != REFERENCE or any(choice.name for choice in self.hospitals.values())

    @property
    def alphas(self) -> dict[str, float]:
        """Share of the own model of every hospital that uses one."""
        used = {site: choice.name or self.chosen.name for site, choice in self.hospitals.items()}
        return {site: alpha_of(name) for site, name in used.items() if alpha_of(name)}

    @property
    def strategies(self) -> dict[str, str]:
        """Strategy of every hospital that uses another one than that for all."""
        return exceptions(self.hospitals)

    @property
    def family(self) -> str:
        """Family of the advice: ``own`` if most hospitals get models of their own, else that of the strategy for all;
        if that is one model, the most frequent family of exceptions from it."""
        if self.chosen.family in ("outlier", "groups") and 2 * len(self._single()) > len(self.hospitals):
            return "own"
        if self.chosen.name != REFERENCE:
            return self.chosen.family
        found = [self.named[c.name].family for c in self.hospitals.values() if c.name]
        return max(found, key=found.count, default="one model")

    def _single(self) -> set[str]:
        """Return the hospitals with models of their own: fine-tuned ones, or those of a group of one."""
        last = config.phases(self.chosen.study)[-1].algorithm
        groups = getattr(last, "groups", {}).values()
        alone = {group[0] for group in groups if len(group) == 1} - set(self.strategies)
        return alone | set(self.alphas)


def exceptions(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Return the strategy of every hospital that uses another one than that for all."""
    return {site: choice.name for site, choice in choices.items() if choice.name}


def file_of(kind: str, strategy: str) -> str:
    """Return the name of a file or folder that only exceptions use.

    >>> file_of("study", "own 1 after fedavg")
    'study-own-1-after-fedavg'
    """
    return f"{kind}-{strategy.replace(' ', '-')}"


def plain(found: Advice) -> dict[str, Any]:
    """Return the decision with its numbers, ready for JSON."""
    return {
        "strategy": found.chosen.name,
        "family": found.family,
        "shown to be better than one model for all": found.claims,
        "trainings": found.most if found.spent is None else found.spent,
        "models": str(os.path.relpath(found.models.run.folder.path, found.folder)) if found.models else None,
        "trainings of the models": found.models.members if found.models else 0,
        "rounds of the models, times those compared": found.times,
        "gain over fedavg as given": {"mean": found.gain.mean, "low": found.gain.low, "high": found.gain.high},
        "p": found.p,
        "strategies": {
            c.name: {"gain": c.gain.mean, "low": c.gain.low, "high": c.gain.high, "p": c.p, "better": c.better}
            for c in found.compared
        },
        "test": _tested(found),
        "hospitals": {site: _hospital(found, site) for site in found.sites},
    }


def _tested(found: Advice) -> dict[str, Any] | None:
    """Return the test scores of what every hospital uses; None without the models of all of them."""
    places = {site: file_of(MODELS, name) for site, name in found.strategies.items()}
    if found.models is None or not set(places.values()) <= found.delivered.keys():
        return None
    models = {s: found.delivered[places.get(s, MODELS)] for s in found.models.run.result.test}
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
        "uses": choice.name or found.chosen.name,
        "share of its own model": found.alphas.get(site, 0.0),
    }
    if choice.promise:
        expected = choice.promise.expected
        numbers["promising after one training" if choice.promise.promising else "best after one training"] = {
            "name": choice.promise.name, "expected gain": expected.mean, "probability": expected.positive,
        }  # fmt: skip
    if choice.confirmation:
        sure = choice.confirmation
        numbers["after two trainings"] = {
            "name": sure.name, "gain": sure.gain.mean, "low": sure.gain.low, "high": sure.gain.high, "p": sure.p,
            "better": sure.better,
        }  # fmt: skip
    return numbers
