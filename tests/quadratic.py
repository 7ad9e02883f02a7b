"""Sites whose objective is a quadratic, so that every algorithm has an answer on paper.

F(w) = mean over cases of a/2 (sum of the parts of w - b_case)^2, minimised by full-batch gradient descent.
With one part, K steps of size eta give fit(w) = b + (1 - eta a)^K (w - b). Running statistics, where there are some,
are no parts: training moves them a tenth of the way to a^2, as batch normalisation would.
"""

import copy
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import load_file

from polysite import tree
from polysite.engines.plan import Plan
from polysite.engines.rounds import Progress, run_rounds
from polysite.engines.simulator import Simulator
from polysite.site import Budget, CaseScore, Divergence, Fit, Objective, Tilt


@dataclass
class Quadratic:
    a: float
    b: np.ndarray  # one optimum per case
    steps: int = 5
    lr: float = 0.05
    start: dict = field(default_factory=lambda: {"w": np.array([3.0])})
    fits: list = field(default_factory=list)
    asked: list = field(default_factory=list)  # what every fit was given: (parameters, objective, budget, only)
    instead: tuple | None = None  # curvature and optimum of a loss that replaces its own; None: the same
    kinds: tuple = ()  # the class of every case; all are of class 0 where none are given
    splits: dict = field(default_factory=dict)  # cases of a split that does not have all of them

    @property
    def size(self):
        return len(self.b)

    @property
    def pull(self):
        """1 - (1 - eta a)^K: how far towards its optimum the site goes in one fit."""
        return 1 - (1 - self.lr * self.a) ** self.steps

    @property
    def fresh(self):
        """Unlike the start, and unlike at another site."""
        return {**self.start, **{k: 0.1 * self.a - 0.5 * v for k, v in tree.trained(self.start).items()}}

    def calibrate(self, params):
        return {**params, **{k: v * 0 + self.a**2 for k, v in tree.statistics(params).items()}}

    def at(self, round):
        site = copy.copy(self)
        site.fits = []
        return site

    def begin(self, round, start):
        site = copy.copy(self)
        site.start = start
        return site

    def amount(self, channel):
        return float(sum(k == channel for k in self.kinds or (0,) * self.size))

    def sketch(self, kind, cases):
        return np.array([np.mean([b for n, b in zip(self.cases("train"), self.b, strict=True) if n in cases])])

    def patient_of(self, case):
        return case

    def noise_rng(self):
        return np.random.default_rng([int(1000 * self.a), 3])

    def radiomics(self, cases, bin_width):
        """What a case looks like tells its optimum."""
        b = np.array([x for n, x in zip(self.cases("train"), self.b, strict=True) if n in cases])
        return np.stack([b, np.abs(b), bin_width + 0 * b], axis=1)

    def cases(self, split):
        return self.splits.get(split, tuple(str(i) for i in range(self.size)))

    def lift(self, params):
        return params

    def losses(self, params, *, augmented=False):
        return {
            n: 0.5 * self.a * float(sum(tree.trained(params).values()).item() - b) ** 2
            for n, b in zip(self.cases("train"), self.b, strict=True)
        }

    def score(self, params, cases):
        losses = self.losses(params)
        return {n: CaseScore({"L": 1 / (1 + losses[n])}, losses[n]) for n in cases}

    def fit(self, params, objective=Objective(), budget=Budget(), *, only=("*",), keep=None):
        """A minibatch is the whole batch."""
        self.asked.append((params, objective, budget, only))
        b = np.mean([x for n, x in zip(self.cases("train"), self.b, strict=True) if keep is None or n in keep])
        lr, steps = budget.lr or self.lr, budget.steps or self.steps * (budget.epochs or 1)
        mix, tilt = objective.mix, objective.tilt or Tilt()
        p = {k: np.array(v, float) for k, v in tree.trained(params).items()}
        twin = {k: np.array(v, float) for k, v in mix.twin.items() if k in p} if mix else {}
        second = {k: np.array(v, float) for k, v in (objective.personal or {}).items()}
        steep, aim = self.instead if objective.loss and self.instead else (self.a, b)
        for _ in range(steps):
            g = dict.fromkeys(p, steep * (sum(p.values()) - aim))  # the same for every additive part
            if mix:
                g, other = mixed_gradients(self.a, b, p, twin, mix)
                twin = {k: twin[k] - lr * other[k] for k in twin}
            extra = [term_gradient(self, p, t) for t in objective.extra]
            force = {
                k: g[k]
                + sum(pulls[k] for pulls in extra)
                + (tilt.linear[k] if tilt.linear else 0)
                + (tilt.weight * (p[k] - tilt.anchor[k]) if k in (tilt.anchor or {}) else 0)
                for k in p
            }
            p = {k: p[k] - lr * force[k] if tree.matches(k, only) else p[k] for k in p}
            both = sum(p.values()) + sum(second.values())
            second = {k: v - lr * self.a * (both - b) for k, v in second.items()}
        pace = {k: 0.1 if tree.matches(k, only) else 0.0 for k in tree.statistics(params)}
        p = {**p, **{k: (1 - x) * params[k] + x * self.a**2 for k, x in pace.items()}}
        loss = float(np.mean(list(self.losses(p).values())))
        self.fits.append(Fit(p, loss, steps, steps * lr, steps * lr, twin, second))
        return self.fits[-1]


def mixed_gradients(a, b, p, twin, mix):
    """Of both models, the mean over lam from U(0, 1), which has E lam^2 = 1/3 and E lam (1 - lam) = 1/6."""
    part = {k: k.rpartition(".")[0] if mix.by == "layer" else "" for k in twin}
    middle = {k: (p[k] + twin[k]) / 2 if k in twin else p[k] for k in p}
    mine, other = {k: a * (sum(middle.values()) - b) for k in p}, {}
    for k in twin:
        near = [j for j in twin if part[j] == part[k]]  # those that share its lam
        rest = (sum(middle[j] for j in p if j not in near) - b) / 2
        mine[k] = a * (sum(p[j] / 3 + twin[j] / 6 for j in near) + rest)
        other[k] = a * (sum(p[j] / 6 + twin[j] / 3 for j in near) + rest)
    u, v = ({k: x[k] for k in twin} for x in (p, twin))
    across = 2 * mix.orthogonality * tree.dot(u, v) / tree.dot(u, u) / tree.dot(v, v)
    for k in twin:
        mine[k] = mine[k] + across * (v[k] - tree.dot(u, v) / tree.dot(u, u) * u[k])
        other[k] = other[k] + across * (u[k] - tree.dot(u, v) / tree.dot(v, v) * v[k])
    return mine, other


def term_gradient(site, p, term):
    return divergence_gradient(site, p, term) if isinstance(term, Divergence) else contrast_gradient(p, term)


def divergence_gradient(site, p, term):
    """What the encoder of class i makes of a case is its parameter times the case's optimum: |w_i| std(beta b)."""
    kinds, found = np.array(site.kinds or (0,) * site.size), dict.fromkeys(p, 0.0)
    for k in p:
        if ".class" in k:
            mine = kinds == int(k.split(".class")[1].split(".")[0])
            spread = np.std(np.exp(term.focus * (2 * mine - 1)) * site.b)
            found[k] = (0.2 if term.weight is None else term.weight) * spread * np.sign(p[k])
    return found


def contrast_gradient(p, term):
    """The features of these sites are the parameters themselves: weight * (1 - q) (dcos_far - dcos_near) / T."""
    z, near, far = (np.concatenate([np.asarray(t[k], float) for k in p]) for t in (p, term.near, term.far))

    def cos(y):
        return z @ y / np.linalg.norm(z) / np.linalg.norm(y)

    def slope(y):
        return y / np.linalg.norm(z) / np.linalg.norm(y) - cos(y) * z / (z @ z)

    q = 1 / (1 + np.exp((cos(far) - cos(near)) / term.temperature))
    g = term.weight * (1 - q) / term.temperature * (slope(far) - slope(near))
    return dict(zip(p, np.split(g, np.cumsum([np.size(v) for v in p.values()])[:-1]), strict=True))


class Aims(Quadratic):
    """A site that judges by other cases than it trains on: by how near the model is to ``goal``."""

    goal = None

    def score(self, params, cases):
        miss = abs(params["w"].item() - (self.b.mean() if self.goal is None else self.goal))
        return {n: CaseScore({"L": 1 / (1 + miss)}, miss) for n in cases}


def served_models(folder, names, name="best"):
    """Return the model that every site uses in the end, from the files of a run folder."""
    found = {p.name.split(".")[1]: load_file(p)["w"].item() for p in (folder.path / "models").glob(f"{name}*")}
    return dict.fromkeys(names, found["safetensors"]) if "safetensors" in found else found


# Four sites on which every formula of the specification has been checked by scripts of its own
A, B, N = np.array([0.5, 1.0, 2.0, 3.0]), np.array([-1.0, 0.3, 2.0, 0.9]), np.array([2, 8, 5, 5])
P, ETA, K, Q0 = N / N.sum(), 0.1, 5, 0.7
R = (1 - ETA * A) ** K  # what a fit leaves of the way to the optimum
NAMES, START = ("s0", "s1", "s2", "s3"), {"w": np.array([Q0])}


def bed(a=A, b=B, n=N, kind=Quadratic, **settings):
    """Sites s0, s1, ...; all cases of a site have one optimum."""
    settings = {"lr": ETA, "steps": K, "start": START, **settings}
    return {f"s{i}": kind(a[i], np.full(n[i], b[i]), **settings) for i in range(len(b))}


@dataclass(frozen=True)
class Played:
    """A run, and what its sites remembered after every round."""

    rounds: list
    kept: list
    engine: Simulator

    @property
    def last(self):
        return self.rounds[-1]

    @property
    def state(self):
        return self.last.state

    @property
    def states(self):
        return [r.state for r in self.rounds]

    @property
    def memories(self):
        return self.kept[-1]

    @property
    def crossed(self):
        """Every payload that went over the wire."""
        return [p for r in self.rounds for p in (*r.sent.values(), *(x.payload for x in r.replies.values()))]

    def models(self, name="w"):
        """The shared model after every round."""
        return [r.state.model[name].item() for r in self.rounds]

    def own(self, field="model", name="w", round=-1):
        """What every site keeps for itself after a round."""
        return np.array([m[field][name].item() for _, m in sorted(self.kept[round].items())])


def play(algorithm, sites, rounds, share=1.0, start=None, *, state=None, resume=None, seed=0, engine=None, wire=False):
    """Let sites play some rounds, from the start of the first of them or from a state."""
    engine = engine or Simulator(algorithm, sites, wire=wire)
    start = start or next(iter(sites.values())).start
    resume = resume if state is None else Progress(-1, state, {})
    done, kept = [], []
    for r in run_rounds(algorithm, engine, start, Plan(rounds=rounds, share=share), seed=seed, resume=resume):
        done.append(r)
        kept.append(engine.memories())
    return Played(done, kept, engine)
