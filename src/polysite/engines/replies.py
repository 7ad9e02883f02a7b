"""The replies of one round at the server: received, restored, checked, and held or summed as they arrive.

An algorithm with ``needs = "sum"`` is given one reply that stands for all: the mean of the models by weight, and the
sum of the weights. The mean is summed in the order of the sites' names while the replies arrive, so the server holds
the sum and one reply (and replies that arrive before their turn), whatever the number of sites.

The share of a reply in a mean depends on the weights of all replies. They are known beforehand from the sites' numbers
of cases. If another weight arrives, or a reply is missing or refused, the sum is discarded and the sites deliver the
replies once more, now with known weights. So the result has the bits of a mean over held replies.
Real hospitals reply in any order, and some not at all: ``PhaseSites`` stores their replies in memory or on disk,
announces no weights, and delivers them a second time in the order of the sites' names.

A guard (``guard.py``) measures and limits every reply that passes the checks. In the first round of a phase it needs
all replies to know what is usual, so the sum waits for the second delivery.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polysite import tree
from polysite.algorithms.base import Algorithm, is_summable, objections
from polysite.engines.guard import RoundGuard
from polysite.engines.phase_sites import PhaseSites, Reply
from polysite.engines.reply_checks import Look, judge, look
from polysite.engines.site_turn import OutgoingStep, restore_reply
from polysite.errors import PayloadError
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

Weights = Mapping[SiteId, float]


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies of one round."""

    all: Mapping[SiteId, Reply]  # restored, all that could be; without arrays if they were summed
    refused: Mapping[SiteId, str]  # sites whose reply must not be merged, and why
    total: Tree | None = None  # mean of the models by weight, if they were summed
    limited: Mapping[SiteId, Payload] = field(default_factory=dict)  # held replies as the guard left them
    weights: Weights = field(default_factory=dict)  # of the replies that count, if the guard changed any
    masked: Payload | None = None  # the one reply that stands for all, if they came under masks (``secure/``)
    remarks: tuple[str, ...] = ()  # sentences for a person

    @property
    def heard(self) -> dict[SiteId, Payload]:
        """The replies that count."""
        heard = {i: self.limited.get(i, r.payload) for i, r in self.all.items() if i not in self.refused}
        return {i: Payload(**{**p, "weight": self.weights[i]}) if i in self.weights else p for i, p in heard.items()}

    @property
    def merged(self) -> dict[SiteId, Payload]:
        """The replies for ``merge``: those that count, or one that stands for them."""
        if self.masked is not None:
            return {min(self.heard): self.masked}
        if self.total is None:
            return self.heard
        weight = sum(weights_of(self.heard).values())
        return {min(self.heard): Payload(model=self.total, weight=weight)}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round as far as it is known before any reply."""

    algorithm: Algorithm[Any]
    transport: PhaseSites
    params: Tree  # a tree with the names, shapes and types of the model
    steps: tuple[OutgoingStep, ...]
    round: int
    sent: Mapping[SiteId, Payload]
    arrived: Callable[[SiteId, int], None]  # called with every site that replied, and how many have
    guard: RoundGuard | None = None


class Sum:
    """Running mean of models, in the order of the sites' names, for the weights that are expected.

    A guard decides by which weights replies with the expected weights are averaged.
    """

    def __init__(self, weights: Weights, guard: RoundGuard | None = None):
        self.weights = dict(sorted(weights.items()))
        self.total: Tree | None = None
        self._given = self.weights if guard is None else guard.weights(self.weights)
        self._whole = sum(self._given.values())
        self._waiting = list(reversed(self.weights))  # sites whose reply is not added, the next one last
        self._early: dict[SiteId, Tree] = {}  # models that arrived before their turn
        self._failed = False

    def add(self, site: SiteId, sound: bool, payload: Payload) -> None:
        """Add a reply. That of a site without an expected weight is ignored, as long as it is not sound."""
        weight = weights_of({site: payload})[site] if sound else None
        twice = sound and (site in self._early or site not in self._waiting)
        if self._failed or weight != self.weights.get(site) or twice:
            self._failed, self.total, self._early = True, None, {}
        elif sound:
            self._early[site] = payload["model"]
            while self._waiting and self._waiting[-1] in self._early:
                name = self._waiting.pop()
                self.total = tree.add_share(self.total, self._early.pop(name), self._given[name] / self._whole)

    def is_mean_of(self, replies: Mapping[SiteId, Payload]) -> bool:
        """Whether the sum is the mean of these replies."""
        return not self._failed and not self._waiting and self.weights == weights_of(replies)


def weights_of(replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
    """Return the weights of replies in a mean, in the order of the sites' names."""
    return {i: float(replies[i].get("weight", 1.0)) for i in sorted(replies)}


def expected_weights(exchange: Exchange) -> dict[SiteId, float] | None:
    """Return the weights that the sites will reply; None if the replies of this round cannot be summed.

    None of them is expected while a guard has no limits: replies are summed when they are delivered again.
    """
    algorithm, sizes = exchange.algorithm, exchange.transport.sizes
    if not is_summable(algorithm):
        return None
    if exchange.guard is not None and not exchange.guard.settled:
        return {}
    sizes = sizes if algorithm.reply.get("weight") == "count" else dict.fromkeys(sizes, 1)
    factor = {i: float(p.get("factor", 1.0)) if "weight" in algorithm.reply else 1.0 for i, p in exchange.sent.items()}
    return {i: sizes[i] * factor[i] for i in sorted(exchange.sent) if i in sizes}


def gather(exchange: Exchange, state: Any, expected: Weights | None) -> Replies:
    """Receive the replies of a round. With ``expected`` weights their models are summed as they arrive."""
    if expected is None:
        return _hold(exchange, state, exchange.transport.train(exchange.round, exchange.sent))
    replies, running = _sum(exchange, expected)
    if exchange.guard is not None:
        exchange.guard.settle(replies.heard)
    if not replies.heard or running.is_mean_of(replies.heard):
        return _weighted(exchange, replace(replies, total=running.total))
    known = weights_of(replies.heard)
    sent = {i: p for i, p in exchange.sent.items() if i in known}
    exchange = replace(exchange, arrived=lambda site, count: None)
    again, running = _sum(replace(exchange, sent=sent), known, repeat=True)
    if running.is_mean_of(again.heard):
        return _weighted(exchange, replace(replies, total=running.total))
    # a GPU may round differently
    return _hold(exchange, state, exchange.transport.repeat(exchange.round, exchange.sent))


def _weighted(exchange: Exchange, replies: Replies) -> Replies:
    """Return the replies with the weights that a guard gives them."""
    if exchange.guard is None or "weight" not in exchange.algorithm.reply:
        return replies
    known = weights_of(replies.heard)
    given = exchange.guard.weights(known)
    return replies if given == known else replace(replies, weights=given)


def stripped(reply: Reply) -> Reply:
    """Return a reply without its arrays: the numbers that a record needs."""
    numbers = {k: v for k, v in reply.payload.items() if isinstance(v, float)}
    fits = tuple(replace(fit, params={}, twin={}, personal={}) for fit in reply.fits)
    return replace(reply, payload=Payload(**numbers), fits=fits)


def _hold(exchange: Exchange, state: Any, arriving: Iterator[tuple[SiteId, Reply]]) -> Replies:
    """Receive all replies, then check them."""
    replies: dict[SiteId, Reply] = {}
    broken: dict[SiteId, str] = {}
    for site, reply, problem in _restored(exchange, arriving):
        replies[site] = reply
        if problem is not None:
            broken[site] = problem
        exchange.arrived(site, len(replies))
    looks = {i: _look(exchange, i, r.payload) for i, r in replies.items() if i not in broken}
    refused = judge(exchange.params, exchange.sent, looks) | broken
    sound = {i: r.payload for i, r in replies.items() if i not in refused}
    refused |= objections(exchange.algorithm, state, sound)
    sound = {i: p for i, p in sound.items() if i not in refused}
    limited: dict[SiteId, Payload] = {}
    if exchange.guard is not None:
        for site, payload in sound.items():
            exchange.guard.measure(site, payload)
        exchange.guard.settle(sound)
        limited = {i: exchange.guard.limit(i, p) for i, p in sound.items()}
    return _weighted(exchange, Replies(replies, refused, limited=limited))


def _sum(exchange: Exchange, expected: Weights, repeat: bool = False) -> tuple[Replies, Sum]:
    """Check and sum every reply as it arrives; only its numbers are kept."""
    running, guard = Sum(expected, exchange.guard), exchange.guard
    replies: dict[SiteId, Reply] = {}
    broken: dict[SiteId, str] = {}
    looks: dict[SiteId, Look] = {}
    deliver = exchange.transport.repeat if repeat else exchange.transport.train
    for site, reply, problem in _restored(exchange, deliver(exchange.round, exchange.sent)):
        if problem is None:
            looks[site] = _look(exchange, site, reply.payload)
        else:
            broken[site] = problem
        payload, sound = reply.payload, problem is None and looks[site].problem is None
        if guard is not None and sound:
            guard.measure(site, payload)
            payload = guard.limit(site, payload)
        running.add(site, sound, payload)
        replies[site] = stripped(reply)
        exchange.arrived(site, len(replies))
        del reply, payload  # before the next site trains
    return Replies(replies, judge(exchange.params, exchange.sent, looks) | broken), running


def _look(exchange: Exchange, site: SiteId, reply: Payload) -> Look:
    reported = exchange.transport.reported.get(site)
    return look(exchange.algorithm.reply, exchange.params, exchange.sent.get(site), reply, reported)


def _restored(
    exchange: Exchange, arriving: Iterator[tuple[SiteId, Reply]]
) -> Iterator[tuple[SiteId, Reply, str | None]]:
    """Yield every reply with the outgoing steps reversed, and why that was impossible."""
    for site, reply in arriving:
        sent = exchange.sent.get(site, Payload())
        outcome: tuple[SiteId, Reply, str | None]
        try:
            payload = restore_reply(exchange.algorithm, sent, reply.payload, exchange.steps)
            outcome = site, replace(reply, payload=payload.each(exchange.transport.lift)), None
            del payload
        except PayloadError as problem:
            outcome = site, replace(reply, payload=Payload()), str(problem)
        del reply
        yield outcome
        del outcome  # before the next site trains
