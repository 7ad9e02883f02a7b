"""Any algorithm with one shared model, which serves an exponential moving average of that model over the rounds.

Paper: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim. 1992

    m <- decay m + (1 - decay) w,    served: m / (1 - decay^t) after t rounds

The paper has the plain mean over all steps. Here recent rounds weigh more, and the division corrects for the start of m
at zero, so that the initial model has no share (Kingma and Ba, ICLR 2015, section 3). The inner algorithm continues
from w itself. Only the served model, which is validated, tested and kept, is the average; a later phase starts from it.

Running statistics of batch normalisation are averaged with the same weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polysite import tree
from polysite.algorithms.average import serve_received
from polysite.algorithms.base import Algorithm, Around, facts
from polysite.algorithms.fedavg import FedAvg
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    inner: Any  # state of the inner algorithm
    model: Tree  # the average, corrected for its start; before the first round the initial model
    rounds: int = 0  # that the average is over


@dataclass(frozen=True)
class Averaged(Around):
    """An algorithm that serves a moving average of its shared model.

    Args:
        decay: Weight of the former average, at least 0 and less than 1; 0.9 averages about the last 10 rounds, 0 serves
            the last model.
        inner: Algorithm that trains; it must have one model that all sites use.
    """

    decay: float = 0.9
    inner: Algorithm[Any] = field(default_factory=FedAvg)

    serve = serve_received

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay = {self.decay} must be at least 0 and less than 1")
        if not facts(self.inner).shared_model:
            raise ConfigError(
                f"{type(self.inner).__name__} has no single model that all sites use, so there is nothing to average "
                "over the rounds; averaged goes around fedavg, fedprox, scaffold and others that have one, or inside "
                "clustered"
            )

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(self.inner.init(params, sites), params)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return super().send(state.inner, cohort)

    def serving_payloads(self, state: State, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        """Return the average for every site."""
        return {i: Payload(model=state.model) for i in sites}

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        inner, rounds = self.inner.merge(state.inner, replies), state.rounds + 1
        new = (1 - self.decay) / (1 - self.decay**rounds)  # share of this round; 1 in the first
        model = tree.map(lambda m, w: (1 - new) * m + new * w, state.model, inner.model)
        return State(inner, model, rounds)

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        return super().shares(state.inner, replies)

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return super().diagnostics(state.inner)
