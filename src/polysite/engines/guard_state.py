"""Settings of the guard, and what it knows about every site: by how much does each of them count?

Evidence about a site's direction is collected over rounds:

    standing = (prior + sum_t h c) / (prior + sum_t h^2) * (1 - STEEP max(0, excess - ROOM))

c is the median cosine of the site's change with those of the others, h the median cosine of the others, at least 0;
excess is the mean over rounds by how much what sets the site apart from the others persists more than usual
(``directions.py``), with older rounds decaying by RECENT. The standing is about 1 for a site like all others, 0 for
noise and for one that pulls the model its own way, and -1 for a reversed change. The sums over h end when that of h^2
reaches FULL: in the beginning all learn the same task, and an honest hospital that differs has a positive standing;
later, near the point where the sites balance one another, it must oppose the others.

The factor of a site falls from 1 at the standing SOUND to ``least`` at DOUBTFUL. It never becomes zero, because only a
person can tell an unlike hospital from an attack.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polysite.engines.directions import Direction
from polysite.errors import ConfigError
from polysite.payload import SiteId

PRIOR, FULL, RECENT = 0.015, 0.4, 0.8
ROOM, STEEP = 0.25, 4.0  # excess of persistence that honest hospitals may have; loss of standing beyond it
SOUND, DOUBTFUL = 0.4, 0.15  # standings


@dataclass(frozen=True)
class Guard:
    """Limits on what a single site can do to an aggregate.

    Args:
        use: Whether the guard is on: auto means on in a deployment and off in a simulation.
        clip: Longest change of a site, as a multiple of the usual length; at least 1.
        cap: Largest share of a site in a mean by weights, more than 0 and at most 1; 2/K if that is more.
        least: Factor of a site whose changes persistently lack the direction of the others, 0.01 to 1; 1: all sites
            count fully.
    """

    use: Literal["auto", "on", "off"] = "auto"
    clip: float = 2.0
    cap: float = 0.45
    least: float = 0.05

    def __post_init__(self) -> None:
        for name, low, high in (("clip", 1.0, 1e6), ("cap", 1e-3, 1.0), ("least", 0.01, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"run.guard.{name} = {getattr(self, name)} must lie between {low:g} and {high:g}; leave it out for "
                    "the default"
                )

    def factor(self, standing: float) -> float:
        """Return the factor of a site by its standing.

        >>> Guard().factor(1.0), Guard().factor(-0.5)
        (1.0, 0.05)
        """
        rise = (standing - DOUBTFUL) / (SOUND - DOUBTFUL)
        return 1.0 if rise >= 1 else self.least + (1 - self.least) * max(rise, 0.0)


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
        own_way = min(max(STEEP * (self.excesses / self.recent - ROOM), 0.0), 1.0)
        alike = self.agreement / self.amount
        return alike * (1 - own_way) if alike > 0 else alike

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
    apart: Mapping[SiteId, Any] = field(default_factory=dict)  # sketches of what set sites apart in the last round
    shortened: tuple[SiteId, ...] = ()  # sites of which a change was too long
    capped: tuple[SiteId, ...] = ()  # sites whose share was too large

    def begin(self) -> "GuardState":
        """Return the state at the beginning of a phase: lengths may be others."""
        return replace(self, usual={}, apart={})

    def known(self, site: SiteId) -> Evidence:
        """Return what is known about a site."""
        return self.evidence.get(site, Evidence())

    def compared(self, directions: Mapping[SiteId, Direction]) -> "GuardState":
        """Return the state after the directions of a round."""
        evidence = {**self.evidence, **{i: self.known(i).after(found) for i, found in directions.items()}}
        apart = {**self.apart, **{i: found.apart for i, found in directions.items()}}
        return replace(self, evidence=dict(sorted(evidence.items())), apart=apart)
