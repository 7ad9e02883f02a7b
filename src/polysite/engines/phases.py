"""A study as a sequence of phases: validation, the best round, early stopping, checkpoints, the result.

A phase starts from the best model of the phases before it. Rounds are counted through all phases. With ``run.best =
"own"`` in the last phase, the sites end with the models of their own best rounds of that phase (``own_best.py``); the
round that is best for all together is kept as well.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from polysite.algorithms import name_of
from polysite.algorithms.base import Algorithm, case_clusters, is_finished, serving_payloads, site_clusters
from polysite.cluster.mixture import CaseClusters
from polysite.engines import checkpoint, site_memory
from polysite.engines.best_round import advantage, judged, surprises
from polysite.engines.own_best import STRANGER, improved
from polysite.engines.phase_sites import PhaseSites, Served
from polysite.engines.plan import Plan
from polysite.engines.record import Result, RoundRecord, SiteValidation, incident, mean_score, measure_of
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.run_folder import RunFolder
from polysite.engines.site_memory import Memory
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, Paused, RunError
from polysite.payload import Payload, SiteId
from polysite.privacy import Release, epsilon
from polysite.site import CaseScore, Examined, Scores
from polysite.storage import set_aside
from polysite.tree import Tree

SHARED = "*"  # owner of a model that all sites use
ABOUT: Mapping[str, Any] = MappingProxyType({"task": "segmentation", "labels": (), "modalities": ()})

log = logging.getLogger("polysite")


@dataclass(frozen=True)
class Phase:
    """A part of a study with an algorithm of its own."""

    algorithm: Algorithm[Any]
    transport: PhaseSites
    plan: Plan


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Content of a checkpoint file."""

    at: Progress  # without the memories
    begins: int = 0  # first round of the phase, in the checkpoint that a phase began from
    kept: tuple[SiteId, ...] = ()  # sites whose memory lies beside the checkpoint; other sites keep their own


@dataclass(frozen=True)
class Models:
    """The models that sites use in the end, with the phase that serves them."""

    phase: Phase
    round: int  # the best one; with models of several rounds, the last of these
    payloads: Callable[[Sequence[SiteId]], Mapping[SiteId, Payload]]  # from which sites choose their model


class Spent:
    """What a study costs every site under differential privacy: its assessment, and its rounds, earlier ones too."""

    def __init__(self, records: Iterable[RoundRecord] = (), assessed: Mapping[SiteId, Release] = MappingProxyType({})):
        self._releases: dict[SiteId, list[Release]] = {i: [release] for i, release in assessed.items()}
        for record in records:
            self._note(record)

    def _note(self, record: RoundRecord) -> None:
        for site, known in record.sites.items():
            self._releases.setdefault(site, []).extend(known.releases)

    def add(self, record: RoundRecord) -> RoundRecord:
        """Return the record of a round with the epsilon of every site so far, and log it."""
        self._note(record)
        cost = {i: epsilon(all, all[-1].delta) for i in record.sites if (all := self._releases[i])}
        if cost:
            listed = ", ".join(f"{i} {value:.2f}" for i, value in sorted(cost.items()))
            log.info("round %d: epsilon spent so far: %s", record.round + 1, listed)
        return replace(record, sites={i: replace(s, epsilon=cost.get(i)) for i, s in record.sites.items()})


class EvaluationWriter(Protocol):
    """Receives every examined case of the final evaluation."""

    def add(self, owner: SiteId, site: SiteId, examined: Examined) -> None:
        """Add a case of a site, predicted with the model of an owner."""
        ...


@dataclass(frozen=True)
class Evaluate:
    """How a finished run is evaluated."""

    write: Callable[[str, CaseClusters | None], AbstractContextManager[EvaluationWriter]]  # opens that of a split
    tolerance: float = 1.0  # distance of surfaces that still agree


def run_phases(
    phases: Sequence[Phase],
    params: Tree,
    seed: int,
    folder: RunFolder,
    *,
    resume: Progress | None = None,
    watch: Watch = Watch(),
    about: Mapping[str, Any] = ABOUT,
    evaluate: Evaluate | None = None,
    until: int | None = None,
) -> Result:
    """Run all rounds, keep the best model, and write everything to the run folder.

    Args:
        phases: The phases, in order.
        params: Initial parameters.
        seed: Decides the cohorts.
        folder: The run folder.
        resume: Position to continue from.
        watch: Observer of the progress.
        about: Task, labels and modalities, for the result.
        evaluate: How to evaluate the final model; None computes only Dice (or accuracy).
        until: Number of rounds after which to stop with a checkpoint, by raising ``Paused``; None for all rounds.
    """
    at = resume or before_training(phases[:1], params)
    _go_on(phases, folder, at)
    while True:
        at = _train(phases, params, seed, folder, at, watch, until)
        if at.phase + 1 == len(phases):
            return _finish(phases, folder, at, about, evaluate)
        at = _next(phases, folder, at, params)


def before_training(phases: Sequence[Phase], params: Tree) -> Progress:
    """Return the position before the first round; refuse what an algorithm cannot do with its sites or this network."""
    states = [p.algorithm.init(p.transport.lift(params), p.transport.names) for p in phases]
    return Progress(-1, states[0], {})


def _go_on(phases: Sequence[Phase], folder: RunFolder, at: Progress) -> None:
    """Have the sites go on in the phase of a checkpoint; what they are sent again for it does not count."""
    phase = phases[at.phase]
    if at.phase:
        with phase.transport.sites.uncounted():
            enter_phase(phases, at.phase, folder)
    if any(r.validation for r in folder.records()[-1:]):  # it was the last that the sites got
        phase.transport.sites.have(_served_now(phase, at))


def _train(
    phases: Sequence[Phase],
    params: Tree,
    seed: int,
    folder: RunFolder,
    at: Progress,
    watch: Watch,
    until: int | None,
) -> Progress:
    """Run the remaining rounds of a phase, or those until a pause; returns the position after them."""
    phase = phases[at.phase]
    plan, transport, began = phase.plan, phase.transport, time.perf_counter()
    if _is_over(phase, at):  # interrupted after its last round
        transport.remember(at.memories, at.versions)
        return at
    if until is not None and at.round + 1 >= until:
        raise Paused
    slow = False
    spent = Spent(folder.records(), folder.assessed())
    rounds = run_rounds(phase.algorithm, transport, params, plan, seed, resume=at, watch=watch, keep_replies=False)
    for r in rounds:
        record = r.record(at.phase, plan.pooled)
        record = spent.add(replace(record, incidents=(*record.incidents, *transport.incidents())))
        heard = {i: r.index for i in r.replies if i not in r.refused}
        versions = {**at.versions, **heard}
        at = replace(
            at,
            round=r.index,
            state=r.state,
            memories=transport.memories(),
            versions=versions,
            guard=r.guard_state,
        )
        done, ended = r.index + 1 - at.first, is_finished(phase.algorithm, r.state)
        stops = until is not None and r.index + 1 >= until  # a search compares the scores of paused runs
        due = done % plan.validate_every == 0 or done == plan.rounds or ended
        if due or stops:
            validating = time.perf_counter()
            at, record = _validate(phases, folder, at, record, due)
            slow = slow or _note_slow(plan, record, time.perf_counter() - validating)
        record = record.with_traffic(*transport.sites.traffic())
        incidents = (*record.incidents, *transport.incidents())
        record = replace(record, incidents=incidents, elapsed=round(time.perf_counter() - began, 3))
        folder.append(record)
        last = _is_over(phase, at)
        pause = stops and not last
        if done % plan.checkpoint_every == 0 or last or pause:
            _keep(folder, folder.round(r.index), phase, at)
        watch.round(record)
        score = record.mean_score
        log.info("round %d%s", r.index + 1, "" if score is None else f": {record.measure} {score:.4f}")
        if last and done < plan.rounds and not ended:
            log.info("stopped after round %d: %d validations without a better one", r.index + 1, at.waited)
        if pause:
            raise Paused
        if last:
            break
        del r
    return at


def _note_slow(plan: Plan, record: RoundRecord, seconds: float) -> bool:
    """Say that validation takes longer than training, which is rarely meant; return whether it does."""
    training = sum(site.seconds for site in record.sites.values())
    if seconds <= max(training, 5.0):
        return False
    log.warning(
        "validation took %.0f s and training %.0f s in round %d: validate less often (run.validate_every = %d), with a "
        "larger window (train.window) or less overlap (train.overlap)",
        seconds, training, record.round + 1, plan.validate_every * ceil(2 * seconds / max(training, 0.1)),
    )  # fmt: skip
    return True


def _is_over(phase: Phase, at: Progress) -> bool:
    """Whether a phase has run all its rounds, ended by itself, or exhausted its patience."""
    plan, begun = phase.plan, at.round >= at.first
    patient = plan.patience is None or hasattr(phase.algorithm, "is_finished")  # such an algorithm ends by itself
    impatient = not patient and at.waited >= (plan.patience or 0)
    return at.round + 1 - at.first >= plan.rounds or impatient or (begun and is_finished(phase.algorithm, at.state))


def _next(phases: Sequence[Phase], folder: RunFolder, at: Progress, params: Tree) -> Progress:
    """Begin the next phase; returns its position."""
    at = _chosen(phases, folder, at)
    index, first = at.phase + 1, at.round + 1
    best = load_checkpoint(folder, folder.best(at.best_round), phases).at
    _keep(folder, folder.phase(index), phases[best.phase], best, first)
    log.info("phase %d begins from the model of round %d", index + 1, best.round + 1)
    start = enter_phase(phases, index, folder)
    phase = phases[index]
    state = phase.algorithm.init(phase.transport.lift(start or params), phase.transport.names)
    guard = at.guard.begin() if at.guard else None
    at = replace(at, state=state, memories={}, versions={}, waited=0, phase=index, first=first, own={}, guard=guard)
    if _chooses_own(phases, index) and not phase.plan.best_from:
        scores = phase.transport.score(at.round, _served_now(phase, at), "validation")
        at = _choose_own(phase, folder, at, scores)[0] if any(scores.values()) else at
    return at


def enter_phase(phases: Sequence[Phase], index: int, folder: RunFolder, everyone: Sequence[SiteId] = ()) -> Tree:
    """Have the sites start a phase from the models that they were served when it began.

    Returns the shared model if the server can see it. ``everyone`` names the sites
    concerned, if these are not the sites of the phase. An algorithm whose server merges models needs a shared model to
    begin with, so it is refused after a phase that leaves every site its own.
    """
    phase = phases[index]
    begun = load_checkpoint(folder, folder.phase(index), phases)
    best, before = begun.at, phases[begun.at.phase]
    _begin_earlier(phases, best.phase, folder, everyone)
    before.transport.remember(best.memories, best.versions)
    concerned = everyone or sorted({*before.transport.names, *before.transport.audience})
    sent = serving_payloads(before.algorithm, best.state, concerned)
    served = before.transport.serve(best.round, sent)
    several = next((i for i, count in served.groups.items() if count != 1), None)
    if several is not None:
        raise ConfigError(
            f"phase {index + 1} starts from one model at every site, but in phase {best.phase + 1} {several!r} has "
            f"{served.groups[several]}, for different patients; let another algorithm come before it"
        )
    if served.shared is None and any(kind in ("model", "update") for kind in phase.algorithm.reply.values()):
        raise ConfigError(
            f"phase {index + 1} trains a model that sites share, but after phase {best.phase + 1} every site has its "
            "own; let it be fine_tune or local, or let another algorithm come before it"
        )
    phase.transport.begin(begun.begins, served)
    return next((models[0] for models in served.models.values()), {})


def _begin_earlier(phases: Sequence[Phase], index: int, folder: RunFolder, everyone: Sequence[SiteId]) -> None:
    """Have sites start an earlier phase, unless they have done so since this process began."""
    began = phases[index].transport.began
    if index and (began is None or not began.issuperset(everyone)):
        enter_phase(phases, index, folder, everyone)


def _keep(
    folder: RunFolder,
    path: Path,
    phase: Phase,
    at: Progress,
    begins: int = 0,
    versions: Mapping[SiteId, int] | None = None,
) -> None:
    """Write a checkpoint, with the memory of every site in a file of its own.

    ``versions`` has the version of the memory of every site that the checkpoint is kept for; by default of the sites
    that keep their memories themselves.
    """
    name = name_of(phase.algorithm)
    memories = [Memory(i, name, at.versions.get(i, -1), content) for i, content in at.memories.items() if content]
    kept = tuple(m.site for m in memories)
    if versions is None:
        versions = {} if phase.transport.simulated else at.versions
    folder.keep(path, Checkpoint(replace(at, memories={}), begins, kept), memories, versions)
    phase.transport.retain(folder.needed())


def load_checkpoint(folder: RunFolder, path: Path, phases: Sequence[Phase]) -> Checkpoint:
    """Read a checkpoint with the memories that belong to it."""
    modules = {type(phase.algorithm).__module__ for phase in phases}  # a state may hold their classes
    lift = phases[0].transport.lift
    loaded: Checkpoint = checkpoint.load(path, lift, modules)
    if not isinstance(loaded, Checkpoint) or loaded.at.phase not in range(len(phases)):
        raise RunError(f"{path} does not belong to this study")
    at = loaded.at
    name = name_of(phases[at.phase].algorithm)
    empty = dict.fromkeys(phases[at.phase].transport.names, Payload())
    known = {i: site_memory.load(folder.memory(path, i), i, name, at.versions.get(i, -1)) for i in loaded.kept}
    return replace(loaded, at=replace(at, memories={**empty, **known}))


def adopt(folder: RunFolder, phase: Phase, at: Progress) -> Progress:
    """Keep a position that was not trained here as the last and the best round of a run folder; return it so."""
    at = replace(at, best_round=at.round, best_score=0.0)
    for path in (folder.round(at.round), folder.best(at.round)):
        _keep(folder, path, phase, at)
    return at


def find_progress(folder: RunFolder, phases: Sequence[Phase]) -> Progress | None:
    """Return the newest readable checkpoint; a damaged one is reported and set aside."""
    paths = folder.checkpoints()
    for path in paths:
        try:
            at = load_checkpoint(folder, path, phases).at
            if at.best_round >= 0:
                load_checkpoint(folder, folder.best(at.best_round), phases)
            for round in {own.round for own in at.own.values()} if at.phase + 1 == len(phases) else ():
                load_checkpoint(folder, folder.own(round), phases)
            if at.phase:
                load_checkpoint(folder, folder.phase(at.phase), phases)
        except RunError as problem:
            log.warning("%s; trying the checkpoint before it", problem)
            continue
        for damaged in paths[: paths.index(path)]:
            set_aside(damaged)
        folder.rewind(at.round)
        log.info("resuming after round %d from %s", at.round + 1, path.name)
        return at
    if paths:
        raise RunError(
            f"none of the checkpoints of {folder.path} can be read; nothing was changed, its log.txt says why"
        )
    folder.rewind(-1)
    log.info("no checkpoint yet: starting from round 0")
    return None


def find_best(
    folder: RunFolder, phases: Sequence[Phase], round: int, everyone: Sequence[SiteId] = ()
) -> tuple[Phase, Progress]:
    """Return the phase and position of the best round; the sites' memories are restored to it.

    ``everyone`` names the sites that the models concern, if these are not the sites of the study.
    """
    best = load_checkpoint(folder, folder.best(round), phases).at
    _begin_earlier(phases, best.phase, folder, everyone)
    phases[best.phase].transport.remember(best.memories, best.versions)
    return phases[best.phase], best


def find_own(folder: RunFolder, phases: Sequence[Phase], sites: Sequence[SiteId]) -> Models:
    """Return the models of these sites' own best rounds; the sites' memories are restored to them."""
    phase, rounds = phases[-1], folder.own_rounds()
    mine = {i: rounds.get(i, rounds[STRANGER]) for i in sites}
    sent: dict[SiteId, Payload] = {}
    memories: dict[SiteId, Payload] = {}
    versions: dict[SiteId, int] = {}
    _begin_earlier(phases, len(phases) - 1, folder, sites)
    for round in sorted(set(mine.values())):
        at, users = load_checkpoint(folder, folder.own(round), phases).at, [i for i in sites if mine[i] == round]
        sent |= serving_payloads(phase.algorithm, at.state, users)
        memories |= {i: at.memories[i] for i in users if i in at.memories}
        versions |= {i: at.versions[i] for i in users if i in at.versions}
    phase.transport.remember(memories, versions)
    return Models(phase, max(mine.values()), lambda asked: {i: sent[i] for i in asked})


def find_models(folder: RunFolder, phases: Sequence[Phase], result: Result, sites: Sequence[SiteId]) -> Models:
    """Return the models that sites use according to the result of a run; their memories are restored to them."""
    if result.best_rounds:
        return find_own(folder, phases, sites)
    return _of_best(*find_best(folder, phases, result.best_round, sites))


def _of_best(phase: Phase, best: Progress) -> Models:
    return Models(phase, best.round, lambda asked: serving_payloads(phase.algorithm, best.state, asked))


def _chooses_own(phases: Sequence[Phase], index: int) -> bool:
    """Return whether sites choose their own best round in a phase. Only the last phase decides what they end with."""
    return index + 1 == len(phases) and phases[index].plan.best == "own"


def _choose_own(
    phase: Phase, folder: RunFolder, at: Progress, scores: Mapping[SiteId, Scores]
) -> tuple[Progress, bool]:
    """Update the own best rounds of the sites; keep a checkpoint for those for which this round is the best so far."""
    sites = sorted({*phase.transport.names, *phase.transport.audience})
    clusters = site_clusters(phase.algorithm, at.state, sites)
    better = improved(at.own, clusters, scores, at.round, "site" if phase.plan.guarded else "case")
    at = replace(at, own={**at.own, **better})
    if better:
        mine = replace(at, memories={i: m for i, m in at.memories.items() if i in better})
        _keep(folder, folder.own(at.round), phase, mine, versions={i: at.versions.get(i, -1) for i in better})
    return at, bool(better)


def _served_now(phase: Phase, at: Progress) -> Mapping[SiteId, Payload]:
    return serving_payloads(phase.algorithm, at.state, phase.transport.audience)


def _validate(
    phases: Sequence[Phase], folder: RunFolder, at: Progress, record: RoundRecord, due: bool = True
) -> tuple[Progress, RoundRecord]:
    """Have every site score the model; keep a checkpoint if it is the best so far. Without scores nothing changes.

    A validation that is not due, because the run pauses, is only recorded: a run that pauses ends with the same model
    as one that does not.
    """
    phase = phases[at.phase]
    plan, sent = phase.plan, _served_now(phase, at)
    scores = phase.transport.score(at.round, sent, "validation")
    if not any(scores.values()):
        return at, record
    means = {i: SiteValidation.of(s) for i, s in scores.items()}
    over: Literal["case", "site"] = "site" if plan.best == "site" or plan.guarded else "case"
    score, earliest = mean_score(scores, over), at.first + plan.best_from - 1
    record = replace(record, validation=means, measure=measure_of(scores), mean_score=score)
    if not due:
        return at, record
    eligible = not plan.best_from or at.round >= earliest
    reigns = at.best_round >= 0 and (not plan.best_from or at.best_round >= earliest)
    if plan.guarded:
        at, record, better = _judge(at, record, scores, eligible, reigns)
    else:
        better = eligible and score > (at.best_score if reigns else -1.0)
    progress = not eligible
    if better:
        at = replace(at, best_round=at.round, best_score=score)
    if eligible and _chooses_own(phases, at.phase):
        at, progress = _choose_own(phase, folder, at, scores)
    at = replace(at, waited=0 if better or progress else at.waited + 1)
    record = replace(record, best_round=at.best_round)
    record = replace(record, best_rounds={i: own.round for i, own in at.own.items() if i != STRANGER})
    if phase.plan.peek:  # for the report; nothing is chosen by it
        seen = phase.transport.score(at.round, sent, "test")
        record = replace(record, peeked={i: SiteValidation.of(s, counted=True) for i, s in seen.items() if s})
    if better:
        _keep(folder, folder.best(at.round), phase, at)
    return at, record


def _judge(
    at: Progress, record: RoundRecord, scores: Mapping[SiteId, Scores], eligible: bool, reigns: bool
) -> tuple[Progress, RoundRecord, bool]:
    """Return whether a round is better by the voices of all sites; sudden changes of scores become incidents."""
    now = judged(scores)
    means = {i: mean for i, (_, mean) in now.items()}
    found = tuple(incident(sentence, site) for site, sentence in surprises(at.judged, now))
    for each in found:
        log.warning("round %d: %s: %s", at.round, each["site"], each["what"])
    better = eligible and (not reigns or advantage(means, at.best_scores) > 0)
    at = replace(at, judged={**at.judged, **now}, best_scores=means if better else at.best_scores)
    return at, replace(record, incidents=(*record.incidents, *found)), better


def _chosen(phases: Sequence[Phase], folder: RunFolder, at: Progress) -> Progress:
    """Return a position with a best round; if no round has been scored yet, score the last one now."""
    if at.best_round < 0:
        at, _ = _validate(phases, folder, at, RoundRecord(at.round, at.phase, {}))
    if at.best_round < 0:
        raise RunError(
            f"no site judged any round of {folder.path}, so there is no best one; nothing is lost, its checkpoints are "
            "there: resume the run when a site judges that has validation cases"
        )
    return at


def _finish(
    phases: Sequence[Phase], folder: RunFolder, at: Progress, about: Mapping[str, Any], evaluate: Evaluate | None
) -> Result:
    """Export the last and the best models, evaluate the best ones, write the result."""
    at = _chosen(phases, folder, at)
    last = phases[at.phase]
    _export(last.transport, folder, "last", at.round, _served_now(last, at))
    phase, best = find_best(folder, phases, at.best_round)
    own = {i: own.round for i, own in at.own.items() if i in last.transport.audience}
    others = [i for i, round in own.items() if (round, at.phase) != (best.round, best.phase)]
    common = _common(phase, best, folder, others)
    concerned = sorted({*last.transport.names, *last.transport.audience})
    models = find_own(folder, phases, concerned) if own else _of_best(phase, best)
    transport = models.phase.transport
    sent = models.payloads(transport.audience)
    served = _export(transport, folder, "best", models.round, sent)
    validation, test = _evaluated(models, sent, served, evaluate)
    if not any((*validation.values(), *test.values())):
        raise RunError(
            f"no site judged the best model of {folder.path}, so there is no result; nothing is lost, its models and "
            "checkpoints are there: resume the run when a site judges"
        )
    moved = transport.sites.traffic()
    result = Result(
        **about,
        rounds=at.round + 1,
        best_round=best.round,
        best_phase=best.phase,
        validation=validation,
        test=test,
        incidents=tuple(phase.transport.incidents()),
        best_rounds=own,
        common={
            split: {**{i: s for i, s in scores.items() if i not in others}, **common.get(split, {})}
            for split, scores in (("validation", validation), ("test", test))
            if own
        },
        bytes_down=moved[0],
        bytes_up=moved[1],
    )
    folder.finish(result)
    return result


def _common(
    phase: Phase, best: Progress, folder: RunFolder, sites: Collection[SiteId]
) -> dict[str, Mapping[SiteId, Scores]]:
    """Export the model of the common best round and return its scores, by split, at the sites that use another model.

    Without such sites nothing is exported. The sites' memories must be those of that round.
    """
    if not sites:
        return {}
    sent = _served_now(phase, best)
    _export(phase.transport, folder, "common", best.round, sent)
    others = {i: payload for i, payload in sent.items() if i in sites}
    return {split: _scored(phase.transport, best.round, others, split) for split in ("validation", "test")}


def _scored(transport: PhaseSites, index: int, sent: Mapping[SiteId, Payload], split: str) -> dict[SiteId, Scores]:
    """Return the scores of a split without counts, which leave a hospital only with all other measures."""
    scores = transport.score(index, sent, split)
    return {i: {case: replace(s, counts={}) for case, s in cases.items()} for i, cases in scores.items()}


def _evaluated(
    models: Models, sent: Mapping[SiteId, Payload], served: Served, evaluate: Evaluate | None
) -> tuple[Mapping[SiteId, Scores], Mapping[SiteId, Scores]]:
    """Score the validation and the test cases; the split that is reported is examined by all measures on the way."""
    transport = models.phase.transport
    if evaluate is None:
        validation = _scored(transport, models.round, sent, "validation")
        return validation, transport.score(models.round, sent, "test")
    owners = () if models.phase.plan.pooled else transport.names
    test = examine(models, sent, served, "test", evaluate, owners)
    if any(test.values()):
        return _scored(transport, models.round, sent, "validation"), test
    return examine(models, sent, served, "validation", evaluate, owners), test


def examine(
    models: Models,
    sent: Mapping[SiteId, Payload],
    served: Served,
    split: str,
    evaluate: Evaluate,
    owners: Collection[SiteId] | None,
) -> Mapping[SiteId, Scores]:
    """Predict every case of a split once per model, compute all measures, and hand them to the evaluation's writer.

    Args:
        models: The models that the sites use.
        sent: Payloads of the sites whose cases are examined.
        served: The models that these sites use.
        split: The split to examine.
        evaluate: Where the measures go.
        owners: Sites whose own models are also examined on the cases of all others, if models differ and the sites
            are simulated; None for no site.

    Returns:
        The scores of every site's own model.
    """
    transport, scores = models.phase.transport, {i: dict[str, CaseScore]() for i in sent}
    across = owners is not None and transport.can_cross
    absent = [i for i in owners or () if i not in sent] if across else []  # they have a model, but no case to examine
    more = models.payloads(absent) if absent else {}
    trees = {**served.models, **(transport.serve(models.round, more).models if more else {})}
    shared = Served(trees, served.hidden).shared is not None
    rows = transport.examine(
        models.round, sent if shared else {**sent, **more}, split, evaluate.tolerance, across and not shared
    )
    first = next(rows, None)
    if first is None:  # no case in this split
        return scores
    clusters = case_clusters(models.phase.algorithm, next(iter(sent.values()), Payload()))
    with evaluate.write(split, clusters) as writer:
        for owner, site, examined in chain([first], rows):
            writer.add(SHARED if shared else owner, site, examined)
            if owner == site:
                scores.setdefault(site, {})[examined.case] = examined.score
    return scores


def _export(transport: PhaseSites, folder: RunFolder, name: str, round: int, sent: Mapping[SiteId, Payload]) -> Served:
    """Save the served models: one file if all sites use the same, else one per site, and one per group of cases."""
    served = transport.serve(round, sent, name)
    for site, models in {"": served.shared}.items() if served.shared is not None else served.models.items():
        for k, model in enumerate(models):
            parts = (name, *([site] if site else []), *([f"group-{k}"] if len(models) > 1 else []))
            folder.save_model(".".join(parts), model)
    return served
