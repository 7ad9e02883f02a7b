"""FedProx: federated averaging with local training held near the received model.

Paper: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020

    w_k ~ argmin_v F_k(v) + mu/2 |v - w|^2,    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j

The anchor w is the received model and does not move during local training. mu = 0 is FedAvg. Dice losses have small
gradients: a mu of 0.1 already slows a U-Net down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polysite.algorithms.average import State, average, begin_model, send_model, serve_received
from polysite.algorithms.base import INF, Facts, Kind, within
from polysite.payload import Payload, SiteId
from polysite.site import Objective, Site, Tilt


@dataclass(frozen=True)
class FedProx:
    """Federated averaging with a proximal term that holds local training near the received model.

    Args:
        mu: Weight of the proximal term (mu in the paper), at least 0; 0 is FedAvg. Default: docs/results/defaults.md.
    """

    mu: float = 0.01

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "weight": "count"}

    def __post_init__(self) -> None:
        within(self, mu=(0, INF))

    @property
    def facts(self) -> Facts:
        """Facts that other modules act on."""
        return Facts(needs="sum", pull=self.mu, shared_model=True, only_fits=True)

    init = begin_model
    send = send_model

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(got["model"], Objective(Tilt(anchor=got["model"], weight=self.mu)))
        return Payload(model=fit.params, weight=site.size), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(average(replies))

    serve = serve_received
