"""FedDiv: one encoder per class, averaged by the amount of that class at each site, and one decoder per site.

Paper: FedDiv, section IV, Algorithms 1 to 3 and equations 1 to 7

    theta_k <- fit_k(theta, phi_k) of the encoders alone, on F_k + alpha L_e              one round, and in the next
    phi*_k  <- fit_k(theta, phi_k) of the decoder alone, on F_k
    theta^i <- sum_k N_k^i theta_k^i / N^i,    N^i = sum_j N_j^i                          the encoder of class i
    phi_k   <- phi*_k - (phi*_k - m_k) g(s_k),    g(x) = e^-(lam x)^gamma                 element by element
    L_e = sum_i mean_j std_batch(beta_i(l) F_j^i)

F_j^i is the j-th feature of the encoder of class i; ``Divergence`` in ``polysite.site`` defines beta. In a segmentation
the paper prints pool(l^gamma) for the mask l in beta, which is pool(l) for a binary mask, and says that gamma sharpens
edges, which pool(l)^gamma does: ``edges`` is that gamma. N_k^i counts cases in a classification and voxels in a
segmentation. m_k and s_k are the mean and the standard deviation of the decoders of the ``nearest`` sites, site k
included: an element with lam s < 1 becomes their mean, one with lam s > 1 stays personal. lam = 0 averages the
decoders, a large lam keeps all of them personal.

s depends on the network, on the learning rate and on the round: what lam = 10 keeps personal in a classifier is nothing
in a U-Net. By default lam is therefore chosen anew for the decoders of every round and site, such that the given
``share`` of the elements stays personal, those with the largest s: 1 / lam is a quantile of s. share = 0 is lam = 0,
share = 1 keeps every decoder personal.

A round sends one part of the model down and the other part up, half the traffic of FedAvg: a site trains the part that
it received in the round before. In its first exchange, and after a round that it missed, it receives the whole model.
The server keeps the decoder of every site. Every reply contains the amounts of all classes at the site.

An encoder stays as it is if no replying site has its class. A site that is absent from a decoder round keeps its
decoder and enters no mean. A site that never sent a decoder is served the mean of all decoders; this is our reading,
since the paper does not say. The paper gives neither the lam of its tables, nor the focus of beta, nor the distance
between sites, which here is the Euclidean distance between decoders. Running statistics of an encoder are averaged like
its parameters, those of a decoder by a plain mean.

The network must have one encoder per class (``unet_sub``, ``densenet_sub``). With alpha = 0 any other network is
treated as a single encoder for all classes, weighted by cases.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean, plain
from polysite.site import Cases, Divergence, Objective, Site
from polysite.tree import Tree

DECODER = ("decoder.*", "head.*")
PRIVATE = 1e12  # largest lam: all that deviates at all stays personal
CASES = "cases"  # name of the weight of an encoder for all classes


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    encoder: Tree
    decoder: Tree  # mean of all decoders; initially the start
    decoders: Mapping[SiteId, Tree] = field(default_factory=dict)  # by site, of those that have sent one
    holders: tuple[SiteId, ...] = ()  # sites that replied last: they hold the other part of the model
    rounds: int = 0
    personal: float | None = None  # share of decoder elements with lam s > 1; None before the first decoders
    spread: float = 0.0  # mean standard deviation s
    lam: float = 0.0  # mean over the sites


@dataclass(frozen=True)
class FedDiv:
    """One encoder per class, averaged by the amount of that class at each site; a personal decoder per site.

    Args:
        alpha: Weight of the divergence loss (alpha in the paper), at least 0; None: 0.4 to segment, 0.2 to classify
            (the paper).
        focus: Strength of the weight beta in the divergence loss (lambda of its beta in the paper), at least 0. The
            paper gives none; the default: docs/results/defaults.md.
        lam: Decoder parameters that deviate by more than 1 / lam stay personal (lambda in the paper), at least 0; the
            paper tries 0 to 100. None: chosen in every round by ``share``.
        gamma: Sharpness of that limit (gamma in the paper), at least 1; the paper takes 10.
        nearest: Number of sites whose decoders are compared, the site itself included, at least 1; None: all.
        share: Share of the decoder's parameters that stay personal, 0 to 1, those that deviate most; without effect if
            lam is given. The paper recommends slight personalisation; the default: docs/results/defaults.md.
        edges: Exponent of the averaged mask in beta of a segmentation (gamma of its beta in the paper), at least 1; 1
            is the equation as printed, more sharpens edges as the paper's text says.
    """

    alpha: float | None = None
    focus: float = 1.0
    lam: float | None = None
    gamma: float = 10.0
    nearest: int | None = None
    share: float = 0.1
    edges: float = 1.0

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "counts": "counts"}

    def __post_init__(self) -> None:
        within(self, alpha=(0, INF), focus=(0, INF), lam=(0, PRIVATE), gamma=(1, INF), nearest=(1, INF))
        within(self, share=(0, 1), edges=(1, INF))

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        encoder, decoder = tree.drop(params, DECODER), tree.select(params, DECODER)
        if params and not (tree.trained(encoder) and tree.trained(decoder)):
            raise ConfigError(
                "feddiv parts a network into encoder and decoder (decoder.*, head.*); this one has not both"
            )
        if params and self.alpha != 0 and CASES in _classes(encoder):
            raise ConfigError(
                "feddiv needs a network with an encoder for every class, model.name = 'unet_sub' or 'densenet_sub'; "
                "with algorithm.alpha = 0 it takes any other as one encoder for all classes"
            )
        return State(encoder, decoder)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        encoding = _encoding(state)
        # names without values
        asked = tree.map(lambda x: x.reshape(-1)[:0], state.encoder if encoding else state.decoder)
        sent: dict[SiteId, Payload] = {}
        for i in cohort:
            own = state.decoders.get(i, state.decoder)
            news = own if encoding else state.encoder
            sent[i] = Payload(model=news if i in state.holders else {**state.encoder, **own}, asked=asked)
        return sent

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        model, asked = _whole(got, memory), got["asked"]
        rest = {k: v for k, v in model.items() if k not in asked}
        encoding = any(not tree.matches(k, DECODER) for k in asked)
        terms = [Divergence(self.alpha, self.focus, self.edges)] if encoding and self.alpha != 0 else []
        fit = site.fit(model, Objective(extra=terms), only=sorted({f"{k.partition('.')[0]}.*" for k in asked}))
        counts = {c: np.array([_amount(site, c)]) for c in _classes(tree.drop(model, DECODER))}
        return Payload(model={k: fit.params[k] for k in asked}, counts=counts), Payload(rest=rest)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        heard = replace(state, holders=tuple(sorted(replies)), rounds=state.rounds + 1)
        if not _encoding(state):
            return self._decoders(heard, {i: replies[i]["model"] for i in heard.holders})
        encoder = dict(state.encoder)
        for name, members in _classes(state.encoder).items():
            parts = {i: Payload(part={k: p["model"][k] for k in members}) for i, p in replies.items()}
            weights = {i: _count(p, name) for i, p in replies.items()}
            if any(weights.values()):
                encoder.update(mean(parts, "part", weights))
        return replace(heard, encoder=encoder)

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the mean share of every site in the encoders, over the classes; empty in decoder rounds."""
        by_class: dict[SiteId, list[float]] = {i: [] for i in sorted(replies)}
        for name in _classes(state.encoder) if _encoding(state) else ():
            total = sum(_count(p, name) for p in replies.values())
            for i in by_class if total else ():
                by_class[i].append(_count(replies[i], name) / total)
        return {i: math.fsum(each) / len(each) for i, each in by_class.items() if each}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        if state.personal is None:
            return {}
        measured = {"personal share of the decoders": state.personal, "deviation between decoders": state.spread}
        return {**measured, **({"lam": state.lam} if self.lam is None else {})}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield _whole(got, memory), cases

    def _decoders(self, state: State, came: Mapping[SiteId, Tree]) -> State:
        """Update the decoders that were sent, by equation 5, and the deviation between them."""
        near = {i: self._near(i, came) for i in came}
        known = {group: _spread([came[j] for j in group]) for group in dict.fromkeys(near.values())}
        lam = {group: self._lam(tree.trained(deviation)) for group, (_, deviation) in known.items()}
        own = {i: self._personal(came[i], *known[near[i]], lam[near[i]]) for i in came}
        deviations = {group: tree.trained(deviation) for group, (_, deviation) in known.items()}
        numbers = sum(math.prod(x.shape) for i in came for x in deviations[near[i]].values())
        far = {g: tree.sums(lam[g] * x > 1 for x in each.values()) for g, each in deviations.items()}
        whole = {g: tree.sums(each.values()) for g, each in deviations.items()}
        beyond, total = (sum(x for i in came for x in each[near[i]]) for each in (far, whole))
        decoders = dict(sorted({**state.decoders, **own}.items()))
        return replace(
            state,
            decoders=decoders,
            decoder=_average(list(decoders.values())),
            personal=beyond / numbers,
            spread=total / numbers,
            lam=math.fsum(lam[near[i]] for i in came) / len(came),
        )

    def _lam(self, deviation: Tree) -> float:
        """Return lam: the given one, or the one with which the wanted share of the elements is personal."""
        if self.lam is not None:
            return self.lam
        found = np.asarray(plain(tree.flat(deviation)), np.float64)
        shared = round((1 - self.share) * found.size)  # number of elements that are not personal
        if not shared:
            return PRIVATE
        limit = float(np.partition(found, shared - 1)[shared - 1]) if shared < found.size else INF
        return min(1 / max(limit, 1 / PRIVATE), PRIVATE)

    def _near(self, site: SiteId, came: Mapping[SiteId, Tree]) -> tuple[SiteId, ...]:
        """Return the sites with the nearest decoders, sorted by name; ties go to the first by name."""
        if self.nearest is None or self.nearest >= len(came):
            return tuple(came)
        own = tree.trained(came[site])
        away = {j: tree.norm(tree.sub(own, tree.trained(other))) for j, other in came.items()}
        return tuple(sorted(sorted(came, key=lambda j: (j != site, away[j], j))[: self.nearest]))

    def _personal(self, own: Tree, average: Tree, deviation: Tree, lam: float) -> Tree:
        def number(x: Any, m: Any, s: Any) -> Any:
            far = (lam * s).clip(None, 1000 ** (1 / self.gamma))  # e^-1000 is zero, and nothing overflows
            taken = math.e ** -(far**self.gamma)
            return taken * m + (1 - taken) * x

        trained = [tree.trained(t) for t in (own, average, deviation)]
        return {**average, **tree.map(number, *trained)}


def _encoding(state: State) -> bool:
    """Return whether the next round trains the encoders: every other round, beginning with the first."""
    return state.rounds % 2 == 0


def _whole(got: Payload, memory: Payload) -> Tree:
    """Return the model of a site: the received part and the part that it remembers."""
    return {**memory.get("rest", {}), **got["model"]}


def _classes(encoder: Tree) -> dict[str, list[str]]:
    """Return the parameter names of the encoder of each class; parameters of no class are under ``cases``.

    >>> _classes({"stem.class0.w": 0, "encoder.class0.w": 0, "stem.class1.w": 0})
    {'class0': ['stem.class0.w', 'encoder.class0.w'], 'class1': ['stem.class1.w']}
    """
    names: dict[str, list[str]] = {}
    for name in encoder:
        second = (*name.split("."), "")[1]
        names.setdefault(second if _number(second) is not None else CASES, []).append(name)
    return names


def _number(name: str) -> int | None:
    digits = name.removeprefix("class")
    return int(digits) if name.startswith("class") and digits.isdecimal() else None


def _amount(site: Site, name: str) -> float:
    number = _number(name)
    return float(site.size) if number is None else site.amount(number)


def _count(reply: Payload, name: str) -> float:
    return float(reply["counts"][name][0]) if name in reply["counts"] else 0.0


def _average(trees: Sequence[Tree]) -> Tree:
    """Return the plain mean, computed as a step from the first tree, so that the mean of equal trees is exact."""
    return tree.map(lambda *xs: xs[0] + sum(x - xs[0] for x in xs) / len(xs), *trees)


def _spread(near: Sequence[Tree]) -> tuple[Tree, Tree]:
    """Return (mean, standard deviation), element by element."""
    average = _average(near)

    def deviation(m: Any, *xs: Any) -> Any:
        return (sum((x - m) ** 2 for x in xs) / len(xs)) ** 0.5

    return average, tree.map(deviation, average, *near)
