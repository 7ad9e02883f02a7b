"""Cross-check of contributions: what the ballots of a jury (``jury.py``) say about every site.

The harms r of all sites follow from ballots with the differences y, in units p of what was learnt:

    minimise  sum_ballots w (|y / p - sum_i s_i r_i| + sum_i b_i |s_i r_i|),      s_i = +-1/m for a half of m sites

Absolute values, so that a minority of false ballots is outvoted; a site has no voice about itself (its s is 0). The
second term, with b = BLAME for a harm and PRAISE for a benefit, blames as few sites as explain the ballots, and none
unless clearly most ballots speak against it; it would rather call one site better than the others than all others
worse. The weight w is the median p of the round for every ballot, so that no juror gains a voice by what it claims, and
decays by RECENT with every round that is newer. A juror whose own model is not better than the zero model has nothing
to say. While little is learnt, harms are small: they are multiplied by W / (W + PRIOR) with W the sum of w over rounds.

Harm is computed twice, from the newest round alone and from all rounds that are kept; the larger one counts. So a site
that turns hostile late is found in that round, and one whose harm is small in a single round is found by many.

An honest hospital that differs from all others does harm, too, when these have learnt their part, but a small share of
what all have learnt; what is learnt from wrong labels does harm of about a third of it and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from polysite.engines.jury import Ballot
from polysite.payload import SiteId

RECENT, WINDOW = 0.9, 12  # decay of older ballots; rounds with ballots that are kept
BLAME, PRAISE = 0.1, 0.06  # share by which ballots against a site, or for it, must outweigh the others
PRIOR = 0.02  # in units of the loss
TINY = 1e-3  # least unit of harm
UNHEARD = 1e-6  # weight of a ballot by a juror that has learnt nothing
STEPS, CLOSE = 60, 1e-4  # of the minimisation


@dataclass(frozen=True, slots=True)
class Finding:
    """What a jury found about a site."""

    harm: float  # as a share of what was learnt
    learnt: float  # what was learnt by the jurors that judged it, summed over rounds with decay


def findings(rounds: Sequence[Sequence[Ballot]]) -> dict[SiteId, Finding]:
    """Return what was found about every site that a ballot concerns.

    Args:
        rounds: The ballots of every round, the newest last.
    """
    total = _regressed(rounds)
    newest = _regressed(rounds[-1:]) if len(rounds) > 1 else {}
    return {i: max(newest.get(i, f), f, key=lambda each: each.harm) for i, f in total.items()}


def _regressed(rounds: Sequence[Sequence[Ballot]]) -> dict[SiteId, Finding]:
    ballots, units, weights, ages = list[Ballot](), list[float](), list[float](), list[int]()
    for age, cast in enumerate(reversed(rounds)):
        usual = max(median([b.learnt for b in cast if b.learnt > 0] or [0.0]), TINY)
        ballots += cast
        units += [min(max(b.learnt, 0.25 * usual), 2 * usual) for b in cast]
        weights += [usual * RECENT**age * (1.0 if b.learnt > 0 else UNHEARD) for b in cast]
        ages += [age] * len(cast)
    names = sorted({i for b in ballots for i in b.signs})
    if not names:
        return {}
    rows = np.array([[b.signs.get(i, 0.0) for i in names] for b in ballots])
    unit, weight = np.array(units), np.array(weights)
    found = _least_deviations(rows, np.array([b.difference for b in ballots]) / unit, weight)
    harms = {}
    for k, site in enumerate(names):
        voices = rows[:, k] != 0
        learnt = float(sum(weight[voices & (np.array(ages) == age)].mean() for age in {*np.array(ages)[voices]}))
        harms[site] = Finding(float(found[k]) * learnt / (learnt + PRIOR), learnt)
    return harms


def _least_deviations(
    rows: NDArray[np.float64], seen: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimise sum w (|seen - rows r| + b sum |rows| |r|) by reweighted least squares."""
    voices = weight @ np.abs(rows)
    found: NDArray[np.float64] = np.zeros(rows.shape[1])
    for _ in range(STEPS):
        data = weight / np.maximum(np.abs(seen - rows @ found), CLOSE)
        doubt = voices * np.where(found < 0, PRAISE, BLAME)
        blame = doubt / np.maximum(np.abs(found), CLOSE)
        if not found.any():  # the first step is plain least squares
            data, blame = weight, doubt
        found[:] = np.linalg.solve((rows * data[:, None]).T @ rows + np.diag(blame), rows.T @ (data * seen))
    return found
