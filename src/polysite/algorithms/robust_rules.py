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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polysite import tree
from polysite.algorithms.base import (
    INF,
    TINY,
    Algorithm,
    Around,
    Facts,
    diagnostics,
    facts,
    serving_payloads,
    within,
)
from polysite.algorithms.fedavg import FedAvg
from polysite.algorithms.robust import GeometricMedian, krum_scores
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean
from polysite.site import Cases, Site
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
        if not 0 <= self.beta < 0.5:
            raise ConfigError(
                f"the trimmed mean cuts less than half from each end, got beta = {self.beta}; set it below 0.5"
            )
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
        count = len(sites)
        if self.rule == "krum" and count < 2 * self.f + 3:
            raise ConfigError(
                f"krum tolerates f = {self.f} bad sites among {2 * self.f + 3} or more, and there are {count}; lower "
                "f, or choose median or geometric_median"
            )
        if self.rule == "krum" and self.keep > count - self.f:
            raise ConfigError(
                f"krum cannot keep {self.keep} of {count} sites of which f = {self.f} may be bad; lower keep"
            )
        if self.rule == "trimmed_mean" and self.beta and not self._cut(count):
            least = f"set it to {ceil(100 / count) / 100} or more" if count > 2 else "it takes three or more"
            raise ConfigError(f"beta = {self.beta} cuts nothing from {count} sites; {least}, or to 0 for a mean")
        return self.inner.init(params, sites)

    def send(self, state: Any, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self.inner.send(state, cohort)

    def serving_payloads(self, state: Any, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return serving_payloads(self.inner, state, sites)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return self.inner.local(got, memory, site)

    def merge(self, state: Any, replies: Mapping[SiteId, Payload]) -> Any:
        fields = [name for name, kind in self.inner.reply.items() if kind in ("model", "update")]
        centre = self._aggregates(state, replies, fields)
        return self.inner.merge(state, {i: Payload(**{**p, **centre}) for i, p in replies.items()})

    def shares(self, state: Any, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the weights of the replies, for rules that have weights."""
        if self.rule == "geometric_median":
            return MEDIAN.shares(state, replies)
        return self._krum(replies) if self.rule == "krum" and len(replies) >= 2 * self.f + 3 else {}

    def diagnostics(self, state: Any) -> Mapping[str, float]:
        return diagnostics(self.inner, state)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        return self.inner.serve(got, memory, site, cases)

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
        cut = self._cut(count) if self.rule == "trimmed_mean" else (count - 1) // 2  # the median, also for krum
        return {name: tree.trimmed_mean([replies[i][name] for i in sorted(replies)], cut) for name in fields}

    def _cut(self, sites: int) -> int:
        return floor(self.beta * sites + 1e-9)

    def _krum(self, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        order = sorted(replies)
        score = krum_scores(replies, len(order) - self.f - 2)
        chosen = sorted(order, key=score.__getitem__)[: min(self.keep, len(order) - self.f)]  # ties: by name
        return {i: float(i in chosen) / len(chosen) for i in order}

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
