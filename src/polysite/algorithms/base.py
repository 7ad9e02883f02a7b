"""The contract that every algorithm keeps. Nothing here is inherited from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree

S = TypeVar("S")


class Algorithm(Protocol[S]):
    """Five functions of values: no file, no socket, no device, no seed, no training loop.

    ``needs`` says whether ``merge`` can live with a (secure) sum of the replies or must see each one.
    ``plain_sgd`` says that the mathematics holds for plain SGD alone: no momentum, no Adam.
    ``strangers`` says that a site which never trained is served a model that others trained.
    """

    @property
    def needs(self) -> Literal["sum", "each"]: ...

    @property
    def plain_sgd(self) -> bool: ...

    @property
    def strangers(self) -> bool: ...

    def init(self, params: Tree, sites: Sequence[SiteId]) -> S:
        """The server's state before round 0."""
        ...

    def send(self, state: S, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        """Server to each site of the cohort."""
        ...

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        """At the site: (what goes back, what the site remembers)."""
        ...

    def merge(self, state: S, replies: Mapping[SiteId, Payload]) -> S:
        """Sites to server. ``replies`` may miss sites that dropped out; it is never empty."""
        ...

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        """Which parameters this site uses for which of these patients."""
        ...
