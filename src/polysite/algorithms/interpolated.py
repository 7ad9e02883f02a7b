"""Interpolation: every site trains on alone and uses a point between the shared and its own model where that pays.

Paper: interpolation of weights: Wortsman et al., Robust fine-tuning of zero-shot models, CVPR 2022; the choice of alpha
is this project's (``polysite.metrics.shrinkage``)

    v_k <- steps on F_k(v) + lam/2 |v - w|^2 from v_k,    v_k = w at first,    w the initial model of the site
    w + alpha_k (v_k - w)                                 the model that site k uses
    g_ki(alpha) = score_i(w + alpha (v_k - w)) - score_i(w)        gain of validation case i

It is a phase after another algorithm; w is the shared model, or that of the site's cluster. For every alpha a site
sends the sum of its gains, the sum of their squares and the number of its validation cases. The server computes from
the sums of all sites the posterior of every site's true mean gain, which shrinks towards the mean of all sites and
towards 0, the more the fewer cases a site has. Of all alpha the one with the highest posterior mean is taken if
P(gain > 0) >= sure; else alpha = 0: the site keeps w. A site without validation cases keeps w as well, as does a site
that does not train. alpha = 1 alone is fine-tuning that is used only where it pays. With ``fixed`` nothing is chosen:
it gives alpha for some sites, as was found by cross-validation, and the others keep w and do not train.

No model is sent in either direction. v_k is always the last one: alpha, not the round, limits how far it goes. A round
predicts the validation cases once for w and once per alpha, so a phase of few rounds with many epochs costs least. The
record of a round (``diagnostics``) has alpha and the probability of every site, for up to 12 sites.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from polysite import tree
from polysite.algorithms.base import INF, TINY, Facts, Kind, within
from polysite.errors import ConfigError, nearest
from polysite.metrics.shrinkage import Tally, posterior
from polysite.payload import Payload, SiteId, plain
from polysite.site import Budget, Cases, Objective, Site, Tilt
from polysite.tree import Tree

MAX_NAMED = 12  # sites in the diagnostics by name
MAX_CASES = 1e9


@dataclass(frozen=True, slots=True)
class Choice:
    """What the server has chosen for a site."""

    alpha: float
    positive: float  # probability that the best alpha gains, also if it was not taken
    gain: float  # posterior mean of that gain


@dataclass(frozen=True, slots=True)
class State:
    """State of the server."""

    gains: Mapping[SiteId, Tree]  # last sums of every site
    choices: Mapping[SiteId, Choice]


@dataclass(frozen=True)
class Interpolated:
    """A point between the model of the phase before and a locally trained one, chosen per site by evidence.

    Args:
        alphas: Shares of the own model to choose from, each more than 0 and at most 1; 0 is always a candidate.
        sure: Probability of a gain from which on a site leaves the shared model, at least 0 and less than 1. With
            gains of 0.03 +- 0.05 Dice, 4 sites and 3 validation cases each, 0.8 finds 78 % of them, 0.95 finds 35 %.
            Without any gain 0.8 moves 11 to 36 % of the sites, 0.9 moves 2 to 16 %; a wrong choice costs little,
            because gain and loss are then about as likely.
        fixed: Shares of the own model that are given instead of chosen, by site, each from 0 to 1; empty: all are
            chosen. Sites that are not named keep the model they start from.
        lam: Weight of the proximal term of local training (lambda of Ditto), at least 0.
        lr: Local learning rate, more than 0; None: the site's own (train.lr).
        epochs: Local epochs per round, at least 1; None: the site's own (train.epochs).
        steps: Local iterations per round, at least 1, instead of epochs.
    """

    alphas: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    sure: float = 0.9
    fixed: Mapping[SiteId, float] = field(default_factory=dict)
    lam: float = 0.0
    lr: float | None = None
    epochs: int | None = None
    steps: int | None = None

    reply: ClassVar[Mapping[str, Kind]] = {"gains": "statistics"}
    facts: ClassVar[Facts] = Facts(needs_model=True, sends_scores=True)

    def __post_init__(self) -> None:
        within(self, sure=(0, 1), lam=(0, INF), lr=(TINY, INF), epochs=(1, INF), steps=(1, INF))
        odd = next((a for a in self.alphas if not 0 < a <= 1), None)
        if odd is not None or not self.alphas:
            raise ConfigError(
                f"alphas = {list(self.alphas)}: give at least one, each more than 0 and at most 1; 0 is always tried"
            )
        wrong = next((site for site, alpha in self.fixed.items() if not 0 <= alpha <= 1), None)
        if wrong is not None:
            raise ConfigError(f"fixed: alpha of {wrong!r} is {self.fixed[wrong]}; give 0 to 1")
        if self.sure == 1:
            raise ConfigError("sure = 1 is never reached; take less, as in 0.8, or leave the phase out")

    def init(self, params: Tree, sites: Sequence[SiteId]) -> State:
        odd = next((site for site in self.fixed if site not in sites), None)
        if odd is not None:
            raise ConfigError(f"algorithm.fixed names {odd!r}, which is no site that trains; {nearest(odd, sites)}")
        return State({}, {})

    def send(self, state: State, cohort: Sequence[SiteId]) -> Mapping[SiteId, Payload]:
        return {i: Payload(alpha=self._alpha(state, i)) for i in cohort}

    def _alpha(self, state: State, site: SiteId) -> float:
        if self.fixed:
            return self.fixed.get(site, 0.0)
        return state.choices[site].alpha if site in state.choices else 0.0

    def local(self, got: Payload, memory: Payload, site: Site) -> tuple[Payload, Payload]:
        if self.fixed and not got["alpha"]:
            return Payload(gains=self._gains(site, site.start)), memory
        tilt = Tilt(anchor=site.start, weight=self.lam) if self.lam else None
        budget = Budget(self.lr, self.epochs, self.steps)
        own = site.fit(memory.get("model", site.start), Objective(tilt), budget).params
        return Payload(gains=self._gains(site, own)), Payload(model=own)

    def merge(self, state: State, replies: Mapping[SiteId, Payload]) -> State:
        heard = {i: {k: np.array(plain(x)) for k, x in p["gains"].items()} for i, p in replies.items()}
        gains = dict(sorted({**state.gains, **heard}.items()))
        found = [posterior({i: _tally(sums, j) for i, sums in gains.items()}).sites for j in range(len(self.alphas))]
        choices = {}
        for i, sums in gains.items():
            j = max(range(len(self.alphas)), key=lambda j: found[j][i].mean)
            best, known = found[j][i], sums["cases"].item() > 0
            sure = known and best.mean > 0 and best.positive >= self.sure
            alpha = self.fixed.get(i, 0.0) if self.fixed else self.alphas[j] if sure else 0.0
            choices[i] = Choice(alpha, best.positive, best.mean)
        return State(gains, choices)

    def objections(self, state: State, replies: Mapping[SiteId, Payload]) -> dict[SiteId, str]:
        """Return the sites whose sums cannot be those of gains."""
        return {i: "'gains' are no sums of gains" for i, p in sorted(replies.items()) if not self._possible(p["gains"])}

    def diagnostics(self, state: State) -> Mapping[str, float]:
        numbers = {"hospitals with a model of their own": float(sum(c.alpha > 0 for c in state.choices.values()))}
        for i, choice in state.choices.items() if len(state.choices) <= MAX_NAMED else ():
            numbers |= {f"alpha, {i}": choice.alpha, f"P(gain > 0), {i}": choice.positive}
        return numbers

    def serve(self, got: Payload, memory: Payload, site: Site, cases: Cases) -> Iterator[tuple[Tree, Cases]]:
        yield between(site.start, memory.get("model", site.start), float(got["alpha"])), cases

    def _gains(self, site: Site, own: Tree) -> Tree:
        """Return the sums of the gains of the validation cases, for every alpha."""
        cases = () if self.fixed else site.cases("validation")  # nothing is chosen by them
        before = {n: s.mean for n, s in site.score(site.start, cases).items()} if cases else {}
        tallies = []
        for alpha in self.alphas:
            after = site.score(between(site.start, own, alpha), cases) if cases else {}
            tallies.append(Tally.of([after[n].mean - before[n] for n in cases]))
        sums = {"total": [t.total for t in tallies], "squares": [t.squares for t in tallies]}
        return {"cases": np.array([float(len(cases))]), **{k: np.array(v) for k, v in sums.items()}}

    def _possible(self, gains: Tree) -> bool:
        shapes = {"cases": (1,), "total": (len(self.alphas),), "squares": (len(self.alphas),)}
        if {k: tuple(x.shape) for k, x in gains.items()} != shapes:
            return False
        cases, total, squares = (np.asarray(plain(gains[k])) for k in shapes)
        whole = 0 <= cases.item() <= MAX_CASES and cases.item() == int(cases.item())
        # scores lie between 0 and 1; by Cauchy and Schwarz a sum is bounded by that of the squares
        return whole and bool((squares <= cases + 1e-6).all() and (total**2 <= cases * squares + 1e-6).all())


def between(start: Tree, own: Tree, alpha: float) -> Tree:
    """Return start + alpha (own - start), running statistics included; exactly start or own for alpha = 0 or 1."""
    if alpha in (0, 1):
        return own if alpha else start
    return tree.map(lambda w, v: w + alpha * (v - w), start, own)


def _tally(gains: Tree, j: int) -> Tally:
    """Return the sums for the alpha of number j."""
    return Tally(int(gains["cases"].item()), float(gains["total"][j]), float(gains["squares"][j]))
