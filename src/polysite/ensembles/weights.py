"""Weights of an ensemble's members, chosen on the validation cases of a hospital and shrunk towards equal weights.

The weights lie on a grid over the simplex that includes equal weights. With d_i the gain of a case's score (the mean
Dice of its labels, or the accuracy) over equal weights, the weights with the largest

    mean d  -  sqrt(v / n),    v = (K s^2 + sum_i (d_i - mean d)^2) / (K + n)

are taken: the mean gain over n cases less its standard error. The variance v includes K = 4 prior cases with a
deviation of s = 0.05, so that two cases choose weights only where a member is clearly better. Equal weights have 0, and
of several best ones those nearest to them are taken. A hospital without validation cases has equal weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import torch

from polysite.payload import SiteId
from polysite.training.network import Network
from polysite.training.torch_site import TorchSite
from polysite.tree import Tree

POINTS = 100  # of the grid, at most
FINEST = 10  # steps along an edge of the simplex
PRIOR, SPREAD = 4, 0.05  # prior cases, and the deviation of their gains

Values = np.ndarray


@dataclass(frozen=True)
class Choice:
    """Weights of the members for one hospital."""

    weights: tuple[float, ...]
    cases: int = 0  # validation cases that chose them
    gain: float = 0.0  # of the mean validation score over equal weights
    error: float = 0.0  # standard error of the gain, with the prior cases


def equal(count: int) -> Choice:
    """Return equal weights."""
    return Choice((1 / count,) * count)


def grid(count: int) -> Values:
    """Return points on the simplex, one row each, equal weights first.

    >>> grid(2)[:3].tolist(), len(grid(2)), len(grid(5))
    ([[0.5, 0.5], [0.0, 1.0], [0.1, 0.9]], 11, 71)
    """
    steps = max(k for k in range(1, FINEST + 1) if k == 1 or comb(k + count - 1, count - 1) <= POINTS)
    points = [p for p in _compositions(steps, count) if len(set(p)) > 1]
    return np.array([[1 / count] * count, *([x / steps for x in p] for p in points)])


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of ``count`` whole numbers with this sum."""
    if count == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, count - 1):
            yield (first, *rest)


def choose(points: Values, scores: Values) -> Choice:
    """Choose weights from the scores of all points (rows, the first with equal weights) on all cases (columns)."""
    gains = scores - scores[0]
    count = scores.shape[1]
    if not count:
        return equal(points.shape[1])
    mean = gains.mean(1)
    variance = (PRIOR * SPREAD**2 + ((gains - mean[:, None]) ** 2).sum(1)) / (PRIOR + count)
    error = np.sqrt(variance / count)
    bound = mean - error
    bound[0] = 0.0
    away = np.linalg.norm(points - points[0], axis=1)
    best = min(range(len(points)), key=lambda k: (-round(bound[k], 9), away[k], k))
    return Choice(tuple(map(float, points[best])), count, float(mean[best]), float(error[best]) if best else 0.0)


def on_validation(
    sites: Mapping[SiteId, TorchSite], models: Sequence[Mapping[SiteId, Tree]], networks: Sequence[Network]
) -> dict[SiteId, Choice]:
    """Choose the weights of every hospital on its validation cases.

    Args:
        sites: The hospitals.
        models: The models that each member has for the hospitals.
        networks: The networks of the members.
    """
    return {
        name: _at_site(site, [m[name] for m in models], networks) for name, site in sites.items() if name in models[0]
    }


def _at_site(site: TorchSite, models: Sequence[Tree], networks: Sequence[Network]) -> Choice:
    points, columns = grid(len(models)), []
    members = [(site.using(network), site.lift(model)) for network, model in zip(networks, models, strict=True)]
    for case in site.cases("validation"):
        found = [next(member.predictions(model, (case,))) for member, model in members]
        stack, truth = torch.stack([logits for _, logits, _ in found]), found[0][2]
        columns.append([site.score_of(case, mixed(p, stack), truth).mean for p in points])
    return choose(points, np.array(columns).reshape(-1, len(points)).T)


def mixed(weights: Values, logits: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean of the members' logits of a case."""
    factors = torch.as_tensor(weights, dtype=logits.dtype, device=logits.device)
    mean: torch.Tensor = torch.tensordot(factors, logits, 1)
    return mean
