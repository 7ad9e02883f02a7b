"""Models with a private part per site: the last layers (FedPer) or the first (LG-FedAvg).

``partial_models.py`` describes how patterns of names divide a model.
"""

from dataclasses import dataclass

from polysite.algorithms.partial_models import PrivatePart, parted, whole
from polysite.payload import Payload
from polysite.site import Site


@dataclass(frozen=True)
class FedPer(PrivatePart):
    """Federated averaging of all but the last layers, which stay at each site.

    Paper: Arivazhagan et al., Federated Learning with Personalization Layers, 2019

        (u_k, v_k) <- fit_k(u, v_k)    all layers together,    u <- sum_k p_k u_k,    p_k = n_k / sum_j n_j

    u is shared, v_k stays at site k. The FeTS 2022 benchmark keeps the last 8 parameters of the U-Net, its last
    up-block and the head: private = ["decoder.3.*", "head.*"] for unet, ["decoder.2.*", "head.*"] for unet_small.
    A site that never trained is served u and the initial v.

    Args:
        private: Patterns of the parameters that stay at a site.
    """

    private: tuple[str, ...] = ("head.*",)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(whole(self.private, got, memory, site))
        rest, own = parted(self.private, fit.params)
        return Payload(model=rest, weight=site.size), Payload(private=own)


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """Federated averaging of all but the first layers, which stay at each site.

    Paper: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020

        (u_k, v_k) <- fit_k(u, v_k)    all layers together,    u <- sum_k p_k u_k,    p_k = n_k / sum_j n_j

    As FedPer, but v_k are the first layers. The FeTS 2022 benchmark keeps the first 8 parameters of the U-Net, its stem
    and the first down-block: private = ["stem.*", "encoder.0.*"]. The paper starts from a model trained by FedAvg, so
    that the shared part is not an average of decoders of unrelated encoders.
    A site that never trained is served u and the initial v.

    Args:
        private: Patterns of the parameters that stay at a site.
    """

    private: tuple[str, ...] = ("stem.*", "encoder.*")
