"""Ditto: FedAvg, and a personal model per site that is held near the shared one.

Paper: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, Algorithm 1

    w_k = fit_k(w),    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j                the shared model, as in FedAvg
    v_k <- steps on F_k(v) + lam/2 |v - w|^2 from v_k                              the personal model

The anchor of v_k is the received model w, not the locally trained w_k. v_k starts from the initial model, is kept from
round to round and never leaves the site. A site is served its v_k; a site that never trained is served w. lam = 0 is
local training beside FedAvg. The paper tries lam from 0.05 to 2 and chooses it per site; the default 0.1 is a choice of
this project. The FeTS 2022 benchmark does not train this form: its Ditto comes after training (``fine_tune``), with lam
0.001, 0.01, 0.1 or 1 chosen by the validation cases of every site. F_k is a mean over cases, so lam does not depend on
their number. A round trains twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from polysite.algorithms.average import OneModel
from polysite.algorithms.base import INF, TINY, Facts, one_of, within
from polysite.payload import Payload
from polysite.site import Budget, Cases, Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True)
class Ditto(OneModel):
    """FedAvg, and a personal model per site that is held near the shared one.

    Args:
        lam: Weight of the proximal term of the personal model (lambda in the paper), at least 0; 0 is local training.
            The paper tries 0.05 to 2; docs/results/defaults.md compares the default with others.
        lr: Local learning rate, more than 0; None: the site's own (train.lr).
        epochs: Local epochs per round, at least 1; None: the site's own (train.epochs).
        steps: Local iterations per round, at least 1, instead of epochs.
        own_lr: Learning rate of the personal model, more than 0; None: that of the shared one.
        own_epochs: Epochs of the personal model, at least 1; None: those of the shared one.
        own_steps: Iterations of the personal model, at least 1, instead of epochs.
    """

    lam: float = 0.1
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None
    own_lr: float | None = None
    own_epochs: int | None = None
    own_steps: int | None = None

    facts: ClassVar[Facts] = Facts(needs="sum", only_fits=True)

    def __post_init__(self) -> None:
        within(self, lam=(0, INF), lr=(TINY, INF), epochs=(1, INF), steps=(1, INF))
        within(self, own_lr=(TINY, INF), own_epochs=(1, INF), own_steps=(1, INF))
        one_of(self, "ditto")
        one_of(self, "ditto", "own_epochs", "own_steps")

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w = got["model"]
        fit = site.fit(w, budget=Budget(self.lr, self.epochs, self.steps))
        own = site.fit(memory.get("model", site.start), Objective(Tilt(anchor=w, weight=self.lam)), self._own())
        return Payload(model=fit.params, weight=site.size), Payload(model=own.params)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield memory.get("model", got["model"]), cases

    def _own(self) -> Budget:
        """Return the budget of the personal model."""
        given = self.own_epochs is not None or self.own_steps is not None
        epochs, steps = (self.own_epochs, self.own_steps) if given else (self.epochs, self.steps)
        return Budget(self.lr if self.own_lr is None else self.own_lr, epochs, steps)
