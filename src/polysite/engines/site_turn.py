"""One turn of a site, the same in a simulation and at a hospital, and the server's inverse of it.

::

    payload received -> algorithm.local -> outgoing steps -> reply        at the site: take_turn
    reply received -> outgoing steps reversed -> reply checks -> merge    at the server: restore_reply, rounds.py

An outgoing step is a small value (compression; clipping, noise or a mask) that changes a reply before it leaves.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from polysite.algorithms.base import Algorithm, Kind, facts
from polysite.engines.reply_checks import kinds_of
from polysite.errors import ConfigError
from polysite.payload import Payload
from polysite.privacy import Release
from polysite.site import Fit, Site, setup_of

log = logging.getLogger("polysite")


class OutgoingStep(Protocol):
    """Interface of a step that changes a reply before it leaves the site, and that the server reverses."""

    @property
    def reveals(self) -> Literal["each", "sum"]:
        """Whether the server can restore each reply, or only the sum of all (as with masks)."""
        ...

    def apply(self, kinds: Mapping[str, Kind], got: Payload, reply: Payload) -> Payload:
        """Return the changed reply, which leaves the site; ``got`` is the payload that the site received."""
        ...

    def restore(self, kinds: Mapping[str, Kind], sent: Payload, reply: Payload) -> Payload:
        """Return the restored reply, given the payload that the server sent; raise PayloadError if they do not fit."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """Outcome of a site's turn."""

    reply: Payload
    """What leaves the site, after all outgoing steps."""
    memory: Payload
    """What the site remembers if the reply is merged."""
    fits: tuple[Fit, ...]
    seconds: float
    kinds: Mapping[str, Kind]
    """Kind of every field of the reply that the algorithm announces."""
    steps: tuple[OutgoingStep, ...] = ()
    """The outgoing steps that were applied."""
    disjoint: bool = False
    """No patient is in two of several fits."""

    @property
    def releases(self) -> tuple[Release, ...]:
        """What the turn cost under differential privacy: noise in fits, or on the reply."""
        fits = dict.fromkeys(f.release for f in self.fits) if self.disjoint else [f.release for f in self.fits]
        found = (*fits, *(getattr(step, "release", None) for step in self.steps))
        return tuple(release for release in found if release is not None)


def take_turn(
    algorithm: Algorithm[Any], got: Payload, memory: Payload, site: Site, steps: Sequence[OutgoingStep] = ()
) -> Turn:
    """Run the algorithm at a site and apply the outgoing steps to its reply."""
    began, before = time.perf_counter(), setup_of(site)
    reply, memory = algorithm.local(got, memory, site)
    compiling, problem = setup_of(site)
    compiling -= before[0]
    seconds = time.perf_counter() - began - compiling
    if compiling > 1:
        log.info("compiling the training step took %.0f s, which do not count as training time", compiling)
    if problem != before[1]:
        log.warning("the network is not compiled, which makes training slower: %s", problem)
    kinds = kinds_of(algorithm.reply, got, reply)
    for step in steps:
        reply = step.apply(kinds, got, reply)
    disjoint = len(site.fits) > 1 and facts(algorithm).disjoint_fits
    return Turn(reply, memory, tuple(site.fits), seconds, kinds, tuple(steps), disjoint)


def restore_reply(
    algorithm: Algorithm[Any], sent: Payload, reply: Payload, steps: Sequence[OutgoingStep] = ()
) -> Payload:
    """Reverse the outgoing steps at the server."""
    if not steps:
        return reply
    kinds = kinds_of(algorithm.reply, sent, reply)
    for step in reversed(steps):
        reply = step.restore(kinds, sent, reply)
    return reply


def check_steps(algorithm: Algorithm[Any], name: str, steps: Sequence[OutgoingStep]) -> None:
    """Refuse steps that reveal only the sum of the replies to an algorithm that needs each reply."""
    if facts(algorithm).needs == "each" and any(step.reveals == "sum" for step in steps):
        raise ConfigError(
            f"{name} needs the reply of each site, and only the sum of all replies would be revealed; choose an "
            "algorithm with needs = 'sum' ('polysite algorithms' lists them)"
        )
