"""Hostile hospitals for tests and for ``bench/attacks.py``: a simulated federation in which some sites attack.

An attack changes what a hostile site sends: its model, its weight, its scores, or the labels that it trains on.
Attackers that know the others' replies (``drift``, ``aware``) see them before they reply.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from polysite import tree
from polysite.engines.phase_sites import Reply
from polysite.engines.simulator import Simulator
from polysite.payload import Payload, SiteId
from polysite.site import CaseScore, Scores
from polysite.tree import Tree

LIE = 900  # factor of a claimed number of cases
CLAIMED = 2000  # cases whose scores are claimed
COSINE = 0.5  # of the attacker that knows the guard with the mean of the others: of 0.05, 0.5 and 0.8 what costs most
AWAKE = 4  # round in which a sleeper begins to attack


@dataclass(frozen=True)
class View:
    """What an attacker knows when it replies."""

    site: SiteId
    round: int
    sent: Tree  # the model that it was sent
    own: Tree  # the change that honest training gave
    others: Mapping[SiteId, Tree] = field(default_factory=dict)  # changes of the honest sites


Change = Callable[[View], Tree]


def flip(factor: float) -> Change:
    """Return the attack with the opposite of the honest change, so many times as long."""
    return lambda view: tree.scale(view.own, -factor)


def noise(view: View) -> Tree:
    """Return random numbers, three times as long as the honest change."""
    random = np.random.default_rng([view.round, *view.site.encode()])

    def like(x):
        drawn = random.standard_normal(tuple(x.shape))
        return x.new_tensor(drawn) if hasattr(x, "new_tensor") else drawn.astype(x.dtype)

    drawn = tree.map(like, view.own)
    return tree.scale(drawn, 3 * tree.norm(view.own) / tree.norm(drawn))


def drift(view: View, z: float = 1.5) -> Tree:
    """Return the mean of the others minus ``z`` standard deviations in every coordinate ("a little is enough")."""
    rows = [view.others[i] for i in sorted(view.others)]
    middle = tree.mean(rows)
    squares = tree.mean([tree.map(lambda x, m: (x - m) ** 2, row, middle) for row in rows])
    return tree.map(lambda m, s: m - z * s**0.5, middle, squares)


def aware(view: View, cosine: float = COSINE) -> Tree:
    """Return a change as long as the others' and partly aligned with them, but always to the same side.

    The component along the mean of the others hides the rest, which undoes what was learnt. Its scores lie, too.
    """
    rows = [view.others[i] for i in sorted(view.others)]
    usual = sorted(tree.norm(row) for row in rows)[len(rows) // 2]
    middle = tree.mean(rows)
    middle = tree.scale(middle, 1 / tree.norm(middle))
    pull = tree.scale(view.sent, -1.0)
    side = tree.map(lambda p, m, c=tree.dot(pull, middle): p - c * m, pull, middle)
    side = tree.scale(side, (1 - cosine**2) ** 0.5 / tree.norm(side))
    return tree.scale(tree.map(lambda s, m: s + cosine * m, side, middle), usual)


CHANGES: Mapping[str, Change | None] = {
    "sign flip": flip(10.0),
    "quiet flip": flip(1.0),
    "scaled update": flip(-100.0),
    "label flip": None,  # of the training cases
    "noise": noise,
    "free rider": lambda view: tree.scale(noise(view), 0.01),  # next to nothing
    "weight lie": flip(1.0),  # with a large number of cases, from the beginning
    "score lie": None,
    "inlier drift": drift,
    "aware": aware,  # with false scores
    "sleeper": lambda view: flip(-1.0 if view.round < AWAKE else 1.0)(view),  # when directions are compared no more
}
ATTACKS = tuple(CHANGES)


class Hostile(Simulator):
    """A simulation in which some sites attack."""

    attack: str = ""  # one of ``ATTACKS``; empty for none
    hostile: frozenset[SiteId] = frozenset()
    liked: int = 0  # first round whose model a liar praises; it condemns all other models

    def attacked(self, attack: str, hostile: Collection[SiteId], liked: int = 0) -> "Hostile":
        """Set the attack; return this transport."""
        self.attack, self.hostile, self.liked = attack, frozenset(hostile), liked
        self.replied: dict[SiteId, Tree] = {}  # models that hostile sites have sent last
        return self

    @property
    def sizes(self) -> Mapping[SiteId, int]:
        """Number of training cases that every site claims."""
        lie = LIE if self.attack == "weight lie" else 1
        return {i: n * (lie if i in self.hostile else 1) for i, n in super().sizes.items()}

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Let each site take its turn; hostile ones come last, and know the replies of the others."""
        change = CHANGES.get(self.attack)
        honest = dict(super().train(round, {i: p for i, p in sent.items() if i not in self.hostile}))
        changes = {i: _change(sent[i], r.payload) for i, r in honest.items()} if change else {}
        replies = dict(honest)
        for site, reply in super().train(round, {i: p for i, p in sent.items() if i in self.hostile}):
            payload = reply.payload
            if change is not None:
                start = tree.trained(sent[site]["model"])
                moved = tree.add(start, change(View(site, round, start, _change(sent[site], payload), changes)))
                payload = Payload(**{**payload, "model": {**payload["model"], **moved}})
                self.replied[site] = moved
            if self.attack == "weight lie" and "weight" in payload:
                payload = Payload(**{**payload, "weight": payload["weight"] * LIE})
            replies[site] = replace(reply, payload=payload)
        yield from ((site, replies[site]) for site in sent)

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Score models; a liar claims perfect scores of one round, and bad ones of all others.

        The attacker that knows the guard calls a model as much worse than its own as it is better.
        """
        scores = dict(super().score(round, sent, split))
        for site in self.hostile & scores.keys() if split == "validation" else ():
            if self.attack == "score lie":
                value = 0.999 if round == self.liked else 0.001
                names = next((tuple(s.labels) for s in scores[site].values()), ())
                claimed = CaseScore(dict.fromkeys(names, value), loss=1 - value)
                scores[site] = {f"{site}-{k}": claimed for k in range(CLAIMED)}
            if self.attack == "aware":
                got = sent[site]
                own = Payload(**{**got, "model": {**got["model"], **self.replied.get(site, {})}})
                middle = super().score(round, {site: own}, split)[site]
                scores[site] = {k: _mirrored(s, middle[k]) for k, s in scores[site].items()}
        return scores


def _mirrored(score: CaseScore, middle: CaseScore) -> CaseScore:
    labels = {k: min(max(2 * middle.labels[k] - x, 0.0), 1.0) for k, x in score.labels.items()}
    return replace(score, labels=labels, loss=max(2 * middle.loss - score.loss, 0.0))


def _change(sent: Payload, reply: Payload) -> Tree:
    return tree.sub(tree.trained(reply["model"]), tree.trained(sent["model"]))
