"""The contract that every algorithm keeps. Nothing here is inherited from."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree

S = TypeVar("S")
INF = float("inf")
TINY = 1e-12  # the least a hyper-parameter may be that must not be zero

# What a field of a reply is. ``model``: the parameters that a site was sent, running statistics included, or was asked
# for by their names (``asked``); ``update``: a value per trained parameter; ``count``: a number of cases; ``counts``:
# several, by name, of cases or voxels; ``one``: 1, where all sites count alike; ``rate``: a learning rate or a sum of
# them; ``cost``: a loss or the like, not negative; ``statistics``: arrays that describe all cases; ``cases``: arrays
# with a row for every case, which a hospital may not want to tell; ``number``: another.
Kind = Literal["model", "update", "count", "counts", "one", "rate", "cost", "statistics", "cases", "number"]


class Algorithm(Protocol[S]):
    """Five functions of values: no file, no socket, no device, no seed, no training loop.

    ``reply`` says what a site answers, field by field: all that ever leaves it, and what the server holds it to. A
    field whose name ends in ``?`` may be left out; ``x*`` are all fields that begin with x and that it was sent.
    A field called ``weight`` multiplies all that the server takes of a site, so ``weighted`` can scale it.
    ``needs`` says whether ``merge`` can live with a (secure) sum of the replies or must see each one.
    ``plain_sgd`` says that the mathematics holds for plain SGD alone: no momentum, no Adam.
    ``strangers`` says that a site which never trained is served a model that others trained.
    """

    @property
    def reply(self) -> Mapping[str, Kind]: ...

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


def shares(algorithm: Algorithm[S], state: S, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
    """How much every reply counts in what ``merge`` makes of it, for the record.

    An algorithm whose weights are not those that the sites state says so in a method of this name; one that does not
    average says nothing.
    """
    own = getattr(algorithm, "shares", None)
    if own is not None:
        return dict(own(state, replies))
    weights = {i: float(p["weight"]) for i, p in sorted(replies.items()) if "weight" in p}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()} if total > 0 else {}


def offered(algorithm: Algorithm[S], state: S, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
    """What sites are sent to be served by: what ``offer`` says, where that is not what they are sent to train with."""
    offer = getattr(algorithm, "offer", algorithm.send)
    found: Mapping[SiteId, Payload] = offer(state, sites)
    return found


def objections(algorithm: Algorithm[S], state: S, replies: Mapping[SiteId, Payload]) -> dict[SiteId, str]:
    """Whom the server should not hear, and why, where only the algorithm can tell: its method ``refuse``, if any."""
    refuse = getattr(algorithm, "refuse", None)
    return {} if refuse is None else dict(refuse(state, replies))


def over(algorithm: Algorithm[S], state: S) -> bool:
    """Whether an algorithm that comes to an end by itself, and says so in a method of this name, has come to it."""
    own = getattr(algorithm, "over", None)
    return own is not None and bool(own(state))


def told(algorithm: Algorithm[S], state: S) -> dict[str, float]:
    """Numbers that an algorithm tells of a round, by name, for the record: those of its method ``tell``, if any."""
    tell = getattr(algorithm, "tell", None)
    return {} if tell is None else {name: float(value) for name, value in tell(state).items()}


def within(settings: Any, **bounds: tuple[float, float]) -> None:
    """Refuse a hyper-parameter outside [low, high]; None, where it may be None, is let pass."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not (low <= value <= high and value < INF):
            least = "more than 0" if low == TINY else f"at least {low:g}"
            limits = "finite" if value == INF else least if high == INF else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name} = {value} must be {limits}")
