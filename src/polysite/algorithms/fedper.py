"""Models of which a part stays at every site: FedPer keeps the last layers there, LG-FedAvg the first.

What stays is said by patterns of names, never by positions: ``head.*`` is the output of every network, ``stem.*`` and
``encoder.*`` are the contracting half of a U-Net and all but the classifier of a DenseNet. A layer's running statistics
stay with any of its parameters. All sites begin with the same private part, that of the initial model. It crosses the
wire in neither direction, and the server does not even hold it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from polysite import tree
from polysite.algorithms.average import average
from polysite.algorithms.base import Kind
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree

Patterns = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class State:
    model: Tree  # the shared part


@dataclass(frozen=True)
class FedPer:
    """Federated averaging of all but the last layers, which every site keeps for itself.

    Paper: Arivazhagan et al., Federated Learning with Personalization Layers, 2019

        (u_k, v_k) <- fit_k(u, v_k)    all layers together,    u <- sum_k p_k u_k,    p_k = n_k / sum_j n_j

    u is shared, v_k stays at site k. The FeTS 2022 benchmark keeps the last 8 parameters of the U-Net, its last
    up-block and the head: private = ["decoder.3.*", "head.*"] for unet, ["decoder.2.*", "head.*"] for unet_small.
    A site that never trained is served u and the initial v.
    """

    private: tuple[str, ...] = ("head.*",)  # patterns of the names that stay at a site

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "weight": "count"}
    needs: ClassVar[Literal["sum", "each"]] = "sum"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _refuse_nothing(self.private)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(_shared(self.private, params))

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.model) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return _train(self.private, got, memory, site)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(average(replies))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield _whole(self.private, got, memory, site), cases


@dataclass(frozen=True)
class LGFedAvg:
    """Federated averaging of all but the first layers: every site sees with its own eyes, all judge alike.

    Paper: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020

        (u_k, v_k) <- fit_k(u, v_k)    all layers together,    u <- sum_k p_k u_k,    p_k = n_k / sum_j n_j

    As FedPer, but here the first layers are v_k, which stays at site k. The FeTS 2022 benchmark keeps the first 8
    parameters of the U-Net, its stem and the first down-block: private = ["stem.*", "encoder.0.*"]. The paper starts
    from a model that FedAvg has trained, so that what is shared is not the mean of decoders of unlike encoders.
    A site that never trained is served u and the initial v.
    """

    private: tuple[str, ...] = ("stem.*", "encoder.*")  # patterns of the names that stay at a site

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "weight": "count"}
    needs: ClassVar[Literal["sum", "each"]] = "sum"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _refuse_nothing(self.private)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        return State(_shared(self.private, params))

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.model) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return _train(self.private, got, memory, site)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(average(replies))

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield _whole(self.private, got, memory, site), cases


def _train(private: Patterns, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
    fit = site.fit(_whole(private, got, memory, site))
    shared, own = _parted(private, fit.params)
    return Payload(model=shared, weight=site.size), Payload(private=own)


def _whole(private: Patterns, got: Payload, memory: Payload, site: Site) -> Tree:
    """The model of a site: what it received and, whatever that is, its own private part."""
    _, start = _parted(private, site.start)
    return {**got["model"], **memory.get("private", start)}


def _parted(private: Patterns, model: Tree) -> tuple[Tree, Tree]:
    """(What is shared, what stays at a site.)"""
    named = tree.select(model, private)
    layers = {_layer(k) for k in named}
    own = {**named, **{k: v for k, v in tree.statistics(model).items() if _layer(k) in layers}}
    return {k: v for k, v in model.items() if k not in own}, own


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _shared(private: Patterns, params: Tree) -> Tree:
    """What the server holds; patterns that do not part this network in two are refused."""
    parts = ", ".join(dict.fromkeys(k.partition(".")[0] for k in params))
    for pattern in private if params else ():
        if not tree.select(params, [pattern]):
            raise ConfigError(
                f"private names {pattern!r}, and no parameter of this network is called that; its parts are {parts}, "
                "as in 'head.*'"
            )
    shared, _ = _parted(private, params)
    if params and not tree.trained(shared):
        raise ConfigError(
            f"private = {list(private)} keeps every parameter at the sites, so that nothing is shared; "
            "name fewer, or choose local"
        )
    return shared


def _refuse_nothing(private: Patterns) -> None:
    if not private:
        raise ConfigError("private names nothing that stays at a site; name it, as in ['head.*'], or choose fedavg")
