"""Guarded aggregation: what one site can do to an aggregate is limited, and what it does is recorded.

Between the reply checks and the merge, in both engines alike:

    clip      a change of the model longer than clip * usual is shortened to that length; usual is the median length of
              the round before (in the first round of a phase, of that round)
    cap       no site has more than the share ``cap`` of a mean by weights, or 2/K among K < 5 sites
    factor    a site whose changes lack the direction of the others, who agree among themselves, or do harm to the
              validation cases of the others (``cross_check.py``), counts less; its changes are not longer than usual

The bound and the factors of a round are known before its replies, so replies can still be summed as they arrive, and a
site that clips its own reply needs nothing else. Evidence about a site's direction is collected over rounds:

    standing = (prior + sum_t h c) / (prior + sum_t h^2) * (1 - STEEP max(0, excess - ROOM))

c is the median cosine of the site's change with those of the others, h the median cosine of the others, at least 0;
excess is the mean over rounds by how much what sets the site apart from the others persists more than usual
(``directions.py``), with older rounds decaying by RECENT. The standing is about 1 for a site like all others, 0 for
noise and for one that pulls the model its own way, and -1 for a reversed change. The sums over h end when that of h^2
reaches FULL: in the beginning all learn the same task, and an honest hospital that differs has a positive standing;
later, near the point where the sites balance one another, it must oppose the others. The factor falls from 1 at SOUND
to ``least`` at DOUBTFUL; it never becomes zero, because only a person can tell an unlike hospital from an attack. In
the same way it falls from 1 at the harm TOLERATED to ``least`` at HARMFUL; the smaller factor counts. While a site
counts less, the others show little of the harm that it would do, so its harm falls by no more than PAROLE in a check.

Running statistics of batch normalisation are clipped in the same way, as a part of their own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from polysite import tree
from polysite.algorithms.base import Kind
from polysite.engines.cross_check import WINDOW, Ballot, Contrasts, harms
from polysite.engines.directions import Direction, Signs, Sketch, compare, differences, length
from polysite.engines.record import SiteGuard
from polysite.engines.reply_checks import kinds_of
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.tree import Tree

PRIOR, FULL, RECENT = 0.015, 0.4, 0.8
ROOM, STEEP = 0.25, 4.0  # excess of persistence that honest hospitals may have; loss of standing beyond it
SOUND, DOUBTFUL = 0.4, 0.15  # standings
TOLERATED, HARMFUL, PAROLE = 0.3, 0.45, 0.95  # harms, as shares of what was learnt; decay of the harm of a suspect
EARLY = 3  # rounds at the beginning of a phase with a cross-check; later ones have it if they are validated
STATISTICS = " statistics"  # suffix of the name of a part


@dataclass(frozen=True)
class Guard:
    """Limits on what a single site can do to an aggregate.

    Args:
        use: Whether the guard is on: auto means on in a deployment and off in a simulation.
        clip: Longest change of a site, as a multiple of the usual length; at least 1.
        cap: Largest share of a site in a mean by weights, more than 0 and at most 1; 2/K if that is more.
        least: Factor of a site whose changes persistently lack the direction of the others, or do harm to their
            validation cases, 0.01 to 1; 1: all sites count fully.
        jury: Number of sites that score two more models on their validation cases in validated rounds, and in the
            first three of a phase, so that harm is noticed; 0: none.
    """

    use: Literal["auto", "on", "off"] = "auto"
    clip: float = 2.0
    cap: float = 0.4
    least: float = 0.05
    jury: int = 7

    def __post_init__(self) -> None:
        if self.jury < 0:
            raise ConfigError(f"run.guard.jury = {self.jury} must not be negative; 0 means that no site judges")
        for name, low, high in (("clip", 1.0, 1e6), ("cap", 1e-3, 1.0), ("least", 0.01, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"run.guard.{name} = {getattr(self, name)} must lie between {low:g} and {high:g}; leave it out for "
                    "the default"
                )

    def factor(self, standing: float) -> float:
        """Return the factor of a site by the direction of its changes.

        >>> Guard().factor(1.0), Guard().factor(-0.5)
        (1.0, 0.05)
        """
        return self._between((standing - DOUBTFUL) / (SOUND - DOUBTFUL))

    def factor_of_harm(self, harm: float) -> float:
        """Return the factor of a site that does harm.

        >>> Guard().factor_of_harm(0.1), Guard().factor_of_harm(0.9)
        (1.0, 0.05)
        """
        return self._between((HARMFUL - harm) / (HARMFUL - TOLERATED))

    def _between(self, rise: float) -> float:
        rise = min(max(rise, 0.0), 1.0)
        return 1.0 if rise == 1 else self.least + (1 - self.least) * rise


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about the direction of a site's changes."""

    agreement: float = PRIOR  # prior and sum of h c
    amount: float = PRIOR  # prior and sum of h^2
    excesses: float = 0.0  # sum of persistence above the usual
    recent: float = 1.0  # prior and number of rounds in that sum
    rounds: int = 0

    @property
    def standing(self) -> float:
        """1 for a site like all others, 0 for noise or a way of its own, -1 for reversed changes."""
        own_way = min(max(STEEP * (self.excess - ROOM), 0.0), 1.0)
        alike = self.agreement / self.amount
        return alike * (1 - own_way) if alike > 0 else alike

    @property
    def excess(self) -> float:
        """How much more than usual the site persists in what sets it apart."""
        return self.excesses / self.recent

    def after(self, seen: Direction) -> "Evidence":
        """Return the evidence after one more round."""
        h = max(seen.coherence, 0.0)
        excess, recent = self.excesses, self.recent
        if seen.persistence is not None and seen.usual is not None:
            excess, recent = RECENT * excess + seen.persistence - seen.usual, RECENT * recent + 1
        new = min(h * h, max(FULL - self.amount, 0.0))
        agreement = self.agreement + (new / h * seen.cosine if new else 0.0)
        return Evidence(agreement, self.amount + new, excess, recent, self.rounds + 1)


@dataclass(frozen=True, slots=True)
class GuardState:
    """What the guard remembers from round to round: a part of every checkpoint."""

    usual: Mapping[str, float] = field(default_factory=dict)  # length of a change, by part
    evidence: Mapping[SiteId, Evidence] = field(default_factory=dict)
    clips: Mapping[SiteId, int] = field(default_factory=dict)  # rounds in which a change was shortened
    caps: Mapping[SiteId, int] = field(default_factory=dict)  # rounds in which the share was limited
    apart: Mapping[SiteId, Any] = field(default_factory=dict)  # sketches of what set sites apart in the last round
    ballots: tuple[tuple[Ballot, ...], ...] = ()  # of the last cross-checks
    naive: Mapping[SiteId, float] = field(default_factory=dict)  # loss of the zero model at the jurors
    harms: Mapping[SiteId, float] = field(default_factory=dict)

    def begin(self) -> "GuardState":
        """Return the state at the beginning of a phase: lengths and losses may be others."""
        return replace(self, usual={}, apart={}, ballots=(), naive={})

    def factor(self, guard: Guard, site: SiteId) -> float:
        """Return the factor of a site."""
        known = self.evidence.get(site, Evidence())
        return min(guard.factor(known.standing), guard.factor_of_harm(self.harms.get(site, 0.0)))

    def checked(self, guard: Guard, cast: tuple[Ballot, ...], naive: Mapping[SiteId, float]) -> "GuardState":
        """Return the state after the ballots of a round."""
        if not cast:
            return replace(self, naive=naive)
        ballots, known = (*self.ballots, cast)[-WINDOW:], dict(self.harms)
        for site, found in harms(ballots).items():
            harm = min(found, 1.0)
            suspect = guard.factor_of_harm(known.get(site, 0.0)) < 1
            known[site] = max(harm, PAROLE * known[site]) if suspect else harm
        return replace(self, ballots=ballots, naive=naive, harms=dict(sorted(known.items())))


class RoundGuard:
    """The guard in one round.

    Args:
        guard: The settings.
        state: What is known from the rounds before.
        reply: Fields of a reply and their kinds.
        sent: The payloads of the round.
        signs: Signs of the sketches.
        clusters: Clusters of sites that share a model; a cluster of its own for every site says nothing.
        check: Numbers from which a jury is drawn; none without a cross-check in this round.
    """

    def __init__(
        self,
        guard: Guard,
        state: GuardState,
        reply: Mapping[str, Kind],
        sent: Mapping[SiteId, Payload],
        signs: Signs,
        clusters: Mapping[SiteId, str],
        check: tuple[int, ...] = (),
    ):
        self.guard, self.state, self.reply, self.sent, self.signs = guard, state, reply, sent, signs
        self._clusters = clusters if len({*clusters.values()}) < len(clusters) else {}
        self.usual = dict(state.usual)
        self.factors = {i: state.factor(guard, i) for i in sent}
        self._draw = check if reply.get("model") == "model" else ()
        self.contrasts = Contrasts((), 0, ())
        self._lengths: dict[SiteId, dict[str, float]] = {}
        self._scales: dict[SiteId, dict[str, float]] = {}
        self._sketches: dict[SiteId, Sketch] = {}
        self._claimed: Mapping[SiteId, float] = {}
        self._given: Mapping[SiteId, float] = {}

    @property
    def streams(self) -> bool:
        """Whether the limits are known before any reply arrives."""
        return bool(self.state.usual)

    def assemble(self, sites: Iterable[SiteId]) -> None:
        """Begin the contrasts of a cross-check, from the replies of these sites."""
        groups = self._groups(sites) if self._draw else []
        self.contrasts = Contrasts(groups, self.guard.jury, self._draw)

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
        for site, direction in self._compared(self._sketches).items():
            evidence = self.state.evidence.get(site, Evidence()).after(direction)
            self.factors[site] = min(self.factors[site], self.guard.factor(evidence.standing))
        self.usual = self._medians(self._lengths)

    def limit(self, site: SiteId, reply: Payload) -> Payload:
        """Return a measured reply with changes of at most the longest allowed length.

        Without a field ``weight`` a site's factor shortens its changes instead.
        """
        factor = 1.0 if "weight" in self.reply else self.factors[site]
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
        return self.usual.get(part, 0.0) * (self.guard.clip if self.factors[site] == 1 else 1.0)

    def weights(self, claimed: Mapping[SiteId, float]) -> dict[SiteId, float]:
        """Return the weights by which the replies of these sites are averaged.

        The factor of a site is of its own weight or the median weight of the others, whichever is less.
        """
        if "weight" not in self.reply:
            return dict(claimed)
        limited = capped(claimed, max(self.guard.cap, 2 / len(claimed)) if claimed else 1.0)
        self._claimed, self._given = dict(claimed), limited
        full = [w for i, w in limited.items() if self.factors[i] == 1]
        usual = median(full) if full else float("inf")
        return {i: w if self.factors[i] == 1 else min(w, usual) * self.factors[i] for i, w in limited.items()}

    def close(self, merged: Mapping[SiteId, Any]) -> tuple[GuardState, dict[SiteId, SiteGuard]]:
        """Return what to remember, and the record of every site whose reply was merged."""
        lengths = {i: n for i, n in self._lengths.items() if i in merged}
        found = self._compared(merged)
        evidence = dict(self.state.evidence)
        for site, direction in found.items():
            evidence[site] = evidence.get(site, Evidence()).after(direction)
        records = {i: self._record(i, found.get(i), evidence.get(i)) for i in sorted(lengths)}
        usual = {**self.usual, **self._medians(lengths)}
        clips = _counted(self.state.clips, [i for i, r in records.items() if r.clipped])
        caps = _counted(self.state.caps, [i for i, r in records.items() if r.capped_share is not None])
        apart = {**self.state.apart, **{i: direction.apart for i, direction in found.items()}}
        evidence = dict(sorted(evidence.items()))
        return replace(self.state, usual=usual, evidence=evidence, clips=clips, caps=caps, apart=apart), records

    def _compared(self, merged: Mapping[SiteId, Any]) -> dict[SiteId, Direction]:
        """Return the directions of the sites, each compared with those that were sent the same model."""
        found: dict[SiteId, Direction] = {}
        for group in self._groups(self._sketches.keys() & merged.keys()):
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


def describe(records: Mapping[SiteId, SiteGuard]) -> Iterator[str]:
    """Yield a sentence for everything that the guard changed in a round."""
    for site, seen in records.items():
        for part in seen.clipped:
            times = seen.lengths[part] / seen.longest[part]
            yield f"{site}: {part} is shortened: its change is {times:.3g} times as long as is allowed"
        if seen.capped_share is not None:
            yield f"{site}: its share is {seen.capped_share:.1%} instead of {seen.claimed_share or 0:.1%}"
        if seen.factor < 1:
            yield f"{site}: it counts by {seen.factor:.2f} of its weight"


def changes(
    guard: Guard, before: GuardState, after: GuardState, records: Mapping[SiteId, SiteGuard]
) -> Iterator[tuple[SiteId, str]]:
    """Yield findings that are new in a round: a site and a sentence with the evidence."""
    for site, seen in records.items():
        if seen.clipped and seen.factor == 1 and site not in before.clips:
            part = max(seen.clipped, key=lambda p: seen.lengths[p] / seen.longest[p])
            times = seen.lengths[part] / seen.longest[part] * guard.clip
            yield site, f"its change of the model was {times:.3g} times as long as is usual and was shortened"
        if seen.capped_share is not None and site not in before.caps:
            yield (
                site,
                (
                    f"by its number of cases it would have {seen.claimed_share or 0:.1%} of the mean; its share is "
                    f"limited to {seen.capped_share:.1%}"
                ),
            )
        yield from ((site, sentence) for sentence in _suspicions(guard, before, after, site, seen))


def _suspicions(guard: Guard, before: GuardState, after: GuardState, site: SiteId, seen: SiteGuard) -> Iterator[str]:
    """Yield sentences if a site begins to count less, by its direction or its harm, or counts fully again."""
    former, factor = (s.factor(guard, site) for s in (before, after))
    known, harm = after.evidence.get(site, Evidence()), after.harms.get(site, 0.0)
    lacking, harmful = (
        [guard.factor(s.evidence.get(site, Evidence()).standing) < 1 for s in (before, after)],
        [guard.factor_of_harm(s.harms.get(site, 0.0)) < 1 for s in (before, after)],
    )
    if lacking == [False, True]:
        yield (
            f"its changes lack the direction of the other sites (standing {known.standing:.2f} after "
            f"{known.rounds} rounds, cosine {seen.cosine or 0:+.2f} in the last one, while the others agree by "
            f"{seen.coherence or 0:+.2f}); it counts by {factor:.2f} of its weight"
        )
    if harmful == [False, True]:
        yield (
            f"models with its changes are worse on the validation cases of the other sites, by {harm:.2f} of what was "
            f"learnt so far; it counts by {factor:.2f} of its weight"
        )
    if factor == 1 > former:
        yield f"it counts fully again (standing {known.standing:.2f}, harm {harm:+.2f})"


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
