"""From a study to a decision: assess, tune, compare strategies, personalise where it pays, deliver models.

    assess        how the hospitals differ, and which strategies that suggests
    recipe        how one model for all is trained best: learning rate, server, additions (``polysite.tuning``)
    strategies    every strategy with that recipe and equal local steps, on inner folds
    longer        the chosen strategy with three times the rounds, kept if its mean score is higher
    own           models of single hospitals, fine-tuned from the chosen strategy, where that pays beyond chance
    deliver       a study that is ready to train, and the models of the inner folds together as an ensemble

No stage sees a test case. Every stage is a set of runs in the folder, and its result follows from them alone, so the
same command continues an advice that was interrupted, and ends with the same choice.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import tomli_w

from polysite import assessment, config, evidence, study, tuning
from polysite.advice.contenders import FAMILIES, REFERENCE, Contender, contenders, unselected
from polysite.advice.decide import (
    LEVEL,
    Comparison,
    Gain,
    by_site,
    candidate,
    compare,
    confirmed,
    differences,
    gain_of,
    shrunken,
)
from polysite.advice.stages import LONGER, Shares, shares
from polysite.advice.tournament import Played, play
from polysite.algorithms.base import facts
from polysite.benchmark.budget import lengthen
from polysite.benchmark.jobs import Step, silent
from polysite.config import Study
from polysite.data.sources import Phantom, PhantomClasses
from polysite.engines.run_folder import RunFolder
from polysite.ensembles import ensemble
from polysite.errors import ConfigError, RunError
from polysite.heterogeneity.verdict import Verdict
from polysite.metrics import shrinkage
from polysite.metrics.statistics import signed_rank
from polysite.storage import write_file
from polysite.study import Run
from polysite.tuning.search import same_settings

GIVEN = "fedavg, as given"  # the study's own recipe
ALPHAS = (0.5, 1.0)  # shares of the own model that are tried
PERSONAL_ROUNDS = 5  # a fifth of the rounds, at a quarter of the learning rate
PERSONAL_RATE = 4
WATCHING = 0.05  # share of the cases that only watch the training of the advised study
SIMILAR = 2  # federations of the evidence bank that are shown


@dataclass(frozen=True)
class Own:
    """Evidence for a hospital's own model: the share of it, and the posterior of its gain."""

    alpha: float  # 0: the hospital uses the shared model
    tried: float  # share with the highest expected gain
    gain: shrinkage.Gain


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
    chosen: Contender
    longer: Gain | None  # gain of three times the rounds; None if that was not tried
    own: Mapping[str, Own]
    final: Played  # the advised study
    gain: Gain  # of the advised study over FedAvg as the study has it
    p: float
    sites: Mapping[str, Gain]
    study: Study
    alike: tuple[evidence.Match, ...]  # the most similar federations of the evidence bank
    models: Run | None  # the ensemble of the inner folds, evaluated on the test cases; None if there is none

    @property
    def given(self) -> Played:
        """FedAvg as the study has it."""
        return self.played.get(GIVEN, self.played[REFERENCE])

    @property
    def claims(self) -> bool:
        """Whether a strategy, or an own model of a hospital, was shown to be better than one model for all."""
        return self.chosen.name != REFERENCE or any(own.alpha for own in self.own.values())

    @property
    def family(self) -> str:
        """Family of the advised strategy; ``own`` if one model for all is only adapted to hospitals."""
        if self.chosen.name == REFERENCE and any(own.alpha for own in self.own.values()):
            return "own"
        return self.chosen.family


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
        trainings: The budget, in whole trainings of FedAvg with the study's settings; None for what the strategies and
            the models of single hospitals take, with the study's own recipe and rounds.
        inner: Number of inner folds, each of which is left out once.
        parallel: Largest number of runs in parallel; None for as many as fit.
        step: Reports progress.
        only: Strategies to compare, by name; empty for all that the assessment proposes.
    """
    if base.then:
        raise ConfigError("the study has phases under [[then]], but an advice chooses the phases: leave them out")
    base = _seeded(config.vary(base, {"algorithm": {"name": "fedavg"}, "run": {"pooled": False}}))
    settings = {"study": config.dump(base), "trainings": trainings or 0.0, "inner": inner, "only": list(only)}
    same_settings(out, "advise.toml", settings)
    dealt = study.check(base)
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "advise.toml", lambda path: path.write_text(tomli_w.dumps(settings), encoding="utf-8"))
    step("assessing the hospitals", 0)
    verdict = _assessed(base, out / "assessment")
    cases = sum(len(splits["train"]) for splits in dealt.values())
    space = _recipes()
    budget = shares(trainings, len(contenders(verdict, base, cases, only)), inner, tuning.least(base, space, inner))

    recipe, words = _recipe(base, space, out / "recipe", budget.recipe, inner, parallel, step)
    listed = contenders(verdict, recipe, cases, only)
    studies = {c.name: c.study for c in listed} | ({GIVEN: base} if words else {})
    step(f"{len(studies)} strategies on {inner} inner folds", 0)
    played = play(studies, REFERENCE, out / "strategies", inner, parallel, step)
    compared = compare({n: p for n, p in played.items() if n != GIVEN}, REFERENCE)
    once, chosen = dict(played), listed[0]
    best = candidate(compared, played, [c.name for c in sorted(listed, key=lambda c: FAMILIES.index(c.family))])
    if best is not None:
        two = _again(best.name, played, out / "again", inner, parallel, step)
        one = played[best.name], played[REFERENCE]
        sure, played[best.name], played[REFERENCE] = confirmed(best.name, one, two, len(compared))
        compared = sorted([sure, *(c for c in compared if c is not best)], key=lambda c: -c.gain.mean)
        chosen = next(c for c in listed if c.name == (best.name if sure.better else REFERENCE))
    final, longer = _longer(played[chosen.name], out / "longer", budget.longer, inner, parallel, step)
    # an own model is compared with the one it starts from
    shared = once[chosen.name] if final is played[chosen.name] else final
    adapted, own = _own(shared, out / "own", inner, parallel, step)
    final = final if adapted is shared else adapted

    given = played.get(GIVEN, played[REFERENCE])
    gains = differences(final, given)
    sites = by_site(gains)
    advised = _advised(final.study, base)
    nearest = evidence.similar(evidence.describe_study(base, dealt), SIMILAR + 1)
    alike = tuple(match for match in nearest if not match.same)[:SIMILAR]
    tested = any(splits["test"] for splits in dealt.values())
    models = _models(final, out / "models", step) if tested else None
    found = Advice(
        out, verdict, budget, words, tuple(listed), played, tuple(compared), chosen, longer, own, final,
        gain_of(gains), signed_rank(list(gains.values())), sites, advised, alike, models,
    )  # fmt: skip
    write_file(out / "study.toml", lambda path: path.write_text(config.dump(study.pinned(advised)), encoding="utf-8"))
    write_file(out / "advice.json", lambda path: path.write_text(json.dumps(plain(found), indent=1), encoding="utf-8"))
    return found


def _seeded(base: Study) -> Study:
    """Return a study whose patients and splits stay the same with another seed."""
    data = base.data
    if isinstance(data, Phantom | PhantomClasses) and data.seed is None:
        data = replace(data, seed=base.seed)
    return replace(base, data=data, split=replace(base.split, seed=base.split.seed_of(base.seed)))


def plain(found: Advice) -> dict[str, Any]:
    """Return the decision with its numbers, ready for JSON."""
    return {
        "strategy": found.chosen.name,
        "family": found.family,
        "shown to be better than one model for all": found.claims,
        "recipe": found.recipe or "that of the study",
        "trainings": found.trainings.total,
        "gain over fedavg as given": {"mean": found.gain.mean, "low": found.gain.low, "high": found.gain.high},
        "p": found.p,
        "strategies": {
            c.name: {"gain": c.gain.mean, "low": c.gain.low, "high": c.gain.high, "p": c.p, "better": c.better}
            for c in found.compared
        },
        "test": {"mean": found.models.mean, "hospitals": found.models.dice()} if found.models else None,
        "hospitals": {
            site: {
                "score": found.final.by_site()[site],
                "gain": gain.mean,
                "low": gain.low,
                "high": gain.high,
                "share of its own model": found.own[site].alpha if site in found.own else 0.0,
            }
            for site, gain in found.sites.items()
        },
    }


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
) -> tuple[Study, str]:
    """Return the study with the best recipe for one model, and the recipe in words; the study's own without budget."""
    if not trainings:
        return base, ""
    found = tuning.tune(
        base, out, space, trainings, inner, "steps", tuning.Simulated(parallel), step, tuning.write_page
    )
    return found.study, "" if found.best is found.reference else found.best.candidate.name


def _again(
    name: str, played: Mapping[str, Played], out: Path, inner: int, parallel: int | None, step: Step
) -> tuple[Played, Played]:
    """Train a strategy and the reference with another seed; return both."""
    step(f"{name} and {REFERENCE} again, with another seed", 0)
    again = {n: replace(played[n].study, seed=played[n].study.seed + 1) for n in (name, REFERENCE)}
    found = play(again, None, out, inner, parallel, step)
    lost = next((n for n in again if n not in found), None)
    if lost is not None:
        raise RunError(f"{lost} failed with another seed, which shows the luck of a training; see {out / 'runs'}")
    return found[name], found[REFERENCE]


def _longer(
    short: Played, out: Path, trainings: float, inner: int, parallel: int | None, step: Step
) -> tuple[Played, Gain | None]:
    """Train with more rounds, if the budget allows; return the better one, and the gain of the longer training."""
    if not trainings:
        return short, None
    step(f"{LONGER} times the rounds", 0)
    long = play({"longer": lengthen(short.study, LONGER)}, None, out, inner, parallel, step)["longer"]
    gain = gain_of(differences(long, short))
    return (long if gain.mean > 0 else short), gain


def _own(shared: Played, out: Path, inner: int, parallel: int | None, step: Step) -> tuple[Played, dict[str, Own]]:
    """Fine-tune at every hospital; return the study in which those use their own models for which it pays."""
    if shared.study.then:  # models of patients' clusters are no start for a hospital
        return shared, {}
    step("models of single hospitals", 0)
    sites = sorted({site for site, _ in shared.scores})
    tried = {f"own {a:g}": _with_own(shared.study, dict.fromkeys(sites, a)) for a in ALPHAS}
    played = play(tried, None, out, inner, parallel, step, before=shared.jobs)
    found = {a: shrunken(differences(played[f"own {a:g}"], shared), inner) for a in ALPHAS}
    own = {site: _choose(site, found, len(sites)) for site in sites}
    alphas = {site: each.alpha for site, each in own.items() if each.alpha}
    if not alphas:
        return shared, own
    step("the advised study", 0)
    return play({"final": _with_own(shared.study, alphas)}, None, out, inner, parallel, step, shared.jobs)["final"], own


def _choose(site: str, found: Mapping[float, shrinkage.Gains], sites: int) -> Own:
    """Return the share of the own model for a hospital: above 0 only if a gain is beyond chance, for all hospitals."""
    tried = max(found, key=lambda alpha: found[alpha].sites[site].mean)
    gain = found[tried].sites[site]
    sure = gain.mean > 0 and gain.positive >= 1 - LEVEL / (sites * len(found))
    return Own(tried if sure else 0.0, tried, gain)


def _with_own(shared: Study, alphas: Mapping[str, float]) -> Study:
    rounds = max(1, shared.run.rounds // PERSONAL_ROUNDS)
    phase = {
        "algorithm": {"name": "interpolated", "fixed": dict(alphas)},
        "train": {"lr": shared.train.lr / PERSONAL_RATE},
        "run": {"rounds": rounds, "validate_every": rounds},
    }
    return config.vary(shared, {"then": [phase]})


def _models(final: Played, out: Path, step: Step) -> Run | None:
    """Return the models of the inner folds as one ensemble per hospital; None for models of patients' clusters."""
    if RunFolder(out).finished:
        return Run(RunFolder(out), RunFolder(out).result)
    if any(facts(phase.algorithm).ends_study for phase in config.phases(final.study)):
        return None
    step("the models of the inner folds together", 0)
    return ensemble(final.runs, out)


def _advised(chosen: Study, base: Study) -> Study:
    """Return the study to train: it serves its last models, as was measured, and is validated as the given one.

    Nothing is chosen by validation cases, so few of them watch the training, and the others train.
    """
    last = unselected(chosen)
    run = replace(last.run, validate_every=base.run.validate_every, best_from=last.run.rounds)
    return replace(last, run=run, split=replace(base.split, validation=min(base.split.validation, WATCHING)))
