"""FPFC: one model per site, with a penalty on every pair of models that fuses similar ones.

Paper: Yu, Liu, Wang and Sun, Clustered Federated Learning based on Nonconvex Pairwise Fusion, 2022

    min  sum_i F_i(w_i) + 1/(2m) sum_ij g(|w_i - w_j|),    g the smoothed SCAD penalty, constant beyond a lam
    w_i     <- steps on F_i(w) + rho/2 |w - zeta_i|^2 from w_i       zeta_i = 1/m sum_j (w_j + theta_ij - v_ij / rho)
    theta_ij <- argmin g(|t|) + rho/2 |t - delta_ij|^2               delta_ij = w_i - w_j + v_ij / rho
    v_ij    <- rho (delta_ij - theta_ij)                             once per pair with at least one reply

theta is a multiple s of delta, so the server keeps delta and s of every pair. Sites i and j are in one cluster if
|theta_ij| <= nu, directly or through other sites. A site is served the mean of its cluster, weighted by cases. The
number of clusters need not be known. As in the authors' program, only the ``fused`` layers are personal and the rest is
averaged over all sites: the server holds m models and m(m-1)/2 vectors of the fused layers, which is refused before
training if it cannot fit or takes more than ``pair_memory`` (delta sums all differences so far, each pair with shares
of its own, so it does not follow from the present models). zeta is sent together with the model; the site replies w_i.

lam, xi and nu are distances between models, which grow with the network and with training; with ``relative`` they are
multiples of the largest distance between two models so far, which is measured again in every round after the warm-up.
(The largest so far, not that of the round: as sites fuse, distances shrink, and a limit that shrank with them would
never be reached.) The paper's warm-up, which chooses lam, could not be read: here the warm-up is a number of rounds
without penalty (lam = 0), a reconstruction. In these rounds, and with lam = 0, every site trains the fused layers
alone, held near its own last model.

Pairs without a reply stay as they are. A new site starts at the mean of all models. A site that never trained is served
the largest cluster, or the mean of all sites if every cluster is a single site. lr (L + rho) must stay below 2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from polysite import tree
from polysite.algorithms.average import serve_received
from polysite.algorithms.base import INF, TINY, Facts, Kind, in_rounds, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.cluster.fusion import scad_share
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Objective, Site, Tilt
from polysite.tree import Tree

Pairs = tuple[list[int], list[int], list[int]]  # row of every pair, and the positions of both sites

PIECE = 1 << 17  # elements of the pairs that are updated at once
LARGE = 1 << 12  # elements of a leaf from which a CPU updates one pair after the other
SMALL = 1 << 28  # bytes that the pairs of any study may take
ROOM = 0.8  # share of the memory that pairs may take: the rest is for the program and the data


@dataclass(frozen=True, slots=True)
class State:
    """State of the server. Pairs of sites are in the order of their names; a leaf has a row per pair."""

    shared: Tree  # part that is averaged over all sites
    models: Mapping[SiteId, Tree]  # fused part of every site
    deltas: Tree  # delta = w_i - w_j + v_ij / rho of every pair; empty before the first reply
    lengths: tuple[tuple[float, float], ...]  # of every pair: share s (theta_ij = s delta), and gap |theta_ij|
    cases: Mapping[SiteId, float]  # of every site that has replied
    rounds: int = 0
    unit: float = 0.0  # unit of lam, xi and nu if they are relative


@dataclass(frozen=True)
class Fpfc:
    """A model per site with a pairwise penalty that fuses the models of similar sites.

    Args:
        lam: Strength of the penalty (lambda in the paper), at least 0: models nearer than about this distance are
            fused. The authors' programs take 0.4 and 0.6.
        a: Models further apart than a times lam are not penalised (a in the paper), more than 2; 3.7 in the authors'
            programs.
        xi: Distance below which the penalty is quadratic (xi in the paper), more than 0 and less than lam; 1e-4 to 1e-3
            in the authors' programs.
        rho: Weight of the proximal term (rho in the paper), more than 1 / (a - 1); 1 in the authors' programs.
        nu: Sites with |theta_ij| up to this are in one cluster (nu in the paper), at least 0; 0.1 in the authors'
            programs.
        relative: Whether lam, xi and nu are multiples of the largest distance between two models so far.
        warmup: Rounds without penalty, at least 0; a value between 0 and 1 is a share of all rounds. The default is our
            choice: the paper's warm-up could not be read.
        fused: Patterns of the parameters that are personal and fused; the others are averaged over all sites.
        pair_memory: Memory that the pairs of sites may take, as a multiple of the models of all sites, more than 0; a
            run that needs more, and more than 256 MiB, is refused before training. The default is our choice: up to
            it, a round of the server takes at most about 20 times as long as with ``fedavg``.
    """

    lam: float = 0.5
    a: float = 3.7
    xi: float = 1e-3
    rho: float = 1.0
    nu: float = 0.1
    relative: bool = False
    warmup: float = 0.0
    fused: tuple[str, ...] = ("head.*",)
    pair_memory: float = 1.5

    reply: ClassVar[Mapping[str, Kind]] = {"model": "model", "cases": "count"}

    def __post_init__(self) -> None:
        within(self, lam=(0, INF), a=(2 + 1e-9, INF), xi=(TINY, INF), rho=(TINY, INF), nu=(0, INF), warmup=(0, INF))
        within(self, pair_memory=(TINY, INF))
        if 0 < self.lam <= self.xi:
            raise ConfigError(f"xi = {self.xi} must be less than lam = {self.lam}, or the penalty has no linear part")
        if self.rho <= 1 / (self.a - 1):
            raise ConfigError(
                f"rho = {self.rho} must be more than 1 / (a - 1) = {1 / (self.a - 1):g}, or a pair has no one answer"
            )
        if not self.fused:
            raise ConfigError("fused names nothing that is personal; name it, as in ['head.*'], or choose fedavg")

    @property
    def facts(self) -> Facts:
        """Facts that other modules act on."""
        return Facts(pull=self.rho)

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("fused", self.fused, params)
        shared, own = parted(self.fused, params)
        refuse_too_many(tree.trained(own), params, len(sites), self.pair_memory)
        return State(shared, dict.fromkeys(sorted(sites), own), {}, (), {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        groups = self._clusters(state)
        home = {i: group for group in groups for i in group}
        largest = max(groups, key=len)  # the first of several largest
        # a model of a single site is not served to others
        largest = largest if len(largest) > 1 else tuple(state.models)
        means = {g: {**state.shared, **_mean(state, g)} for g in {home.get(i, largest) for i in cohort}}
        anchors = _anchors(state, cohort)
        return {i: Payload(model=means[home.get(i, largest)], anchor=anchors[i]) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        start = {**got["model"], **got["anchor"], **memory.get("own", {})}
        fit = site.fit(start, Objective(Tilt(anchor=got["anchor"], weight=self.rho)))
        _, own = parted(self.fused, fit.params)
        return Payload(model=fit.params, cases=site.size), Payload(own=own)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        order = sorted(replies)
        parts = {i: parted(self.fused, replies[i]["model"]) for i in order}
        cases = {i: replies[i]["cases"] for i in order}
        models = dict(sorted({**state.models, **{i: own for i, (_, own) in parts.items()}}.items()))
        shared = tree.mean([parts[i][0] for i in order], [cases[i] for i in order])
        rounds, unit = state.rounds + 1, state.unit
        deltas, lengths = _widened(state, models)
        touched = [n for n, (i, j) in enumerate(combinations(models, 2)) if i in replies or j in replies]
        trained = [tree.trained(w) for w in models.values()]
        if self.relative and rounds > self.warmup:
            squares = tree.squared_distances(trained)[np.triu_indices(len(trained), 1)]
            unit = max(unit, float(np.sqrt(squares[touched].max(initial=0.0))))
        before = np.array([share for share, _ in lengths])[touched]
        deltas, squares = _updated(trained, deltas, touched, 1 - before)
        state = State(shared, models, deltas, (), dict(sorted({**state.cases, **cases}.items())), rounds, unit)
        fresh = dict(zip(touched, (self._lengths(state, x**0.5) for x in squares.tolist()), strict=True))
        return replace(state, lengths=tuple(fresh.get(n, both) for n, both in enumerate(lengths)))

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the part that is averaged over all sites."""
        total = sum(p["cases"] for p in replies.values())
        return {i: p["cases"] / total for i, p in sorted(replies.items())}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"clusters": len(self._clusters(state)), **({"unit": state.unit} if self.relative else {})}

    serve = serve_received

    def scaled(self, rounds: int) -> "Fpfc":
        """Return the algorithm with the warm-up in rounds."""
        return replace(self, warmup=in_rounds(self.warmup, rounds))

    def _lengths(self, state: State, length: float) -> tuple[float, float]:
        """Return (share, gap) of a pair with a delta of this length."""
        unit = (state.unit or 1.0) if self.relative else 1.0
        lam = 0.0 if state.rounds <= self.warmup else self.lam * unit
        share = scad_share(length, lam, self.a, self.xi * unit, self.rho)
        return share, share * length

    def _clusters(self, state: State) -> tuple[tuple[SiteId, ...], ...]:
        unit = (state.unit or 1.0) if self.relative else 1.0
        pairs = combinations(state.models, 2)
        if not state.lengths:  # no reply yet: all are alike
            return (tuple(state.models),)
        linked = [pair for pair, (_, gap) in zip(pairs, state.lengths, strict=True) if gap <= self.nu * unit]
        return tree.components(state.models, linked)


def refuse_too_many(own: Tree, whole: Tree, sites: int, most: float) -> None:
    """Refuse pairs that cannot fit into memory, or that take more than ``most`` times the models of all sites.

    Needed are the pairs of a round and of the next one, and four models of every site (of both rounds, its reply, and
    what it is sent).
    """
    pairs, (size, model) = sites * (sites - 1) // 2, (sum(int(x.nbytes) for x in t.values()) for t in (own, whole))
    need, room = (2 * pairs + 4 * sites) * size, tree.memory(own)
    keeps = (
        f"fpfc keeps a copy of the fused parameters for each of the {pairs} pairs of {sites} sites and needs {need} "
        f"bytes ({need / 2**30:.1f} GiB)"
    )
    if need > ROOM * room:
        raise ConfigError(
            f"{keeps}, and this device has {room / 2**30:.1f} GiB; name fewer parameters in fused, as in ['head.*'], "
            "or choose ifca or cfl"
        )
    times = pairs * size / max(sites * model, 1)
    if need > SMALL and times > most:
        raise ConfigError(
            f"{keeps}, its pairs {times:.1f} times the models of all sites, but pair_memory is {most:g}; name fewer "
            f"parameters in fused, as in ['head.*'], or accept slower rounds with pair_memory = "
            f"{np.ceil(10 * times) / 10:g} or more"
        )


def _widened(state: State, models: Mapping[SiteId, Tree]) -> tuple[Tree, list[tuple[float, float]]]:
    """Return deltas, and shares and gaps, of the pairs of these sites; zeros where there was no reply."""
    pairs = list(combinations(models, 2))
    known = {pair: n for n, pair in enumerate(combinations(state.models, 2))} if state.lengths else {}
    lengths = [state.lengths[known[pair]] if pair in known else (0.0, 0.0) for pair in pairs]
    if list(known) == pairs:
        return state.deltas, lengths
    old, new = list(known.values()), [n for n, pair in enumerate(pairs) if pair in known]

    def widen(name: str, x: Any) -> Any:
        rows = tree.rows_like(x, len(pairs))
        if known:
            rows[new] = state.deltas[name][old]
        return rows

    return {k: widen(k, x) for k, x in tree.trained(next(iter(models.values()))).items()}, lengths


def _updated(models: Sequence[Tree], deltas: Tree, touched: list[int], kept: Any) -> tuple[Tree, Any]:
    """Return the deltas after w_i - w_j + kept * delta in the touched pairs, and the squared lengths of these.

    Computed in blocks of pairs, so that no more is held than the old and the new deltas.
    """
    ends = np.triu_indices(len(models), 1)
    one, other = ends[0][touched].tolist(), ends[1][touched].tolist()
    squares, found = np.zeros(len(touched)), {}
    for name, last in deltas.items():
        rows = [w[name].reshape(-1) for w in models]
        fresh = tree.used_again_like(last) if len(touched) == len(last) else last + 0
        if len(rows[0]) > (PIECE if getattr(last, "is_cuda", False) else LARGE):
            squares += _updated_large(rows, last, fresh, (touched, one, other), kept)
        else:
            squares += _updated_small(rows, last, fresh, (touched, one, other), kept)
        found[name] = fresh
    return found, squares


def _updated_small(rows: Sequence[Any], last: Any, fresh: Any, pairs: Pairs, kept: Any) -> Any:
    """Write the new deltas of a small leaf, many pairs at once, and return their squared lengths."""
    together, squares = tree.stacked(rows), np.zeros(len(kept))
    step = max(PIECE // max(len(rows[0]), 1), 1)
    for start in range(0, len(kept), step):
        here = slice(start, start + step)
        places, one, other = (x[here] for x in pairs)
        factors = tree.column_like(together, kept[here])
        piece = together[one] - together[other] + factors * last[places].reshape(len(places), -1)
        fresh[places] = piece.reshape(len(places), *last.shape[1:])
        squares[here] = (piece * piece).sum(1).tolist()
    return squares


def _updated_large(rows: Sequence[Any], last: Any, fresh: Any, pairs: Pairs, kept: Any) -> Any:
    """Do the same for a large leaf, pair by pair and in pieces that stay in the CPU's cache."""
    subtract, multiply = tree.functions(last, "subtract", "multiply")
    wide = len(rows[0]) if getattr(last, "is_cuda", False) else PIECE
    product, square = rows[0][:wide] + 0, rows[0] + 0  # reused: fresh memory is slow
    factors, squares = tree.column_like(rows[0], kept), np.zeros(len(kept))
    for n, (place, i, j) in enumerate(zip(*pairs, strict=True)):
        new, old = fresh[place].reshape(-1), last[place].reshape(-1)
        for start in range(0, len(new), wide):
            here = slice(start, start + wide)
            piece = new[here]
            subtract(rows[i][here], rows[j][here], out=piece)
            piece += multiply(old[here], factors[n], out=product[: len(piece)])
            multiply(piece, piece, out=square[here])
        squares[n] = float(square[None].sum(1)[0])
    return squares


def _mean(state: State, group: Sequence[SiteId]) -> Tree:
    """Return the mean by cases over the sites of a group that have replied; the initial model if none has."""
    heard = [i for i in group if i in state.cases]
    if not heard:
        return state.models[group[0]]
    return tree.mean([state.models[i] for i in heard], [state.cases[i] for i in heard])


def _anchors(state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Tree]:
    """Return zeta_i of every site; for a new site, the mean of all models.

    theta_ij - v_ij / rho is 2 share - 1 times delta, which has the opposite sign for the second site of a pair.
    """
    order, middle = list(state.models), tree.mean(tree.trained(w) for w in state.models.values())
    if not state.lengths:
        return dict.fromkeys(cohort, middle)
    ends = np.triu_indices(len(order), 1)
    factors = np.array([2 * share - 1 for share, _ in state.lengths]) / len(order)
    known = [i for i in cohort if i in state.models]
    chosen = []
    for i in known:
        first, last = (np.nonzero(end == order.index(i))[0] for end in ends)
        chosen.append((np.r_[first, last].tolist(), np.r_[factors[first], -factors[last]]))
    found = tree.row_mixtures(state.deltas, chosen)
    return {**dict.fromkeys(cohort, middle), **{i: tree.add(middle, x) for i, x in zip(known, found, strict=True)}}
