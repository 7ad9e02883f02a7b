"""FedProx: federated averaging with local training held near the received model.

Paper: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020

    w_k ~ argmin_v F_k(v) + mu/2 |v - w|^2,    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j

The anchor w is the received model and does not move during local training. mu = 0 is FedAvg. Dice losses have small
gradients: a mu of 0.1 already slows a U-Net down.
"""

from dataclasses import dataclass

from polysite.algorithms.average import OneModel
from polysite.algorithms.base import INF, Facts, within
from polysite.payload import Payload
from polysite.site import Objective, Site, Tilt


@dataclass(frozen=True)
class FedProx(OneModel):
    """Federated averaging with a proximal term that holds local training near the received model.

    Args:
        mu: Weight of the proximal term (mu in the paper), at least 0; 0 is FedAvg. Default: docs/results/defaults.md.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        within(self, mu=(0, INF))

    @property
    def facts(self) -> Facts:
        """Facts that other modules act on."""
        return Facts(needs="sum", pull=self.mu, shared_model=True, only_fits=True)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(got["model"], Objective(Tilt(anchor=got["model"], weight=self.mu)))
        return Payload(model=fit.params, weight=site.size), memory
