"""Division of a model into a shared and a private part, and how both are combined.

The private part is given by patterns of names, never by positions: ``head.*`` is the output of every network,
``stem.*`` and ``encoder.*`` are the contracting half of a U-Net and all but the classifier of a DenseNet. The running
statistics of a layer are private if one of its parameters is. All sites start with the private part of the initial
model. It is never sent, and the server does not hold it.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from polysite import tree
from polysite.algorithms.average import OneModel, State
from polysite.algorithms.base import Facts
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree

Patterns = tuple[str, ...]


class PrivatePart(OneModel):
    """Base of an algorithm whose sites keep a part of the model, named by the patterns ``private``."""

    private: Patterns
    facts: ClassVar[Facts] = Facts(needs="sum", only_fits=True)

    def __post_init__(self) -> None:
        refuse_nothing(self.private)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(shared(self.private, params))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield whole(self.private, got, memory, site), cases


def whole(private: Patterns, got: Payload, memory: Payload, site: Site) -> Tree:
    """Return the model of a site: the received parameters with its own private part."""
    _, start = parted(private, site.start)
    return {**got["model"], **memory.get("private", start)}


def parted(private: Patterns, model: Tree) -> tuple[Tree, Tree]:
    """Return (shared part, private part)."""
    named = tree.select(model, private)
    layers = {layer(k) for k in named}
    own = {**named, **{k: v for k, v in tree.statistics(model).items() if layer(k) in layers}}
    return {k: v for k, v in model.items() if k not in own}, own


def layer(name: str) -> str:
    """Return the layer of a parameter.

    >>> layer("stem.norm0.weight")
    'stem.norm0'
    """
    return name.rpartition(".")[0]


def shared(private: Patterns, params: Tree) -> Tree:
    """Return the shared part. Refuse patterns that match nothing or everything."""
    refuse_unknown("private", private, params)
    rest, _ = parted(private, params)
    if params and not tree.trained(rest):
        raise ConfigError(
            f"private = {list(private)} keeps every parameter at the sites, so that nothing is shared; "
            "name fewer, or choose local"
        )
    return rest


def refuse_unknown(setting: str, patterns: Patterns, params: Tree) -> None:
    """Refuse a pattern that matches no parameter. Without parameters (no network yet) nothing is refused."""
    parts = ", ".join(dict.fromkeys(k.partition(".")[0] for k in params))
    for pattern in patterns if params else ():
        if not tree.select(params, [pattern]):
            raise ConfigError(
                f"{setting} names {pattern!r}, and no parameter of this network is called that; its parts are {parts}, "
                "as in 'head.*'"
            )


def refuse_nothing(private: Patterns) -> None:
    """Refuse an empty list of patterns."""
    if not private:
        raise ConfigError("private names nothing that stays at a site; name it, as in ['head.*'], or choose fedavg")
