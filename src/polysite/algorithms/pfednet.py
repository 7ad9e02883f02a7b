"""pFedNet: a shared part, and a personal part per site that is drawn to those of sites with similar data.

Paper: Zhao, Liu, Liu and He, Medical Federated Model with Mixture of Personalized and Sharing Components, 2023

    min  1/m sum_n f_n(x, z_n) + lam sum over edges (i, j) of |z_i - z_j|
    x <- x - eta 1/m sum_n grad_x f_n                                             one exchange, z fixed
    Z <- argmin 1/m <G, Z> + lam sum_ij |z_i - z_j| + 1/(2 eta) |Z - Z_t|^2       the next one, x fixed

The two exchanges alternate: a round here is one exchange, and two are a round of the paper. The whole network is sent,
the trained part is returned. Sites take any number of steps, so G_n = (z_n - trained z_n) / (sum of learning rates) is
a mean gradient, and x the mean of the trained x (by cases unless ``uniform``). Without edges and with the default eta,
a personal part is the result of its local training. The second problem is solved exactly; the authors stop ADMM after
25 or 200 iterations. Their option of sparse updates is not implemented.

The graph joins every site with its ``neighbours`` by a sketch of its training cases, which every reply contains:
``labels``, the share of every label (class), or ``images``, means and covariances of the modalities. The paper's body
could not be read; this follows the authors' program and its documentation.

An absent site has no gradient, but is moved by its neighbours. A site that never trained is served x and the mean z of
its neighbours, by the sketch of its validation cases or of its images; without cases, the mean z of all sites. For this
it receives the personal parts and sketches of all sites, without names. lam = 0 is personal layers beside shared ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Literal

import numpy as np

from polysite import tree
from polysite.algorithms.average import towards
from polysite.algorithms.base import INF, TINY, Kind, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.cluster.fusion import lasso_mixture, nearest_edges
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site, Sketch
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    shared: Tree
    personal: Mapping[SiteId, Tree]
    sketches: Mapping[SiteId, tuple[float, ...]]  # of the sites that have replied
    half: Literal["shared", "personal"] = "shared"  # part that the next exchange trains


@dataclass(frozen=True)
class PFedNet:
    """A shared part, and a personal part per site that is fused with those of sites with similar data.

    Args:
        lam: Strength of the fusion between neighbours (lambda in the paper), at least 0; 0 is personal layers alone.
            lam * eta is a distance between personal parts. The default: docs/results/defaults.md.
        neighbours: Number of neighbours of a site in the graph, at least 1. The default is our choice.
        sketch: Summary by which neighbours are found: labels (share of every label) or images (means and covariances).
        eta: Step size of the personal part (eta in the paper), more than 0; None: m times the sites' sum of learning
            rates.
        personal: Patterns of the parameters that are personal.
        uniform: Whether the shared part is a mean over sites, instead of a mean weighted by number of cases.
    """

    lam: float = 1e-3
    neighbours: int = 3
    sketch: Sketch = "labels"
    eta: float | None = None
    personal: tuple[str, ...] = ("head.*",)
    uniform: bool = True

    def __post_init__(self) -> None:
        within(self, lam=(0, INF), neighbours=(1, INF), eta=(TINY, INF))
        if not self.personal:
            raise ConfigError("personal names nothing that sites have of their own; name it, as in ['head.*']")

    @property
    def reply(self) -> Mapping[str, Kind]:
        size: dict[str, Kind] = {} if self.uniform else {"cases": "count"}
        return {"model": "model", "sketch": "statistics", "time": "rate", **size}

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        refuse_unknown("personal", self.personal, params)
        shared, own = parted(self.personal, params)
        if params and not tree.trained(shared):
            raise ConfigError(f"personal = {list(self.personal)} leaves nothing to share; name fewer, or choose fpfc")
        return State(shared, dict.fromkeys(sorted(sites), own), {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: _sent(state, i) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        """Train the part in ``model``; the part in ``fixed`` stays as it was sent."""
        fit = site.fit({**got["fixed"], **got["model"]}, only=tuple(got["model"]))
        model = {k: fit.params[k] for k in got["model"]}
        sketch = {"sketch": site.sketch(self.sketch, site.cases("train"))}
        size = {} if self.uniform else {"cases": site.size}
        return Payload(model=model, sketch=sketch, time=fit.lr_sum, **size), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        newcomers = {i: _own(state, i) for i in replies if i not in state.personal}
        sketches = {i: tuple(map(float, p["sketch"]["sketch"].reshape(-1).tolist())) for i, p in replies.items()}
        state = replace(
            state,
            personal=dict(sorted({**state.personal, **newcomers}.items())),
            sketches=dict(sorted({**state.sketches, **sketches}.items())),
        )
        if state.half == "personal":
            return replace(state, personal=self._drawn(state, replies), half="shared")
        sizes = self._sizes(replies)
        shared = tree.mean([replies[i]["model"] for i in sizes], sizes.values())
        return replace(state, shared=shared, half="personal")

    def objections(self, state: State, replies: Mapping[SiteId, Payload]) -> Mapping[SiteId, str]:
        """Return the sites with a missing sketch, or one of another length than those of most sites."""
        known = [len(sketch) for sketch in state.sketches.values()]
        sketches = {i: p["sketch"] for i, p in replies.items()}
        lengths = {i: prod(s["sketch"].shape) if set(s) == {"sketch"} else 0 for i, s in sketches.items()}
        usable = known or [n for n in lengths.values() if n]
        usual = max(sorted(set(usable)), key=usable.count, default=0)
        return {i: f"its sketch has {n} numbers instead of {usual}" for i, n in lengths.items() if n != usual or not n}

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """Return the share of every site in the shared part; empty in rounds of the personal parts."""
        if state.half == "personal":
            return {}
        sizes = self._sizes(replies)
        return {i: n / sum(sizes.values()) for i, n in sizes.items()}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        return {"edges": len(self._edges(state))}

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        near = self._near(got, site) if "sketches" in got else {}
        yield {**got["fixed"], **got["model"], **near}, cases

    def _sizes(self, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        return {i: 1.0 if self.uniform else replies[i]["cases"] for i in sorted(replies)}

    def _edges(self, state: State) -> tuple[tuple[int, int], ...]:
        """Return the edges of the graph, as positions among the sites that have replied."""
        return nearest_edges(list(state.sketches.values()), self.neighbours)

    def _drawn(self, state: State, replies: Mapping[SiteId, Payload]) -> Mapping[SiteId, Tree]:
        """Return the personal parts after a step along their gradients and towards their neighbours."""
        times = {i: p["time"] for i, p in replies.items()}
        length = median(times.values()) if self.eta is None else self.eta / len(state.personal)  # eta / m
        moved = {
            i: towards(z, replies[i]["model"], length / times[i]) if i in replies else z
            for i, z in state.personal.items()
        }
        heard, edges = list(state.sketches), self._edges(state)
        if not edges or not self.lam:
            return moved
        now = {i: tree.trained(moved[i]) for i in heard}
        trees = [now[i] for i in heard]
        centre = tree.mean(trees)  # subtracted, so that rounding does not hide small differences between sites
        mixture = lasso_mixture(tree.gram(trees, centre), edges, length * len(state.personal) * self.lam)
        mixed = tree.mixtures(trees, mixture.T, centre)
        return {**moved, **{i: {**moved[i], **z} for i, z in zip(heard, mixed, strict=True)}}

    def _near(self, got: Payload, site: Site) -> Tree:
        """Return the mean personal part of the sites with the nearest sketches, for a site that never trained."""
        known = site.cases("train") or site.cases("validation")
        known = known or (site.cases("test") if self.sketch == "images" else ())  # labels of test cases are not used
        if not known:
            return {}
        own = np.asarray(site.sketch(self.sketch, known), float).reshape(-1)
        others = {n: np.array(x.tolist(), float) for n, x in got["sketches"].items()}
        far = {n: float(np.linalg.norm(x - own)) for n, x in others.items() if x.shape == own.shape}
        nearest = sorted(far, key=lambda n: (far[n], int(n)))[: self.neighbours]
        return tree.mean([got[f"personal_{n}"] for n in nearest]) if nearest else {}


def _sent(state: State, i: SiteId) -> Payload:
    own = _own(state, i)
    model, fixed = (state.shared, own) if state.half == "shared" else (own, state.shared)
    if i in state.personal or not state.sketches:
        return Payload(model=model, fixed=fixed)
    others = {f"personal_{n}": state.personal[j] for n, j in enumerate(state.sketches)}
    sketches = {str(n): np.array(s) for n, s in enumerate(state.sketches.values())}
    return Payload(model=model, fixed=fixed, sketches=sketches, **others)


def _own(state: State, i: SiteId) -> Tree:
    """Return the personal part of a site; for a new site, the mean of all."""
    return state.personal[i] if i in state.personal else tree.mean(state.personal.values())
