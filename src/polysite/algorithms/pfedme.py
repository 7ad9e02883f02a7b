"""pFedMe: a shared model that minimises Moreau envelopes, and a personal model per site held near it.

Paper: Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1

    min_w mean_k M_k(w),    M_k(w) = min_v F_k(v) + lam/2 |v - w|^2
    at a site, from w_k = w, ``outer`` times:
        v <- ``inner`` steps of size inner_lr on B(v) + lam/2 |v - w_k|^2,    B the loss of one mini-batch
        w_k <- w_k - lr lam (w_k - v)                                         a step along the gradient of M_k
    w <- (1 - beta) w + beta mean_k w_k

All inner steps of an outer step use the same mini-batch; the next outer step draws the next one. v continues from the
last inner steps (``warm``), or starts from w_k each time. The site replies w_k. The last v is the personal model: it
never leaves the site, and the site is served by it. A site with cases that never trained is served the result of the
inner steps from w; a site without cases is served w. (In the paper all sites train in every round and the server
averages some of them; here only the sites of the cohort train.)

Running statistics come from the inner steps. The paper takes lam from 10 to 30, beta up to 4, 5 inner and 20 outer
steps. inner_lr * lam must stay well below 2, or the proximal term diverges. train.gamma decays inner_lr but not lr.

The defaults follow the learning rate of the site, r = train.lr. lam = 1 / (inner r): the proximal term is as strong as
the inner steps are long, so that v goes about 1 - 1/e as far as without it. The authors' published results have
lam r = 1.5: an outer step then goes at most 0.67 r times the gradient, less than one step of FedAvg, for ``inner``
steps of computation. On phantoms, the authors' ratio gave a Dice of 0.35 after 800 local steps, this default 0.59, and
local training 0.61 after 640 (one run each; no other value was tried; docs/results/phantoms.md).
inner_lr = r / (1 + r lam): if r suits F, whose curvature is then about 1 / r, this suits F + lam/2 |.|^2, whose
curvature is larger by lam. lr = 1 / lam: M_k has a gradient with constant lam, and the step then ends at v; the
authors' rate of 0.005 goes 0.075 of this way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State, average, towards
from polysite.algorithms.base import INF, TINY, Facts, within
from polysite.payload import Payload, SiteId
from polysite.site import Budget, Cases, Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True)
class PFedMe(OneModel):
    """A shared model that minimises Moreau envelopes, and a personal model per site near it.

    Args:
        lam: Weight of the proximal term of the personal model (lambda in the paper), more than 0; the paper takes 10 to
            30. None: 1 / (inner * train.lr), our choice after a trial on phantoms (docs/results/phantoms.md).
        lr: Learning rate of the shared model at a site (eta in the paper), more than 0; the authors take 0.005. None:
            1 / lam, the longest step that the smoothness of the envelopes allows.
        outer: Steps of the shared model at a site per round (R in the paper), at least 1; 20, as in the paper.
        inner_lr: Learning rate of the personal model, more than 0; the authors take 0.05 to 0.1. None: train.lr /
            (1 + train.lr * lam), which allows for the curvature of the proximal term.
        inner: Steps of the personal model per outer step (K in the paper), at least 1, all on one mini-batch; 5, as in
            the paper.
        warm: Whether the personal model continues from the last inner steps, instead of starting from the shared one.
        beta: Step of the server towards the mean (beta in the paper), more than 0; above 1 it goes beyond the mean.
        uniform: Whether all sites have the same weight, as in the paper, instead of weights by number of cases.
    """

    lam: float | None = None
    lr: float | None = None
    outer: int = 20
    inner_lr: float | None = None
    inner: int = 5
    warm: bool = True
    beta: float = 1.0
    uniform: bool = True

    facts: ClassVar[Facts] = Facts(needs="sum")

    def __post_init__(self) -> None:
        within(self, lam=(TINY, INF), lr=(TINY, INF), outer=(1, INF), inner_lr=(TINY, INF), inner=(1, INF))
        within(self, beta=(TINY, INF))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w = own = got["model"]
        lam, _ = self._strengths(site)
        part = 1.0 if self.lr is None else self.lr * lam  # of the way from w_k to v
        for step in range(self.outer):
            start = own if self.warm else w
            own = self._inner_fit(start, w, site, step)
            moved = tree.map(lambda w, v: w - part * (w - v), tree.trained(w), tree.trained(own))
            w = {**moved, **tree.statistics(own)}
        return Payload(model=w, weight=1 if self.uniform else site.size), Payload(model=own)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(towards(state.model, average(replies), self.beta))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        if "model" in memory:
            yield memory["model"], cases
        else:
            yield (self._inner_fit(got["model"], got["model"], site) if site.size else got["model"]), cases

    def _inner_fit(self, start: Tree, w: Tree, site: Site, minibatch: int | None = None) -> Tree:
        """Train the personal model, held near the shared one."""
        lam, rate = self._strengths(site)
        objective = Objective(Tilt(anchor=w, weight=lam))
        return site.fit(start, objective, Budget(rate, steps=self.inner, minibatch=minibatch)).params

    def _strengths(self, site: Site) -> tuple[float, float]:
        """Return (lam, inner_lr) at a site."""
        lam = 1 / (self.inner * site.lr) if self.lam is None else self.lam
        return lam, site.lr / (1 + site.lr * lam) if self.inner_lr is None else self.inner_lr
