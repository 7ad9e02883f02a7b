"""Guarded aggregation: what one site can do to an aggregate is limited, and what it does is recorded.

Between the reply checks and the merge, in all engines alike:

    clip      a change of the model longer than clip * usual is shortened to that length; usual is the median length of
              the round before (in the first round of a phase, of that round)
    cap       no site has more than the share ``cap`` of a mean by weights, or 2/K among K < 5 sites
    factor    a site whose changes lack the direction of the others counts less (``guard_state.py``): its weight is that
              factor of the median weight or of its own, if that is less, and its changes are not longer than usual

Limits and factors follow from the rounds before, so replies are summed as they arrive. In the first round of a phase
they follow from that round: replies are measured as they arrive, and summed when they are delivered once more
(``replies.py``). Running statistics of batch normalisation are clipped in the same way, as a part of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.engines.directions import Direction, Signs, Sketch, compare
from polysite.engines.guard_state import Guard, GuardState
from polysite.engines.record import SiteGuard
from polysite.engines.reply_checks import kinds_of
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

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
    """

    def __init__(
        self,
        guard: Guard,
        state: GuardState,
        reply: Mapping[str, Kind],
        sent: Mapping[SiteId, Payload],
        signs: Signs,
        clusters: Mapping[SiteId, str],
    ):
        self.guard, self.state, self.reply, self.sent, self.signs = guard, state, reply, sent, signs
        self._clusters = clusters if len({*clusters.values()}) < len(clusters) else {}
        self.usual, self.factors = dict(state.usual), self._factors(state)
        self._lengths: dict[SiteId, dict[str, float]] = {}
        self._scales: dict[SiteId, dict[str, float]] = {}
        self._sketches: dict[SiteId, Sketch] = {}
        self._claimed: Mapping[SiteId, float] = {}
        self._capped: Mapping[SiteId, float] = {}

    @property
    def settled(self) -> bool:
        """Whether the limits are known: in the first round of a phase, they follow from all replies."""
        return bool(self.usual)

    def measure(self, site: SiteId, reply: Payload) -> None:
        """Keep lengths and direction of a sound reply."""
        lengths = self._lengths[site] = {}
        for part, value, base in _parts(self.reply, self.sent[site], reply):
            lengths[part], sketch = self.signs.measure(value, base)
            if part == "model":
                self._sketches[site] = sketch

    def settle(self, heard: Collection[SiteId]) -> None:
        """Derive usual lengths and factors from the measured replies that count, unless limits are known."""
        if not self.settled:
            self.factors = self._factors(self.state.compared(self._compared(heard)))
            self.usual = self._medians(heard)

    def limit(self, site: SiteId, reply: Payload) -> Payload:
        """Return a measured reply with changes of at most the longest allowed length.

        Without a field ``weight`` a site's factor shortens its changes, too.
        """
        factor = 1.0 if "weight" in self.reply else self.factors[site]
        scales = self._scales[site] = {p: self._scale(site, p, n) for p, n in self._lengths[site].items()}
        fields: dict[str, Any] = dict(reply)
        for part, value, base in _parts(self.reply, self.sent[site], reply):
            scale = scales[part] * factor
            if scale < 1:
                name = part.removesuffix(STATISTICS)
                fields[name] = {**fields[name], **{k: _shortened(x, base[k], scale) for k, x in value.items()}}
        return Payload(**fields)

    def weights(self, claimed: Mapping[SiteId, float]) -> dict[SiteId, float]:
        """Return the weights by which the replies of these sites are averaged."""
        if "weight" not in self.reply or not claimed:
            return dict(claimed)
        self._claimed, self._capped = dict(claimed), capped(claimed, max(self.guard.cap, 2 / len(claimed)))
        full = [w for i, w in self._capped.items() if self.factors[i] == 1]
        usual = median(full) if full else float("inf")
        return {i: w if self.factors[i] == 1 else min(w, usual) * self.factors[i] for i, w in self._capped.items()}

    def close(
        self, merged: Mapping[SiteId, Any]
    ) -> tuple[GuardState, dict[SiteId, SiteGuard], list[tuple[SiteId, str]]]:
        """Return what to remember, the record of every site whose reply was merged, and what is new: (site, sentence)
        with the evidence."""
        found = self._compared(merged)
        state = self.state.compared(found)
        seen = {i: self._record(i, found.get(i), state) for i in sorted(merged) if i in self._lengths}
        state = replace(
            state,
            usual={**self.usual, **self._medians(seen)},
            shortened=_with(state.shortened, (i for i, r in seen.items() if r.clipped)),
            capped=_with(state.capped, (i for i, r in seen.items() if r.capped_share is not None)),
        )
        return state, seen, [(i, sentence) for i, r in seen.items() for sentence in self._news(i, r, state)]

    def _factors(self, state: GuardState) -> dict[SiteId, float]:
        return {i: self.guard.factor(state.known(i).standing) for i in self.sent}

    def _scale(self, site: SiteId, part: str, size: float) -> float:
        longest = self._longest(site, part)
        return longest / size if 0 < longest < size * (1 - 1e-9) else 1.0

    def _longest(self, site: SiteId, part: str) -> float:
        """Return the longest change that is allowed: the usual one for a site that does not count fully."""
        return self.usual.get(part, 0.0) * (self.guard.clip if self.factors[site] == 1 else 1.0)

    def _compared(self, heard: Collection[SiteId]) -> dict[SiteId, Direction]:
        """Return the directions of the sites, each compared with those that were sent the same model."""
        groups: dict[Any, list[SiteId]] = {}
        for site in sorted(self._sketches.keys() & {*heard}):
            model = tuple(id(x) for x in self.sent[site].get("model", {}).values())
            groups.setdefault((self._clusters.get(site), model), []).append(site)
        found: dict[SiteId, Direction] = {}
        for group in groups.values():
            found |= compare({i: self._sketches[i] for i in group}, self.factors, self.state.apart)
        return found

    def _medians(self, heard: Collection[SiteId]) -> dict[str, float]:
        """Return the median length of every part, over sites with a full factor if there are any."""
        lengths = {i: n for i, n in self._lengths.items() if i in heard}
        full = [n for i, n in lengths.items() if self.factors[i] == 1] or [*lengths.values()]
        parts = sorted({part for n in full for part in n})
        found = {part: median(n[part] for n in full if part in n) for part in parts}
        return {part: size for part, size in found.items() if size > 0}

    def _record(self, site: SiteId, found: Direction | None, state: GuardState) -> SiteGuard:
        lengths, scales = self._lengths[site], self._scales.get(site, {})
        claimed, given = self._claimed.get(site), self._capped.get(site)
        return SiteGuard(
            lengths=lengths,
            longest={part: self._longest(site, part) for part in lengths},
            clipped={part: scale for part, scale in scales.items() if scale < 1},
            cosine=found.cosine if found else None,
            coherence=found.coherence if found else None,
            persistence=found.persistence if found else None,
            usual_persistence=found.usual if found else None,
            standing=state.known(site).standing if site in state.evidence else None,
            factor=self.factors[site],
            claimed_share=claimed / sum(self._claimed.values()) if claimed else None,
            capped_share=given / sum(self._capped.values()) if given and given != claimed else None,
        )

    def _news(self, site: SiteId, seen: SiteGuard, after: GuardState) -> Iterator[str]:
        times = max((seen.lengths[p] / seen.longest[p] for p in seen.clipped), default=0.0)
        if times and seen.factor == 1 and site not in self.state.shortened:
            times *= self.guard.clip
            yield f"its change of the model was {times:.3g} times as long as is usual and was shortened"
        if seen.capped_share is not None and site not in self.state.capped:
            claimed = f"by its number of cases it would have {seen.claimed_share or 0:.1%} of the mean"
            yield f"{claimed}; its share is limited to {seen.capped_share:.1%}"
        known = after.known(site)
        former, factor = (self.guard.factor(each.standing) for each in (self.state.known(site), known))
        if former == 1 > factor:
            yield (
                f"its changes lack the direction of the other sites (standing {known.standing:.2f} after "
                f"{known.rounds} rounds, cosine {seen.cosine or 0:+.2f} in the last one, while the others agree by "
                f"{seen.coherence or 0:+.2f}); it counts by {factor:.2f} of its weight"
            )
        if factor == 1 > former:
            yield f"it counts fully again (standing {known.standing:.2f})"


def describe(site: SiteId, seen: SiteGuard) -> Iterator[str]:
    """Yield a sentence for everything that the guard changed for a site in a round."""
    for part in seen.clipped:
        times = seen.lengths[part] / seen.longest[part]
        yield f"{site}: {part} is shortened: its change is {times:.3g} times as long as is allowed"
    if seen.capped_share is not None:
        yield f"{site}: its share is {seen.capped_share:.1%} instead of {seen.claimed_share or 0:.1%}"
    if seen.factor < 1:
        yield f"{site}: it counts by {seen.factor:.2f} of its weight"


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


def _with(before: tuple[SiteId, ...], sites: Iterable[SiteId]) -> tuple[SiteId, ...]:
    return tuple(sorted({*before, *sites}))


def _shortened(x: Any, base: Any, scale: float) -> Any:
    """Return base + scale * (x - base), in the memory of one leaf."""
    change = x - base
    change *= scale
    change += base
    return change


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
