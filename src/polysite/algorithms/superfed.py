"""SuPerFed: every site trains a twin of the shared model such that all mixtures of the two perform well.

Paper: Hahn, Jeong and Lee, Connecting Low-Loss Subspace for Personalized Federated Learning, KDD 2022

    w(lam) = (1 - lam) w_k + lam v_k,    lam from U(0, 1) for every mini-batch
    F_k(w(lam)) + mu |w_k - w|^2 + nu cos^2(w_k, v_k)    over w_k, from w, and v_k, where it was
    w <- sum_k p_k w_k,    p_k = n_k / sum_j n_j

v_k is the twin. Every site draws its own initial values for it (with equal values they would never separate, since the
gradient of cos^2 vanishes where w_k and v_k are parallel), and it never leaves the site. Model mixing draws one lam for
all parameters, layer mixing one per layer. During the first ``after`` rounds there is no twin: lam = 0, and the round
equals FedProx with 2 mu for its mu. The authors' commands start mixing after 0.4 to 0.6 of all rounds.

A site is served w(lam) of the received model and its twin, with the lam from ``choices`` that scores best on its
validation cases (on its training cases if it has none); running statistics are re-estimated for each. A site without a
twin is served w. The authors' program differs: it chooses on the test cases, adds 1e-6 to every product inside the
cosine, takes the norm of w_k - w array by array without squaring it, and has no twins of the biases of convolutions
(``shared = ["*.bias"]`` here, in networks without affine normalisation). The square and ``after`` are our choice: they
were not compared with the paper's text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from polysite import tree
from polysite.algorithms.average import OneModel, average
from polysite.algorithms.base import INF, Facts, in_rounds, within
from polysite.errors import ConfigError
from polysite.payload import Payload, SiteId
from polysite.site import Cases, Mix, Objective, Site, Tilt
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    model: Tree
    rounds: int = 0


@dataclass(frozen=True)
class SuPerFed(OneModel):
    """Federated averaging, and a second model (twin) per site that is mixed with the shared one.

    Args:
        mu: Weight of |w_k - w|^2 (mu in the paper), at least 0; the mu of fedprox is twice this one. 0.01 in the
            authors' program.
        nu: Weight of the squared cosine between model and twin (nu in the paper), at least 0; 2 in the authors'
            program.
        after: Rounds before the twins; a value between 0 and 1 is a share of all rounds. The authors' commands take
            0.4 to 0.6.
        by: Draw one mixing coefficient for the whole model, or one per layer.
        shared: Patterns of the parameters that have no twin.
        choices: Mixing coefficients to choose from when a site is served, each 0 to 1 (lambda in the paper).
    """

    mu: float = 0.01
    nu: float = 2.0
    after: float = 0.4
    by: Literal["model", "layer"] = "model"
    shared: tuple[str, ...] = ()
    choices: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

    facts: ClassVar[Facts] = Facts(needs="sum")

    def __post_init__(self) -> None:
        within(self, mu=(0, INF), nu=(0, INF), after=(0, INF))
        if not self.choices or not all(0 <= lam <= 1 for lam in self.choices):
            raise ConfigError(f"choices = {list(self.choices)} must name at least one mixture, each between 0 and 1")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        if params and not self._mixed(params):
            raise ConfigError(f"shared = {list(self.shared)} leaves no parameter that could have a twin; name fewer")
        return State(params)

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(model=state.model, twins=state.rounds >= self.after) for i in cohort}

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        w, mix = got["model"], None
        if got["twins"]:
            twin = memory["twin"] if "twin" in memory else self._mixed(site.fresh)
            mix = Mix(twin, self.nu, self.by)
        fit = site.fit(w, Objective(Tilt(anchor=w, weight=2 * self.mu), mix=mix))
        return Payload(model=fit.params, weight=site.size), Payload(twin=fit.twin) if mix else memory

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        return State(average(replies), state.rounds + 1)

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield self._best(got["model"], memory["twin"], site) if "twin" in memory else got["model"], cases

    def scaled(self, rounds: int) -> "SuPerFed":
        """Return the algorithm with ``after`` in rounds."""
        return replace(self, after=in_rounds(self.after, rounds))

    def _mixed(self, params: Tree) -> Tree:
        """Return the parameters that have a twin."""
        return tree.drop(tree.trained(params), self.shared)

    def _best(self, w: Tree, twin: Tree, site: Site) -> Tree:
        """Return the mixture that scores best at this site; ties go to the one nearest to w."""
        scored = site.cases("validation") or site.cases("train")
        if not scored:
            return _between(w, twin, 0.5)
        best, model = -INF, w
        for lam in sorted(self.choices):
            between = site.calibrate(_between(w, twin, lam))
            scores = [s.mean for s in site.score(between, scored).values()]
            if sum(scores) > best:
                best, model = sum(scores), between
        return model


def _between(w: Tree, twin: Tree, lam: float) -> Tree:
    mixed = {k: w[k] for k in twin}
    return {**w, **tree.map(lambda x, y: (1 - lam) * x + lam * y, mixed, twin)}
