"""FedNova: federated averaging in which the number of local steps does not change a site's weight.

Paper: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020

    d_k = (w - w_k) / t_k,    w <- w - (sum_k p_k t_k) sum_k p_k d_k

t_k is measured by the local training loop: the distance that a constant gradient of one would have moved a weight. For
plain SGD that is the sum of the learning rates (eta times the number of steps); with momentum it includes the geometric
sums of momentum. For Adam it is the sum of the learning rates too, which the theory does not cover. With equal numbers
of steps FedNova is FedAvg. With ``tau = "sizes"`` t_k is n_k instead, as if the steps were in proportion to the
cases:

    w <- w + (g / K) sum_k (w_k - w),    g = K sum_k p_k^2

That is the form of the FeTS 2022 benchmark (equations 4 and 5). The real steps are only nearly in proportion, because
the last batch of an epoch may be smaller than the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from polysite.algorithms.average import OneModel, State, average, towards
from polysite.algorithms.base import Facts, Kind
from polysite.payload import Payload, SiteId
from polysite.site import Site


@dataclass(frozen=True)
class FedNova(OneModel):
    """Federated averaging with updates normalised by local effort.

    Args:
        tau: Local effort t_k: as measured in training (measured), or the number of training cases (sizes), as in the
            FeTS 2022 benchmark.
    """

    tau: Literal["measured", "sizes"] = "measured"

    facts: ClassVar[Facts] = Facts(shared_model=True)

    @property
    def reply(self) -> Mapping[str, Kind]:
        return {"model": "model", "weight": "count", "reach": "rate" if self.tau == "measured" else "count"}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(got["model"])
        reach = fit.reach if self.tau == "measured" else site.size
        return Payload(model=fit.params, weight=site.size, reach=reach), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        """Move towards the mean of the w_k by weights p_k/t_k, which equals w - (sum p t) sum p (w - w_k)/t_k."""
        order = sorted(replies)
        total = sum(replies[i]["weight"] for i in order)
        p, t = {i: replies[i]["weight"] / total for i in order}, {i: replies[i]["reach"] for i in order}
        length = sum(p[i] * t[i] for i in order) * sum(p[i] / t[i] for i in order)
        return State(towards(state.model, average(replies, self.shares(state, replies)), length))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        slowness = {i: p["weight"] / p["reach"] for i, p in sorted(replies.items())}
        return {i: s / sum(slowness.values()) for i, s in slowness.items()}
