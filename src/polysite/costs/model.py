"""Cost of a federated run: steps, bytes, seconds at real hospitals.

Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024, equations 34 to 38

    steps          sum_r sum_k s_k
    parallel steps sum_r max_k s_k
    seconds        sum_r max_k (s_k t_batch + n_k t_case + down_k / v_down + up_k / v_up)

A round lasts as long as its slowest site. ``measured`` uses the records of a run; ``planned`` needs no run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, nearest
from polysite.payload import SiteId


@dataclass(frozen=True, slots=True)
class Load:
    """Work and traffic of one site in one round."""

    steps: int = 0  # of training
    cases: int = 0  # validated
    down: int = 0  # bytes received
    up: int = 0  # bytes sent
    patches: int | None = None  # trained on; None if not known
    trials: int = 1  # candidates that were trained at once, of which the site keeps one


@dataclass(frozen=True, slots=True)
class Demand:
    """Lower bounds of what a study takes at a hospital: parameters of its network, and bytes."""

    parameters: int
    memory: int  # main memory
    gpu: int  # memory of the GPU; 0 if the site computes on the CPU
    disk: int


@dataclass(frozen=True)
class Cost:
    """Cost of a whole run."""

    rounds: int
    steps: int  # of all sites
    parallel_steps: int  # sum over rounds of the largest number of steps of a site
    pooled_steps: int | None  # if the patches of a round formed one pool, as papers count; None if not known
    down: Mapping[SiteId, int]  # bytes to every site
    up: Mapping[SiteId, int]  # bytes from every site
    slowest: tuple[SiteId, ...]  # the site that the others wait for, by round
    computing: tuple[float, ...]  # seconds of computation of that site, by round
    communicating: tuple[float, ...]  # seconds of communication of that site, by round

    @property
    def bytes_down(self) -> int:
        """Bytes to all sites."""
        return sum(self.down.values())

    @property
    def bytes_up(self) -> int:
        """Bytes from all sites."""
        return sum(self.up.values())

    @property
    def bytes_of_busiest(self) -> int:
        """Bytes received and sent by the site with the most traffic."""
        return max((n + self.up[i] for i, n in self.down.items()), default=0)

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return sum(a + b for a, b in zip(self.computing, self.communicating, strict=True))


def measured(exchanges: Iterable[tuple[Mapping[SiteId, Load], bool]], speeds: Speeds, batch: int) -> Cost:
    """Return the cost of a run from the loads that it recorded.

    Not recorded, and so not counted: evaluations inside an algorithm's own exchange (FedCostWAvg, q-FedAvg).

    Args:
        exchanges: For every round, the load of each site and whether training was pooled. A pooled round runs on one
            machine, which validates the cases of all sites and sends nothing.
        speeds: Speeds of the sites.
        batch: The run's ``train.batch``.
    """
    rounds = list(exchanges)
    _know(speeds, [load for load, _ in rounds])
    return _total([_one_machine(load) if pooled else load for load, pooled in rounds], speeds, batch)


def planned(exchanges: Iterable[Mapping[SiteId, Load]], speeds: Speeds, batch: int) -> Cost:
    """Return the cost of a run that has not begun, from the loads that ``rehearse`` predicts and ``train.batch``.

    >>> once = {"a": Load(steps=3, cases=2, down=8, up=16, patches=9), "b": Load(steps=1, down=8, up=16, patches=3)}
    >>> cost = planned([once] * 10, Speeds(), batch=4)
    >>> cost.steps, cost.parallel_steps, cost.pooled_steps
    (40, 30, 30)
    """
    return measured(((loads, False) for loads in exchanges), speeds, batch)


def total(exchanges: Iterable[Mapping[SiteId, Load]]) -> Load:
    """Return the work and traffic of all sites in all rounds.

    >>> total([{"a": Load(steps=3, down=8, up=16), "b": Load(steps=1, down=8)}] * 10)
    Load(steps=40, cases=0, down=160, up=160, patches=None, trials=1)
    """
    every = [load for loads in exchanges for load in loads.values()]
    return Load(*(sum(getattr(load, name) for load in every) for name in ("steps", "cases", "down", "up")))


def without_grid(exchanges: Iterable[Mapping[SiteId, Load]]) -> list[dict[SiteId, Load]]:
    """Return the loads as if every site trained one candidate only, the one that it keeps.

    >>> without_grid([{"a": Load(steps=12, cases=2, patches=36, trials=6)}])
    [{'a': Load(steps=2, cases=2, down=0, up=0, patches=6, trials=1)}]
    """

    def single(load: Load) -> Load:
        patches = None if load.patches is None else load.patches // load.trials
        return replace(load, steps=load.steps // load.trials, patches=patches, trials=1)

    return [{i: single(load) for i, load in loads.items()} for loads in exchanges]


def _one_machine(load: Mapping[SiteId, Load]) -> dict[SiteId, Load]:
    """Return the load if one machine did the work of all sites, without traffic."""
    where = max(load, key=lambda i: load[i].steps, default="")
    known = [x.patches for x in load.values() if x.steps and x.patches is not None]
    patches = sum(known) if len(known) == sum(x.steps > 0 for x in load.values()) else None
    steps, cases = (sum(getattr(x, k) for x in load.values()) for k in ("steps", "cases"))
    return {where: Load(steps, cases, patches=patches)}


def _names(rounds: Iterable[Mapping[SiteId, Load]]) -> list[SiteId]:
    return sorted({i for load in rounds for i in load})


def _know(speeds: Speeds, rounds: Sequence[Mapping[SiteId, Load]]) -> None:
    """Refuse speeds of a site that is not in the run."""
    names = _names(rounds)
    for site in speeds.sites:
        if names and site not in names:
            raise ConfigError(f"cost.sites names {site!r}, which is no site of this run; {nearest(site, names)}")


def _pooled(rounds: Iterable[Mapping[SiteId, Load]], batch: int) -> int | None:
    patches = [[x.patches for x in load.values() if x.steps] for load in rounds]
    if any(n is None for each in patches for n in each):
        return None
    return sum(math.ceil(sum(n or 0 for n in each) / batch) for each in patches)


def _total(rounds: Sequence[Mapping[SiteId, Load]], speeds: Speeds, batch: int) -> Cost:
    names = _names(rounds)
    at = {i: speeds.at(i) for i in names}

    def spent(site: SiteId, load: Load) -> tuple[float, float]:
        """Seconds of computation and of communication."""
        v = at[site]
        return load.steps * batch * v.patch + load.cases * v.case, load.down / v.down / 1e6 + load.up / v.up / 1e6

    slowest, longest = [], []
    for load in rounds:
        times = {i: spent(i, x) for i, x in load.items()}
        last = max(sorted(times), key=lambda i: sum(times[i]), default="")  # empty if no site replied
        slowest.append(last)
        longest.append(times.get(last, (0.0, 0.0)))
    down = {i: sum(load[i].down for load in rounds if i in load) for i in names}
    up = {i: sum(load[i].up for load in rounds if i in load) for i in names}
    return Cost(
        rounds=len(rounds),
        steps=sum(x.steps for load in rounds for x in load.values()),
        parallel_steps=sum(max((x.steps for x in load.values()), default=0) for load in rounds),
        pooled_steps=_pooled(rounds, batch),
        down=down,
        up=up,
        slowest=tuple(slowest),
        computing=tuple(t for t, _ in longest),
        communicating=tuple(t for _, t in longest),
    )
