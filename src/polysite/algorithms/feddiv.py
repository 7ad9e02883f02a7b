"""FedDiv: an encoder for every class, averaged by how much of it a site has; a decoder for every site.

Paper: FedDiv, section IV, Algorithms 1 to 3 and equations 1 to 7

    theta_k <- fit_k(theta, phi_k) of the encoders alone, on F_k + alpha L_e              one round, and in the next
    phi*_k  <- fit_k(theta, phi_k) of the decoder alone, on F_k
    theta^i <- sum_k N_k^i theta_k^i / N^i,    N^i = sum_j N_j^i                          the encoder of class i
    phi_k   <- phi*_k - (phi*_k - m_k) g(s_k),    g(x) = e^-(lam x)^gamma                 number by number
    L_e = sum_i mean_j std_batch(beta_i(l) F_j^i)

F_j^i is the j-th feature of the encoder of class i; ``Divergence`` in ``polysite.site`` says what beta is. (In a
segmentation the paper raises the mask in beta to a power; a mask of 0 and 1 is every power of itself.) N_k^i counts
cases in a classification and voxels in a segmentation. m_k and s_k are the mean and the standard deviation of the
decoders of the ``nearest`` sites, site k among them: a number on which they agree (lam s < 1) becomes their mean, one
on which they do not (lam s > 1) stays the site's own. lam = 0 averages the decoders, a large lam keeps all apart.

A round sends one part of the model down and the other up, half of what FedAvg moves: what a site trains, it was sent in
the round before. With the first exchange, and after a round in which it was not heard, it is sent the whole model. The
server keeps every site's decoder. How much of every class a site has goes along with each reply.

An encoder of whose class nobody who replied has anything stays as it is. Who is absent from a round for decoders keeps
its own and counts in no mean. A site that never sent one is served the mean of all decoders: that is our reading, the
paper does not say. Nor does it give lam, the focus of beta, or how sites are near: here by the Euclidean distance
between their decoders. Running statistics of an encoder are averaged as its parameters are, those of a decoder plainly.

The network must have an encoder for every class (``unet_sub``, ``densenet_sub``). With alpha = 0 any other will do, as
one that has a single encoder for all classes, weighted by cases.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, Kind, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId, mean
from polysite.site import Cases, Divergence, Objective, Site
from polysite.tree import Tree

DECODER = ("decoder.*", "head.*")
CASES = "cases"  # what an encoder of all classes is weighted by


@dataclass(frozen=True, slots=True)
class State:
    encoder: Tree
    decoder: Tree  # the mean of those below; at first the initial one
    decoders: Mapping[SiteId, Tree] = field(default_factory=dict)  # of every site that has sent one
    holders: tuple[SiteId, ...] = ()  # who was heard in the last round: it remembers the part that was not trained
    rounds: int = 0
    personal: float | None = None  # share of the decoders' numbers with lam s > 1; None: no decoder was sent yet
    spread: float = 0.0  # mean of s


@dataclass(frozen=True)
class FedDiv:
    """One encoder per class, averaged by the amount of that class at each site; a personal decoder per site.

    Args:
        alpha: Weight of the divergence loss (alpha in the paper), at least 0; None: 0.4 to segment, 0.2 to classify
            (the paper).
        focus: Strength of the weight beta in the divergence loss (lambda of its beta in the paper), at least 0.
        lam: Decoder parameters that deviate by more than 1 / lam stay personal, at least 0; the paper tries 0 to 100.
        gamma: Sharpness of that limit (gamma in the paper), at least 1.
        nearest: Number of sites whose decoders are compared, the site itself included, at least 1; None: all.
    """

    alpha: float | None = None
    focus: float = 1.0
    lam: float = 10.0
    gamma: float = 10.0
    nearest: int | None = None

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "counts": "counts"}
    needs: ClassVar[Literal["sum", "each"]] = "each"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within(self, alpha=(0, INF), focus=(0, INF), lam=(0, 1e12), gamma=(1, INF), nearest=(1, INF))

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
        asked = tree.map(lambda x: x.reshape(-1)[:0], state.encoder if encoding else state.decoder)  # names alone
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
        terms = [Divergence(self.alpha, self.focus)] if encoding and self.alpha != 0 else []
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
        """Of every site in the encoders, on average over the classes; decoders are its own, so no share."""
        found: dict[SiteId, list[float]] = {i: [] for i in sorted(replies)}
        for name in _classes(state.encoder) if _encoding(state) else ():
            total = sum(_count(p, name) for p in replies.values())
            for i in found if total else ():
                found[i].append(_count(replies[i], name) / total)
        return {i: math.fsum(each) / len(each) for i, each in found.items() if each}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        if state.personal is None:
            return {}
        return {"personal share of the decoders": state.personal, "deviation between decoders": state.spread}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield _whole(got, memory), cases

    def _decoders(self, state: State, came: Mapping[SiteId, Tree]) -> State:
        """A decoder for every site that sent one, by equation 5, and how far apart they are."""
        near = {i: self._near(i, came) for i in came}
        known = {group: _spread([came[j] for j in group]) for group in dict.fromkeys(near.values())}
        own = {i: self._personal(came[i], *known[near[i]]) for i in came}
        deviations = [tree.trained(known[near[i]][1]) for i in came]
        numbers = sum(math.prod(x.shape) for each in deviations for x in each.values())
        beyond = sum(float((self.lam * x > 1).sum()) for each in deviations for x in each.values())
        total = sum(float(x.sum()) for each in deviations for x in each.values())
        everyone = dict(sorted({**state.decoders, **own}.items()))
        average = _average(list(everyone.values()))
        return replace(state, decoders=everyone, decoder=average, personal=beyond / numbers, spread=total / numbers)

    def _near(self, site: SiteId, came: Mapping[SiteId, Tree]) -> tuple[SiteId, ...]:
        """The sites whose decoders are nearest, by name; of those equally near, the first by name."""
        if self.nearest is None or self.nearest >= len(came):
            return tuple(came)
        mine = tree.trained(came[site])
        away = {j: tree.norm(tree.sub(mine, tree.trained(other))) for j, other in came.items()}
        return tuple(sorted(sorted(came, key=lambda j: (j != site, away[j], j))[: self.nearest]))

    def _personal(self, own: Tree, average: Tree, deviation: Tree) -> Tree:
        def number(x: Any, m: Any, s: Any) -> Any:
            far = (self.lam * s).clip(None, 1000 ** (1 / self.gamma))  # e^-1000 is zero, and nothing overflows
            taken = math.e ** -(far**self.gamma)
            return taken * m + (1 - taken) * x

        trained = [tree.trained(t) for t in (own, average, deviation)]
        return {**average, **tree.map(number, *trained)}


def _encoding(state: State) -> bool:
    """Whether the encoders are to be trained next: in every other round, and first."""
    return state.rounds % 2 == 0


def _whole(got: Payload, memory: Payload) -> Tree:
    """The model of a site: what it was sent, and what it remembers of the rest."""
    return {**memory.get("rest", {}), **got["model"]}


def _classes(encoder: Tree) -> dict[str, list[str]]:
    """The names of every class's encoder, by class; of what is no class's own, by all cases.

    >>> _classes({"stem.class0.w": 0, "encoder.class0.w": 0, "stem.class1.w": 0})
    {'class0': ['stem.class0.w', 'encoder.class0.w'], 'class1': ['stem.class1.w']}
    """
    found: dict[str, list[str]] = {}
    for name in encoder:
        second = (*name.split("."), "")[1]
        found.setdefault(second if _number(second) is not None else CASES, []).append(name)
    return found


def _number(name: str) -> int | None:
    digits = name.removeprefix("class")
    return int(digits) if name.startswith("class") and digits.isdecimal() else None


def _amount(site: Site, name: str) -> float:
    number = _number(name)
    return float(site.size) if number is None else site.amount(number)


def _count(reply: Payload, name: str) -> float:
    return float(reply["counts"][name][0]) if name in reply["counts"] else 0.0


def _average(trees: Sequence[Tree]) -> Tree:
    """The plain mean, as a step from the first: the mean of equals is the same to the last bit."""
    return tree.map(lambda *xs: xs[0] + sum(x - xs[0] for x in xs) / len(xs), *trees)


def _spread(near: Sequence[Tree]) -> tuple[Tree, Tree]:
    """(mean, standard deviation) number by number."""
    average = _average(near)

    def deviation(m: Any, *xs: Any) -> Any:
        return (sum((x - m) ** 2 for x in xs) / len(xs)) ** 0.5

    return average, tree.map(deviation, average, *near)
