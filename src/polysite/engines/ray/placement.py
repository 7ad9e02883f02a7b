"""Placement of sites on the nodes of a cluster: pure functions of the nodes' resources and the sites' sizes.

A worker is one process with one network; it holds one or more sites. On CPUs a node has one worker for every
``threads`` CPUs; on GPUs, one worker for every GPU, or several that share it. Results do not depend on the placement.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polysite.errors import ConfigError
from polysite.payload import SiteId


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    id: str
    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """What one worker takes of a node, and the sites that it holds."""

    node: str
    cpus: float
    gpus: float
    sites: tuple[SiteId, ...] = ()


def place(
    nodes: Sequence[Node], sizes: Mapping[SiteId, int], threads: int, workers: int = 0, gpus: bool = True
) -> list[Place]:
    """Return the workers of a study.

    Args:
        nodes: The nodes, in a fixed order.
        sizes: Number of cases of every site.
        threads: Threads of a worker on a CPU.
        workers: Number of workers; 0 for one per GPU, or without GPUs one per ``threads`` CPUs. There are never more
            workers than sites.
        gpus: Whether GPUs may be used; nodes without one are then left out if any node has some.

    >>> place([Node("a", 4), Node("b", 4)], {"north": 9, "south": 5, "east": 4}, threads=4)
    [Place(node='a', cpus=4, gpus=0.0, sites=('north',)), Place(node='b', cpus=4, gpus=0.0, sites=('east', 'south'))]
    """
    if workers < 0:
        raise ConfigError(f"--workers {workers} must be a number of workers, or 0 to choose by the cluster's resources")
    if not nodes:
        raise ConfigError("the Ray cluster has no node; start one with 'ray start', or leave out --ray-address")
    seats = _on_gpus(nodes, threads, workers, len(sizes)) if gpus else []
    seats = seats or _on_cpus(nodes, threads, workers, len(sizes))
    shared = spread(sizes, {str(k): 0 for k in range(len(seats))})
    return [replace(seat, sites=shared[str(k)]) for k, seat in enumerate(seats) if shared[str(k)]]


def spread(sizes: Mapping[SiteId, int], loads: Mapping[str, int]) -> dict[str, tuple[SiteId, ...]]:
    """Assign sites to workers: the largest site first, each to the worker with the fewest cases so far.

    Args:
        sizes: Number of cases of every site.
        loads: Number of cases that every worker holds already.
    """
    loads, order = dict(loads), list(loads)
    given: dict[str, list[SiteId]] = {worker: [] for worker in loads}
    for site in sorted(sizes, key=lambda i: (-sizes[i], i)):
        least = min(order, key=lambda worker: (loads[worker], len(given[worker]), order.index(worker)))
        given[least].append(site)
        loads[least] += sizes[site]
    return {worker: tuple(sorted(sites)) for worker, sites in given.items()}


def find_room(nodes: Sequence[Node], taken: Sequence[Place], lost: Place) -> str | None:
    """Return the node for a worker that replaces a lost one: the same if it is there, or the one with the most room.

    Args:
        nodes: Nodes that are left.
        taken: Workers that are left.
        lost: The lost worker.

    Returns:
        None if no node has room; the other workers then take over its sites.
    """
    room = {}
    for node in nodes:
        mine = [p for p in taken if p.node == node.id]
        free = node.gpus - sum(p.gpus for p in mine), node.cpus - sum(p.cpus for p in mine)
        if free[0] >= lost.gpus - 1e-6 and free[1] >= lost.cpus - 1e-6:
            room[node.id] = free
    return lost.node if lost.node in room else max(room, key=lambda i: (room[i], i), default=None)


def _on_gpus(nodes: Sequence[Node], threads: int, workers: int, sites: int) -> list[Place]:
    """Return workers on the GPUs, first one on every node; with more workers than GPUs, several share a GPU."""
    slots = _rounds({n.id: int(n.gpus) for n in nodes})
    count = min(workers or len(slots), sites)
    if not slots:
        return []
    share = math.ceil(count / len(slots))
    chosen = [slots[k % len(slots)] for k in range(count)]
    return _sized(nodes, chosen, threads, 1.0 if share == 1 else math.floor(1e4 / share) / 1e4)


def _on_cpus(nodes: Sequence[Node], threads: int, workers: int, sites: int) -> list[Place]:
    """Return workers on the CPUs, first one on every node."""
    slots = _rounds({n.id: int(n.cpus // threads) for n in nodes})
    slots = slots or [max(nodes, key=lambda n: n.cpus).id]  # no node has as many CPUs as a worker has threads
    count = min(workers or len(slots), sites)
    return _sized(nodes, [slots[k % len(slots)] for k in range(count)], threads, 0.0)


def _rounds(counts: Mapping[str, int]) -> list[str]:
    """Return every node as often as it is counted, by turns.

    >>> _rounds({"a": 3, "b": 1})
    ['a', 'b', 'a', 'a']
    """
    return [node for k in range(max(counts.values())) for node in counts if counts[node] > k]


def _sized(nodes: Sequence[Node], chosen: Sequence[str], threads: int, gpus: float) -> list[Place]:
    """Return the workers with as many CPUs as they have threads, or their part of the node's if it has fewer."""
    part = {n.id: math.floor(1e4 * n.cpus / max(chosen.count(n.id), 1)) / 1e4 for n in nodes}
    return [Place(node, min(threads, part[node]), gpus) for node in chosen]
