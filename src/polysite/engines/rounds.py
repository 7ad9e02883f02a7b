"""The rounds of a study, whatever carries the messages.

A transport is what differs between a simulation and real hospitals: it takes payloads to sites and brings replies
back. Everything else is here once: sampling, merging, validation, the best round, early stopping, checkpoints, records.
"""

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from polysite.algorithms.base import Algorithm, shares, told
from polysite.engines import checkpoint
from polysite.engines.folder import RunFolder
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
    checkpoint_every: int = 5  # rounds
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

    def serve(self, round: int, sent: Mapping[SiteId, Payload]) -> Mapping[SiteId, tuple[Tree, ...]]:
        """The parameters that every site would use, one tree per group of its patients."""
        ...

    def memories(self) -> Mapping[SiteId, Payload]:
        """What the sites remember, as far as this side keeps it."""
        ...

    def remember(self, memories: Mapping[SiteId, Payload]) -> None:
        """Give the sites their memories back after a restart."""
        ...

    def lift(self, params: Tree) -> Tree:
        """The same values where the server computes."""
        ...


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
    memories: Mapping[SiteId, Payload]
    best_round: int = -1
    best_score: float = -1.0
    waited: int = 0  # validations since the best


class Watch:
    """Looks on; the command line shows progress with it. Does nothing by itself."""

    def case(self, done: int, of: int, case: str) -> None: ...

    def begin(self, title: str, rounds: int, done: int, best: float) -> None: ...

    def end(self) -> None: ...

    def site(self, round: int, site: SiteId, done: int, of: int) -> None: ...

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
        transport.remember(resume.memories)
    for index in range(resume.round + 1 if resume else 0, plan.rounds):
        sent = algorithm.send(state, cohort(names, plan.share, seed, index))
        replies: dict[SiteId, Reply] = {}
        for site, reply in transport.train(index, sent):
            replies[site] = reply
            watch.site(index, site, len(replies), len(sent))
        refused = screen(algorithm.reply, params, sent, {i: r.payload for i, r in replies.items()})
        for site, reason in refused.items():
            log.warning("round %d: the reply of %r is refused: %s", index, site, reason)
        heard = {i: r.payload for i, r in replies.items() if i not in refused}
        transport.settle(heard)
        counted = shares(algorithm, state, heard) if heard else {}
        if heard:
            state = algorithm.merge(state, heard)
        yield Round(index, state, sent, replies, refused, counted, told(algorithm, state))


def train(
    algorithm: Algorithm[Any],
    transport: Transport,
    params: Tree,
    plan: Plan,
    seed: int,
    folder: RunFolder,
    *,
    resume: Progress | None = None,
    watch: Watch = Watch(),
    about: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Run all rounds, keep the best model, write everything down; returns the result that is also in the folder,
    with what is known ``about`` the study."""
    at = resume or Progress(-1, None, {})
    if resume and _patience_is_out(plan, at):  # it was interrupted after its last round
        transport.remember(at.memories)
        return _finish(algorithm, transport, folder, at, about or {})
    began = time.perf_counter()
    for r in run(algorithm, transport, params, plan, seed, resume=resume, watch=watch):
        record = _record(r)
        at = Progress(r.index, r.state, transport.memories(), at.best_round, at.best_score, at.waited)
        last = r.index == plan.rounds - 1
        if (r.index + 1) % plan.validate_every == 0 or last:
            at = _validate(algorithm, transport, plan, folder, at, record)
        record["elapsed"] = round(time.perf_counter() - began, 3)
        folder.append(record)
        stop = _patience_is_out(plan, at)
        if (r.index + 1) % plan.checkpoint_every == 0 or last or stop:
            folder.keep(r.index, at)
        watch.round(record)
        if stop:
            log.info("stopped after round %d: %d validations without a better one", r.index, at.waited)
            break
    return _finish(algorithm, transport, folder, at, about or {})


def _patience_is_out(plan: Plan, at: Progress) -> bool:
    return plan.patience is not None and at.waited >= plan.patience


def find_progress(folder: RunFolder, transport: Transport, algorithm: Algorithm[Any]) -> Progress | None:
    """The newest checkpoint that can be read; a damaged one is reported, set aside, and the one before is used."""
    found, module = folder.checkpoints(), type(algorithm).__module__
    for path in found:
        try:
            at: Progress = checkpoint.load(path, transport.lift, module)
            if at.best_round >= 0:
                checkpoint.load(folder.best(at.best_round), module=module)
        except RunError as problem:
            log.warning("%s; trying the checkpoint before it", problem)
            continue
        folder.set_aside(found[: found.index(path)])
        folder.rewind(at.round)
        log.info("resuming after round %d from %s", at.round, path.name)
        return at
    if found:
        raise RunError(
            f"none of the checkpoints of {folder.path} can be read; nothing was changed, its log.txt says why"
        )
    folder.rewind(-1)
    log.info("no checkpoint yet: starting from round 0")
    return None


def find_best(folder: RunFolder, transport: Transport, algorithm: Algorithm[Any], round: int) -> Progress:
    """Where the study stood after its best round; the sites remember again what they did then."""
    best: Progress = checkpoint.load(folder.best(round), transport.lift, type(algorithm).__module__)
    transport.remember(best.memories)
    return best


def mean_score(scores: Mapping[SiteId, Scores], over: Literal["case", "site"]) -> float:
    """Mean over the labels of a case, then over all cases, or over the cases of a site and then the sites.

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


def _record(r: Round) -> dict[str, Any]:
    def of(site: SiteId, reply: Reply) -> dict[str, Any]:
        steps = sum(f.steps for f in reply.fits)
        return {
            "loss": sum(f.loss * f.steps for f in reply.fits) / steps if steps else None,
            "steps": steps,
            "lr_sum": sum(f.time for f in reply.fits),
            "seconds": round(reply.seconds, 4),
            "bytes_down": r.sent[site].nbytes if site in r.sent else 0,
            "bytes_up": reply.payload.nbytes,
            "said": {k: v for k, v in reply.payload.items() if isinstance(v, float)},  # its weight, its cost, ...
        }

    sites = {i: of(i, p) for i, p in r.replies.items()}
    absent = sorted(r.sent.keys() - r.replies.keys())
    more = {"shares": dict(r.shares), **({"told": dict(r.told)} if r.told else {})}
    return {"round": r.index, "sites": sites, "absent": absent, "refused": dict(r.refused), **more}


def _validate(
    algorithm: Algorithm[Any], transport: Transport, plan: Plan, folder: RunFolder, at: Progress, record: dict[str, Any]
) -> Progress:
    """Have every site judge the model; remember it if it is the best so far."""
    sent = algorithm.send(at.state, transport.audience)
    scores = transport.score(at.round, sent, "validation")
    score = mean_score(scores, plan.best)
    better = score > at.best_score
    best = (at.round, score, 0) if better else (at.best_round, at.best_score, at.waited + 1)
    at = Progress(at.round, at.state, at.memories, *best)
    record["validation"] = {i: _per_label(s) for i, s in scores.items()}
    record["measure"], record["mean_score"], record["best_round"] = measure(scores), score, at.best_round
    if better:
        folder.keep_best(at.round, at)
    return at


def _per_label(scores: Scores) -> dict[str, Any]:
    keys = next(iter(scores.values()), {})
    mean = {k: math.fsum(s[k] for s in scores.values()) / len(scores) for k in keys}
    quality = {k: v for k, v in mean.items() if k not in ASIDE}
    return {"cases": len(scores), "loss": mean.get("loss"), "score": quality}


def _finish(
    algorithm: Algorithm[Any], transport: Transport, folder: RunFolder, at: Progress, about: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Export the last and the best model, examine the best on the test cases, write the result."""
    _export(transport, folder, "last", at.round, algorithm.send(at.state, transport.audience))
    best = find_best(folder, transport, algorithm, at.best_round)
    sent = algorithm.send(best.state, transport.audience)
    _export(transport, folder, "best", best.round, sent)
    result = {
        **about,
        "rounds": at.round + 1,
        "best_round": best.round,
        "validation": transport.score(best.round, sent, "validation"),
        "test": transport.score(best.round, sent, "test"),
    }
    folder.finish(result)
    return result


def _export(transport: Transport, folder: RunFolder, name: str, round: int, sent: Mapping[SiteId, Payload]) -> None:
    """One file if all hospitals use the same parameters, one per hospital (and group of patients) otherwise."""
    served = {i: [Payload(model=t) for t in trees] for i, trees in transport.serve(round, sent).items()}
    first = next(iter(served.values()))
    if len(first) == 1 and all(models == first for models in served.values()):
        folder.save_model(name, first[0]["model"])
        return
    for site, models in served.items():
        for k, model in enumerate(models):
            folder.save_model(f"{name}.{site}" if len(models) == 1 else f"{name}.{site}.{k}", model["model"])
