"""FedRoD: a shared model independent of the sites' label frequencies, and a personal head that depends on them.

Paper: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022

    (f_k, G_k) <- steps on the balanced loss of G(f(x))               shared: (f, G) <- sum_k p_k (f_k, G_k)
    P_k        <- steps on the site's own loss of G(f(x)) + P(f(x))   of P alone; p_k = n_k / sum_j n_j

f is the body, G the generic head, and P_k the personal head of the same shape, which starts from zero and never leaves
site k. After every step of (f, G), P takes a step on the same patches, without gradient into f or G; this needs a
second forward pass. Both heads are linear, so a site is served one network with the head G + P_k. A site that never
trained is served (f, G).

The balanced loss is the balanced softmax, -log(n_y e^(g_y) / sum_c n_c e^(g_c)), with n_c the site's count of class c.
For overlapping labels this project derives a counterpart that is not in the paper: the site's own loss of
z_c + log(pi_c / (1 - pi_c)), with pi_c the share of label c among the voxels of a random patch of the site. For
cross-entropy (train.loss = "dice_ce") z then estimates log p(x | c) / p(x | not c), independent of the site's
frequencies; for Dice this holds only approximately. This is the linear variant of the paper; in the other variant a
second network generates P_k from the site's class counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State
from polysite.algorithms.base import INF, Facts, within
from polysite.algorithms.partial_models import refuse_unknown
from polysite.payload import Payload, SiteId
from polysite.site import Balanced, Cases, Objective, Site
from polysite.tree import Tree

HEAD = ("head.*",)


@dataclass(frozen=True)
class FedRoD(OneModel):
    """A shared model trained with a balanced loss, and a personal head per site trained with the plain loss.

    Args:
        clip: Largest shift of a logit by the frequency of its label, at least 0; it keeps the shift of an absent label
            finite. The default is a frequency of about 0.001: docs/results/defaults.md.
    """

    clip: float = 7.0

    facts: ClassVar[Facts] = Facts(needs="sum")

    def __post_init__(self) -> None:
        within(self, clip=(0, INF))

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("fedrod", HEAD, params)
        return State(params)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        own = memory.get("personal") or tree.zeros(tree.select(site.start, HEAD))
        fit = site.fit(got["model"], Objective(loss=Balanced(self.clip), personal=own))
        return Payload(model=fit.params, weight=site.size), Payload(personal=fit.personal)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        model = got["model"]
        if "personal" in memory:
            model = {**model, **tree.add(tree.select(model, HEAD), memory["personal"])}
        yield model, cases
