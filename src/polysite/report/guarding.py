"""Alarms of the guard of a run (``run.guard``), which name the site and the evidence; rounds.jsonl has every round."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from polysite.engines.record import RoundRecord, SiteGuard
from polysite.report.runs import Method

OFTEN, LONG = 3, 3.0  # rounds with a shortened change, and its length by what is allowed, from which there is an alarm


@dataclass(frozen=True)
class Watched:
    """One site over all rounds with a guard."""

    site: str
    seen: Sequence[SiteGuard]

    @property
    def clipped(self) -> list[float]:
        """How many times longer than allowed a change was, for every round in which it was shortened."""
        return [max(g.lengths[p] / g.longest[p] for p in g.clipped) for g in self.seen if g.clipped]

    @property
    def lowered(self) -> list[float]:
        """Factors below 1."""
        return [g.factor for g in self.seen if g.factor < 1]

    def mean(self, what: str) -> float | None:
        """Return the mean of a number over the rounds that have it."""
        known = [value for g in self.seen if (value := getattr(g, what)) is not None]
        return fmean(known) if known else None

    def alarms(self) -> Iterator[str]:
        """Yield sentences with the evidence."""
        rounds = len(self.seen)
        if self.lowered:
            standing = min((g.standing for g in self.seen if g.standing is not None), default=0.0)
            evidence = f"cosine with the other sites {_shown(self.mean('cosine'))} on average, while these agree by "
            evidence += f"{_shown(self.mean('coherence'))}; what sets it apart persists from round to round by "
            evidence += f"{_shown(self.mean('persistence'))}, that of the others by "
            evidence += f"{_shown(self.mean('usual_persistence'))}; lowest standing {standing:.2f}"
            yield (
                f"Alarm: the changes of {self.site} lack the direction of the other hospitals ({evidence}). It counted "
                f"by {min(self.lowered):.2f} of its weight at the least, in {len(self.lowered)} of {rounds} rounds. "
                "Its data may be very unlike the others', its labels may be wrong, or it may be hostile: ask it."
            )
        if len(self.clipped) >= OFTEN or max(self.clipped, default=0.0) >= LONG:
            yield (
                f"Alarm: changes of {self.site} were shortened in {len(self.clipped)} of {rounds} rounds; the longest "
                f"was {max(self.clipped):.3g} times as long as is allowed."
            )


def watched(records: Sequence[RoundRecord]) -> list[Watched]:
    """Return the sites that a guard watched."""
    seen: dict[str, list[SiteGuard]] = {}
    for record in records:
        for site, guard in record.guard.items():
            seen.setdefault(site, []).append(guard)
    return [Watched(site, seen[site]) for site in sorted(seen)]


def alarms(methods: Sequence[Method]) -> list[str]:
    """Return the alarms of all runs."""
    several = sum(len(m.runs) for m in methods) > 1
    return [
        f"{run.name}: {sentence}" if several else sentence
        for m in methods
        for run in m.runs
        for site in watched(run.records)
        for sentence in site.alarms()
    ]


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"
