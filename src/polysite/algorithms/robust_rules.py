"""Any averaging algorithm, with an aggregate that a few broken or hostile sites cannot move instead of the mean.

Median and trimmed mean: Yin et al., ICML 2018. Krum: Blanchard et al., NeurIPS 2017. Geometric median: Pillutla, Kakade
and Harchaoui, IEEE TSP 2022. Centred clipping:
Paper: Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021

    z <- rule(w_1, ..., w_K),    then the inner algorithm merges replies in which every w_k is z

So a mean of the replies, by whatever weights, is z. Models and other updates that the replies hold (the controls of
SCAFFOLD) are aggregated by the same rule. Centred clipping starts at the model w that was sent:

    z <- z + sum_k p_k (w_k - z) min(1, tau / |w_k - z|),    p_k = 1/K

The paper centres at the momentum of former rounds and has a fixed tau; here tau is the median distance of the replies
from z, unless ``radius`` is given, so that it follows the length of the changes.

All rules but the geometric median give all sites the same weight. Honest hospitals that differ from most are treated
like bad ones: the guard of deployments (run.guard) is milder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polysite import tree
from polysite.algorithms.base import INF, TINY, Algorithm, Around, Facts, facts, within
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.robust import GeometricMedian, check_beta, check_cut, check_krum, cut_of, krum_choice
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean
from polysite.tree import Tree

Rule = Literal["median", "trimmed_mean", "krum", "geometric_median", "centred_clipping"]
MEDIAN = GeometricMedian()


@dataclass(frozen=True)
class Robust(Around):
    """An averaging algorithm whose mean is replaced by a robust aggregate.

    Args:
        rule: The aggregate: median or trimmed_mean of every coordinate, krum, geometric_median or centred_clipping.
        beta: Trimmed mean: share of the replies cut from each end, at least 0 and less than 0.5.
        f: Krum: number of bad sites to tolerate, at least 0; it needs 2f + 3 sites.
        keep: Krum: number of models to average, at least 1; 1 is Krum, more is multi-Krum.
        radius: Centred clipping: longest distance from the centre (tau in the paper), more than 0; None: the median
            distance.
        iterations: Centred clipping: number of steps of the centre, at least 1.
        inner: Algorithm that averages; its replies must have the fields ``model`` and ``weight``.
    """

    rule: Rule = "trimmed_mean"
    beta: float = 0.25
    f: int = 1
    keep: int = 1
    radius: float | None = None
    iterations: int = 5
    inner: Algorithm[Any] = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        within(self, f=(0, INF), keep=(1, INF), radius=(TINY, INF), iterations=(1, INF))
        check_beta(self.beta)
        reply = self.inner.reply
        clusters = hasattr(self.inner, "site_clusters") or "number" in reply.values()  # the number of a cluster
        if clusters or not {"model", "weight"} <= reply.keys():
            raise ConfigError(
                f"{type(self.inner).__name__} has no mean over all sites that a robust rule could replace; robust goes "
                "around fedavg, fedprox, scaffold and others that average by weights, and inside clustered and weighted"
            )

    @property
    def facts(self) -> Facts:
        return replace(facts(self.inner), needs="each", poolable=False)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> Any:
        if self.rule == "krum":
            check_krum(self.f, self.keep, len(sites))
        if self.rule == "trimmed_mean":
            check_cut(self.beta, len(sites))
        return super().init(params, sites)

    def merge(self, state: Any, replies: Mapping[SiteId, Payload]) -> Any:
        fields = [name for name, kind in self.inner.reply.items() if kind in ("model", "update")]
        centre = self._aggregates(state, replies, fields)
        return self.inner.merge(state, {i: Payload(**{**p, **centre}) for i, p in replies.items()})

    def shares(self, state: Any, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the weights of the replies, for rules that have weights."""
        if self.rule == "geometric_median":
            return MEDIAN.shares(state, replies)
        return self._krum(replies) if self.rule == "krum" and len(replies) >= 2 * self.f + 3 else {}

    def _aggregates(self, state: Any, replies: Mapping[SiteId, Payload], fields: list[str]) -> dict[str, Tree]:
        """Return the robust aggregate of every field."""
        shares = self.shares(state, replies)
        if shares:
            return {name: mean(replies, name, shares) for name in fields}
        if self.rule == "centred_clipping":
            sent = self.inner.send(state, sorted(replies)[:1])
            start = next(iter(sent.values()))
            return {name: self._centre(start.get(name, {}), replies, name) for name in fields}
        count = len(replies)
        cut = cut_of(self.beta, count) if self.rule == "trimmed_mean" else (count - 1) // 2  # the median, also for krum
        return {name: tree.trimmed_mean([replies[i][name] for i in sorted(replies)], cut) for name in fields}

    def _krum(self, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        chosen = krum_choice(replies, self.f, self.keep)
        return {i: float(i in chosen) / len(chosen) for i in sorted(replies)}

    def _centre(self, start: Tree, replies: Mapping[SiteId, Payload], name: str) -> Tree:
        """Return the centre of one field after all iterations. An update starts at zero."""
        values = [replies[i][name] for i in sorted(replies)]
        update = self.inner.reply[name] == "update"
        centre = tree.zeros(values[0]) if update else {k: start[k] for k in values[0]}
        for _ in range(self.iterations):
            away = _distances(values, centre)
            radius = float(np.median(away)) if self.radius is None else self.radius
            scales = np.minimum(1.0, np.divide(radius, away, out=np.ones_like(away), where=away > 0))
            steps = [
                tree.map(lambda x, c, s=float(s): (x - c) * s, v, centre) for v, s in zip(values, scales, strict=True)
            ]
            centre = tree.add(centre, tree.mean(steps))
        return centre


def _distances(values: Sequence[Tree], centre: Tree) -> NDArray[np.float64]:
    """Return the distances of the trained parameters from the centre."""
    middle = tree.trained(centre)
    return np.array([tree.norm(tree.sub(tree.trained(value), middle)) for value in values])
