"""Hostile hospitals for tests and for ``bench/attacks.py``: a simulated federation in which some sites attack.

An attack changes what a hostile site sends: its model, its weight, its scores, or the labels that it trains on.
Attackers that know the others' replies (``drift``, ``aware``) see them before they reply.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from polysite import tree
from polysite.engines.simulator import Simulator
from polysite.engines.transport import Reply
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
    sent: Tree
    """The model that it was sent."""
    own: Tree
    """The change that honest training gave."""
    others: Mapping[SiteId, Tree] = field(default_factory=dict)
    """Changes of the honest sites."""


Change = Callable[[View], Tree]


def sign_flip(view: View, scale: float = 10.0) -> Tree:
    """Return the opposite of the honest change, ten times as long."""
    return tree.scale(view.own, -scale)


def quiet_flip(view: View) -> Tree:
    """Return the opposite of the honest change, of its length."""
    return tree.scale(view.own, -1.0)


def scaled(view: View) -> Tree:
    """Return the honest change, a hundred times as long."""
    return tree.scale(view.own, 100.0)


def noise(view: View) -> Tree:
    """Return random numbers, three times as long as the honest change."""
    random = np.random.default_rng([view.round, *view.site.encode()])
    drawn = tree.map(lambda x: _like(x, random.standard_normal(tuple(x.shape))), view.own)
    return tree.scale(drawn, 3 * tree.norm(view.own) / tree.norm(drawn))


def free_rider(view: View) -> Tree:
    """Return next to nothing: the model that was sent, with a little noise."""
    return tree.scale(noise(view), 0.01)


def drift(view: View, z: float = 1.5) -> Tree:
    """Return the mean of the others minus ``z`` standard deviations in every coordinate ("a little is enough")."""
    rows = [view.others[i] for i in sorted(view.others)]
    middle = tree.mean(rows)
    squares = tree.mean([tree.map(lambda x, m: (x - m) ** 2, row, middle) for row in rows])
    return tree.map(lambda m, s: m - z * s**0.5, middle, squares)


def aware(view: View, cosine: float = COSINE) -> Tree:
    """Return a change as long as the others' and partly aligned with them, but always to the same side.

    It knows what the guard looks at: norm, direction, and harm to the validation cases of the others. The component
    along the mean of the others hides the rest, which pulls every weight towards zero and so undoes what was learnt.
    As a juror it lies: of the two models that it is asked about it calls the better one the worse one, by as much, and
    it claims to have learnt a lot, so that its ballot has the largest weight.
    """
    rows = [view.others[i] for i in sorted(view.others)]
    usual = sorted(tree.norm(row) for row in rows)[len(rows) // 2]
    middle = tree.mean(rows)
    middle = tree.scale(middle, 1 / tree.norm(middle))
    pull = tree.scale(view.sent, -1.0)
    side = tree.map(lambda p, m, c=tree.dot(pull, middle): p - c * m, pull, middle)
    side = tree.scale(side, (1 - cosine**2) ** 0.5 / tree.norm(side))
    return tree.scale(tree.map(lambda s, m: s + cosine * m, side, middle), usual)


def sleeper(view: View) -> Tree:
    """Return the honest change in the first rounds, and its opposite when the comparison of directions has ended."""
    return view.own if view.round < AWAKE else quiet_flip(view)


CHANGES: Mapping[str, Change | None] = {
    "sign flip": sign_flip,
    "quiet flip": quiet_flip,
    "scaled update": scaled,
    "label flip": None,  # of the training cases
    "noise": noise,
    "free rider": free_rider,
    "weight lie": quiet_flip,  # with a large number of cases, from the beginning
    "score lie": None,
    "inlier drift": drift,
    "aware": aware,  # with false scores
    "sleeper": sleeper,
}
ATTACKS = tuple(CHANGES)


class Hostile(Simulator):
    """A simulation in which some sites attack.

    Args:
        attack: Name of the attack, from ``ATTACKS``; empty for none.
        hostile: The sites that attack.
        liked: First round whose model a liar praises; it condemns all other models.
    """

    attack: str = ""
    hostile: frozenset[SiteId] = frozenset()
    liked: int = 0

    @cached_property
    def replied(self) -> dict[SiteId, Tree]:
        """Models that hostile sites have sent last."""
        return {}

    def attacked(self, attack: str, hostile: Collection[SiteId], liked: int = 0) -> "Hostile":
        """Set the attack; return this transport."""
        self.attack, self.hostile, self.liked = attack, frozenset(hostile), liked
        return self

    @property
    def sizes(self) -> Mapping[SiteId, int]:
        """Number of training cases that every site claims."""
        lie = LIE if self.attack == "weight lie" else 1
        return {i: n * (lie if i in self.hostile else 1) for i, n in super().sizes.items()}

    def train(self, round: int, sent: Mapping[SiteId, Payload]) -> Iterator[tuple[SiteId, Reply]]:
        """Let each site take its turn; hostile ones come last, and know the replies of the others."""
        change, honest = CHANGES.get(self.attack), dict[SiteId, Reply]()
        for site, reply in super().train(round, {i: p for i, p in sent.items() if i not in self.hostile}):
            honest[site] = reply
        changes = {i: _change(sent[i], r.payload) for i, r in honest.items()} if change else {}
        replies = dict(honest)
        for site, reply in super().train(round, {i: p for i, p in sent.items() if i in self.hostile}):
            payload = reply.payload
            if change is not None:
                start = sent[site]["model"]
                view = View(site, round, tree.trained(start), _change(sent[site], payload), changes)
                moved = tree.add(tree.trained(start), change(view))
                payload = Payload(**{**payload, "model": {**payload["model"], **moved}})
                self.replied[site] = moved
            if self.attack == "weight lie" and "weight" in payload:
                payload = Payload(**{**payload, "weight": payload["weight"] * LIE})
            replies[site] = replace(reply, payload=payload)
        yield from ((site, replies[site]) for site in sent)

    def score(self, round: int, sent: Mapping[SiteId, Payload], split: str) -> Mapping[SiteId, Scores]:
        """Score models; a liar claims perfect scores of one round, and bad ones of all others.

        The attacker that knows the guard lies to the jury.
        """
        scores = dict(super().score(round, sent, split))
        if self.attack == "score lie" and split == "validation":
            value = 0.999 if round == self.liked else 0.001
            for site in self.hostile & scores.keys():
                names = next((tuple(s.labels) for s in scores[site].values()), ())
                claimed = CaseScore(dict.fromkeys(names, value), loss=1 - value)
                scores[site] = {f"{site}-{k}": claimed for k in range(CLAIMED)}
        if self.attack == "aware" and split == "validation":
            for site in self.hostile & scores.keys():
                scores[site] = self._perjury(round, site, sent[site], scores[site])
        return scores

    def _perjury(self, round: int, site: SiteId, sent: Payload, true: Scores) -> Scores:
        """Return scores mirrored at those of its own reply, around which a jury's models lie; a bad one for zeros."""
        if not any(tree.norm({k: x}) for k, x in tree.trained(sent["model"]).items()):
            return {k: replace(s, loss=s.loss + 1) for k, s in true.items()}
        own = Payload(**{**sent, "model": {**sent["model"], **self.replied.get(site, {})}})
        middle = super().score(round, {site: own}, "validation")[site]
        return {k: _mirrored(s, middle[k]) for k, s in true.items()}


def _mirrored(score: CaseScore, middle: CaseScore) -> CaseScore:
    labels = {k: min(max(2 * middle.labels[k] - x, 0.0), 1.0) for k, x in score.labels.items()}
    return replace(score, labels=labels, loss=max(2 * middle.loss - score.loss, 0.0))


def _change(sent: Payload, reply: Payload) -> Tree:
    return tree.sub(tree.trained(reply["model"]), tree.trained(sent["model"]))


def _like(x: Any, drawn: np.ndarray) -> Any:
    """Return numbers in the library, type and place of a leaf."""
    return x.new_tensor(drawn) if hasattr(x, "new_tensor") else drawn.astype(x.dtype)
