"""A fake Ray cluster inside the test process: a test chooses its nodes and GPUs, and which workers it loses."""

import itertools
import json
import pickle
from types import SimpleNamespace

from polysite.engines.host import HostPhase, SiteHost
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.ray import cluster
from polysite.engines.ray.cluster import Workers
from polysite.engines.ray.wire import RayWire
from polysite.engines.sites import Sites
from table import CASES, arrays, sites

OPENER = "ray_fake:QuadraticSites"


class QuadraticSites:
    """What a worker of the table's algorithms holds."""

    def __init__(self, recipe, device):
        self.cases, self.device, self.sites = json.loads(recipe), device, {}

    def load(self, names):
        self.sites |= {i: s for i, s in sites().items() if i in names}

    def host(self, name):
        return SiteHost(name, {k: HostPhase(CASES[case], self.sites[name]) for k, case in enumerate(self.cases)})

    def describe(self, name):
        return {"device": self.device}


class Lost(Exception):
    """A lost worker, as Ray reports it."""


class TaskError(Exception):
    """An error of the site's own, as Ray reports it."""


class Reference:
    def __init__(self, value):
        self.value = value


class Job:
    """A call that waits in the queue of its actor."""

    def __init__(self, actor, method, given, options):
        self.actor, self.method, self.given, self.options, self.done = actor, method, given, options, False

    def run(self):
        self.problem, self.done = None, True
        try:
            method, given = getattr(self.actor.instance, self.method), crossed(values(self.given))
            self.result = crossed(method(*given, **crossed(self.options)))
        except Exception as problem:
            self.problem = TaskError()
            self.problem.cause = problem


class Actor:
    def __init__(self, kind, node, options, given):
        self.node, self.options, self.queue, self.dead = node, options, [], False
        self.instance = kind(*values(given))

    def __getattr__(self, method):
        def remote(*given, **options):
            self.queue.append(Job(self, method, given, options))
            return self.queue[-1]

        return SimpleNamespace(remote=remote)


def values(given):
    return [x.value if isinstance(x, Reference) else x for x in given]


LOST = ("RayActorError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError")


class FakeRay:
    """``lose(k)`` is asked after every finished call, by its number, for a node or an actor to lose."""

    def __init__(self, nodes, lose=lambda ray, k: None):
        self.alive, self.actors, self.lose, self.count = dict(nodes), [], lose, itertools.count()
        lost = dict.fromkeys((*LOST, "ActorUnschedulableError"), Lost)
        self.exceptions = SimpleNamespace(RayTaskError=TaskError, **lost)
        strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        self.util = SimpleNamespace(scheduling_strategies=strategies)

    def nodes(self):
        resources = {i: {"CPU": cpus, "GPU": gpus} for i, (cpus, gpus) in self.alive.items()}
        return [{"NodeID": i, "NodeManagerAddress": i, "Alive": True, "Resources": r} for i, r in resources.items()]

    def remote(self, kind):
        def options(**chosen):
            def start(*given):
                node = chosen["scheduling_strategy"]
                assert node in self.alive
                self.actors.append(Actor(kind, node, chosen, given))
                return self.actors[-1]

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def put(self, value):
        return Reference(crossed(value))

    def wait(self, jobs, timeout):
        return jobs, []

    def kill(self, actor):
        actor.dead = True

    def lose_node(self, node):
        del self.alive[node]
        for actor in self.actors:
            actor.dead |= actor.node == node

    def get(self, job):
        while not job.done:
            if job.actor.dead:
                raise Lost("the process ended")
            job.actor.queue.pop(0).run()
            self.lose(self, next(self.count))
        if job.problem:
            raise job.problem
        return job.result


def crossed(value):
    """The value as another process receives it: a copy whose arrays cannot be written."""
    copy = pickle.loads(pickle.dumps(value))
    for array in arrays(copy):
        array.setflags(write=False)
    return copy


def transports(monkeypatch, ray, *cases, count=0, device="cpu", threads=1):
    """One transport per phase, each with an algorithm of the table, on a cluster that is not there."""
    monkeypatch.setattr(cluster, "_ray", lambda: ray)
    monkeypatch.setattr("polysite.own_process.begin", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    known = sites()
    sizes = {i: s.size for i, s in known.items()}
    workers = Workers(OPENER, json.dumps(cases), sizes, device=device, threads=threads, count=count)
    everyone, roles = Sites(RayWire(workers), known, refusals=workers.incidents), {"names": known, "audience": known}
    return workers, [PhaseSites(CASES[case], everyone, k, known=known, **roles) for k, case in enumerate(cases)]
