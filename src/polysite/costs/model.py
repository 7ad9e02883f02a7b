"""What a federated run costs: steps, bytes, seconds on real hospitals, energy.

Paper: Manthe et al., Federated brain tumor segmentation: an extensive benchmark, 2024, equations 34 to 38

    steps          sum_r sum_k s_k
    parallel steps sum_r max_k s_k
    seconds        sum_r max_k (s_k t_batch + n_k t_case + down_k / v_down + up_k / v_up)
    energy         sum_r sum_k (s_k t_batch + n_k t_case) watts + bytes kwh_per_gb        an estimate, not in the paper

A round lasts as long as its slowest site. Energy is that of sites while they compute and of the network; that of sites
which wait, of the server and of cooling is left out. ``measured`` reads the records of a run, ``planned`` needs no run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from polysite.costs.speeds import Speeds
from polysite.errors import ConfigError, nearest
from polysite.payload import SiteId

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Load:
    """What one site does in one round."""

    steps: int = 0  # of training
    cases: int = 0  # patients validated
    down: int = 0  # bytes
    up: int = 0  # bytes
    patches: int | None = None  # trained on; None: not known


@dataclass(frozen=True)
class Cost:
    """What a run costs, or would."""

    rounds: int
    steps: int  # of all sites
    parallel_steps: int  # of the site that takes most of them, round by round
    pooled_steps: int | None  # if all patches of a round were one pool, as papers count; None: the records do not tell
    down: Mapping[SiteId, int]  # bytes to every site
    up: Mapping[SiteId, int]  # bytes from every site
    slowest: tuple[SiteId, ...]  # whom the others wait for, round by round
    computing: tuple[float, ...]  # seconds that it computes
    communicating: tuple[float, ...]  # seconds that it sends and receives
    estimated_kwh: float  # of all sites and the network

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values())

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values())

    @property
    def bytes_of_busiest(self) -> int:
        """Received and sent by the site that moves most."""
        return max((n + self.up[i] for i, n in self.down.items()), default=0)

    @property
    def seconds_by_round(self) -> tuple[float, ...]:
        """How long it has been going at the end of every round."""
        return tuple(accumulate(a + b for a, b in zip(self.computing, self.communicating, strict=True)))

    @property
    def seconds(self) -> float:
        return self.seconds_by_round[-1] if self.rounds else 0.0


def measured(exchanges: Iterable[tuple[Mapping[SiteId, Load], bool]], speeds: Speeds, batch: int) -> Cost:
    """Return the cost of a run, from the recorded loads of its rounds (each with whether it was pooled).

    Only what is recorded counts: not what a site evaluates inside an algorithm's own exchange (FedCostWAvg, q-FedAvg),
    not what an absent site received, nor the model that goes to the sites once more to be validated. A ``pooled`` run
    is one machine that trains, validates everybody's patients, and sends nothing.
    """
    rounds = list(exchanges)
    _know(speeds, [load for load, _ in rounds])
    return _total([_one_machine(load) if pooled else load for load, pooled in rounds], speeds, batch)


def planned(exchanges: Iterable[Mapping[SiteId, Load]], speeds: Speeds, batch: int) -> Cost:
    """The cost of a run that has not begun, from what its sites will do in every round (``rehearse`` tells), and the
    run's train.batch.

    >>> once = {"a": Load(steps=3, cases=2, down=8, up=16, patches=9), "b": Load(steps=1, down=8, up=16, patches=3)}
    >>> cost = planned([once] * 10, Speeds(), batch=4)
    >>> cost.steps, cost.parallel_steps, cost.pooled_steps
    (40, 30, 30)
    """
    rounds = [dict(loads) for loads in exchanges]
    _know(speeds, rounds)
    return _total(rounds, speeds, batch)


def _one_machine(load: Mapping[SiteId, Load]) -> dict[SiteId, Load]:
    """The same work in one place."""
    where = max(load, key=lambda i: load[i].steps, default="")
    return {where: Load(sum(x.steps for x in load.values()), sum(x.cases for x in load.values()))}


def _names(rounds: Iterable[Mapping[SiteId, Load]]) -> list[SiteId]:
    return sorted({i for load in rounds for i in load})


def _know(speeds: Speeds, rounds: Sequence[Mapping[SiteId, Load]]) -> None:
    """Refuse speeds of a hospital that has no part in the run."""
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

    slowest, longest, joules = [], [], 0.0
    for load in rounds:
        times = {i: spent(i, x) for i, x in load.items()}
        last = max(sorted(times), key=lambda i: sum(times[i]), default="")  # nobody, where nobody replied
        slowest.append(last)
        longest.append(times.get(last, (0.0, 0.0)))
        joules += sum(computing * at[i].watts for i, (computing, _) in times.items())
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
        estimated_kwh=joules / JOULES_PER_KWH + (sum(down.values()) + sum(up.values())) / 1e9 * speeds.kwh_per_gb,
    )
