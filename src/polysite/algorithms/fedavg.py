"""Federated averaging: every site trains the shared model, and the server averages the results.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017

    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j over the sites that replied

Three variants: fixed local epochs (``epochs``, the default; a large site takes more steps), fixed local iterations
(``steps``, the same number at all sites), and ``uniform`` weights p_k = 1/K. With a ``server`` optimiser the mean
update is passed to that optimiser as a gradient: ``server = Adam()`` is FedAdam.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, average
from polysite.algorithms.base import INF, TINY, Facts, one_of, within
from polysite.algorithms.server_optimisers import Adagrad, Adam, ServerOptimiser, Yogi
from polysite.payload import Payload, SiteId
from polysite.site import Budget, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    optimiser: Any = None


@dataclass(frozen=True)
class FedAvg(OneModel):
    """Federated averaging, optionally with an optimiser at the server.

    Args:
        lr: Local learning rate, more than 0; None: the site's own (train.lr).
        epochs: Local epochs per round, at least 1; None: the site's own (train.epochs).
        steps: Local iterations per round, at least 1, instead of epochs.
        uniform: Whether all sites have the same weight, p_k = 1/K, instead of p_k = n_k/N.
        server: Server optimiser that the mean update is given to; None: take the mean itself.
    """

    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None
    uniform: bool = False
    server: ServerOptimiser | None = None

    facts: ClassVar[Facts] = Facts(needs="sum", poolable=True, shared_model=True, only_fits=True)

    def __post_init__(self) -> None:
        within(self, lr=(TINY, INF), epochs=(1, INF), steps=(1, INF))
        one_of(self, "fedavg")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params, self.server.init(tree.trained(params)) if self.server else None)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        fit = site.fit(got["model"], budget=Budget(self.lr, self.epochs, self.steps))
        return Payload(model=fit.params, weight=1 if self.uniform else site.size), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        target = average(replies)
        if self.server is None:
            return State(target)
        start = tree.trained(state.model)
        model, optimiser = self.server.step(start, tree.sub(tree.trained(target), start), state.optimiser)
        return State({**target, **model}, optimiser)


FEDADAGRAD, FEDADAM, FEDYOGI = FedAvg(server=Adagrad()), FedAvg(server=Adam()), FedAvg(server=Yogi())
