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
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import tomli_w

from polysite import assessment, config, study, tuning
from polysite.advice.contenders import REFERENCE, START, Contender, Family, contenders, ends_in_clusters, unselected
from polysite.advice.decide import (
    Comparison,
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
from polysite.advice.personal import Trainings, alpha_of, choose, ranks
from polysite.advice.result import GIVEN, Advice, exceptions, file_of, plain
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

MODELS = "models"  # folder of the models of the advised study
RULES = 3  # version of how a budget is spent: an advice that began by other rules cannot be continued


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
        gain_of(gains), signed_rank(list(gains.values())), sites, advised, studies, effort.times,
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
    settings = {
        "study": config.dump(base), "trainings": trainings or 0.0, "inner": inner, "only": list(only), "rules": RULES,
    }  # fmt: skip
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


def _save(file: Path, chosen: Study) -> None:
    write_file(file, lambda path: path.write_text(config.dump(study.pinned(chosen)), encoding="utf-8"))


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


def _final(trained: Trainings, shared: str, used: Mapping[str, Played]) -> Played:
    """Return the strategy for all, with the scores of what every hospital uses."""
    final = trained.both(shared)
    scores = {key: used[key[0]].scores[key] if key[0] in used else score for key, score in final.scores.items()}
    return replace(final, scores=scores)
