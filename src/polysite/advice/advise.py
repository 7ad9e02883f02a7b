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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from polysite import assessment, config, study
from polysite.advice.contenders import REFERENCE, START, Contender, Family, contenders
from polysite.advice.decide import Comparison, candidate, compare, confirmed, hopeful
from polysite.advice.deliver import Delivered, inner_models, steps_of, steps_spent, to_train, train
from polysite.advice.personal import Trainings, alpha_of, choose, ranks
from polysite.advice.result import MODELS, Advice, exceptions, file_of, plain
from polysite.advice.stages import comparing
from polysite.advice.tournament import STRATEGIES, Played, Runs
from polysite.benchmark.budget import equalise
from polysite.benchmark.jobs import Step, silent
from polysite.benchmark.workers import kept
from polysite.config import Study
from polysite.data.split import SiteSplit
from polysite.errors import ConfigError
from polysite.heterogeneity.verdict import Verdict
from polysite.storage import write_file
from polysite.tuning.search import same_settings

RULES = 4  # version of how a budget is spent: an advice that began by other rules cannot be continued


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
            the strategies and the models of single hospitals take.
        inner: Number of inner folds, each of which is left out once.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        only: Strategies to compare, by name; empty for all that the assessment proposes.
    """
    runs = Runs(out, inner, parallel, step)
    base, dealt, verdict, listed, most = _begun(base, runs, trainings, only)
    step(f"{len(listed)} strategies on {inner} inner folds", 0)
    trained = Trainings(_race({START: base, **_equal(listed)}, runs), runs)
    listed += [_own(name, trained.one[name].study) for name in trained.own(REFERENCE)]
    compared, chosen = _for_all(trained, listed)
    choices, used = choose(trained, chosen.name, _families(listed))
    final = _final(trained, chosen.name, used)
    left, unit = None, steps_of(trained.one[START].jobs[0].study)  # of FedAvg
    if trainings is not None:
        left = trainings * unit - steps_spent([*trained.one.values(), *trained.two.values()])

    everything = {name: trained.both(name) for name in trained.one}
    apart = sorted(set(exceptions(choices).values()))
    ends = {MODELS: final, **{file_of(MODELS, name): everything[name] for name in apart}}
    wanted, effort = to_train({name: end.study for name, end in ends.items()}, base, left)
    studies = {name: wanted[file_of(MODELS, name)] for name in apart}
    _save(out / "study.toml", wanted[MODELS])
    for name, other in studies.items():
        _save(out / f"{file_of('study', name)}.toml", other)
    delivered: dict[str, Delivered] = {}
    if left is not None:
        delivered = train(wanted, effort.members, runs)
        left -= sum(found.members * steps_of(wanted[name]) for name, found in delivered.items())
    elif any(splits["test"] for splits in dealt.values()):
        delivered = {n: models for n, end in ends.items() if (models := inner_models(end, out / n, step))}
    advice = Advice(
        out, verdict, most, tuple(listed), everything, tuple(compared), chosen, choices, final, wanted[MODELS], studies,
        effort.times, delivered, None if left is None or trainings is None else trainings - left / unit,
    )  # fmt: skip
    write_file(out / "advice.json", lambda path: path.write_text(json.dumps(plain(advice), indent=1), encoding="utf-8"))
    return advice


def _begun(
    base: Study, runs: Runs, trainings: float | None, only: Sequence[str]
) -> tuple[Study, Mapping[str, SiteSplit], Verdict, list[Contender], float]:
    """Write the settings of an advice into its folder and assess the hospitals; return the study, its cases, the
    recommendations of the assessment, the strategies and the trainings that comparing takes. Refuse what cannot be
    advised."""
    out, inner = runs.folder, runs.inner
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
    runs.step("assessing the hospitals", 0)
    verdict = _assessed(base, out / "assessment")
    try:
        listed = contenders(verdict, base, sum(len(splits["train"]) for splits in dealt.values()), only)
        most = comparing(trainings, [c.trainings for c in listed], inner)
    except ConfigError:
        if fresh:  # nothing was trained: the folder would refuse another budget
            shutil.rmtree(out)
        raise
    return base, dealt, verdict, listed, most


def _save(file: Path, chosen: Study) -> None:
    write_file(file, lambda path: path.write_text(config.dump(study.pinned(chosen)), encoding="utf-8"))


def _assessed(base: Study, folder: Path) -> Verdict:
    """Return the recommendations of an assessment, from its folder if it is there."""
    if not (folder / "assessment.json").exists():
        return assessment.assess(base, folder).verdict
    return assessment.read_verdict(folder)


def _equal(listed: Sequence[Contender]) -> dict[str, Study]:
    """Return the studies of all strategies with equal local steps; those after the shared first phase have them."""
    alike = {c.name: c.study for c in listed if c.continues}
    return {
        **equalise({c.name: c.study for c in listed if c.name not in alike or c.name == REFERENCE}, REFERENCE, "steps"),
        **alike,
    }


def _race(studies: Mapping[str, Study], runs: Runs) -> dict[str, Played]:
    """Train strategies on inner folds, on all but the first one only those that are hopeful after it."""
    first = runs.play(studies, STRATEGIES, folds=[0], reference=REFERENCE)
    whole = {REFERENCE, START}
    alive = {n: studies[n] for n, one in first.items() if n in whole or hopeful(one, first[REFERENCE])}
    for name in (name for name in first if name not in alive):
        runs.step(f"{name} ends after the first inner fold: it gained at no hospital", 0)
    played = runs.play(alive, STRATEGIES, reference=REFERENCE)
    return {n: played.get(n, one) for n, one in first.items() if n in played or n not in alive}


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
