"""Cross-check of contributions: hospitals measure what the changes of the others do to their own validation cases.

After a merge, some hospitals (the jury) score two models each, the served model plus and minus half a contrast:

    contrast of h    mean change of one half of the other sites - mean change of the other half
    ballot of h      y = loss(served + contrast / 2) - loss(served - contrast / 2),   p = loss(zero model) - their mean

The halves are drawn anew for every juror and round. y is positive if the first half does harm to the juror's cases; p
is what the model has learnt so far (the zero model knows nothing), the unit in which harm is counted. The harms r of
all sites follow from the ballots of several rounds, older ones decaying by RECENT:

    minimise  sum_ballots w (|y / p - sum_i s_i r_i| + BLAME sum_i |s_i r_i|),      s_i = +-1/m for a half of m sites

Absolute values, so that a minority of false ballots is outvoted; a site has no voice about itself (its s is 0). The
second term blames as few sites as explain the ballots, and none unless clearly most ballots speak against it. While
little is learnt, harms are small: they are multiplied by W / (W + PRIOR) with W the decayed sum of p. An honest
hospital that differs from all others does harm, too, when these have learnt their part, but a small share of what all
have learnt; what is learnt from wrong labels does harm of half of it and more.

No juror sees the model of another site. From all that it sees in a round (the served model, the contrast, its own
change) no combination gives the change of a single other site either: each half has at least two others, and the
served model has all of them with positive weights. So a jury needs five sites that were sent the same model. Two jurors
that put together what they see may come closer to it, and so may one that takes the changes of several rounds as equal.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from polysite import tree
from polysite.engines.transport import Transport
from polysite.payload import Payload, SiteId
from polysite.site import Scores
from polysite.tree import Tree

FEWEST = 5  # sites of a jury's group: two others in either half
RECENT, WINDOW = 0.9, 12  # decay of older ballots; rounds with ballots that are kept
BLAME = 0.2  # share by which ballots against a site must outweigh the others
PRIOR = 0.05  # in units of the loss
TINY = 1e-3  # least unit of harm
STEPS, CLOSE = 60, 1e-4  # of the minimisation


@dataclass(frozen=True, slots=True)
class Ballot:
    """What a contrast did to the validation cases of a juror."""

    juror: SiteId
    signs: Mapping[SiteId, float]  # of the other sites in the contrast
    difference: float  # of the losses
    learnt: float  # loss of the zero model minus that of the two models


class Contrasts:
    """Running contrasts of the jurors of a round, in the order of the sites' names.

    Args:
        groups: Sites that were sent the same model, in groups.
        jury: Largest number of jurors.
        draw: Numbers from which jurors and halves are drawn.
    """

    def __init__(self, groups: Iterable[Sequence[SiteId]], jury: int, draw: Sequence[int]):
        random = np.random.default_rng(draw)
        able = [sorted(group) for group in groups if len(group) >= FEWEST]
        pairs = sorted((site, k) for k, group in enumerate(able) for site in group)
        chosen = sorted(random.permutation(len(pairs))[:jury].tolist())
        self.signs = {pairs[n][0]: _halves(able[pairs[n][1]], pairs[n][0], random) for n in chosen}
        self.trees: dict[SiteId, Tree] = {}
        self.added: set[SiteId] = set()
        self.uneven = False  # whether models have different parameters, so that there is no difference

    def add(self, site: SiteId, model: Tree) -> None:
        """Add the trained parameters of a site's model to all contrasts that it is part of."""
        self.added.add(site)
        model = tree.trained(model) if self.signs else model
        for juror, signs in self.signs.items():
            if site in signs and self.trees.get(juror, model).keys() == model.keys():
                self.trees[juror] = tree.add_share(self.trees.get(juror), model, signs[site])
            elif site in signs:
                self.uneven = True

    def complete(self, heard: Iterable[SiteId]) -> bool:
        """Whether the contrasts are those of all replies that count."""
        return not self.uneven and self.added == set(heard)


def _halves(group: Sequence[SiteId], juror: SiteId, random: np.random.Generator) -> dict[SiteId, float]:
    others = [i for i in group if i != juror]
    order, half = random.permutation(len(others)), len(others) // 2
    first = {others[k] for k in order[:half]}
    return {i: 1 / half if i in first else -1 / (len(others) - half) for i in others}


def moved(model: Tree, contrast: Tree, share: float | None) -> Tree:
    """Return a model plus a share of a contrast, or with zeros for None; parameters that the contrast lacks stay."""
    return {
        k: x if k not in contrast else x * 0 if share is None else x + contrast[k] * share for k, x in model.items()
    }


def cast(
    transport: Transport,
    round: int,
    served: Mapping[SiteId, Payload],
    contrasts: Mapping[SiteId, Tree],
    signs: Mapping[SiteId, Mapping[SiteId, float]],
    naive: Mapping[SiteId, float],
) -> tuple[tuple[Ballot, ...], dict[SiteId, float]]:
    """Have the jurors score their models; return the ballots, and the losses of the zero model.

    Args:
        transport: Carries models to the jurors.
        round: The round.
        served: Payloads from which the jurors choose the model that they use.
        contrasts: Contrast of every juror.
        signs: Signs of the other sites in it.
        naive: Losses of the zero model that are known.
    """
    jurors = [h for h in sorted(contrasts) if contrasts[h] and contrasts[h].keys() <= _model(served, h).keys()]

    def losses(sites: Sequence[SiteId], share: float | None) -> dict[SiteId, float]:
        sent = {h: Payload(**{**served[h], "model": moved(_model(served, h), contrasts[h], share)}) for h in sites}
        scores = transport.score(round, sent, "validation") if sent else {}
        found = {h: mean_loss(scores.get(h, {})) for h in sites}
        return {h: loss for h, loss in found.items() if loss is not None}

    naive = {**naive, **losses([h for h in jurors if h not in naive], None)}
    first, second = losses(jurors, 0.5), losses(jurors, -0.5)
    able = [h for h in jurors if h in first and h in second and h in naive]
    return tuple(Ballot(h, signs[h], first[h] - second[h], naive[h] - (first[h] + second[h]) / 2) for h in able), naive


def _model(served: Mapping[SiteId, Payload], site: SiteId) -> Tree:
    return served[site].get("model", {}) if site in served else {}


def mean_loss(scores: Scores) -> float | None:
    """Return the mean loss of some cases; None without cases, or if it is not finite."""
    loss = fmean(s.loss for s in scores.values()) if scores else float("nan")
    return loss if isfinite(loss) else None


def harms(rounds: Sequence[Sequence[Ballot]]) -> dict[SiteId, float]:
    """Return the harm of every site that a ballot concerns, as a share of what was learnt.

    Args:
        rounds: The ballots of every round, the newest last. Those of a single round do not tell a site well from those
            that it shared a half with: no site is blamed.
    """
    if len(rounds) < 2:
        return {i: 0.0 for cast in rounds for ballot in cast for i in ballot.signs}
    ballots, units, ages = list[Ballot](), list[float](), list[int]()
    for age, cast in enumerate(reversed(rounds)):
        usual = median(b.learnt for b in cast) if cast else 0.0
        ballots += cast
        units += [max(min(max(b.learnt, 0.25 * usual), 2 * usual), TINY) for b in cast]
        ages += [age] * len(cast)
    names = sorted({i for b in ballots for i in b.signs})
    if not names:
        return {}
    unit = np.array(units)
    rows = np.array([[b.signs.get(i, 0.0) for i in names] for b in ballots])
    weight = unit * RECENT ** np.array(ages, float)
    found = _least_deviations(rows, np.array([b.difference for b in ballots]) / unit, weight)
    harmed = {}
    for k, site in enumerate(names):
        voices = rows[:, k] != 0
        learnt = weight[voices].sum() / len({b.juror for b in ballots if site in b.signs})
        harmed[site] = float(found[k] * learnt / (learnt + PRIOR))
    return harmed


def _least_deviations(
    rows: NDArray[np.float64], seen: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimise sum w (|seen - rows r| + BLAME sum |rows| |r|) by reweighted least squares."""
    doubt = BLAME * (weight @ np.abs(rows))
    found: NDArray[np.float64] = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        data = weight / np.maximum(np.abs(seen - rows @ found), CLOSE)
        blame = doubt / np.maximum(np.abs(found), CLOSE)
        if not found.any():  # the first step is plain least squares
            data, blame = weight, doubt
        found[:] = np.linalg.solve((rows * data[:, None]).T @ rows + np.diag(blame), rows.T @ (data * seen))
    return found
