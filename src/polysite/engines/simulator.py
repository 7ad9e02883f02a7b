"""The default engine: all sites in this process, one after the other.

Sites take turns with one network and one optimiser on the device. What a site keeps between turns (its memory, and the
model that a phase starts from) stays on the device while all of it fits there, or else leaves it (``memory_store.py``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polysite.algorithms.base import Algorithm
from polysite.engines.host import HostPhase, SiteHost
from polysite.engines.memory_store import MemoryStore
from polysite.engines.phase_sites import PhaseSites
from polysite.engines.secure.settings import Secure
from polysite.engines.site_turn import OutgoingStep
from polysite.engines.sites import Sites
from polysite.engines.wire import InProcess
from polysite.payload import SiteId
from polysite.privacy import Private
from polysite.site import Site


class Simulator(PhaseSites):
    """One phase over sites in this process.

    Args:
        algorithm: The algorithm.
        sites: Sites that train.
        guests: Sites that are served and score models; None for those that train.
        wire: Pass every payload through the codec, as a network would.
        outgoing: Steps that change a reply before it leaves its site.
        store: Where memories are kept.
        secure: Settings of secure sums.
        private: Differential privacy of training.
        after: The phase before this one, whose hosts go on.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        sites: Mapping[SiteId, Site],
        *,
        guests: Mapping[SiteId, Site] | None = None,
        wire: bool = False,
        outgoing: Sequence[OutgoingStep] = (),
        store: MemoryStore | None = None,
        secure: Secure = Secure(),
        private: Private = Private(),
        after: "Simulator | None" = None,
    ):
        everyone, number = {**sites, **(guests or {})}, after.phase + 1 if after else 0
        store = store or (after.store if after else MemoryStore())
        self.wire: InProcess = after.wire if after else InProcess({})
        self.wire.coded |= wire
        for name, site in everyone.items():
            host = self.wire.hosts.setdefault(name, SiteHost(name, {}, store=store))
            host.phases[number] = HostPhase(algorithm, site, tuple(outgoing), secure, private)
        known = after.sites if after else Sites(self.wire, ())
        known.expect(everyone)
        super().__init__(
            algorithm,
            known,
            number,
            next(iter(sites.values())).lift,
            known=everyone,
            names=sites,
            audience=sites if guests is None else guests,
            store=store,
        )
