"""Guarded aggregation: what one site can do to an aggregate is limited, and what it does is recorded.

Between the reply checks and the merge, in both engines alike:

    clip      a change of the model longer than clip * usual is shortened to that length; usual is the median length of
              the round before (in the first round of a phase, of that round)
    cap       no site has more than the share ``cap`` of a mean by weights, or 2/K among K < 5 sites; a weight above the
              median is to be earned: the more harm a jury finds, the less of it is given
    jury      hospitals measure whether changes do harm to their validation cases (``jury.py``), before the merge: in
              the first rounds of a phase, in validated rounds, and when a change opposes the others
    factor    a site that does harm counts less (``guard_state.py``); its changes are not longer than usual

In a round without a jury the bound and the factors are known before the replies, so replies can still be summed as they
arrive, and a site that clips its own reply needs nothing else. In a round with a jury all replies are held. While a
jury has voted but nothing is learnt yet, a site's change is not longer than usual, and its weight not more than the
median.

Running statistics of batch normalisation are clipped in the same way, as a part of their own.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.engines import jury
from polysite.engines.directions import Direction, Signs, Sketch, compare, differences, length
from polysite.engines.guard_state import TOLERATED, Evidence, Guard, GuardState
from polysite.engines.jury import Ballot
from polysite.engines.record import SiteGuard
from polysite.engines.reply_checks import kinds_of
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

EARLY = 3  # rounds at the beginning of a phase with a jury; later ones have it if they are validated
VOTES = 2  # at most, in a round
REVERSED = -0.05  # cosine with the others at which a jury is asked in any round
STATISTICS = " statistics"  # suffix of the name of a part


class RoundGuard:
    """The guard in one round.

    Args:
        guard: The settings.
        state: What is known from the rounds before.
        reply: Fields of a reply and their kinds.
        sent: The payloads of the round.
        signs: Signs of the sketches.
        clusters: Clusters of sites that share a model; a cluster of its own for every site says nothing.
        numbers: Numbers from which a jury is drawn.
        due: Whether this round has a jury in any case.
    """

    def __init__(
        self,
        guard: Guard,
        state: GuardState,
        reply: Mapping[str, Kind],
        sent: Mapping[SiteId, Payload],
        signs: Signs,
        clusters: Mapping[SiteId, str],
        numbers: tuple[int, ...] = (),
        due: bool = False,
    ):
        self.guard, self.state, self.reply, self.sent, self.signs = guard, state, reply, sent, signs
        self._clusters = clusters if len({*clusters.values()}) < len(clusters) else {}
        self.usual = dict(state.usual)
        self.factors = {i: state.factor(guard, i) for i in sent}
        self._numbers = numbers if reply.get("model") == "model" else ()
        self._known = state  # before any vote of this round
        self._asked, self._votes = due, 0
        self._ballots: tuple[Ballot, ...] = ()
        self._lengths: dict[SiteId, dict[str, float]] = {}
        self._scales: dict[SiteId, dict[str, float]] = {}
        self._sketches: dict[SiteId, Sketch] = {}
        self._claimed: Mapping[SiteId, float] = {}
        self._given: Mapping[SiteId, float] = {}

    @property
    def streams(self) -> bool:
        """Whether the limits are known before any reply arrives."""
        return bool(self.state.usual) and not (self._asked and self._judgeable(self.sent))

    def _judgeable(self, sites: Iterable[SiteId]) -> list[list[SiteId]]:
        """Return the groups of sites that a jury can judge."""
        return jury.able(self._groups(sites)) if self._numbers and self.guard.jury else []

    def must_hold(self, heard: Collection[SiteId]) -> bool:
        """Return whether measured replies must be held for a jury, though none was due.

        So it is if a site that counts fully opposes the others, or begins to lack their direction.
        """
        if self._asked:
            return False
        groups = self._judgeable(heard)
        for site, direction in self._compared([i for group in groups for i in group]).items():
            before = self.state.evidence.get(site, Evidence())
            doubtful = self.guard.factor(before.after(direction).standing) < 1 == self.guard.factor(before.standing)
            if self.factors[site] == 1 and (direction.cosine < REVERSED or doubtful):
                self._asked = True
        return self._asked

    def summon(self, voters: Collection[SiteId], heard: Collection[SiteId]) -> dict[SiteId, dict[SiteId, float]]:
        """Return the jurors of the next vote, and the signs of the other sites in their contrasts; empty without one.

        There is a second vote if nothing was known before the first, or if it finds that a site should count less.

        Args:
            voters: Sites that can score models.
            heard: Sites whose replies are merged.
        """
        known, first = self._known, {ballot.juror: ballot.signs for ballot in self._ballots}
        accused = any(self.factors[i] < 1 == known.factor(self.guard, i) for i in heard)
        again = first and (accused or not known.ballots)
        if not self._asked or self._votes == VOTES or (self._votes and not again):
            return {}
        before = [ballot.signs for cast in self.state.ballots for ballot in cast]
        numbers, self._votes = (*self._numbers, self._votes), self._votes + 1
        return jury.draw(self._judgeable(heard), voters, self.guard.jury, numbers, before, first or None)

    def hear(self, ballots: tuple[Ballot, ...], naive: Mapping[SiteId, float]) -> None:
        """Let the ballots of the jury decide by how much sites count in this round."""
        self._ballots += ballots
        self.state = self._known.judged(self.guard, self._ballots, naive)
        known = self.state.compared(self._compared(self._sketches))
        self.factors = {i: known.factor(self.guard, i) for i in self.sent}

    def measure(self, site: SiteId, reply: Payload) -> None:
        """Keep lengths and direction of a sound reply."""
        lengths = self._lengths[site] = {}
        for part, value, base in _parts(self.reply, self.sent[site], reply):
            change = differences(value, base)
            lengths[part] = length(list(change.values()))
            if part == "model":
                self._sketches[site] = self.signs.sketch(change)

    def settle(self) -> None:
        """Derive usual lengths and factors from this round, if there is no round before in this phase."""
        if self.streams:
            return
        known = self.state.compared(self._compared(self._sketches))
        self.factors = {i: min(factor, known.factor(self.guard, i)) for i, factor in self.factors.items()}
        self.usual = self._medians(self._lengths)

    def limit(self, site: SiteId, reply: Payload) -> Payload:
        """Return a measured reply with changes of at most the longest allowed length.

        Without a field ``weight`` a site's factor shortens its changes, too.
        """
        return self._limited(site, reply, 1.0 if "weight" in self.reply else self.factors[site])

    def judged(self, site: SiteId, reply: Payload) -> Tree:
        """Return the model of a measured reply as a jury judges it: with limited changes, whatever the factor."""
        model: Tree = self._limited(site, reply, 1.0).get("model", {})
        return model

    def _limited(self, site: SiteId, reply: Payload, factor: float) -> Payload:
        scales = {p: self._scale(site, p, n) for p, n in self._lengths[site].items()}
        self._scales[site] = scales
        fields: dict[str, Any] = dict(reply)
        for part, value, base in _parts(self.reply, self.sent[site], reply):
            scale = scales[part] * factor
            if scale < 1:
                name = part.removesuffix(STATISTICS)
                fields[name] = {**fields[name], **_shortened(value, base, scale)}
        return Payload(**fields)

    def _scale(self, site: SiteId, part: str, size: float) -> float:
        longest = self._longest(site, part)
        return longest / size if 0 < longest < size * (1 - 1e-9) else 1.0

    def _longest(self, site: SiteId, part: str) -> float:
        """Return the longest change that is allowed: the usual one for a site that does not count fully."""
        trusted = self.factors[site] == 1 and not self.state.undecided(site)
        return self.usual.get(part, 0.0) * (self.guard.clip if trusted else 1.0)

    def weights(self, claimed: Mapping[SiteId, float]) -> dict[SiteId, float]:
        """Return the weights by which the replies of these sites are averaged.

        The factor of a site is of its own weight or the median weight of the others, whichever is less. A weight above
        that median is to be earned: harm times weight, in medians, is at most what is tolerated of a usual weight. As
        long as a jury is undecided about a site, its weight is not above the median.
        """
        if "weight" not in self.reply:
            return dict(claimed)
        limited = capped(claimed, max(self.guard.cap, 2 / len(claimed)) if claimed else 1.0)
        full = [w for i, w in limited.items() if self.factors[i] == 1]
        usual = median(full) if full else float("inf")
        limited = {i: min(w, usual * self._earned(i)) for i, w in limited.items()}
        self._claimed, self._given = dict(claimed), limited
        doubted = {i for i in claimed if self.factors[i] < 1 or self.state.undecided(i)}
        return {i: min(w, usual) * self.factors[i] if i in doubted else w for i, w in limited.items()}

    def _earned(self, site: SiteId) -> float:
        """Return the largest weight of a site that counts fully, as a multiple of the median."""
        harm = self.state.harms.get(site, 0.0) if self.factors[site] == 1 else 0.0
        return max(TOLERATED / harm, 1.0) if harm > 0 else float("inf")

    def close(self, merged: Mapping[SiteId, Any]) -> tuple[GuardState, dict[SiteId, SiteGuard]]:
        """Return what to remember, and the record of every site whose reply was merged."""
        lengths = {i: n for i, n in self._lengths.items() if i in merged}
        found = self._compared(merged)
        state = self.state.compared(found)
        records = {i: self._record(i, found.get(i), state.evidence.get(i)) for i in sorted(lengths)}
        usual = {**self.usual, **self._medians(lengths)}
        clips = _counted(self.state.clips, [i for i, r in records.items() if r.clipped])
        caps = _counted(self.state.caps, [i for i, r in records.items() if r.capped_share is not None])
        return replace(state, usual=usual, clips=clips, caps=caps), records

    def _compared(self, merged: Collection[SiteId]) -> dict[SiteId, Direction]:
        """Return the directions of the sites, each compared with those that were sent the same model."""
        found: dict[SiteId, Direction] = {}
        for group in self._groups(self._sketches.keys() & {*merged}):
            found |= compare({i: self._sketches[i] for i in group}, self.factors, self.state.apart)
        return found

    def _groups(self, sites: Iterable[SiteId]) -> list[list[SiteId]]:
        """Return the sites in groups that were sent the same model."""
        groups: dict[Any, list[SiteId]] = {}
        for site in sorted(sites):
            model = tuple(id(x) for x in self.sent[site].get("model", {}).values())
            groups.setdefault((self._clusters.get(site), model), []).append(site)
        return list(groups.values())

    def _record(self, site: SiteId, found: Direction | None, evidence: Evidence | None) -> SiteGuard:
        lengths, scales = self._lengths[site], self._scales.get(site, {})
        whole, total = sum(self._claimed.values()), sum(self._given.values())
        return SiteGuard(
            lengths=lengths,
            longest={part: self._longest(site, part) for part in lengths},
            clipped={part: scale for part, scale in scales.items() if scale < 1},
            cosine=found.cosine if found else None,
            coherence=found.coherence if found else None,
            persistence=found.persistence if found else None,
            usual_persistence=found.usual if found else None,
            standing=evidence.standing if evidence else None,
            harm=self.state.harms.get(site),
            judges=len({ballot.juror for ballot in self._ballots if site in ballot.signs}),
            factor=self.factors[site],
            claimed_share=self._claimed[site] / whole if site in self._claimed and whole else None,
            capped_share=(
                self._given[site] / total if site in self._given and self._given[site] != self._claimed[site] else None
            ),
        )

    def _medians(self, lengths: Mapping[SiteId, Mapping[str, float]]) -> dict[str, float]:
        """Return the median length of every part, over sites with a full factor if there are any."""
        full = {i: n for i, n in lengths.items() if self.factors[i] == 1} or lengths
        parts = sorted({part for n in full.values() for part in n})
        found = {part: median(n[part] for n in full.values() if part in n) for part in parts}
        return {part: size for part, size in found.items() if size > 0}


def _counted(before: Mapping[SiteId, int], sites: list[SiteId]) -> dict[SiteId, int]:
    return {**before, **{i: before.get(i, 0) + 1 for i in sites}}


def capped(weights: Mapping[SiteId, float], cap: float) -> dict[SiteId, float]:
    """Return weights of which none is more than the share ``cap`` of their sum.

    >>> capped({"a": 900.0, "b": 5.0, "c": 4.0}, 0.4)
    {'a': 6.0, 'b': 5.0, 'c': 4.0}
    """
    order = sorted(weights, key=lambda i: (-weights[i], i))
    for heavy in range(len(order)):
        rest, room = sum(weights[i] for i in order[heavy:]), 1 - cap * heavy
        most = cap * rest / room  # room is above 0: where it is at most cap, nothing heavier than most is left
        if room <= cap or weights[order[heavy]] <= most:
            return {i: most if order.index(i) < heavy else w for i, w in weights.items()}
    return dict(weights)


def _parts(expected: Mapping[str, Kind], sent: Payload, reply: Payload) -> list[tuple[str, Tree, Tree]]:
    """Return the parts of a reply that are changes of something sent: (name, value, what it started from).

    A model that the site was not sent under its name, nor as ``model``, has no beginning to compare it with.
    """
    parts = []
    for name, kind in kinds_of(expected, sent, reply).items():
        if kind not in ("model", "update"):
            continue
        value = reply[name]
        base = tree.zeros(value) if kind == "update" else sent.get(name) or sent.get("model") or {}
        if not value.keys() <= base.keys():
            continue
        for part, of in ((name, tree.trained(value)), (name + STATISTICS, tree.statistics(value))):
            if of:
                parts.append((part, of, base))
    return parts


def _shortened(value: Tree, base: Tree, scale: float) -> dict[str, Any]:
    """Return base + scale * (value - base)."""
    return {k: base[k] + (x - base[k]) * scale for k, x in value.items()}
