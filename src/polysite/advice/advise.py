"""From a study to a decision: assess, tune, compare strategies, choose for every hospital, deliver models.

    assess        how the hospitals differ, and which strategies that suggests
    recipe        how one model for all is trained best: learning rate, server, additions (``polysite.tuning``)
    strategies    every strategy with that recipe and equal local steps, on inner folds; the one for all is chosen
    hospitals     models of single hospitals, fine-tuned from one model; where they, or another strategy, pay
    mirrored      predictions averaged over mirror images, tried with the finished models; kept if that scores higher
    deliver       a study that is ready to train, and models: trained on all cases while the budget lasts

No stage sees a test case. Every stage is a set of runs in the folder (mirrored scores are a file), and its result
follows from them alone, so the same command continues an advice that was interrupted, and ends with the same choice.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import tomli_w

from polysite import assessment, config, evidence, study, tuning
from polysite.advice.contenders import REFERENCE, START, Contender, Family, contenders, ends_in_clusters, unselected
from polysite.advice.decide import (
    Comparison,
    Gain,
    by_site,
    candidate,
    compare,
    confirmed,
    differences,
    gain_of,
    hopeful,
)
from polysite.advice.deliver import Delivered, inner_models, steps_of, steps_spent, to_train, train
from polysite.advice.mirror import try_mirrored
from polysite.advice.personal import Choice, Trainings, alpha_of, choose, ranks
from polysite.advice.stages import Shares, shares
from polysite.advice.tournament import Played, played, race
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import Step, silent
from polysite.benchmark.workers import kept
from polysite.config import Study
from polysite.data.split import SiteSplit
from polysite.errors import ConfigError
from polysite.heterogeneity.verdict import Verdict
from polysite.metrics.statistics import signed_rank
from polysite.storage import write_file
from polysite.tuning.search import same_settings

GIVEN = "fedavg, as given"  # the study's own recipe
MODELS = "models"  # folder of the models of the advised study
SIMILAR = 2  # federations of the evidence bank that are shown


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
    alike: tuple[evidence.Match, ...]  # the most similar federations of the evidence bank
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


@kept()
def advise(
    base: Study,
    out: Path,
    trainings: float | None,
    inner: int = 3,
    parallel: int | None = None,
    step: Step = silent,
    only: Sequence[str] = (),
) -> Advice:
    """Return which strategy every hospital should use, with the evidence; an interrupted advice is continued.

    Args:
        base: The study; its test cases are never used.
        out: Folder of the advice.
        trainings: The budget, in whole trainings of FedAvg with the study's settings on an inner fold; None for what
            the strategies and the models of single hospitals take, with the study's own recipe and rounds.
        inner: Number of inner folds, each of which is left out once.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        only: Strategies to compare, by name; empty for all that the assessment proposes.
    """
    base, dealt, verdict, budget = _begun(base, out, trainings, inner, only, step)
    cases = _training_cases(dealt)
    recipe, words, known, searched = _recipe(base, _recipes(), out / "recipe", budget.recipe, inner, parallel, step)
    listed = contenders(verdict, recipe, cases, only)
    step(f"{len(listed)} strategies on {inner} inner folds", 0)
    studies = {**({} if known else {START: recipe}), **_equal(listed)}
    before = [job for each in known.values() for job in each.jobs]
    whole = () if known else (START,)
    one = known | race(studies, REFERENCE, whole, out / "strategies", inner, parallel, step, hopeful, before)
    trained = Trainings({n: p for n, p in one.items() if n != GIVEN}, out, inner, parallel, step)
    listed += [_own(name, trained.one[name].study) for name in trained.own(REFERENCE)]
    compared, chosen = _for_all(trained, listed)
    choices, used = choose(trained, chosen.name, _families(listed))
    final = _final(trained, chosen.name, used)
    left, unit, mirror = None, steps_of(one[GIVEN if words else START].jobs[0].study), None  # of FedAvg as given
    if trainings is not None:
        tournament = steps_spent([*trained.one.values(), *trained.two.values()], before)
        left = (trainings - searched) * unit - tournament
    if left is not None and not exceptions(choices) and not ends_in_clusters(final.study):
        step("mirrored predictions", 0)
        final, mirror = try_mirrored(final, out / "mirrored.json")

    everything = {**one, **{name: trained.both(name) for name in trained.one}}
    gains = differences(final, everything.get(GIVEN, everything[START]))
    sites = by_site(gains)
    apart = sorted(set(exceptions(choices).values()))
    ends = {MODELS: final, **{file_of(MODELS, name): everything[name] for name in apart}}
    wanted, effort = to_train({name: end.study for name, end in ends.items()}, base, left)
    advised, studies = wanted[MODELS], {name: wanted[file_of(MODELS, name)] for name in apart}
    _save(out / "study.toml", advised)
    for name, other in studies.items():
        _save(out / f"{file_of('study', name)}.toml", other)
    nearest = evidence.similar(evidence.describe_study(base, dealt), SIMILAR + 1)
    alike = tuple(match for match in nearest if not match.same)[:SIMILAR]
    delivered: dict[str, Delivered] = {}
    if left is not None:
        delivered = train(wanted, effort.members, out, parallel, step)
        left -= sum(found.members * steps_of(wanted[name]) for name, found in delivered.items())
    elif any(splits["test"] for splits in dealt.values()):
        delivered = {n: models for n, end in ends.items() if (models := inner_models(end, out / n, step))}
    others = {n: delivered[file_of(MODELS, n)] for n in apart if file_of(MODELS, n) in delivered}
    spent = None if left is None or trainings is None else trainings - left / unit
    advice = Advice(
        out, verdict, budget, words, tuple(listed), everything, tuple(compared), chosen, choices, mirror, final,
        gain_of(gains), signed_rank(list(gains.values())), sites, advised, studies, effort.times, alike,
        delivered.get(MODELS), others, spent,
    )  # fmt: skip
    write_file(out / "advice.json", lambda path: path.write_text(json.dumps(plain(advice), indent=1), encoding="utf-8"))
    return advice


def _begun(
    base: Study, out: Path, trainings: float | None, inner: int, only: Sequence[str], step: Step
) -> tuple[Study, Mapping[str, SiteSplit], Verdict, Shares]:
    """Write the settings of an advice into its folder and assess the hospitals; return the study, its cases, the
    recommendations of the assessment and the shares of the budget. Refuse what cannot be advised."""
    if base.then:
        raise ConfigError("the study has phases under [[then]], but an advice chooses the phases: leave them out")
    base = study.with_fixed_cases(config.vary(base, {"algorithm": {"name": "fedavg"}, "run": {"pooled": False}}))
    settings = {"study": config.dump(base), "trainings": trainings or 0.0, "inner": inner, "only": list(only)}
    same_settings(out, "advise.toml", settings)
    dealt = study.check(base)
    fresh = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "advise.toml", lambda path: path.write_text(tomli_w.dumps(settings), encoding="utf-8"))
    step("assessing the hospitals", 0)
    verdict = _assessed(base, out / "assessment")
    try:
        efforts = [c.trainings for c in contenders(verdict, base, _training_cases(dealt), only)]
        budget = shares(trainings, efforts, inner, tuning.least(unselected(base), _recipes(), inner))
    except ConfigError:
        if fresh:  # nothing was trained: the folder would refuse another budget
            shutil.rmtree(out)
        raise
    return base, dealt, verdict, budget


def _training_cases(dealt: Mapping[str, SiteSplit]) -> int:
    return sum(len(splits["train"]) for splits in dealt.values())


def file_of(kind: str, strategy: str) -> str:
    """Return the name of a file or folder that only exceptions use.

    >>> file_of("study", "own 1 after fedavg")
    'study-own-1-after-fedavg'
    """
    return f"{kind}-{strategy.replace(' ', '-')}"


def _save(file: Path, chosen: Study) -> None:
    write_file(file, lambda path: path.write_text(config.dump(study.pinned(chosen)), encoding="utf-8"))


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


def _assessed(base: Study, folder: Path) -> Verdict:
    """Return the recommendations of an assessment, from its folder if it is there."""
    if not (folder / "assessment.json").exists():
        return assessment.assess(base, folder).verdict
    return assessment.read_verdict(folder)


def _recipes() -> tuning.Space:
    """Return the recipes that are tried for one model."""
    with as_file(files("polysite.advice").joinpath("recipes.toml")) as file:
        return tuning.load(file)


def _recipe(
    base: Study, space: tuning.Space, out: Path, trainings: float, inner: int, parallel: int | None, step: Step
) -> tuple[Study, str, dict[str, Played], float]:
    """Return the study with the best recipe for one model, the recipe in words, its runs and those of FedAvg as given,
    and the trainings that the search took; without a budget the study's own recipe, and no run.

    Candidates are scored at the rungs alone, and nothing is chosen by these cases within a run, so that strategies can
    go on from the runs of the search.
    """
    if not trainings:
        return base, "", {}, 0.0
    found = tuning.tune(
        unselected(base), out, space, trainings, inner, "steps", tuning.Simulated(parallel), step, tuning.write_page
    )
    words = "" if found.best is found.reference else found.best.candidate.name
    runs = {START: found.best, **({GIVEN: found.reference} if words else {})}
    known = {n: played(found.study if n == START else unselected(base), found.jobs[r.run]) for n, r in runs.items()}
    return found.study, words, known, inner * sum(row.share for row in found.rows)


def _equal(listed: Sequence[Contender]) -> dict[str, Study]:
    """Return the studies of all strategies with equal local steps; those after the shared first phase have them."""
    alike = {c.name: c.study for c in listed if c.continues}
    return {
        **equalise({c.name: c.study for c in listed if c.name not in alike or c.name == REFERENCE}, REFERENCE, "steps"),
        **alike,
    }


def _for_all(trained: Trainings, listed: Sequence[Contender]) -> tuple[list[Comparison], Contender]:
    """Return all strategies against the reference, and the strategy for all."""
    one = {name: each for name, each in trained.one.items() if name != START}
    compared = compare(one, REFERENCE)
    whole = [c for c in compared if len(one[c.name].scores) == len(one[REFERENCE].scores)]
    best = candidate(whole, one, ranks(one, _families(listed)))
    if best is None:
        return compared, listed[0]
    trained.again(best.name, REFERENCE)
    first, second = ((each[best.name], each[REFERENCE]) for each in (one, trained.two))
    sure, _, _ = confirmed(best.name, first, second, len(compared))
    compared = sorted([sure, *(c for c in compared if c is not best)], key=lambda c: -c.gain.mean)
    return compared, next(c for c in listed if c.name == (best.name if sure.better else REFERENCE))


def _families(listed: Sequence[Contender]) -> dict[str, Family]:
    return {c.name: c.family for c in listed}


def _own(name: str, tuned: Study) -> Contender:
    """Return own models of all hospitals as a strategy."""
    share = alpha_of(name)
    between = "" if share == 1 else f", {share:.0%} of the way to it"
    title = f"One model, fine-tuned at every hospital{between}"
    return Contender(name, title, "own", tuned, ("hospitals may outline or scan in their own way",))


def exceptions(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Return the strategy of every hospital that uses another one than that for all."""
    return {site: choice.name for site, choice in choices.items() if choice.name}


def _final(trained: Trainings, shared: str, used: Mapping[str, Played]) -> Played:
    """Return the strategy for all, with the scores of what every hospital uses."""
    final = trained.both(shared)
    scores = {key: used[key[0]].scores[key] if key[0] in used else score for key, score in final.scores.items()}
    return replace(final, scores=scores)
