"""q-FedAvg: sites with a high loss have a larger weight, for an even quality across sites.

Paper: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2

    F_k = loss of the received model on the site's training cases,    L = 1 / eta,    D_k = L (w - w_k)
    h_k = q F_k^(q-1) |D_k|^2 + L F_k^q,    w <- w - sum_k F_k^q D_k / sum_k h_k

The loss needs one more forward pass over the training cases, on fixed patches without augmentation, or with
``augmented`` on patches as in training. eta is the mean learning rate that the local training used. All sites have the
same weight; q = 0 is FedAvg with uniform weights. The norms are large for a U-Net, so a q above one takes small steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State, average, towards
from polysite.algorithms.base import INF, Facts, Kind, within
from polysite.payload import Payload, SiteId
from polysite.site import Site

FLOOR = 1e-10  # added to the loss, whose powers are divided by


@dataclass(frozen=True)
class QFedAvg(OneModel):
    """Federated averaging in which sites with a high loss have a larger weight.

    Args:
        q: Fairness exponent (q in the paper), at least 0; 0 is FedAvg with uniform weights, larger is fairer and
            slower. 1 in the FeTS 2022 benchmark.
        augmented: Whether the loss is measured on augmented patches.
    """

    q: float = 1.0
    augmented: bool = False

    uniform = True
    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "weight": "one", "loss": "cost", "lr": "rate"}
    facts: ClassVar[Facts] = Facts(plain_sgd=True, shared_model=True)

    def __post_init__(self) -> None:
        within(self, q=(0, INF))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        loss = fmean(site.losses(got["model"], augmented=self.augmented).values())
        fit = site.fit(got["model"])
        return Payload(model=fit.params, weight=1, loss=loss, lr=fit.lr_sum / fit.steps), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Move towards the mean of the w_k by weights F_k^q L. Powers are of F_k / max F, a factor that cancels."""
        start, order, above = tree.trained(state.model), sorted(replies), self._pull(replies)
        loss, steep = ({i: f(replies[i]) for i in order} for f in (_loss, _steepness))
        moved = {i: tree.norm(tree.sub(tree.trained(replies[i]["model"]), start)) for i in order}
        below = sum(above[i] * (self.q * steep[i] * moved[i] ** 2 / loss[i] + 1) for i in order)
        return State(towards(state.model, average(replies, above), sum(above.values()) / below))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        pull = self._pull(replies)
        return {i: p / sum(pull.values()) for i, p in pull.items()}

    def _pull(self, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        most = max(map(_loss, replies.values()))
        return {i: p["weight"] * (_loss(p) / most) ** self.q * _steepness(p) for i, p in sorted(replies.items())}


def _loss(reply: Payload) -> float:
    return float(reply["loss"] + FLOOR)


def _steepness(reply: Payload) -> float:
    """Return L = 1/eta."""
    return float(1 / reply["lr"])
