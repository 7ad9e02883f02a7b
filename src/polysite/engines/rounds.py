"""The rounds of one phase, whatever carries the messages: cohort, turns of the sites, reply checks, merge."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polysite.algorithms import name_of
from polysite.algorithms.base import Algorithm, diagnostics, remarks, shares, site_clusters
from polysite.engines.best_round import Judged, Means
from polysite.engines.directions import Signs
from polysite.engines.guard import RoundGuard, describe
from polysite.engines.guard_state import GuardState
from polysite.engines.own_best import Own
from polysite.engines.phase_sites import PhaseSites, Reply
from polysite.engines.plan import Plan, cohort
from polysite.engines.record import RoundRecord, SiteGuard, SiteRecord, finite, incident
from polysite.engines.replies import Exchange, expected_weights, gather, stripped
from polysite.engines.secure.server import check_sites, gather_masked
from polysite.engines.secure.settings import check_algorithm
from polysite.engines.site_turn import check_steps
from polysite.engines.watch import Watch
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

log = logging.getLogger("polysite")


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange with the sites."""

    index: int
    state: Any  # after the merge
    sent: Mapping[SiteId, Payload]
    replies: Mapping[SiteId, Reply]  # restored, all that could be; without arrays unless they are kept
    refused: Mapping[SiteId, str]  # sites whose reply was not merged, and why
    shares: Mapping[SiteId, float]  # weight of every reply in the aggregate
    diagnostics: Mapping[str, float]  # numbers that the algorithm reports
    remarks: tuple[str, ...] = ()  # new sentences of the algorithm for a person
    guard: Mapping[SiteId, SiteGuard] = field(default_factory=dict)  # what the guard saw and did
    guard_state: GuardState | None = None  # None without a guard
    alarms: Sequence[tuple[SiteId, str]] = ()  # new findings of the guard
    traffic: tuple[Mapping[SiteId, int], Mapping[SiteId, int]] = ({}, {})  # bytes to every site, and from it

    def record(self, phase: int, pooled: bool) -> RoundRecord:
        """Return the record of this exchange, before any validation."""
        return RoundRecord(
            self.index,
            phase,
            sites={i: self._site(i, reply) for i, reply in self.replies.items()},
            absent=tuple(sorted(self.sent.keys() - self.replies.keys())),
            refused=dict(self.refused),
            shares=dict(self.shares),
            diagnostics=dict(self.diagnostics),
            bytes_down=dict(self.traffic[0]),
            bytes_up=dict(self.traffic[1]),
            pooled=pooled,
            incidents=(
                *(incident(sentence) for sentence in self.remarks),
                *(incident(f"its reply is refused: {why}", site) for site, why in self.refused.items()),
                *(incident(sentence, site) for site, sentence in self.alarms),
            ),
            guard=dict(self.guard),
        )

    def _site(self, site: SiteId, reply: Reply) -> SiteRecord:
        steps = sum(f.steps for f in reply.fits)
        return SiteRecord(
            loss=finite(sum(f.loss * f.steps for f in reply.fits) / steps) if steps else None,
            steps=steps,
            lr_sum=sum(f.lr_sum for f in reply.fits),
            seconds=round(reply.seconds, 4),
            numbers={k: finite(v) for k, v in reply.payload.items() if isinstance(v, float)},
            releases=reply.releases,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Position of a study: the content of a checkpoint."""

    round: int  # the last one that is finished
    state: Any
    memories: Mapping[SiteId, Payload]  # each is a file of its own on disk
    best_round: int = -1
    best_score: float = -1.0
    waited: int = 0  # validations since the best, in this phase
    phase: int = 0
    first: int = 0  # round with which the phase began
    versions: Mapping[SiteId, int] = field(default_factory=dict)  # of the memories: last round merged, by site
    own: Mapping[SiteId, Own] = field(default_factory=dict)  # best round of every site, with ``run.best = "own"``
    guard: GuardState | None = None
    best_scores: Means = field(default_factory=dict)  # of the sites in the best round, with a guard
    judged: Judged = field(default_factory=dict)  # of the last validation, with a guard


def run_rounds(
    algorithm: Algorithm[Any],
    transport: PhaseSites,
    params: Tree,
    plan: Plan,
    seed: int,
    *,
    resume: Progress | None = None,
    watch: Watch = Watch(),
    keep_replies: bool = True,
) -> Iterator[Round]:
    """Yield the rounds of a phase, from its start or after a checkpoint.

    With ``keep_replies`` every round has the models that its sites replied. Without, it has only their numbers, and
    where the algorithm allows it, models are summed as they arrive (``replies.py``).
    """
    check_steps(algorithm, name_of(algorithm), plan.outgoing)
    names, params = transport.names, transport.lift(params)
    masked = plan.secure.on and bool(algorithm.reply)  # of a method that sends nothing, nothing is masked
    if masked:
        check_algorithm(algorithm)
        check_sites(plan.secure, len(cohort(names, plan.share, seed, 0)))
    state = resume.state if resume else algorithm.init(params, names)
    if resume:
        transport.remember(resume.memories, resume.versions)
    first, begin = (resume.first, resume.round + 1) if resume else (0, 0)
    guarding = (resume.guard if resume else None) or GuardState() if plan.guarded else None
    signs = Signs(transport.secret)
    silent: Collection[SiteId] = ()  # sites of the round before that were absent or refused; they may be again
    for index in range(begin, first + plan.rounds):
        sent = algorithm.send(state, cohort(names, plan.share, seed, index))
        guard = None
        if guarding is not None:
            clusters = site_clusters(algorithm, state, sorted(sent))
            guard = RoundGuard(plan.guard, guarding, algorithm.reply, sent, signs, clusters)
        counter = partial(watch.site, index, of=len(sent))
        exchange = Exchange(algorithm, transport, params, plan.outgoing, index, sent, counter, guard)
        expected = None if keep_replies else expected_weights(exchange)
        if expected is not None:
            expected = {i: weight for i, weight in expected.items() if i not in silent}
        replies = gather_masked(exchange, plan.secure) if masked else gather(exchange, state, expected)
        heard = replies.heard
        silent = sent.keys() - heard.keys()
        for site, reason in replies.refused.items():
            log.warning("round %d: the reply of %r is refused: %s", index, site, reason)
        transport.settle(heard)
        counted = shares(algorithm, state, heard) if heard and not masked else {}
        known = remarks(algorithm, state)
        if heard:
            state = algorithm.merge(state, replies.merged)
        held = not keep_replies and replies.total is None and replies.masked is None  # else they have no arrays left
        came = {i: stripped(r) for i, r in replies.all.items()} if held else dict(replies.all)
        refused = replies.refused
        seen: Mapping[SiteId, SiteGuard] = {}
        alarms: Sequence[tuple[SiteId, str]] = ()
        if guard is not None:
            guarding, seen, alarms = guard.close(heard)
            interventions = (line for site, each in seen.items() for line in describe(site, each))
            for line in (*interventions, *(f"{site}: {sentence}" for site, sentence in alarms)):
                log.warning("round %d: guard: %s", index, line)
        new = (*replies.remarks, *(sentence for sentence in remarks(algorithm, state) if sentence not in known))
        del heard, replies  # release the models of the sites
        for sentence in new:
            log.warning("round %d: %s", index, sentence)
        told = diagnostics(algorithm, state)
        moved = transport.sites.traffic()
        yield Round(index, state, sent, came, refused, counted, told, new, seen, guarding, alarms, moved)
        del sent, exchange, came, guard  # before the next round's arrive
