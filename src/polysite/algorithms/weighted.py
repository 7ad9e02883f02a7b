"""Any averaging algorithm with a factor per site, for example a smaller weight of an outlier.

Paper: Alekseenko et al., Distance-aware non-IID federated learning, MIDL 2024, equation 2

    p_k = omega_k n_k / sum_j omega_j n_j,    omega_k = 1 for a site that is not named

The factors multiply the weights of the inner algorithm (n_k, or 1 if it is uniform, the default of SCAFFOLD), and the
products are normalised: around FedAvg this is FedAvg_omega, and likewise FedProx_omega, SCAFFOLD_omega. The paper gives
the outlier a factor of 0.1, 0.3 or 0.5; an assessment also grades factors by distance for all sites.

The server sends a site its factor, and the site multiplies its weight before it replies. So the server needs no more
than the inner algorithm does: around FedAvg, the sum of the replies by their weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polysite.algorithms.base import Algorithm, Around, Facts, facts, site_clusters
from polysite.algorithms.fedavg import FedAvg
from polysite.errors import ConfigError, nearest
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True)
class Weighted(Around):
    """An averaging algorithm with a factor on the weight of each site.

    Args:
        weights: Factor of every site that shall differ from 1 (omega in the paper), 1e-6 to 1e6.
        inner: Algorithm that averages; its replies must have a field ``weight``.
    """

    weights: Mapping[SiteId, float] = field(default_factory=dict)
    inner: Algorithm[Any] = field(default_factory=FedAvg)

    def __post_init__(self) -> None:
        if "weight" not in self.inner.reply:
            raise ConfigError(
                f"{type(self.inner).__name__} does not average by weights of its sites, so it takes no factors; "
                "weighted goes around fedavg, fedprox, fednova, scaffold and others that do"
            )
        for site, factor in self.weights.items():
            if not 1e-6 <= factor <= 1e6:
                raise ConfigError(f"the factor of {site!r} must lie between 1e-6 and 1e6, got {factor}")

    @property
    def facts(self) -> Facts:
        return replace(facts(self.inner), poolable=False)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> Any:
        for site in self.weights:
            if site not in sites:
                raise ConfigError(
                    f"algorithm.weights names {site!r}, which is no site that trains; {nearest(site, sites)}"
                )
        return self.inner.init(params, sites)

    def send(self, state: Any, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self._scaled(super().send(state, cohort))

    def serving_payloads(self, state: Any, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self._scaled(super().serving_payloads(state, sites))

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        reply, memory = self.inner.local(_without_factor(got), memory, site)
        return Payload(**{**reply, "weight": reply["weight"] * got.get("factor", 1.0)}), memory

    def site_clusters(self, state: Any, sites: Sequence[SiteId]) -> Mapping[SiteId, str]:
        return site_clusters(self.inner, state, sites)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        return self.inner.serve(_without_factor(got), memory, site, cases)

    def _scaled(self, sent: Mapping[SiteId, Payload]) -> Mapping[SiteId, Payload]:
        """Return payloads with the factors of the sites."""
        return {i: p if i not in self.weights else _with_factor(p, self.weights[i]) for i, p in sent.items()}


def _with_factor(payload: Payload, factor: float) -> Payload:
    """Return the payload with the factor of the site, multiplied by that of an inner ``weighted``."""
    return Payload(**{**payload, "factor": factor * payload.get("factor", 1.0)})


def _without_factor(payload: Payload) -> Payload:
    return Payload(**{name: value for name, value in payload.items() if name != "factor"})
