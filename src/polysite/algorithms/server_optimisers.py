"""Server optimisers: they turn the mean update into the next model.

Paper: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2

D is the mean of the updates w_k - w, a descent direction. As in the paper, v starts at tau^2 and there is no bias
correction. Each optimiser consists of two pure functions.
"""

from dataclasses import dataclass

from polysite import tree
from polysite.algorithms.base import INF, TINY, within
from polysite.tree import Tree


@dataclass(frozen=True, slots=True)
class Moments:
    """First and second moment of the mean update."""

    m: Tree
    v: Tree


@dataclass(frozen=True)
class Sgd:
    """Gradient descent at the server, with optional momentum.

        m <- momentum m + D,    w <- w + lr m

    Args:
        lr: Learning rate of the server, more than 0; 1 without momentum is FedAvg.
        momentum: Momentum of the server, at least 0 and less than 1.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        within(self, lr=(TINY, INF), momentum=(0, 0.999999))

    def init(self, model: Tree) -> Tree | None:
        return tree.zeros(model) if self.momentum else None

    def step(self, model: Tree, update: Tree, state: Tree | None) -> tuple[Tree, Tree | None]:
        if state is not None:
            update = state = tree.add(tree.scale(state, self.momentum), update)
        return tree.add(model, tree.scale(update, self.lr)), state


@dataclass(frozen=True)
class Adagrad:
    """Federated averaging with Adagrad at the server.

    Paper: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2

        v <- v + D^2,    m <- b1 m + (1 - b1) D,    w <- w + lr m / (sqrt(v) + tau)

    D is the mean of the updates w_k - w; v starts at tau^2, m at zero, and there is no bias correction.

    Args:
        lr: Learning rate of the server (eta in the paper), more than 0; tune it (docs/results/defaults.md).
        b1: Decay of the mean update (beta_1 in the paper), at least 0 and less than 1; 0 in the paper's experiments.
        tau: Degree of adaptivity (tau in the paper), more than 0; larger is less adaptive. 0.001 in the
            paper's experiments.
    """

    lr: float = 0.3
    b1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        within(self, lr=(TINY, INF), b1=(0, 0.999999), tau=(TINY, INF))

    def init(self, model: Tree) -> Moments:
        return _start(model, self.tau)

    def step(self, model: Tree, update: Tree, state: Moments) -> tuple[Tree, Moments]:
        v = tree.map(lambda v, d: v + d * d, state.v, update)
        return _move(model, update, state.m, v, self.lr, self.b1, self.tau)


@dataclass(frozen=True)
class Adam:
    """Federated averaging with Adam at the server.

    Paper: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2

        v <- b2 v + (1 - b2) D^2,    m <- b1 m + (1 - b1) D,    w <- w + lr m / (sqrt(v) + tau)

    D is the mean of the updates w_k - w; v starts at tau^2, m at zero, and there is no bias correction.

    Args:
        lr: Learning rate of the server (eta in the paper), more than 0; tune it (docs/results/defaults.md).
        b1: Decay of the mean update (beta_1 in the paper), at least 0 and less than 1; 0.9 in the paper's experiments.
        b2: Decay of its square (beta_2 in the paper), at least 0 and less than 1; 0.99 in the paper's experiments.
        tau: Degree of adaptivity (tau in the paper), more than 0; larger is less adaptive. 0.001 in the
            paper's experiments.
    """

    lr: float = 0.03
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        within(self, lr=(TINY, INF), b1=(0, 0.999999), b2=(0, 0.999999), tau=(TINY, INF))

    def init(self, model: Tree) -> Moments:
        return _start(model, self.tau)

    def step(self, model: Tree, update: Tree, state: Moments) -> tuple[Tree, Moments]:
        v = tree.map(lambda v, d: self.b2 * v + (1 - self.b2) * d * d, state.v, update)
        return _move(model, update, state.m, v, self.lr, self.b1, self.tau)


@dataclass(frozen=True)
class Yogi(Adam):
    """Federated averaging with Yogi at the server.

    Paper: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm 2

        v <- v - (1 - b2) D^2 sign(v - D^2),    m <- b1 m + (1 - b1) D,    w <- w + lr m / (sqrt(v) + tau)

    D is the mean of the updates w_k - w; v starts at tau^2, m at zero, and there is no bias correction.

    Args:
        lr: Learning rate of the server (eta in the paper), more than 0; tune it (docs/results/defaults.md).
        b1: Decay of the mean update (beta_1 in the paper), at least 0 and less than 1; 0.9 in the paper's experiments.
        b2: Decay of its square (beta_2 in the paper), at least 0 and less than 1; 0.99 in the paper's experiments.
        tau: Degree of adaptivity (tau in the paper), more than 0; larger is less adaptive. 0.001 in the
            paper's experiments.
    """

    def step(self, model: Tree, update: Tree, state: Moments) -> tuple[Tree, Moments]:
        # v - (1 - b2) d^2 sign(v - d^2), with the sign written as comparisons that arrays and tensors share
        v = tree.map(lambda v, d: v + (1 - self.b2) * d * d * (1.0 * (v < d * d) - 1.0 * (v > d * d)), state.v, update)
        return _move(model, update, state.m, v, self.lr, self.b1, self.tau)


def _start(model: Tree, tau: float) -> Moments:
    return Moments(tree.zeros(model), tree.map(lambda x: x * 0 + tau**2, model))


def _move(model: Tree, update: Tree, m: Tree, v: Tree, lr: float, b1: float, tau: float) -> tuple[Tree, Moments]:
    m = tree.map(lambda m, d: b1 * m + (1 - b1) * d, m, update)
    return tree.map(lambda w, m, v: w + lr * m / (v**0.5 + tau), model, m, v), Moments(m, v)


ServerOptimiser = Sgd | Adagrad | Adam | Yogi  # two pure functions: `init`, and `step` from the mean update
