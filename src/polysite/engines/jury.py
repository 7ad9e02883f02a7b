"""The jury of a round: which hospitals judge the changes of which others, and how they vote.

Before a merge, some hospitals (the jury) score two models each, their own reply plus and minus half a contrast:

    contrast of h    mean change of one half of the other sites - mean change of the other half
    ballot of h      y = loss(own + contrast / 2) - loss(own - contrast / 2),   p = loss(zero model) - their mean

y is positive if the first half does harm to the juror's cases; p is what the juror's model has learnt so far (the zero
model knows nothing), the unit in which harm is counted (``cross_check.py``). The halves are drawn anew for every juror
and round, such that two sites are in the same half about as often as in different ones: then few ballots tell a site
from those that it shares a half with.

There is a second vote, on other halves, before a first verdict and before a site begins to count less.

No juror sees the model of another site. From all that it sees in a round (its own change, at most two contrasts, the
merged model) no combination gives the change of a single other site either. The merged model has the changes of all
with positive weights. In two contrasts whose halves cross, the signs of the others are (+, +), (+, -), (-, +) and
(-, -); a combination without all but one site would need opposite weights for opposite signs. So a jury needs five
sites that were sent the same model. Two jurors that put together what they see may come closer to it, and so may one
that takes the changes of several rounds as equal.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from polysite import tree
from polysite.engines.phase_sites import PhaseSites
from polysite.payload import Payload, SiteId
from polysite.site import Scores
from polysite.tree import Tree

FEWEST = 5  # sites of a jury's group: two others in either half
STARTS, SWEEPS, TRIED = 8, 3, 12  # of the search for balanced halves

Signs = Mapping[SiteId, float]


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a contrast did to the validation cases of a juror."""

    juror: SiteId
    signs: Signs  # of the other sites in the contrast
    difference: float  # of the losses
    learnt: float  # loss of the zero model minus that of the two models


def able(groups: Iterable[Sequence[SiteId]]) -> list[list[SiteId]]:
    """Return the groups that are large enough for a jury."""
    return [sorted(group) for group in groups if len(group) >= FEWEST]


def draw(
    groups: Iterable[Sequence[SiteId]],
    voters: Collection[SiteId],
    jury: int,
    numbers: Sequence[int],
    before: Iterable[Signs] = (),
    first: Mapping[SiteId, Signs] | None = None,
) -> dict[SiteId, dict[SiteId, float]]:
    """Return the jurors of a round, and the signs of the other sites in the contrast of each.

    Args:
        groups: Sites that were sent the same model, in groups.
        voters: Sites that can score models.
        jury: Largest number of jurors.
        numbers: Numbers from which jurors and halves are drawn.
        before: Signs of earlier ballots, which the new ones complete.
        first: Signs of the first vote of this round, if this is the second. The jurors are the same, and their halves
            cross the first ones: some sites of either half are in either half of the first vote.
    """
    random = np.random.default_rng(list(numbers))
    large = able(groups)
    pairs = sorted((site, k) for k, group in enumerate(large) for site in group if site in voters)
    chosen = sorted(random.permutation(len(pairs))[:jury].tolist())
    if first is not None:
        chosen = [n for n, (site, _) in enumerate(pairs) if site in first]
    place = {site: n for n, site in enumerate(sorted({i for group in large for i in group}))}
    together = np.zeros((len(place), len(place)))  # how much more often two sites were in one half than in two
    for signs in before:
        _count(together, {i: s for i, s in signs.items() if i in place}, place)
    jurors = {pairs[n][0]: [i for i in large[pairs[n][1]] if i != pairs[n][0]] for n in chosen}
    tries = [_balanced(jurors, together.copy(), place, random, first or {}) for _ in range(STARTS)]
    return min(tries, key=lambda each: each[0])[1]


def _balanced(
    jurors: Mapping[SiteId, Sequence[SiteId]],
    together: NDArray[np.float64],
    place: Mapping[SiteId, int],
    random: np.random.Generator,
    first: Mapping[SiteId, Signs],
) -> tuple[float, dict[SiteId, dict[SiteId, float]]]:
    """Return halves for every juror, and how unbalanced they are: drawn one after the other, then improved in turn."""
    drawn: dict[SiteId, dict[SiteId, float]] = {}
    for _ in range(SWEEPS):
        for juror, others in jurors.items():
            tried = [_halves(others, random, first.get(juror, {})) for _ in range(TRIED)]
            if juror in drawn:
                _count(together, drawn[juror], place, -1)
                tried.append(drawn[juror])
            drawn[juror] = min(tried, key=lambda signs: _unbalanced(together, signs, place))
            _count(together, drawn[juror], place)
    return float(np.square(np.triu(together, 1)).sum()), drawn


def _halves(others: Sequence[SiteId], random: np.random.Generator, first: Signs) -> dict[SiteId, float]:
    half, crosses = len(others) // 2, bool(first) and len(others) >= 4
    while True:
        chosen = {others[k] for k in random.permutation(len(others))[:half]}
        if not crosses or len({(first[i] > 0, i in chosen) for i in others}) == 4:
            return {i: 1 / half if i in chosen else -1 / (len(others) - half) for i in others}


def _sides(signs: Signs, place: Mapping[SiteId, int], size: int) -> NDArray[np.float64]:
    sides = np.zeros(size)
    sides[[place[i] for i in signs]] = np.sign(list(signs.values()))
    return sides


def _count(together: NDArray[np.float64], signs: Signs, place: Mapping[SiteId, int], times: int = 1) -> None:
    sides = _sides(signs, place, len(together))
    together += times * np.outer(sides, sides)


def _unbalanced(together: NDArray[np.float64], signs: Signs, place: Mapping[SiteId, int]) -> float:
    sides = _sides(signs, place, len(together))
    return float(np.square(np.triu(together + np.outer(sides, sides), 1)).sum())


def contrast(models: Mapping[SiteId, Tree], signs: Signs) -> Tree:
    """Return the contrast of models' trained parameters; empty if the models have different parameters."""
    total: Tree | None = None
    for site in sorted(signs):
        model = tree.trained(models[site])
        if total is not None and total.keys() != model.keys():
            return {}
        total = tree.add_share(total, model, signs[site])
    return total or {}


def moved(model: Tree, contrast: Tree, share: float | None) -> Tree:
    """Return a model plus a share of a contrast, or with zeros for None; parameters that the contrast lacks stay."""
    return {
        k: x if k not in contrast else x * 0 if share is None else x + contrast[k] * share for k, x in model.items()
    }


def cast(
    transport: PhaseSites,
    round: int,
    served: Mapping[SiteId, Payload],
    models: Mapping[SiteId, Tree],
    signs: Mapping[SiteId, Signs],
    naive: Mapping[SiteId, float],
) -> tuple[tuple[Ballot, ...], dict[SiteId, float]]:
    """Have the jurors score their models; return the ballots, and the losses of the zero model.

    Args:
        transport: Carries models to the jurors.
        round: The round.
        served: Payloads from which the jurors choose the model that they use.
        models: The models that the sites replied, as far as they are allowed to change.
        signs: Signs of the other sites in the contrast of every juror.
        naive: Losses of the zero model that are known.
    """
    own = {h: {**served[h]["model"], **models[h]} for h in sorted(signs) if _has(served.get(h), models[h])}
    contrasts = {h: contrast(models, signs[h]) for h in own}
    jurors = [h for h in own if contrasts[h]]

    def losses(sites: Sequence[SiteId], share: float | None) -> dict[SiteId, float]:
        sent = {h: Payload(**{**served[h], "model": moved(own[h], contrasts[h], share)}) for h in sites}
        scores = transport.score(round, sent, "validation") if sent else {}
        found = {h: mean_loss(scores.get(h, {})) for h in sites}
        return {h: loss for h, loss in found.items() if loss is not None}

    naive = {**naive, **losses([h for h in jurors if h not in naive], None)}
    first, second = losses(jurors, 0.5), losses(jurors, -0.5)
    heard = [h for h in jurors if h in first and h in second and h in naive]
    return tuple(Ballot(h, signs[h], first[h] - second[h], naive[h] - (first[h] + second[h]) / 2) for h in heard), naive


def _has(served: Payload | None, model: Tree) -> bool:
    """Whether a payload has a model with all parameters of this one."""
    return served is not None and bool(model) and model.keys() <= served.get("model", {}).keys()


def mean_loss(scores: Scores) -> float | None:
    """Return the mean loss of some cases; None without cases, or if it is not finite."""
    loss = fmean(s.loss for s in scores.values()) if scores else float("nan")
    return loss if isfinite(loss) else None
