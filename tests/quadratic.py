"""Sites whose objective is a quadratic, so that every algorithm has an answer on paper.

F(w) = mean over cases of a/2 (sum of the parts of w - b_case)^2, minimised by full-batch gradient descent.
With one part, K steps of size eta give fit(w) = b + (1 - eta a)^K (w - b). Running statistics, where there are some,
are no parts: training moves them a tenth of the way to a^2, as batch normalisation would.
"""

import copy
from dataclasses import dataclass, field

import numpy as np

from polysite import tree
from polysite.site import Fit, Tilt


@dataclass
class Quadratic:
    a: float
    b: np.ndarray  # one optimum per case
    steps: int = 5
    lr: float = 0.05
    start: dict = field(default_factory=lambda: {"w": np.array([3.0])})
    fits: list = field(default_factory=list)

    @property
    def size(self):
        return len(self.b)

    @property
    def pull(self):
        """1 - (1 - eta a)^K: how far towards its optimum the site goes in one fit."""
        return 1 - (1 - self.lr * self.a) ** self.steps

    def at(self, round):
        site = copy.copy(self)
        site.fits = []
        return site

    def cases(self, split):
        return tuple(str(i) for i in range(self.size))

    def lift(self, params):
        return params

    def losses(self, params, *, augmented=False):
        return {
            n: 0.5 * self.a * float(sum(tree.trained(params).values()).item() - b) ** 2
            for n, b in zip(self.cases("train"), self.b, strict=True)
        }

    def score(self, params, cases):
        losses = self.losses(params)
        return {n: {"L": 1 / (1 + losses[n]), "loss": losses[n]} for n in cases}

    def fit(self, params, *, tilt=None, only=("*",), keep=None, terms=(), lr=None, epochs=None, steps=None):
        b = np.mean([x for n, x in zip(self.cases("train"), self.b, strict=True) if keep is None or n in keep])
        lr, steps = lr or self.lr, steps or self.steps * (epochs or 1)
        tilt, p = tilt or Tilt(), {k: np.array(v, float) for k, v in tree.trained(params).items()}
        for _ in range(steps):
            g = self.a * (sum(p.values()) - b)  # the same for every additive part
            extra = [contrast_gradient(p, t) for t in terms]
            force = {
                k: g
                + sum(pulls[k] for pulls in extra)
                + (tilt.linear[k] if tilt.linear else 0)
                + (tilt.weight * (p[k] - tilt.anchor[k]) if tilt.anchor else 0)
                for k in p
            }
            p = {k: p[k] - lr * force[k] if tree.matches(k, only) else p[k] for k in p}
        p = {**p, **{k: 0.9 * v + 0.1 * self.a**2 for k, v in tree.statistics(params).items()}}
        self.fits.append(Fit(p, float(np.mean(list(self.losses(p).values()))), steps, steps * lr, steps * lr))
        return self.fits[-1]


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
