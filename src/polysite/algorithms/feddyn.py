"""FedDyn: a linear term in every local objective makes the local optima agree with the global one.

Paper: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021

    w_k ~ argmin_v F_k(v) - <g_k, v> + alpha/2 |v - w|^2,    g_k <- g_k - alpha (w_k - w)       at the site
    h <- h - alpha/m sum_k (w_k - w),    w <- mean_k w_k - h / alpha                            m: all sites

h stays the mean of all g_k, absent sites included; when a new site appears, h shrinks accordingly. All sites have the
same weight. alpha is on the scale of the loss: with too small a value, h / alpha becomes too long a step for a U-Net.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.payload import Payload, SiteId, mean
from polysite.site import Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    h: Tree
    sites: tuple[SiteId, ...]


@dataclass(frozen=True)
class FedDyn(OneModel):
    """Federated learning with a dynamic regulariser at every site.

    Args:
        alpha: Weight of the regulariser (alpha in the paper), more than 0, on the scale of the loss; 0.01 in
            the authors' program.
    """

    alpha: float = 0.01

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model"}

    def __post_init__(self) -> None:
        within(self, alpha=(TINY, INF))

    @property
    def facts(self) -> Facts:
        """Facts that other modules act on. It counts the sites that have replied by name, so it needs each reply."""
        return Facts(pull=self.alpha, shared_model=True)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params, tree.zeros(tree.trained(params)), tuple(sorted(sites)))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w = got["model"]
        g = memory["gradient"] if "gradient" in memory else tree.zeros(tree.trained(w))
        fit = site.fit(w, Objective(Tilt(linear=tree.scale(g, -1), anchor=w, weight=self.alpha)))
        moved = tree.sub(tree.trained(fit.params), tree.trained(w))
        return Payload(model=fit.params), Payload(gradient=tree.sub(g, tree.scale(moved, self.alpha)))

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        sites = tuple(sorted({*state.sites, *replies}))
        old, here = len(state.sites) / len(sites), len(replies) / len(sites)
        target = mean(replies, "model")
        h = tree.map(
            lambda h, w, t: h * old - self.alpha * here * (t - w),
            state.h,
            tree.trained(state.model),
            tree.trained(target),
        )
        model = tree.map(lambda t, h: t - h / self.alpha, tree.trained(target), h)
        return State({**target, **model}, h, sites)
