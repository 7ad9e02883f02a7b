"""Hospitals of which only numbers are known, and the exchange with them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polysite.engines.plan import Plan
from polysite.engines.rounds import run_rounds
from polysite.engines.simulator import Simulator
from polysite.heterogeneity.analysis import analyse
from polysite.heterogeneity.assessment import Assessment
from polysite.heterogeneity.exchange import Assess

FAST = Assess(permutations=499, resamples=100, projections=8)


@dataclass
class Host:
    """A site that answers from arrays."""

    quantities: dict[str, np.ndarray]
    embedding: np.ndarray | None = None
    encoder: float = 1.0
    metric: float = 3.0
    fits: tuple[Any, ...] = ()
    asked: list[str] = field(default_factory=list)
    patients: np.ndarray | None = None  # one for each case by default
    seed: int = 0  # of the noise

    @property
    def size(self):
        return len(next(iter(self.quantities.values())))

    def at(self, round):
        return self

    def lift(self, params):
        return params

    def noise_rng(self):
        return np.random.default_rng([self.seed, 99])

    def features(self, kind):
        self.asked.append(kind)
        if kind == "embedding":
            return {"embedding": self.embedding, "encoder": np.array(self.encoder)}
        if kind == "patients":
            return {"patients": np.arange(self.size) if self.patients is None else self.patients}
        if kind == "cases":
            return dict(self.quantities)
        if kind == "absent":
            return {name: values == 0 for name, values in self.quantities.items()}
        return {**self.quantities, "metric": np.full(self.size, self.metric)}


def host(cases=12, seed=0, brightness=100.0, volume=10.0, look=0.0, channels=8, empty=0, unseen=0):
    """A hospital drawn from a few numbers: ``unseen`` cases lack t2, ``empty`` ones have no ET."""
    rng = np.random.default_rng(seed)
    quantities = {
        "intensity t1": rng.normal(brightness, 10, cases),
        "intensity t2": np.where(np.arange(cases) < unseen, 0.0, rng.normal(200, 20, cases)),
        "volume WT": rng.lognormal(np.log(volume), 0.3, cases),
        "volume ET": np.where(np.arange(cases) < empty, 0.0, rng.lognormal(0, 0.3, cases)),
    }
    return Host(quantities, rng.normal(look, 1, (cases, 2, channels, 2)), seed=seed)


def spread_out():
    """Four sites: a is narrow, so that its distances are many of its own deviations; d is far from the others."""
    rng = np.random.default_rng(0)
    places = {"a": (10, 0.5), "b": (14, 4), "c": (18, 4), "d": (40, 4)}
    return {s: Host({"volume WT": rng.normal(*at, 30)}) for s, at in places.items()}


def ask(hosts, settings=FAST, wire=False) -> dict[str, Any]:
    """The replies of one exchange through the engine."""
    engine = Simulator(settings, hosts, wire=wire)
    (only,) = run_rounds(settings, engine, {}, Plan(rounds=1), 0)
    assert not only.refused, only.refused
    return dict(only.state.replies)


def assess(hosts, settings=FAST) -> Assessment:
    return analyse(ask(hosts, settings), settings)
