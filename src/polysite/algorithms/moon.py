"""MOON: local features are drawn to those of the shared model and away from the site's previous model.

Paper: Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021

    loss = F_k + mu * -log( e^(cos(z, z_g)/T) / (e^(cos(z, z_g)/T) + e^(cos(z, z_p)/T)) ),    w <- sum_k p_k w_k

z, z_g and z_p are the features of the same patch in the current, the received and the site's previous model: the
deepest features of the network, pooled over space (the paper adds a projection head, which segmentation networks do not
have). In a site's first round z_p = z_g: the term is constant and the round equals FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

from polysite.algorithms.average import OneModel
from polysite.algorithms.base import INF, TINY, Facts, within
from polysite.payload import Payload
from polysite.site import Contrast, Objective, Site


@dataclass(frozen=True)
class Moon(OneModel):
    """Federated averaging with a contrastive loss between the features of three models.

    Args:
        mu: Weight of the contrastive loss (mu in the paper), at least 0; 0 is FedAvg. The paper takes 1
            or 5, depending on the data.
        temperature: Temperature of the contrastive loss (tau in the paper), more than 0; smaller is sharper. 0.5 in the
            paper.
    """

    mu: float = 1.0
    temperature: float = 0.5

    facts: ClassVar[Facts] = Facts(needs="sum", shared_model=True)

    def __post_init__(self) -> None:
        within(self, mu=(0, INF), temperature=(TINY, INF))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w = got["model"]
        contrast = [Contrast(w, memory["model"], self.mu, self.temperature)] if "model" in memory else []
        fit = site.fit(w, Objective(extra=contrast))
        return Payload(model=fit.params, weight=site.size), Payload(model=fit.params)
