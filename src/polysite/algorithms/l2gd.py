"""L2GD: one model per site; a coin decides whether all sites train or all move towards their mean.

Paper: Hanzely and Richtárik, Federated Learning of a Mixture of Global and Local Models, 2020, Algorithm 1

    min 1/m sum_k F_k(x_k) + lam/2m sum_k |x_k - x|^2,    x = mean_k x_k
    a coin for all sites, 1 with probability p:    0:  x_k <- x_k - lr grad F_k(x_k)
                                                   1:  x_k <- (1 - theta) x_k + theta x,    theta = lr lam (1 - p)/p

In the paper's notation lr = alpha / (m (1 - p)) and theta = alpha lam / (m p). A run of ones does not move x, so an
exchange is only needed when a 1 follows a 0. A round is therefore a run of J ones and a run of L zeros, each of at
least one toss: a site moves to x + (1 - theta)^J (x_k - x), takes L local steps and replies x_k; the mean of the
replies is the next x. This gives the same models as single tosses, with one exchange for J + L tosses, 1/p + 1/(1 - p)
on average.

The coin is a function of the state: the server draws J and L from a generator seeded with (``seed``, number of
completed rounds) and sends them to all sites. The record contains both numbers.

All sites have the same weight. theta follows the learning rate of the preceding local steps and is at most 1. In the
paper p = lam / (L + lam) and alpha = m / (2 (L + lam)) are best for functions of curvature L; with these, theta is 1/2
whatever L is, and the default lam gives theta = 1/2 at any learning rate: lam = p / (2 lr (1 - p)). A round has 1/p
local steps on average, however many an epoch has: set p to one over the steps of an epoch to train as long as FedAvg
does. An absent site does nothing. A new site starts from x, and is served x until it replies. Running statistics are
those of a site's own model; their mean is sent to new sites. lam = 0 is local training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean
from polysite.site import Budget, Cases, Site
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree  # mean of the sites' models
    rounds: int = 0


@dataclass(frozen=True)
class L2gd:
    """A personal model per site; at random, all sites train or all move towards their mean.

    Args:
        lam: Strength of the attraction to the mean (lambda in the paper), at least 0; 0 is local training. None: such
            that theta = 1/2, as with the paper's best alpha and p.
        p: Probability of an aggregation (p in the paper), 0.001 to 0.999; 1/p local steps follow one another on
            average. The default: docs/results/defaults.md.
        lr: Learning rate of a local step, more than 0, alpha / (m (1 - p)) in the paper; None: the site's own
            (train.lr).
        seed: Seed of the coin.
    """

    lam: float | None = None
    p: float = 0.1
    lr: float | None = None
    seed: int = 0

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model"}
    # theta is derived from the learning rate, and a run may be a single local step
    facts: ClassVar[Facts] = Facts(needs="sum", plain_sgd=True, single_step=True)

    def __post_init__(self) -> None:
        within(self, lam=(0, INF), p=(0.001, 0.999), lr=(TINY, INF), seed=(0, INF))
        if self.lr is not None and self._pull(self.lr) > 1:
            raise ConfigError(
                f"l2gd with lam = {self.lam}, p = {self.p} and lr = {self.lr} would move models by theta = "
                f"{self._pull(self.lr):g} of the way to their mean, beyond it; lower lam or lr, or raise p"
            )

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(params)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        ones, zeros = self.tosses(state.rounds)
        return {i: Payload(model=state.model, ones=ones, zeros=zeros) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        own = got["model"]
        if memory:
            keep, own = (1 - min(self._pull(memory["lr"]), 1.0)) ** got["ones"], memory["model"]
            nearer = tree.map(lambda x, z: x + (1 - keep) * (z - x), tree.trained(own), tree.trained(got["model"]))
            own = {**own, **nearer}
        fit = site.fit(own, budget=Budget(self.lr, steps=int(got["zeros"])))
        return Payload(model=fit.params), Payload(model=fit.params, lr=fit.lr_sum / fit.steps)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(mean(replies, "model"), state.rounds + 1)

    def diagnostics(self, state: State) -> Mapping[str, float]:
        ones, zeros = self.tosses(state.rounds - 1) if state.rounds else (0, 0)
        return {"aggregations": ones, "local steps": zeros}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield memory.get("model", got["model"]), cases

    def tosses(self, round: int) -> tuple[int, int]:
        """Return the tosses of a round: J ones (moves to the mean) and L zeros (local steps), at least one of each."""
        toss = np.random.default_rng([self.seed, round])
        return int(toss.geometric(1 - self.p)), int(toss.geometric(self.p))

    def _pull(self, lr: float) -> float:
        """Return theta for local steps with this learning rate."""
        return 0.5 if self.lam is None else lr * self.lam * (1 - self.p) / self.p
