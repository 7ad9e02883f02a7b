"""The contract that every algorithm keeps. No algorithm inherits from it.

Five functions and one attribute are required (``Algorithm``). Further methods are optional; each has a function of
the same name here, which documents the default: ``shares``, ``diagnostics``, ``serving_payloads``, ``objections``,
``is_finished``, ``facts``, ``trials``, ``check_sites``, ``small_sums``, ``small_models``, ``remarks``,
``site_clusters``, ``case_clusters``, ``scaled``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from polysite.cluster.mixture import CaseClusters
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site
from polysite.tree import Tree

S = TypeVar("S")
INF = float("inf")
TINY = 1e-12  # lower bound of a hyper-parameter that must not be zero

Kind = Literal["model", "update", "count", "counts", "one", "rate", "cost", "statistics", "cases", "number"]
"""Kind of a field in a reply.

``model``: the parameters that a site was sent, running statistics included, or those named in the field ``asked``.
``update``: a value per trained parameter. ``count``: a number of cases. ``counts``: several, by name, of cases or
voxels. ``one``: 1, where all sites count alike. ``rate``: a learning rate, or a sum of them. ``cost``: a loss or
similar, not negative. ``statistics``: arrays that summarise all cases. ``cases``: arrays with a row per case, which a
hospital may not want to reveal. ``number``: any other number.
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about an algorithm that configurations, engines and policies act on; it states those that differ."""

    needs: Literal["sum", "each"] = "each"
    """``sum`` if ``merge`` needs only the sum of the replies by their ``weight`` and the sum of the weights (secure
    aggregation); ``each`` if it needs every reply, or the names or number of the sites."""
    plain_sgd: bool = False
    """It is only correct for plain SGD, without momentum or Adam."""
    strangers: bool = True
    """A site that never trained is served a model that others trained."""
    needs_model: bool = False
    """It continues from a trained model, so it cannot be the first phase."""
    ends_study: bool = False
    """A site may end up with several models, so no phase can follow."""
    poolable: bool = False
    """It can run as centralised training (``run.pooled``)."""
    groupable: bool = True
    """It can train groups of sites separately (``clustered``)."""
    sends_scores: bool = False
    """Its replies hold sums of scores, perhaps of a single case."""
    cost_split: Literal["train", "validation"] = "train"
    """Split on which a reply of kind ``cost`` is computed."""
    single_step: bool = False
    """A model that leaves may stand for a single local step."""
    exchanges: int = 0
    """Rounds that it needs to finish; 0 if any number is enough."""
    pull: float = 0.0
    """Weight of a proximal term of local training: SGD diverges if the learning rate times this is 2 or more."""
    shared_model: bool = False
    """All sites use one model, ``model`` of the server's state, which can be averaged over rounds (``averaged``)."""
    only_fits: bool = False
    """What leaves a site follows from fits of the task's own loss to all its cases, and from their number alone."""
    noisy_sums: bool = False
    """It adds noise to sums over patients, so that its training must have noise for patients, too."""
    disjoint_fits: bool = False
    """No patient is in two fits of a turn, so that these cost under noise as much as one."""
    sums_with: str = ""
    """Setting with which it needs only the sum of the replies; empty if there is none."""
    masks_head: bool = False
    """It separates the head from the background in normalised images (not ``prepare.normalise = 'none'``)."""


class Algorithm(Protocol[S]):
    """Interface of an algorithm: five pure functions, without files, sockets, devices, seeds or a training loop."""

    @property
    def reply(self) -> Mapping[str, Kind]:
        """Fields of a reply and their kinds: all that leaves a site. The server refuses anything else.

        ``name?`` may be absent; ``x*`` stands for all fields that begin with x and that the site was sent. A field
        called ``weight`` multiplies the site's contribution; it is scaled by the number ``factor`` if the site was sent
        one (``weighted``).
        """
        ...

    def init(self, params: Tree, sites: Sequence[SiteId]) -> S:
        """Return the server's state before round 0."""
        ...

    def send(self, state: S, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        """Return the payload for each site of the cohort."""
        ...

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        """Work at the site; return (reply, new memory)."""
        ...

    def merge(self, state: S, replies: Mapping[SiteId, Payload]) -> S:
        """Return the server's next state. Sites that dropped out are missing in ``replies``, which is never empty."""
        ...

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        """Yield the parameters that this site uses, each with the cases it uses them for."""
        ...


class Around:
    """Base of an algorithm around another one, with its state: it declares and does what that one declares and does."""

    inner: Algorithm[Any]

    @property
    def reply(self) -> Mapping[str, Kind]:
        return self.inner.reply

    @property
    def facts(self) -> Facts:
        return facts(self.inner)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> Any:
        return self.inner.init(params, sites)

    def send(self, state: Any, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return self.inner.send(state, cohort)

    def serving_payloads(self, state: Any, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return serving_payloads(self.inner, state, sites)

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        return self.inner.local(got, memory, site)

    def merge(self, state: Any, replies: Mapping[SiteId, Payload]) -> Any:
        return self.inner.merge(state, replies)

    def shares(self, state: Any, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        return shares(self.inner, state, replies)

    def diagnostics(self, state: Any) -> Mapping[str, float]:
        return diagnostics(self.inner, state)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        return self.inner.serve(got, memory, site, cases)


def _own(algorithm: Any, method: str, *given: Any) -> Any:
    """Return what an optional method of an algorithm returns; None if the algorithm does not have it."""
    own = getattr(algorithm, method, None)
    return None if own is None else own(*given)


def shares(algorithm: Algorithm[S], state: S, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
    """Return the weight of every reply in the aggregate, for the record.

    By default the normalised ``weight`` fields; empty if the replies have none.
    """
    own = getattr(algorithm, "shares", None)
    if own is not None:
        return dict(own(state, replies))
    weights = {i: float(p["weight"]) for i, p in sorted(replies.items()) if "weight" in p}
    total = sum(weights.values())
    return {i: w / total for i, w in weights.items()} if total > 0 else {}


def serving_payloads(algorithm: Algorithm[S], state: S, sites: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
    """Return the payloads from which sites choose the model they use. By default those of ``send``."""
    own = getattr(algorithm, "serving_payloads", algorithm.send)
    payloads: Mapping[SiteId, Payload] = own(state, sites)
    return payloads


def objections(algorithm: Algorithm[S], state: S, replies: Mapping[SiteId, Payload]) -> dict[SiteId, str]:
    """Return the sites whose reply must not be merged, with reasons that only the algorithm can know. Default: none."""
    return dict(_own(algorithm, "objections", state, replies) or {})


def is_finished(algorithm: Algorithm[S], state: S) -> bool:
    """Return whether the algorithm has finished by itself, before ``run.rounds``. Default: never."""
    return bool(_own(algorithm, "is_finished", state))


def diagnostics(algorithm: Algorithm[S], state: S) -> dict[str, float]:
    """Return numbers about the round, by name, for the record. Default: none."""
    return {name: float(value) for name, value in (_own(algorithm, "diagnostics", state) or {}).items()}


def facts(algorithm: Any) -> Facts:
    """Return the facts that an algorithm, or its class, declares, or the default.

    Classes from outside of polysite may declare some as attributes of their own, as those for 0.1.0 do. One around
    another algorithm that declares none has those of the other, and a subclass that declares some is still only correct
    for plain SGD, and has no model for strangers, if that is so for the class that it derives from.
    """
    known, inner = getattr(algorithm, "facts", None), getattr(algorithm, "inner", None)
    if not isinstance(known, Facts):
        known = facts(inner) if hasattr(inner, "merge") else Facts()
    kinds = (algorithm if isinstance(algorithm, type) else type(algorithm)).__mro__
    stated = [each for kind in kinds if isinstance(each := vars(kind).get("facts"), Facts)]
    known = replace(
        known,
        plain_sgd=known.plain_sgd or any(each.plain_sgd for each in stated),
        strangers=known.strangers and all(each.strangers for each in stated),
    )
    alone = {name: getattr(algorithm, name) for name in ("needs", "plain_sgd", "strangers") if hasattr(algorithm, name)}
    return replace(known, **alone)


def is_summable(algorithm: Any) -> bool:
    """Return whether one reply, the mean of the models, can stand for all replies to an algorithm."""
    summable = facts(algorithm).needs == "sum" and not hasattr(algorithm, "objections")
    return summable and "model" in algorithm.reply and set(algorithm.reply) <= {"model", "weight"}


def trials(algorithm: Any) -> int:
    """Return the number of candidate models that every site trains in a round to keep the best one. Default: 1."""
    count: int = getattr(algorithm, "trials", 1)
    return count


def check_sites(algorithm: Any, train: Mapping[SiteId, int], validation: Mapping[SiteId, int]) -> None:
    """Refuse numbers of cases with which the algorithm cannot work, before anything is trained. Default: accept all."""
    _own(algorithm, "check_sites", train, validation)


def small_sums(algorithm: Any, fewest: int) -> str:
    """Return a sentence about sums over fewer than ``fewest`` cases that may leave a site with more cases, and the
    setting of the study that prevents it. Empty (the default) if there are none."""
    return str(_own(algorithm, "small_sums", fewest) or "")


def small_models(algorithm: Any, fewest: int) -> str:
    """Return a sentence about models of fewer than ``fewest`` training cases that may leave a site with more cases, and
    the setting of the study that prevents it. Empty (the default) if there are none."""
    return str(_own(algorithm, "small_models", fewest) or "")


def remarks(algorithm: Any, state: Any) -> Sequence[str]:
    """Return remarks on the state for the user; the engine logs and records new ones. Default: none."""
    return tuple(_own(algorithm, "remarks", state) or ())


def site_clusters(algorithm: Any, state: Any, sites: Sequence[SiteId]) -> Mapping[SiteId, str]:
    """Return the cluster of every site; the sites of a cluster share a model. Default: every site is its own."""
    own = getattr(algorithm, "site_clusters", None)
    return {i: i for i in sites} if own is None else dict(own(state, sites))


def case_clusters(algorithm: Any, got: Payload) -> CaseClusters | None:
    """Return the clusters of cases by which the algorithm chooses a model, if it has such clusters. Default: none."""
    clusters: CaseClusters | None = _own(algorithm, "case_clusters", got)
    return clusters


def scaled(algorithm: Any, rounds: int) -> Any:
    """Return the algorithm with hyper-parameters that are shares of all rounds turned into numbers of rounds.

    Default: unchanged, except that the inner algorithm of a combinator is scaled.
    """
    own, inner = getattr(algorithm, "scaled", None), getattr(algorithm, "inner", None)
    if own is not None:
        return own(rounds)
    if not hasattr(inner, "merge"):
        return algorithm
    same = scaled(inner, rounds)
    return algorithm if same == inner else replace(algorithm, inner=same)


def in_rounds(given: float, rounds: int) -> float:
    """Return a number of rounds: ``given`` itself, or the share ``given`` of all rounds if it is between 0 and 1.

    A share is at least one round.

    >>> in_rounds(0.4, 30), in_rounds(0.01, 30), in_rounds(12, 30), in_rounds(0, 30)
    (12.0, 1.0, 12, 0)
    """
    return max(1.0, float(round(given * rounds))) if 0 < given < 1 else given


def one_of(settings: Any, name: str, epochs: str = "epochs", steps: str = "steps") -> None:
    """Refuse both a number of epochs and a number of steps of local training."""
    given = getattr(settings, epochs), getattr(settings, steps)
    if None not in given:
        raise ConfigError(
            f"{name} trains a fixed number of epochs or of steps, not both ({epochs} = {given[0]}, {steps} = "
            f"{given[1]}); leave one of them out"
        )


def within(settings: Any, **bounds: tuple[float, float]) -> None:
    """Refuse a hyper-parameter outside [low, high]; None is accepted."""
    for name, (low, high) in bounds.items():
        value = getattr(settings, name)
        if value is not None and not (low <= value <= high and value < INF):
            least = "more than 0" if low == TINY else f"at least {low:g}"
            limits = "finite" if value == INF else least if high == INF else f"between {low:g} and {high:g}"
            raise ConfigError(f"{name} = {value} must be {limits}")
