"""FedExP: federated averaging with a longer server step when the sites' updates disagree.

Paper: Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023

    D_k = w - w_k,    D = sum_k p_k D_k
    w <- w - max(1, sum_k p_k |D_k|^2 / (2 (|D|^2 + epsilon))) D

The served model is the mean of the last two, since the steps oscillate around the optimum; both are sent to the sites,
twice the downward traffic of FedAvg. As in the paper, epsilon is not multiplied by the number of sites. Near
convergence the step length grows like heterogeneity / epsilon: a hundredth of the first |D|^2 is a sensible value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, average, towards
from polysite.algorithms.base import INF, Facts, within
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    before: Tree  # model of the previous round
    length: float = 1.0  # of the last server step, in mean updates


@dataclass(frozen=True)
class FedExP(OneModel):
    """Federated averaging with an extrapolated server step.

    Args:
        epsilon: Constant in the denominator of the step length (epsilon in the paper), at least 0; larger values
            approach FedAvg. It is compared with squared lengths of updates. The default: docs/results/defaults.md.
        uniform: Whether all sites have the same weight, p_k = 1/K, as in the paper; else n_k/N, as in the authors'
            program.
    """

    epsilon: float = 1e-3
    uniform: bool = False

    facts: ClassVar[Facts] = Facts(shared_model=True)

    def __post_init__(self) -> None:
        within(self, epsilon=(0, INF))

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params, params)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.model, before=state.before) for i in cohort}

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        target, start, order = average(replies), tree.trained(state.model), sorted(replies)
        total = sum(replies[i]["weight"] for i in order)
        moved = {i: tree.norm(tree.sub(tree.trained(replies[i]["model"]), start)) ** 2 for i in order}
        above = sum(replies[i]["weight"] / total * moved[i] for i in order)
        below = 2 * (tree.norm(tree.sub(tree.trained(target), start)) ** 2 + self.epsilon)
        length = max(1.0, above / below) if below else 1.0
        return State(towards(state.model, target, length), state.model, length)

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"server step": state.length}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield tree.mean([got["model"], got["before"]]), cases
