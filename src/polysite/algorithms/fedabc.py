"""FedABC: one binary problem per class, so that classes absent at a site do not compete with those present.

Paper: Wang et al., FedABC: Targeting Fair Competition in Personalized Federated Learning, AAAI 2023

    L_c = lam mean (1 - p)^gamma (-log p) over y = 1, p < easy_yes
          + (1 - lam) mean p^gamma (-log(1 - p)) over y = 0, p > easy_no, the hardest only
    (w_k, v_k) <- steps on sum_c L_c from (w, v_k),    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j

This is a reconstruction, not the paper's text. Certain are one binary problem per class instead of the softmax,
under-sampling of negatives, mining of hard samples, and plain averaging at the server. The formula of the loss, its
constants, and the choice of the head's bias as personal part v_k are ours. p is the sigmoid of the logit of class c.
Means are over all voxels (in a classification, cases) of a batch. At most ``ratio`` negatives per positive count, those
with the largest p; all negatives count in a batch without positives. An empty mean is 0. The selection of samples has
no gradient.

Segmentation with one sigmoid per label is one-vs-all already: there only the loss changes, and Dice is kept as a second
term, for comparability with other algorithms. A site continues from its own v_k and is served w with v_k. v_k is also
averaged with the rest, for sites that never trained, which are served the mean of all parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State
from polysite.algorithms.base import INF, TINY, Facts, within
from polysite.algorithms.partial_models import refuse_unknown
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Objective, OneVsAll, Site
from polysite.tree import Tree


@dataclass(frozen=True)
class FedABC(OneModel):
    """FedAvg with a binary loss per class and personal values of some parameters.

    Args:
        lam: Weight of the positive samples, 0 to 1; the negative ones have the rest. This default and the others are
            our choice, since the paper's constants could not be read: docs/results/defaults.md.
        gamma: Exponent that favours hard samples, at least 0; 0 weighs all samples alike.
        easy_yes: Positive samples with at least this probability are left out, up to 1; 1 leaves none out.
        easy_no: Negative samples with at most this probability are left out, 0 to 1; 0 leaves none out.
        ratio: Hardest negative samples kept per positive one, more than 0; None: all.
        personal: Patterns of the parameters of which every site has its own values.
    """

    lam: float = 0.5
    gamma: float = 2.0
    easy_yes: float = 1.0
    easy_no: float = 0.0
    ratio: float | None = 3.0
    personal: tuple[str, ...] = ("head.*bias",)

    facts: ClassVar[Facts] = Facts(needs="sum")

    def __post_init__(self) -> None:
        within(self, lam=(0, 1), gamma=(0, INF), easy_yes=(TINY, 1), easy_no=(0, 1), ratio=(TINY, INF))

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("personal", self.personal, params)
        return State(params)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        loss = OneVsAll(self.lam, self.gamma, self.easy_yes, self.easy_no, self.ratio)
        fit = site.fit({**got["model"], **memory.get("personal", {})}, Objective(loss=loss))
        return Payload(model=fit.params, weight=site.size), Payload(personal=tree.select(fit.params, self.personal))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield {**got["model"], **memory.get("personal", {})}, cases
