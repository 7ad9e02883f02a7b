"""The rounds of a study, phase by phase, whatever carries the messages.

A transport is what differs between a simulation and real hospitals: it takes payloads to sites and brings replies
back. Everything else is here once: sampling, merging, validation, the best round, early stopping, checkpoints, records.
"""

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from polysite.algorithms import name_of
from polysite.algorithms.base import Algorithm, objections, offered, over, shares, told
from polysite.engines import checkpoint, memory
from polysite.engines.compress import Compress
from polysite.engines.folder import RunFolder
from polysite.engines.memory import Memory
from polysite.engines.sampling import cohort
from polysite.engines.screen import screen
from polysite.errors import ConfigError, RunError
from polysite.payload import Payload, SiteId
from polysite.site import ASIDE, Fit, Scores, quality
from polysite.tree import Tree

log = logging.getLogger("polysite")


@dataclass(frozen=True)
class Plan:
    """How long to train, how often to look, how to choose."""

    rounds: int = 30
    share: float = 1.0  # of the sites that take part in a round
    validate_every: int = 1  # rounds
    best: Literal["case", "site"] = "case"  # mean validation Dice (accuracy) over all cases, or over the sites' means
    patience: int | None = None  # stop after this many validations without a better one
    peek: bool = False  # look at the test cases whenever validating, for the report alone: the papers' "best mean"
    checkpoint_every: int = 5  # rounds
    compress: Compress = "none"  # what sites send of their models: all, 16 bits or 8 bits of every change
    wire: bool = False  # simulator: send every payload through the codec, as a network would
    pooled: bool = False  # simulator: one site holds all training cases (the centralised yardstick)

    def __post_init__(self) -> None:
        for name in ("rounds", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least one, got {getattr(self, name)}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"run.patience must be at least one, got {self.patience}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"run.share must lie in (0, 1], got {self.share}")


@dataclass(frozen=True, slots=True)
class Reply:
    payload: Payload
    fits: tuple[Fit, ...]
    seconds: float
    nbytes: int | None = None  # that crossed, where fewer did than the payload has


@dataclass(frozen=True, slots=True)
class Served:
    """What sites would use, one tree per group of their patients, as far as this side may see it."""

    models: Mapping[SiteId, tuple[Tree, ...]]
    hidden: Mapping[SiteId, int] = field(default_factory=dict)  # of sites whose own models stay there: how many
    order: Any = None  # what a network needs to have sites begin from them

    @property
    def groups(self) -> dict[SiteId, int]:
        """How many models every site has."""
        return {**{i: len(trees) for i, trees in self.models.items()}, **self.hidden}

    @property
    def shared(self) -> tuple[Tree, ...] | None:
        """The models, if they are the same everywhere."""
        first, *others = [[Payload(model=t) for t in trees] for trees in self.models.values()] or [[]]
        return None if self.hidden or any(each != first for each in others) else tuple(p["model"] for p in first)


class Transport(Protocol):
    """A way to the sites."""

    @property
    def names(self) -> tuple[SiteId, ...]:
        """The sites that train."""
        ...

    @property
    def audience(self) -> tuple[SiteId, ...]:
        """The sites that are served a model and judge it."""
        ...

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Deliver, and bring back each reply as it arrives."""
        ...

    def settle(self, heard: Collection[SiteId]) -> None:
        """These sites keep what they now remember; whoever was not heard goes back to what it remembered before."""
        ...

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Have every site judge what it would be served."""
        ...

    def serve(self, round: int, sent: Mapping[SiteId, Payload], name: str = "") -> Served:
        """The parameters that every site would use; under this name it may keep them for itself."""
        ...

    def begin(self, round: int, served: Served) -> None:
        """From this round on: this is what sites start from, and schedules start anew."""
        ...

    def memories(self) -> Mapping[SiteId, Payload]:
        """What the sites remember, as far as this side keeps it."""
        ...

    def remember(self, memories: Mapping[SiteId, Payload], versions: Mapping[SiteId, int]) -> None:
        """Give the sites their memories back after a restart; or have those that keep them go back to a version, which
        is the last round in which they were heard."""
        ...

    def retain(self, versions: Mapping[SiteId, Collection[int]]) -> None:
        """Which versions sites may be asked to go back to; they can let go of all others."""
        ...

    def incidents(self) -> Sequence[Mapping[str, Any]]:
        """What went wrong on the way since this was last asked: who was away, late, or refused what, and why."""
        ...

    def lift(self, params: Tree) -> Tree:
        """The same values where the server computes."""
        ...


@dataclass(frozen=True)
class Phase:
    """A part of a study that has an algorithm of its own; it starts from the best model of those before."""

    algorithm: Algorithm[Any]
    transport: Transport
    plan: Plan


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange, for whoever looks on."""

    index: int
    state: Any
    sent: Mapping[SiteId, Payload]
    replies: Mapping[SiteId, Reply]
    refused: Mapping[SiteId, str]  # who replied and was not heard, and why
    shares: Mapping[SiteId, float]  # how much every reply counted
    told: Mapping[str, float]  # what the algorithm says of the round


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a study stands: what a checkpoint holds."""

    round: int  # the last one that is finished
    state: Any
    memories: Mapping[SiteId, Payload]  # on disk, each is a file of its own
    best_round: int = -1
    best_score: float = -1.0
    waited: int = 0  # validations since the best, in this phase
    phase: int = 0
    first: int = 0  # the round that the phase began with
    versions: Mapping[SiteId, int] = field(default_factory=dict)  # of the memories: when each site was last heard


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is on disk of where a study stood."""

    at: Progress  # without the memories
    begins: int = 0  # of what a phase began from: its first round
    kept: tuple[SiteId, ...] = ()  # whose memory lies beside it; others keep theirs themselves


class Watch:
    """Looks on; the command line shows progress with it. Does nothing by itself."""

    def case(self, done: int, of: int, case: str) -> None: ...

    def begin(self, title: str, rounds: int, done: int, best: float) -> None: ...

    def end(self) -> None: ...

    def site(self, round: int, site: SiteId, done: int, of: int) -> None: ...

    def doing(self, site: SiteId, what: str, done: bool) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None: ...


def run(
    algorithm: Algorithm[Any],
    transport: Transport,
    params: Tree,
    plan: Plan,
    seed: int,
    *,
    resume: Progress | None = None,
    watch: Watch = Watch(),
) -> Iterator[Round]:
    """The bare rounds, from the start or after a checkpoint."""
    names, params = transport.names, transport.lift(params)
    state = resume.state if resume else algorithm.init(params, names)
    if resume:
        transport.remember(resume.memories, resume.versions)
    first, begin = (resume.first, resume.round + 1) if resume else (0, 0)
    for index in range(begin, first + plan.rounds):
        sent = algorithm.send(state, cohort(names, plan.share, seed, index))
        replies: dict[SiteId, Reply] = {}
        for site, reply in transport.train(index, sent):
            replies[site] = reply
            watch.site(index, site, len(replies), len(sent))
        refused = screen(algorithm.reply, params, sent, {i: r.payload for i, r in replies.items()})
        sound = {i: r.payload for i, r in replies.items() if i not in refused}
        refused |= objections(algorithm, state, sound)
        for site, reason in refused.items():
            log.warning("round %d: the reply of %r is refused: %s", index, site, reason)
        heard = {i: r.payload for i, r in replies.items() if i not in refused}
        transport.settle(heard)
        counted = shares(algorithm, state, heard) if heard else {}
        if heard:
            state = algorithm.merge(state, heard)
        yield Round(index, state, sent, replies, refused, counted, told(algorithm, state))
        del sent, replies, sound, heard  # models of all sites: not to be kept while those of the next round come in


def train(
    phases: Sequence[Phase],
    params: Tree,
    seed: int,
    folder: RunFolder,
    *,
    resume: Progress | None = None,
    watch: Watch = Watch(),
    about: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Run all rounds, keep the best model, write everything down; returns the result that is also in the folder,
    with what is known ``about`` the study. Rounds are counted through all phases."""
    at = resume
    if at and at.phase:
        _enter(phases, at.phase, folder)
    handed: Mapping[SiteId, int] = {}
    while True:
        at = _train(phases[at.phase if at else 0], params, seed, folder, at, handed, watch)
        if at.phase + 1 == len(phases):
            return _finish(phases, folder, at, about or {})
        at, handed = _next(phases, folder, at, params)


def _train(
    phase: Phase,
    params: Tree,
    seed: int,
    folder: RunFolder,
    at: Progress | None,
    handed: Mapping[SiteId, int],
    watch: Watch,
) -> Progress:
    """What is left of a phase; returns where it ends."""
    plan, transport, began = phase.plan, phase.transport, time.perf_counter()
    if at and _is_over(phase, at):  # it was interrupted after its last round
        transport.remember(at.memories, at.versions)
        return at
    resume, at = at, at or Progress(-1, None, {})
    for r in run(phase.algorithm, transport, params, plan, seed, resume=resume, watch=watch):
        record = _record(r, at.phase, handed if r.index == at.first else {})
        record |= {"pooled": True} if plan.pooled else {}
        record |= _incidents(transport)
        heard = {i: r.index for i in r.replies if i not in r.refused}
        versions = {**at.versions, **heard}
        at = replace(at, round=r.index, state=r.state, memories=transport.memories(), versions=versions)
        done, ended = r.index + 1 - at.first, over(phase.algorithm, r.state)
        if done % plan.validate_every == 0 or done == plan.rounds or ended:
            at = _validate(phase, folder, at, record)
        for name, value in _incidents(transport).items():
            record[name] = [*record.get(name, []), *value]
        record["elapsed"] = round(time.perf_counter() - began, 3)
        folder.append(record)
        last = _is_over(phase, at)
        if done % plan.checkpoint_every == 0 or last:
            _keep(folder, folder.round(r.index), phase, at)
        watch.round(record)
        score = record.get("mean_score")
        log.info("round %d%s", r.index + 1, "" if score is None else f": {record['measure']} {score:.4f}")
        if last and done < plan.rounds and not ended:
            log.info("stopped after round %d: %d validations without a better one", r.index + 1, at.waited)
        if last:
            break
        del r  # with all replies
    return at


def _is_over(phase: Phase, at: Progress) -> bool:
    """Whether a phase has had all its rounds, has come to its end by itself, or lost patience."""
    plan, begun = phase.plan, at.round >= at.first
    patient = plan.patience is None or hasattr(phase.algorithm, "over")  # it knows itself when it ends
    impatient = not patient and at.waited >= (plan.patience or 0)
    return at.round + 1 - at.first >= plan.rounds or impatient or (begun and over(phase.algorithm, at.state))


def _incidents(transport: Transport) -> dict[str, list[Mapping[str, Any]]]:
    found = list(transport.incidents())
    return {"incidents": found} if found else {}


def _next(
    phases: Sequence[Phase], folder: RunFolder, at: Progress, params: Tree
) -> tuple[Progress, Mapping[SiteId, int]]:
    """The beginning of the next phase, and the bytes that it took to bring the sites what they start from."""
    at = _chosen(phases, folder, at)
    index, first = at.phase + 1, at.round + 1
    best = _load_best(folder, phases, at.best_round)
    _keep(folder, folder.phase(index), phases[best.phase], best, first)
    log.info("phase %d begins from the model of round %d", index + 1, best.round)
    start, handed = _enter(phases, index, folder)
    phase = phases[index]
    state = phase.algorithm.init(phase.transport.lift(start or params), phase.transport.names)
    return replace(at, state=state, memories={}, versions={}, waited=0, phase=index, first=first), handed


def _enter(
    phases: Sequence[Phase], index: int, folder: RunFolder, everyone: Sequence[SiteId] = ()
) -> tuple[Tree, Mapping[SiteId, int]]:
    """Have the sites start from what they were served when this phase began, and the server from the model of all;
    returns that, if it can be seen here, and the bytes that went to every site. ``everyone``: whom it concerns, if not
    the sites of the phase.

    A server that is to merge models needs one to begin with; where the sites had their own, it has none.
    """
    phase = phases[index]
    begun = _load(folder, folder.phase(index), phases)
    best, before = begun.at, phases[begun.at.phase]
    if best.phase:
        _enter(phases, best.phase, folder, everyone)
    before.transport.remember(best.memories, best.versions)
    whom = everyone or sorted({*before.transport.names, *before.transport.audience})
    sent = offered(before.algorithm, best.state, whom)
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
    model = next((models[0] for models in served.models.values()), {})
    return model, {i: sent[i].nbytes for i in phase.transport.names if i in sent}


def _keep(folder: RunFolder, path: Path, phase: Phase, at: Progress, begins: int = 0) -> None:
    """Write down where a study stands, and apart from it what every site remembers."""
    name = name_of(phase.algorithm)
    memories = [Memory(i, name, at.versions.get(i, -1), content) for i, content in at.memories.items() if content]
    kept = tuple(m.site for m in memories)
    elsewhere = {i: v for i, v in at.versions.items() if i not in phase.transport.memories()}
    folder.keep(path, Checkpoint(replace(at, memories={}), begins, kept), memories, elsewhere)
    phase.transport.retain(folder.needed())


def _load(folder: RunFolder, path: Path, phases: Sequence[Phase]) -> Checkpoint:
    """What was written down, with the memories that belong to it."""
    modules = {type(phase.algorithm).__module__ for phase in phases}  # whose classes a state may hold
    lift = phases[0].transport.lift
    found: Checkpoint = checkpoint.load(path, lift, modules)
    if not isinstance(found, Checkpoint) or found.at.phase >= len(phases):
        raise RunError(f"{path} does not belong to this study")
    name = name_of(phases[found.at.phase].algorithm)
    nothing = dict.fromkeys(phases[found.at.phase].transport.names, Payload())
    known = {i: memory.load(folder.memory(path, i), i, name, found.at.versions.get(i, -1), lift) for i in found.kept}
    return replace(found, at=replace(found.at, memories={**nothing, **known}))


def find_progress(folder: RunFolder, phases: Sequence[Phase]) -> Progress | None:
    """The newest checkpoint that can be read; a damaged one is reported, set aside, and the one before is used."""
    found = folder.checkpoints()
    for path in found:
        try:
            at = _load(folder, path, phases).at
            if at.best_round >= 0:
                _load(folder, folder.best(at.best_round), phases)
            if at.phase:
                _load(folder, folder.phase(at.phase), phases)
        except RunError as problem:
            log.warning("%s; trying the checkpoint before it", problem)
            continue
        folder.set_aside(found[: found.index(path)])
        folder.rewind(at.round)
        log.info("resuming after round %d from %s", at.round + 1, path.name)
        return at
    if found:
        raise RunError(
            f"none of the checkpoints of {folder.path} can be read; nothing was changed, its log.txt says why"
        )
    folder.rewind(-1)
    log.info("no checkpoint yet: starting from round 0")
    return None


def _load_best(folder: RunFolder, phases: Sequence[Phase], round: int) -> Progress:
    """Where the study stood after its best round."""
    return _load(folder, folder.best(round), phases).at


def find_best(
    folder: RunFolder, phases: Sequence[Phase], round: int, everyone: Sequence[SiteId] = ()
) -> tuple[Phase, Progress]:
    """Where the study stood after its best round, and in which phase; the sites remember again what they did then.

    ``everyone``: whom the models concern, if not the sites of the study.
    """
    best = _load_best(folder, phases, round)
    if best.phase:
        _enter(phases, best.phase, folder, everyone)
    phases[best.phase].transport.remember(best.memories, best.versions)
    return phases[best.phase], best


def mean_score(scores: Mapping[SiteId, Scores], over: Literal["case", "site"]) -> float:
    """Mean over the labels of a case, then over all cases, or over the cases of a site and then the sites; there must
    be a case.

    >>> scores = {"a": {"1": {"WT": 1.0, "loss": 0}, "2": {"WT": 0.8, "loss": 0}}, "b": {"3": {"WT": 0.3, "loss": 0}}}
    >>> round(mean_score(scores, "case"), 3), round(mean_score(scores, "site"), 3)
    (0.7, 0.6)
    """
    sites = [[quality(c) for c in cases.values()] for cases in scores.values() if cases]
    if over == "case":
        sites = [[d for site in sites for d in site]]
    return math.fsum(math.fsum(s) / len(s) for s in sites) / len(sites)


def measure(scores: Mapping[SiteId, Scores]) -> str:
    """What the scores are: Dice, or accuracy in a classification."""
    return "accuracy" if any("accuracy" in s for cases in scores.values() for s in cases.values()) else "Dice"


def examined(result: Mapping[str, Any]) -> str:
    """Which patients a result is judged on: test, or validation where no case was kept for the test."""
    return "test" if any(result["test"].values()) else "validation"


def _record(r: Round, phase: int = 0, handed: Mapping[SiteId, int] | None = None) -> dict[str, Any]:
    def of(site: SiteId, reply: Reply) -> dict[str, Any]:
        steps = sum(f.steps for f in reply.fits)
        return {
            "loss": _finite(sum(f.loss * f.steps for f in reply.fits) / steps) if steps else None,
            "steps": steps,
            "lr_sum": sum(f.time for f in reply.fits),
            "seconds": round(reply.seconds, 4),
            "bytes_down": r.sent[site].nbytes if site in r.sent else 0,
            "bytes_up": reply.payload.nbytes if reply.nbytes is None else reply.nbytes,
            # its weight, its cost, ...
            "said": {k: _finite(v) for k, v in reply.payload.items() if isinstance(v, float)},
        }

    sites = {i: of(i, p) for i, p in r.replies.items()}
    absent = sorted(r.sent.keys() - r.replies.keys())
    more: dict[str, Any] = {"shares": dict(r.shares), **({"told": dict(r.told)} if r.told else {})}
    if handed:  # bytes that brought the sites what the phase starts from
        more["handed"] = dict(handed)
    return {"round": r.index, "phase": phase, "sites": sites, "absent": absent, "refused": dict(r.refused), **more}


def _finite(x: float) -> float | None:
    """What is no number is none in a record either: JSON has no word for it."""
    return x if math.isfinite(x) else None


def _written(scores: Mapping[SiteId, Scores]) -> dict[SiteId, Any]:
    return {i: {c: {k: _finite(v) for k, v in s.items()} for c, s in cases.items()} for i, cases in scores.items()}


def _validate(phase: Phase, folder: RunFolder, at: Progress, record: dict[str, Any]) -> Progress:
    """Have every site judge the model; remember it if it is the best so far. If nobody judges, all stays as it is."""
    sent = offered(phase.algorithm, at.state, phase.transport.audience)
    scores = phase.transport.score(at.round, sent, "validation")
    if not any(scores.values()):
        return at
    score = mean_score(scores, phase.plan.best)
    better = score > at.best_score
    best = (at.round, score, 0) if better else (at.best_round, at.best_score, at.waited + 1)
    at = replace(at, best_round=best[0], best_score=best[1], waited=best[2])
    record["validation"] = {i: _per_label(s) for i, s in scores.items()}
    record["measure"], record["mean_score"], record["best_round"] = measure(scores), score, at.best_round
    if phase.plan.peek:  # nothing is chosen by it
        seen = phase.transport.score(at.round, sent, "test")
        record["peeked"] = {i: _per_label(s) for i, s in seen.items() if s}
    if better:
        _keep(folder, folder.best(at.round), phase, at)
    return at


def _per_label(scores: Scores) -> dict[str, Any]:
    keys = next(iter(scores.values()), {})
    mean = {k: math.fsum(s[k] for s in scores.values()) / len(scores) for k in keys}
    quality = {k: v for k, v in mean.items() if k not in ASIDE}
    return {"cases": len(scores), "loss": _finite(mean.get("loss", math.nan)), "score": quality}


def _chosen(phases: Sequence[Phase], folder: RunFolder, at: Progress) -> Progress:
    """Where there is a best round; if none was judged when it was its turn, the last one has another chance."""
    if at.best_round < 0:
        at = _validate(phases[at.phase], folder, at, {})
    if at.best_round < 0:
        raise RunError(
            f"no site judged any round of {folder.path}, so there is no best one; nothing is lost, its checkpoints are "
            "there: resume the run when a site judges that has validation cases"
        )
    return at


def _finish(phases: Sequence[Phase], folder: RunFolder, at: Progress, about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Export the last and the best model, examine the best on the test cases, write the result."""
    at, last = _chosen(phases, folder, at), phases[at.phase]
    _export(last.transport, folder, "last", at.round, offered(last.algorithm, at.state, last.transport.audience))
    phase, best = find_best(folder, phases, at.best_round)
    transport = phase.transport
    sent = offered(phase.algorithm, best.state, transport.audience)
    _export(transport, folder, "best", best.round, sent)
    result = {
        **about,
        "rounds": at.round + 1,
        "best_round": best.round,
        "best_phase": best.phase,
        "validation": _written(transport.score(best.round, sent, "validation")),
        "test": _written(transport.score(best.round, sent, "test")),
    }
    if not any((*result["validation"].values(), *result["test"].values())):
        raise RunError(
            f"no site judged the best model of {folder.path}, so there is no result; nothing is lost, its models and "
            "checkpoints are there: resume the run when a site judges"
        )
    result |= _incidents(transport)  # since the last round was written down
    folder.finish(result)
    return result


def _export(transport: Transport, folder: RunFolder, name: str, round: int, sent: Mapping[SiteId, Payload]) -> None:
    """One file if all hospitals use the same parameters, one per hospital otherwise, as far as they are seen here; and
    one per group of patients."""
    served = transport.serve(round, sent, name)
    for site, models in {"": served.shared}.items() if served.shared is not None else served.models.items():
        for k, model in enumerate(models):
            parts = (name, *([site] if site else []), *([f"group-{k}"] if len(models) > 1 else []))
            folder.save_model(".".join(parts), model)
