"""What averaging algorithms share: the mean of the sites' models, and a step towards it.

    target <- sum_k a_k w_k / sum_k a_k,    w <- w + length (target - w)

Running statistics of batch normalisation are a plain mean by the sites' own weights: a variance that is extrapolated or
given to an adaptive optimiser can become negative.
"""

from collections.abc import Mapping

from polysite import tree
from polysite.payload import Payload, SiteId, mean
from polysite.tree import Tree


def average(replies: Mapping[SiteId, Payload], by: str | Mapping[SiteId, float] = "weight") -> Tree:
    """The mean of the sites' models by these weights; that of their statistics by the sites' own."""
    if by == "weight":
        return mean(replies, "model", "weight")
    parts = {i: Payload(model=tree.trained(p["model"]), rest=tree.statistics(p["model"])) for i, p in replies.items()}
    weights = {i: p["weight"] for i, p in replies.items()}
    return {**mean(parts, "model", by), **mean(parts, "rest", weights)}


def towards(model: Tree, target: Tree, length: float) -> Tree:
    """A step of this length from a model to the mean of the sites' models; their statistics are taken as they are."""
    if length == 1:
        return target
    start, end = tree.trained(model), tree.trained(target)
    return {**target, **tree.map(lambda w, t: w + length * (t - w), start, end)}
