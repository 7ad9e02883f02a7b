"""Functions that averaging algorithms share: the mean of the sites' models, and a step towards it.

    target <- sum_k a_k w_k / sum_k a_k,    w <- w + length (target - w)

Running statistics of batch normalisation are always a plain mean by the sites' own weights, because a variance that is
extrapolated or passed to an adaptive optimiser can become negative.
"""

from collections.abc import Mapping

from polysite import tree
from polysite.payload import Payload, SiteId, mean
from polysite.tree import Tree


def average(replies: Mapping[SiteId, Payload], by: str | Mapping[SiteId, float] = "weight") -> Tree:
    """Return the mean of the sites' models by these weights, and of running statistics by the field ``weight``."""
    if by == "weight":
        return mean(replies, "model", "weight")
    parts = {i: Payload(model=tree.trained(p["model"]), rest=tree.statistics(p["model"])) for i, p in replies.items()}
    weights = {i: p["weight"] for i, p in replies.items()}
    return {**mean(parts, "model", by), **mean(parts, "rest", weights)}


def towards(model: Tree, target: Tree, length: float) -> Tree:
    """Move a model this many times the way to the target. Running statistics are those of the target."""
    if length == 1:
        return target
    start, end = tree.trained(model), tree.trained(target)
    return {**target, **tree.map(lambda w, t: w + length * (t - w), start, end)}
