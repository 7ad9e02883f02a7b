"""What the guard knows about sites, and by how much each of them counts.

A jury decides where there is one: hospitals measure the harm of the others' changes before they are merged
(``jury.py``, ``cross_check.py``). The factor of a site falls from 1 at the harm TOLERATED to ``least`` at HARMFUL; for
a site whose direction is doubtful, at harms that are smaller by STRICTER; for one that turned around, from agreement
with the others to opposition within a round, from TURNED on. A site that is acquitted counts fully, whatever its
direction. While a site counts less, its harm falls by no more than PAROLE in a check.

Evidence about a site's direction is collected over rounds:

    standing = (prior + sum_t h c) / (prior + sum_t h^2) * (1 - STEEP max(0, excess - ROOM))

c is the median cosine of the site's change with those of the others, h the median cosine of the others, at least 0;
excess is the mean over rounds by how much what sets the site apart from the others persists more than usual
(``directions.py``), with older rounds decaying by RECENT. The standing is about 1 for a site like all others, 0 for
noise and for one that pulls the model its own way, and -1 for a reversed change. The sums over h end when that of h^2
reaches FULL: in the beginning all learn the same task, and an honest hospital that differs has a positive standing;
later, near the point where the sites balance one another, it must oppose the others.

Where no jury can judge (fewer than five sites, or no validation cases), the direction decides: the factor falls from 1
at the standing SOUND to ``least`` at DOUBTFUL. It never becomes zero, because only a person can tell an unlike hospital
from an attack.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polysite.engines.cross_check import WINDOW, findings
from polysite.engines.directions import Direction
from polysite.engines.jury import Ballot
from polysite.errors import ConfigError
from polysite.payload import SiteId

PRIOR, FULL, RECENT = 0.015, 0.4, 0.8
ROOM, STEEP = 0.25, 4.0  # excess of persistence that honest hospitals may have; loss of standing beyond it
SOUND, DOUBTFUL = 0.4, 0.15  # standings
TOLERATED, HARMFUL, PAROLE = 0.23, 0.28, 0.97  # harms, as shares of what was learnt; decay of the harm of a suspect
TURNED, AGREES, OPPOSES, AGREED = 0.07, 0.5, -0.5, 0.1  # tolerated harm; c / h before and after a turn; least h of it
STRICTER = 0.1  # by which less harm is tolerated of a site whose direction is doubtful
SPOKEN = 0.025  # what a juror must have learnt for a verdict, in units of the loss


@dataclass(frozen=True)
class Guard:
    """Limits on what a single site can do to an aggregate.

    Args:
        use: Whether the guard is on: auto means on in a deployment and off in a simulation.
        clip: Longest change of a site, as a multiple of the usual length; at least 1.
        cap: Largest share of a site in a mean by weights, more than 0 and at most 1; 2/K if that is more.
        least: Factor of a site whose changes persistently lack the direction of the others, or do harm to their
            validation cases, 0.01 to 1; 1: all sites count fully.
        jury: Number of sites that score two more models on their validation cases in the first three rounds of a
            phase, in validated rounds, and when a change opposes the others, so that harm is noticed; 0: none.
    """

    use: Literal["auto", "on", "off"] = "auto"
    clip: float = 2.0
    cap: float = 0.45
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
        """Return the factor of a site by the direction of its changes, where no jury judges.

        >>> Guard().factor(1.0), Guard().factor(-0.5)
        (1.0, 0.05)
        """
        return self._between((standing - DOUBTFUL) / (SOUND - DOUBTFUL))

    def factor_of_harm(self, harm: float, standing: float = 1.0, turned: bool = False) -> float:
        """Return the factor of a site by the verdict of a jury.

        >>> Guard().factor_of_harm(0.1), Guard().factor_of_harm(0.1, standing=-1.0), Guard().factor_of_harm(0.9)
        (1.0, 1.0, 0.05)
        """
        doubt = min(max((SOUND - standing) / (SOUND - DOUBTFUL), 0.0), 1.0)
        bar = TURNED if turned else TOLERATED - STRICTER * doubt
        return self._between(1 - (harm / bar - 1) / (HARMFUL / TOLERATED - 1))

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
    ratio: float = 0.0  # c / h of the last round; 0 if the others did not agree
    turned: bool = False  # whether it turned around in any round

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
        ratio = seen.cosine / h if h >= AGREED else 0.0
        turned = self.turned or (self.ratio >= AGREES and ratio <= OPPOSES)
        return Evidence(agreement, self.amount + new, excess, recent, self.rounds + 1, ratio, turned)


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
    learnt: Mapping[SiteId, float] = field(default_factory=dict)  # by the jurors of a site

    def begin(self) -> "GuardState":
        """Return the state at the beginning of a phase: lengths and losses may be others."""
        return replace(self, usual={}, apart={}, ballots=(), naive={})

    def standing(self, site: SiteId) -> float:
        """Return the standing of a site."""
        return self.evidence.get(site, Evidence()).standing

    def factor(self, guard: Guard, site: SiteId) -> float:
        """Return the factor of a site: by the verdict of a jury, or by its direction if no jury has voted."""
        if site not in self.harms:
            return guard.factor(self.standing(site))
        return guard.factor_of_harm(self.harms[site], self.standing(site), self._turned(site))

    def _turned(self, site: SiteId) -> bool:
        return self.evidence.get(site, Evidence()).turned

    def undecided(self, site: SiteId) -> bool:
        """Return whether a jury has voted, and knew too little for a verdict."""
        return self.learnt.get(site, SPOKEN) < SPOKEN

    def compared(self, directions: Mapping[SiteId, Direction]) -> "GuardState":
        """Return the state after the directions of a round."""
        evidence = {**self.evidence}
        for site, direction in directions.items():
            evidence[site] = evidence.get(site, Evidence()).after(direction)
        apart = {**self.apart, **{i: direction.apart for i, direction in directions.items()}}
        return replace(self, evidence=dict(sorted(evidence.items())), apart=apart)

    def judged(self, guard: Guard, cast: tuple[Ballot, ...], naive: Mapping[SiteId, float]) -> "GuardState":
        """Return the state after the ballots of a round."""
        if not cast:
            return replace(self, naive=naive)
        ballots, harms, learnt = (*self.ballots, cast)[-WINDOW:], dict(self.harms), dict(self.learnt)
        for site, found in findings(ballots).items():
            harm = min(found.harm, 1.0)
            suspect = site in harms and self.factor(guard, site) < 1
            harms[site] = max(harm, PAROLE * harms[site]) if suspect else harm
            learnt[site] = found.learnt
        harms, learnt = dict(sorted(harms.items())), dict(sorted(learnt.items()))
        return replace(self, ballots=ballots, naive=naive, harms=harms, learnt=learnt)
