"""From a study to a decision: assess, compare strategies, choose for every hospital, deliver models.

    assess        how the hospitals differ, and which strategies that suggests
    strategies    every strategy with equal local steps, on inner folds; the one for all is chosen
    hospitals     models of single hospitals, fine-tuned from one model; where they, or another strategy, pay
    deliver       a study that is ready to train, and models: trained on all cases while the budget lasts

No stage sees a test case. Every stage is a set of runs in the folder, and its result follows from them alone, so the
same command continues an advice that was interrupted, and ends with the same choice.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from polysite import assessment, config, study
from polysite.advice.contenders import Contender, contenders
from polysite.advice.decide import Comparison, candidate, compare, confirmed, hopeful
from polysite.advice.deliver import Recipe, steps_of, steps_spent, to_train, train
from polysite.advice.personal import Choice, Trainings, choose
from polysite.advice.result import Advice, plain
from polysite.advice.stages import MEMBERS, comparing
from polysite.advice.tournament import Runs
from polysite.algorithms import name_of
from polysite.algorithms.fedavg import FedAvg
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import Trainer
from polysite.benchmark.workers import Workers
from polysite.config import Study
from polysite.errors import ConfigError, PolysiteError
from polysite.heterogeneity.verdict import Verdict
from polysite.storage import private_folder, write_file
from polysite.tuning.search import same_settings

RULES = 4  # version of how a budget is spent: an advice that began by other rules cannot be continued
STRATEGIES = "strategies"  # folder of the runs of all strategies


def simulated(base: Study, folder: Path) -> Verdict:
    """Assess hospitals whose cases are on this machine into a new folder; return what that recommends."""
    return assessment.assess(base, folder).verdict


def advise(
    base: Study,
    out: Path,
    trainings: float | None,
    inner: int = 3,
    only: Sequence[str] = (),
    trainer: Trainer | None = None,
    assess: Callable[[Study, Path], Verdict] = simulated,
    members: int = MEMBERS,
) -> Advice:
    """Return which strategy every hospital should use, with the evidence; an interrupted advice is continued.

    Args:
        base: The study; its test cases are never used.
        out: Folder of the advice.
        trainings: The budget, in whole trainings of FedAvg with the study's settings on an inner fold; None for what
            the strategies and the models of single hospitals take.
        inner: Number of inner folds, each of which is left out once.
        only: Strategies to compare, by name; empty for all that the assessment proposes.
        trainer: Trains the studies of all stages, and reports progress; None for processes of this machine.
        assess: Assesses the hospitals into a new folder and returns what that recommends.
        members: Most trainings of the advised study whose predictions are averaged.
    """
    runs = Runs(out, inner, trainer or Workers())
    begun = _begun(base, runs, trainings, only, assess)
    runs.trainer.step(f"{len(begun.contenders)} strategies on {inner} inner folds", 0)
    trained = _race(begun.contenders, runs)
    trained.own(trained.reference)
    compared, chosen = _for_all(trained)
    choices = choose(trained, chosen)
    left, unit = None, steps_of(trained.one[trained.given.name].jobs[0].study)
    if trainings is not None:
        left = trainings * unit - steps_spent([*trained.one.values(), *trained.two.values()])
    recipes, effort = to_train(_recipes(trained, chosen, choices), begun.base, left, members)
    for recipe in recipes:
        _write(out / f"{recipe.file('study')}.toml", config.dump(study.pinned(recipe.study)))
    spent = begun.most
    if trainings is not None and left is not None:
        recipes = train(recipes, effort.members, runs)
        left -= sum(r.delivered.members * steps_of(r.study) for r in recipes if r.delivered)
        spent = trainings - left / unit
    recipe, *others = recipes
    advice = Advice(out, begun.verdict, trained, compared, choices, recipe, others, effort=effort, trainings=spent)
    _write(out / "advice.json", json.dumps(plain(advice), indent=1))
    return advice


def _write(file: Path, text: str) -> None:
    write_file(file, lambda path: path.write_text(text, encoding="utf-8"))


@dataclass(frozen=True)
class Begun:
    """An advice before anything is trained."""

    base: Study  # by FedAvg, with fixed cases
    verdict: Verdict
    contenders: Sequence[Contender]  # the reference first; all with equal local steps
    most: float  # whole trainings of FedAvg that comparing takes, at most


def given(base: Study) -> Study:
    """Return the study that an advice begins with: by FedAvg, with fixed cases. Refuse one that cannot be advised."""
    if base.then:
        raise ConfigError("the study has phases under [[then]], but an advice chooses the phases: leave them out")
    if base.run.secure.on and not base.assess.private.on:
        raise ConfigError(assessment.UNPROTECTED)
    fedavg = base.algorithm if name_of(base.algorithm) == "fedavg" else FedAvg()
    return study.with_fixed_cases(replace(base, algorithm=fedavg, run=replace(base.run, pooled=False)))


def _begun(
    base: Study, runs: Runs, trainings: float | None, only: Sequence[str], assess: Callable[[Study, Path], Verdict]
) -> Begun:
    """Write the settings of an advice into its folder and assess the hospitals. Refuse what cannot be advised."""
    out, inner, base = runs.folder, runs.inner, given(base)
    settings = {
        "study": config.dump(base), "trainings": trainings or 0.0, "inner": inner, "only": list(only), "rules": RULES,
    }  # fmt: skip
    same_settings(out, "advise.toml", settings)
    dealt = study.check(base)
    fresh = not out.exists()
    private_folder(out)  # it has scores of hospitals
    _write(out / "advise.toml", tomli_w.dumps(settings))
    runs.trainer.step("assessing the hospitals", 0)
    folder = out / "assessment"
    try:
        known = (folder / "assessment.json").exists()
        verdict = assessment.read_verdict(folder) if known else assess(base, folder)
        listed = contenders(verdict, base, sum(len(splits["train"]) for splits in dealt.values()), only)
        most = comparing(trainings, [c.trainings for c in listed], inner)
    except PolysiteError:
        if fresh:  # nothing was trained: the folder would refuse another budget
            shutil.rmtree(out)
        raise
    return Begun(base, verdict, _equal(listed), most)


def _equal(listed: Sequence[Contender]) -> list[Contender]:
    """Return all strategies with equal local steps; those after the shared first phase have them."""
    reference = listed[0]
    studies = {c.name: c.study for c in listed if not c.start or c is reference}
    equal = equalise(studies, reference.name, "steps")
    return [replace(c, study=equal.get(c.name, c.study)) for c in listed]


def _race(listed: Sequence[Contender], runs: Runs) -> Trainings:
    """Train strategies on inner folds, on all but the first one only those that are hopeful after it."""
    reference, *others = listed
    assert reference.start is not None
    whole = [reference.start, reference]
    needed = [c.name for c in whole]
    first = runs.play([*whole, *others], STRATEGIES, folds=[0], needed=needed)
    alive = [c for c in others if c.name in first and hopeful(first[c.name], first[reference.name])]
    for name in (c.name for c in others if c.name in first and c not in alive):
        runs.trainer.step(f"{name} ends after the first inner fold: it gained at no hospital", 0)
    played = runs.play([*whole, *alive], STRATEGIES, needed=needed)
    lost = {c.name for c in alive} - played.keys()
    known = {n: played.get(n, one) for n, one in first.items() if n not in lost}
    return Trainings(runs, reference.start, reference, known)


def _for_all(trained: Trainings) -> tuple[list[Comparison], Contender]:
    """Return all strategies against the reference, and the strategy for all."""
    reference = trained.reference
    yardstick = trained.one[reference.name]
    compared = compare([one for name, one in trained.strategies.items() if name != reference.name], yardstick)
    whole = [c for c in compared if len(trained.one[c.contender.name].scores) == len(yardstick.scores)]
    best = candidate(whole, trained.one)
    if best is None:
        return compared, reference
    trained.again(best.contender, reference)
    sure = confirmed(*trained.pairs(best.contender, reference), len(compared))
    compared = sorted([sure, *(c for c in compared if c is not best)], key=lambda c: -c.gain.mean)
    return compared, best.contender if sure.better else reference


def _recipes(trained: Trainings, shared: Contender, choices: Mapping[str, Choice]) -> list[Recipe]:
    """Return what hospitals should train: the strategy for all, with the scores of what every hospital uses, and the
    strategies of exceptions."""
    final = trained.both(shared.name)
    used = {site: trained.both(choice.used.name) for site, choice in choices.items() if choice.used}
    scores = {key: used.get(key[0], final).scores[key] for key in final.scores}
    apart = {each.contender.name: each for each in used.values()}
    others = [Recipe(apart[name], apart[name].study, name) for name in sorted(apart)]
    return [Recipe(replace(final, scores=scores), final.study), *others]
