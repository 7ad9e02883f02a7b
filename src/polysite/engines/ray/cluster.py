"""The workers of a run on a Ray cluster: started, called, and replaced when a process or a node is lost.

The server keeps all that a lost worker held except the cases, which are read again by its replacement, or by other
workers that take over its sites.
"""

import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from polysite.engines.ray.placement import Node, Place, find_room, place, spread
from polysite.engines.ray.worker import SiteWorker
from polysite.engines.record import Incident, incident
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, PolysiteError, RunError, shown
from polysite.payload import SiteId

ATTEMPTS = 5  # losses of a site's worker without a result; a turn that kills its worker every time ends the run
PATIENCE = 60.0  # seconds without an answer of a starting worker before the log says so
HERE = ("POLYSITE_CACHE",)  # environment variables of the server that hold at the workers, too
# Ray reports its use over the network unless told otherwise; workers choose their device themselves
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

log = logging.getLogger("polysite")


def _ray() -> Any:
    """Return the package; every use of it passes here."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as problem:
        raise ConfigError("the engine 'ray' takes Ray: pip install 'polysite[cluster]'") from problem
    return ray


@contextmanager
def connected(address: str = "") -> Iterator[None]:
    """Connect to a cluster, or start one on this machine; what was started here ends with the block.

    Args:
        address: ``auto`` for the running cluster, or its host and port. Empty: that of ``$RAY_ADDRESS``, or else all
            CPUs and GPUs of this machine.
    """
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS", "") or "local"
    alone: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    before = os.umask(0o077)  # Ray writes its token below the home folder, readable for all unless told otherwise
    try:
        _reach(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **alone)
    except (OSError, ValueError, RuntimeError) as problem:
        raise ConfigError(
            f"no Ray cluster answers at {address!r} ({shown(problem)}); start one with 'ray start --head', or leave "
            "out --ray-address"
        ) from problem
    finally:
        os.umask(before)
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Refuse a host and port at which nothing listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


def nodes() -> list[Node]:
    """Return the living nodes of the cluster, in a fixed order."""
    alive = [n for n in _ray().nodes() if n["Alive"] and n["Resources"].get("CPU")]
    alive.sort(key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
    return [Node(n["NodeID"], n["Resources"]["CPU"], n["Resources"].get("GPU", 0.0)) for n in alive]


@dataclass(eq=False)
class Seat:
    """A worker process, and what the server knows to be there."""

    place: Place
    actor: Any
    number: int


class Workers:
    """The workers of a run, which hold all its sites.

    Args:
        opener: Function that builds sites from the recipe, as ``module:function``.
        recipe: Text from which the workers build their sites.
        sizes: Number of cases of every site.
        device: ``train.device`` of the study: a GPU is used if the cluster has one and this allows it.
        threads: Threads of a worker on a CPU.
        count: Number of workers; 0 to choose by the cluster's resources.
        watch: Observer of the progress.
    """

    def __init__(
        self,
        opener: str,
        recipe: str,
        sizes: Mapping[SiteId, int],
        *,
        device: str,
        threads: int,
        count: int = 0,
        watch: Watch = Watch(),
    ):
        self.facts: dict[SiteId, Mapping[str, Any]] = {}  # of every site's cases
        self._sizes, self._opener, self._threads = dict(sizes), opener, threads
        ray = _ray()
        places = place(nodes(), sizes, threads, count, gpus=device != "cpu")
        if device.startswith("cuda") and not places[0].gpus:
            raise ConfigError(f"train.device = {device!r}, but no node of the Ray cluster has a GPU; use 'auto'")
        self._recipe, self._incidents = ray.put(recipe), list[Incident]()
        self._numbers = itertools.count()
        self._losses = Counter[SiteId]()  # of every site's worker since its last result
        self.seats: list[Seat] = []
        try:
            self.seats = [self._start(p) for p in places]
            loading = [(seat, seat.actor.load.remote(seat.place.sites)) for seat in self.seats]
            for seat, job in loading:
                self._loaded(seat, job, watch)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        """Return a sentence for the log."""
        places = [seat.place for seat in self.seats]
        each = f"{places[0].gpus:g} of a GPU" if places[0].gpus else _counted(self._threads, "thread")
        where = _counted(len({p.node for p in places}), "node")
        inside = "; ".join(", ".join(p.sites) for p in places)
        return f"Ray: {_counted(len(places), 'worker')} on {where}, each with {each}: {inside}"

    def close(self) -> None:
        """End all workers."""
        for seat in self.seats:
            _ray().kill(seat.actor)
        self.seats = []

    def incidents(self) -> list[Incident]:
        """Return the incidents since the last call."""
        incidents, self._incidents = self._incidents, []
        return incidents

    def put(self, value: Any) -> Any:
        """Store a value that several calls use; it crosses to every node once."""
        return _ray().put(value)

    def seat(self, site: SiteId) -> Seat:
        """Return the worker of a site."""
        return next(s for s in self.seats if site in s.place.sites)

    def result(self, site: SiteId, seat: Seat, job: Any) -> Any:
        """Return the result of a call about a site; a lost worker is replaced, and LostWorker is raised."""
        try:
            value = _get(job)
        except LostWorker as problem:
            self._replace(seat, str(problem))
            raise
        self._losses[site] = 0
        return value

    def ask(self, site: SiteId, method: str, *given: Any) -> Any:
        """Return the result of a method about a site, again from its next worker if one is lost."""
        while True:
            seat = self.seat(site)
            try:
                return self.result(site, seat, getattr(seat.actor, method).remote(site, *given))
            except LostWorker:
                continue

    def _start(self, where: Place) -> Seat:
        """Start a worker on its node."""
        ray = _ray()
        actor = ray.remote(SiteWorker).options(
            num_cpus=where.cpus,
            num_gpus=where.gpus,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(where.node, soft=False),
            max_restarts=0,
        )
        environ = {name: os.environ[name] for name in HERE if name in os.environ}
        device = "cuda" if where.gpus else "cpu"
        made = actor.remote(self._opener, self._recipe, device, self._threads, environ)
        return Seat(where, made, next(self._numbers))

    def _loaded(self, seat: Seat, job: Any, watch: Watch = Watch()) -> None:
        """Wait until a worker has loaded its sites; a worker that is lost meanwhile is replaced."""
        try:
            while not _ray().wait([job], timeout=PATIENCE)[0]:
                log.info("waiting for the worker of %s on node %s", ", ".join(seat.place.sites), seat.place.node[:8])
            facts = _get(job)
        except LostWorker as problem:
            return self._replace(seat, str(problem))
        self.facts |= facts
        for name in facts:
            watch.case(len(self.facts), len(self._sizes), name)
        return None

    def _replace(self, lost: Seat, reason: str) -> None:
        """Start a lost worker again where there is room, or give its sites to the other workers."""
        if lost not in self.seats:
            return None
        _ray().kill(lost.actor)
        self.seats.remove(lost)
        self._count(lost.place.sites)
        sites, node = ", ".join(lost.place.sites), find_room(nodes(), [s.place for s in self.seats], lost.place)
        how = "loaded again" if node else "given to the other workers"
        what = f"the worker of {sites} was lost and its sites are {how}: {reason}"
        log.warning(what)
        self._incidents.append(incident(what))
        if node:
            seat = self._start(replace(lost.place, node=node))
            self.seats.append(seat)
            return self._loaded(seat, seat.actor.load.remote(seat.place.sites))
        if not self.seats:
            raise RunError(
                "no node of the Ray cluster is left; nothing that was finished is lost: resume the run on another one"
            )
        return self._give(lost.place.sites)

    def _count(self, sites: Sequence[SiteId]) -> None:
        """Count the losses of sites; refuse to go on with one whose worker is lost again and again."""
        self._losses.update(sites)
        worst = max(sites, key=self._losses.__getitem__)
        if self._losses[worst] == ATTEMPTS:
            raise RunError(
                f"the worker of site {worst!r} was lost {ATTEMPTS} times in one turn, perhaps for want of memory; "
                "nothing that was finished is lost: lower train.batch or --workers and resume the run"
            )

    def _give(self, sites: Sequence[SiteId]) -> None:
        """Have the workers that are left load these sites, too."""
        loads = {str(k): sum(self._sizes[i] for i in s.place.sites) for k, s in enumerate(self.seats)}
        shared = spread({i: self._sizes[i] for i in sites}, loads)
        jobs = []
        for k, seat in enumerate(list(self.seats)):
            if more := shared[str(k)]:
                seat.place = replace(seat.place, sites=(*seat.place.sites, *more))
                jobs.append((seat, seat.actor.load.remote(more)))
        for seat, job in jobs:
            self._loaded(seat, job)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


class LostWorker(Exception):
    """A worker that ended, or that cannot be reached."""


def _get(job: Any) -> Any:
    """Return the result of a call; raise the error of the site as it was, and LostWorker if the worker is gone."""
    ray = _ray()
    try:
        return ray.get(job)
    except ray.exceptions.RayTaskError as problem:
        if isinstance(problem.cause, PolysiteError):
            raise problem.cause from None
        raise
    except (
        ray.exceptions.RayActorError,
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.OutOfMemoryError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.ObjectLostError,
        ray.exceptions.ActorUnschedulableError,
    ) as problem:
        raise LostWorker(shown(" ".join(str(problem).split()))) from problem
