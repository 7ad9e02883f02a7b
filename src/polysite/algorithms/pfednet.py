"""pFedNet: a shared part, and a personal one per site that is drawn to those of sites with data like its own.

Paper: Zhao, Liu, Liu and He, Medical Federated Model with Mixture of Personalized and Sharing Components, 2023

    min  1/m sum_n f_n(x, z_n) + lam sum over edges (i, j) of |z_i - z_j|
    x <- x - eta 1/m sum_n grad_x f_n                                             one exchange, z fixed
    Z <- argmin 1/m <G, Z> + lam sum_ij |z_i - z_j| + 1/(2 eta) |Z - Z_t|^2       the next one, x fixed

The two exchanges alternate: a round here is one of them, and two are a round of the paper. The whole network goes down,
the part that was trained comes back. Sites take any number of steps, so G_n = (z_n - what it became) / (sum of
learning rates) is a mean gradient, and x the mean of what the sites made of it (by cases unless ``uniform``). Without
edges a site's part goes where its training took it, if eta is left out. The second problem is solved exactly, where the
authors stop ADMM after 25 or 200 iterations. Not built: their option to make what is sent sparse.

The graph joins every site with its ``neighbours`` by a sketch of its training cases, which goes up with every reply:
``labels``, the share of every label (class), or ``images``, means and covariances of the modalities. The paper's body
could not be read; this follows the authors' program and what it says of itself.

An absent site has no gradient, but is moved by its neighbours. One that never trained is served x and the mean of the z
of its neighbours, by the sketch of its validation cases, or of any images of its own; without such, that of all. For
this it is sent the personal parts and sketches of all sites, without their names. lam = 0 is personal layers beside
shared ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, TINY, Kind, within
from polysite.algorithms.partial_models import parted, refuse_unknown
from polysite.cluster.fusion import lasso_mixture, nearest_edges
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Site, Sketch
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    shared: Tree
    personal: Mapping[SiteId, Tree]
    sketches: Mapping[SiteId, tuple[float, ...]]  # of the sites that were heard
    half: Literal["shared", "personal"] = "shared"  # what the next exchange trains


@dataclass(frozen=True)
class PFedNet:
    """A shared part, and a personal part per site that is fused with those of sites with similar data.

    Args:
        lam: Strength of the fusion between neighbours (lambda in the paper), at least 0; 0 is personal layers alone.
        neighbours: Number of neighbours of a site in the graph, at least 1.
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

    needs: ClassVar[Literal["sum", "each"]] = "each"
    plain_sgd: ClassVar[bool] = False
    strangers: ClassVar[bool] = True

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
        """Whichever part is to be trained; the other one stays as it was sent."""
        fit = site.fit({**got["fixed"], **got["model"]}, only=tuple(got["model"]))
        model = {k: fit.params[k] for k in got["model"]}
        sketch = {"sketch": site.sketch(self.sketch, site.cases("train"))}
        size = {} if self.uniform else {"cases": site.size}
        return Payload(model=model, sketch=sketch, time=fit.lr_sum, **size), memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        newcomers = {i: _own(state, i) for i in replies if i not in state.personal}
        said = {i: tuple(map(float, p["sketch"]["sketch"].reshape(-1).tolist())) for i, p in replies.items()}
        state = replace(
            state,
            personal=dict(sorted({**state.personal, **newcomers}.items())),
            sketches=dict(sorted({**state.sketches, **said}.items())),
        )
        if state.half == "personal":
            return replace(state, personal=self._drawn(state, replies), half="shared")
        sizes = self._sizes(replies)
        shared = tree.mean([replies[i]["model"] for i in sizes], sizes.values())
        return replace(state, shared=shared, half="personal")

    def objections(self, state: State, replies: Mapping[SiteId, Payload]) -> Mapping[SiteId, str]:
        """Whose sketch is missing, or of another length than those of most."""
        known = [len(sketch) for sketch in state.sketches.values()]
        told = {i: p["sketch"] for i, p in replies.items()}
        lengths = {i: prod(s["sketch"].shape) if set(s) == {"sketch"} else 0 for i, s in told.items()}
        said = known or [n for n in lengths.values() if n]
        usual = max(sorted(set(said)), key=said.count, default=0)
        return {i: f"its sketch has {n} numbers instead of {usual}" for i, n in lengths.items() if n != usual or not n}

    def shares(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, float]:
        """In the shared part; the personal ones are no average."""
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
        """Between positions among the sites that were heard."""
        return nearest_edges(list(state.sketches.values()), self.neighbours)

    def _drawn(self, state: State, replies: Mapping[SiteId, Payload]) -> Mapping[SiteId, Tree]:
        """The personal parts after a step along their gradients and towards their neighbours."""
        times = {i: p["time"] for i, p in replies.items()}
        length = median(times.values()) if self.eta is None else self.eta / len(state.personal)  # eta / m
        moved = {
            i: _along(z, replies[i]["model"], length / times[i]) if i in replies else z
            for i, z in state.personal.items()
        }
        heard, edges = list(state.sketches), self._edges(state)
        if not edges or not self.lam:
            return moved
        now = {i: tree.trained(moved[i]) for i in heard}
        centre = tree.mean(now.values())  # it stays; without it, rounding does not hide how little sites differ
        apart = [tree.sub(now[i], centre) for i in heard]
        gram = np.zeros((len(heard), len(heard)))
        for i in range(len(heard)):
            for j in range(i + 1):
                gram[i, j] = gram[j, i] = tree.dot(apart[i], apart[j])
        mixture = lasso_mixture(gram, edges, length * len(state.personal) * self.lam)
        return {**moved, **{i: {**moved[i], **_mixed(centre, apart, mixture[:, n])} for n, i in enumerate(heard)}}

    def _near(self, got: Payload, site: Site) -> Tree:
        """Of a site that never trained: the mean personal part of the sites whose sketches are nearest to its own."""
        known = site.cases("train") or site.cases("validation")
        known = known or (site.cases("test") if self.sketch == "images" else ())  # no label of a test is looked at
        if not known:
            return {}
        mine = np.asarray(site.sketch(self.sketch, known), float).reshape(-1)
        theirs = {n: np.array(x.tolist(), float) for n, x in got["sketches"].items()}
        far = {n: float(np.linalg.norm(x - mine)) for n, x in theirs.items() if x.shape == mine.shape}
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
    """The personal part of a site; of one that is new, the mean of all."""
    return state.personal[i] if i in state.personal else tree.mean(state.personal.values())


def _along(z: Tree, end: Tree, length: float) -> Tree:
    """This many times the way that training took; running statistics as it left them, for nobody shares them."""
    if length == 1:
        return end
    return {**end, **tree.map(lambda a, b: a + length * (b - a), tree.trained(z), tree.trained(end))}


def _mixed(centre: Tree, apart: Sequence[Tree], shares: Any) -> Tree:
    parts = [float(s) for s in shares]
    return tree.map(lambda c, *xs: c + sum(s * x for s, x in zip(parts, xs, strict=True)), centre, *apart)
