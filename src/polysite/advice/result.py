"""The result of an advice: the strategy of every hospital, the comparisons behind it, and its numbers as JSON."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polysite import config
from polysite.advice.contenders import REFERENCE, START, Contender
from polysite.advice.decide import Comparison, Gain
from polysite.advice.deliver import Delivered
from polysite.advice.personal import Choice, alpha_of
from polysite.advice.stages import Shares
from polysite.advice.tournament import Played
from polysite.config import Study
from polysite.heterogeneity.verdict import Verdict

GIVEN = "fedavg, as given"  # the study's own recipe


@dataclass(frozen=True)
class Advice:
    """A finished advice and its folder."""

    folder: Path
    verdict: Verdict
    trainings: Shares
    recipe: str  # in words; empty if it is the study's own
    contenders: tuple[Contender, ...]
    played: Mapping[str, Played]
    compared: tuple[Comparison, ...]
    chosen: Contender  # the strategy for all
    hospitals: Mapping[str, Choice]  # what single hospitals use instead
    mirror: Gain | None  # gain of mirrored predictions; None if they were not tried
    final: Played  # the advised study, with the scores of what every hospital uses
    gain: Gain  # of the advice over FedAvg as the study has it
    p: float
    sites: Mapping[str, Gain]
    study: Study
    studies: Mapping[str, Study]  # those of exceptions, by strategy
    times: float  # rounds of the advised study, as a multiple of those that were compared
    models: Delivered | None  # evaluated on the test cases; None if there are none
    others: Mapping[str, Delivered]  # models of strategies of exceptions
    spent: float | None  # whole trainings of FedAvg that all stages took; None without a budget

    @property
    def given(self) -> Played:
        """FedAvg as the study has it."""
        return self.played.get(GIVEN, self.played[START])

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
        families = {c.name: c.family for c in self.contenders}
        found = [families[c.name] for c in self.hospitals.values() if c.name]
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
        "recipe": found.recipe or "that of the study",
        "trainings": found.trainings.total if found.spent is None else found.spent,
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
    names = found.strategies
    if found.models is None or not set(names.values()) <= found.others.keys():
        return None
    models = {s: found.others[names[s]] if s in names else found.models for s in found.models.run.result.test}
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
