"""What the guard says about a round: sentences for the log, and alarms that name a site and the evidence."""

from collections.abc import Iterator, Mapping

from polysite.engines.guard_state import Evidence, Guard, GuardState
from polysite.engines.record import SiteGuard
from polysite.payload import SiteId


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
        times = max((seen.lengths[p] / seen.longest[p] for p in seen.clipped), default=0.0)
        times *= 1.0 if after.undecided(site) else guard.clip
        if times > guard.clip and seen.factor == 1 and site not in before.clips:
            yield site, f"its change of the model was {times:.3g} times as long as is usual and was shortened"
        if seen.capped_share is not None and site not in before.caps:
            claimed = f"by its number of cases it would have {seen.claimed_share or 0:.1%} of the mean"
            yield site, f"{claimed}; its share is limited to {seen.capped_share:.1%}"
        yield from ((site, sentence) for sentence in _suspicions(guard, before, after, site, seen))


def _suspicions(guard: Guard, before: GuardState, after: GuardState, site: SiteId, seen: SiteGuard) -> Iterator[str]:
    """Yield sentences if a site begins to lack the direction of the others or to do harm, or counts fully again."""
    former, factor = (s.factor(guard, site) for s in (before, after))
    known, harm = after.evidence.get(site, Evidence()), after.harms.get(site)
    weight = f"it counts by {factor:.2f} of its weight"
    if guard.factor(before.standing(site)) == 1 > guard.factor(known.standing):
        acquitted = f"a jury finds no harm ({harm or 0:+.2f} of what was learnt), so it counts fully"
        yield (
            f"its changes lack the direction of the other sites (standing {known.standing:.2f} after "
            f"{known.rounds} rounds, cosine {seen.cosine or 0:+.2f} in the last one, while the others agree by "
            f"{seen.coherence or 0:+.2f}); {weight if factor < 1 else acquitted}"
        )
    if harm is not None and factor < 1 and (former == 1 or site not in before.harms):
        yield (
            f"models with its changes are worse on the validation cases of the other sites, by {harm:.2f} of what was "
            f"learnt so far; {weight}"
        )
    if factor == 1 > former:
        yield f"it counts fully again (standing {known.standing:.2f}, harm {harm or 0:+.2f})"
