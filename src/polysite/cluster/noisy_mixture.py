"""Fit of the clusters of cases under differential privacy: k-means from few sums that one patient changes little.

Papers: Blum et al., Practical Privacy: The SuLQ Framework, PODS 2005; Su et al., Differentially Private K-Means
Clustering, CODASPY 2016 (few iterations)

The study names the features and a range for each, from what is known and not from the data. With D of them, over all
modalities, a patient is the point

    x_j = (clip(f_j, low_j, high_j) - middle_j) / (half width_j sqrt(D)),    |x| <= 1

the mean over the patient's cases. An exchange asks for the sums over the patients that are nearest to each mean:

    N_k, sum x     of every cluster; in the last exchange also sum |x|^2      /  sqrt(2), or sqrt(3) in the last one

so that one patient changes all of them together by at most 1 in length; ``engines/noise.py`` adds the noise. The server
takes means of sums over all sites, within the unit ball. A cluster of fewer patients than three deviations of the noise
stays where it was. In the end all clusters get weights by their N_k and one variance in all directions.

Percentiles, principal components, the likelihood of a mixture and the choice of a number of clusters by BIC are left
out: what they need is not bounded, or costs more noise than it is worth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from polysite.cluster.mixture import Mixture, Values, checked, scaled, squared_distances
from polysite.errors import ConfigError, DataError
from polysite.privacy import Release, check_limits, epsilon, least_noise

SURE = 3.0  # deviations of the noise; a cluster with fewer patients does not move
DRAWN = 20  # points that are drawn for every mean of the start
LEAST = 1e-4  # smallest variance


@dataclass(frozen=True)
class NoisyClusters:
    """Differential privacy of the clusters, for every patient that they are fitted to.

    Args:
        epsilon: What the fit of the clusters may cost every patient; 0: no noise, and sums leave as they are.
        delta: Probability with which the guarantee may fail; below one over the number of patients.
        features: Radiomic features by name, each with its range over all modalities, which must not come from the data.
        modalities: Number of modalities, at least 1.
        exchanges: Exchanges of the fit, at least 2; more of them find clusters better, and have more noise each.
    """

    epsilon: float = 0.0
    delta: float = 1e-5
    features: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    modalities: int = 1
    exchanges: int = 5

    def __post_init__(self) -> None:
        check_limits("algorithm.noisy", self.epsilon, self.delta)
        if self.modalities < 1 or self.exchanges < 2:
            raise ConfigError("algorithm.noisy needs at least one modality and two exchanges")
        for name, (low, high) in self.features.items():
            if not -1e12 < low < high < 1e12:
                raise ConfigError(
                    f"algorithm.noisy.features: {name} = [{low:g}, {high:g}] must be a range, the smaller one first"
                )
        if self.on and not self.features:
            raise ConfigError(
                "algorithm.noisy.features must name the features to cluster by, each with its range: without limits, "
                "the sums of radiomics cannot have noise"
            )

    @property
    def on(self) -> bool:
        """Whether noise is added."""
        return self.epsilon > 0

    @property
    def release(self) -> Release:
        """What one exchange of the fit costs."""
        return Release(_noise(self.epsilon, self.delta, self.exchanges), delta=self.delta)


@lru_cache(maxsize=64)
def _noise(target: float, delta: float, exchanges: int) -> float:
    return least_noise(lambda noise: epsilon([Release(noise, steps=exchanges)], delta), target, 1e-5)


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The server's state."""

    low: Values  # of all features of all modalities; equal to high if a feature does not count
    high: Values
    means: Values  # clusters x dimensions
    noise: float  # deviation on a sum, at least
    left: int  # exchanges
    exchanges: int = 0  # so far
    cases: float = 0.0  # patients, as far as noise tells
    kept: float = 1.0
    agreement: float = 1.0
    mixture: Mixture | None = None


def begin(settings: NoisyClusters, clusters: int, names: Sequence[str], seed: int) -> State:
    """Return the state before the first exchange.

    Args:
        settings: Ranges and noise.
        clusters: Number of clusters.
        names: Names of all features of a modality, in order.
        seed: Seed of the start.
    """
    unknown = sorted(set(settings.features) - set(names))
    if unknown:
        raise ConfigError(f"algorithm.noisy.features: {unknown[0]!r} is no radiomic feature (docs/radiomics.md)")
    pairs = [settings.features.get(name, (0.0, 0.0)) for name in names] * settings.modalities
    low, high = np.array(pairs, np.float64).T
    dims = int((high > low).sum())
    drawn = np.random.default_rng([seed, clusters]).uniform(-1, 1, (DRAWN * clusters, dims)) / np.sqrt(3 * dims)
    means = drawn[:1]
    for _ in range(clusters - 1):  # each as far as possible from those before
        means = np.concatenate([means, drawn[[squared_distances(drawn, means).min(1).argmax()]]])
    return State(low, high, means, settings.release.noise, settings.exchanges)


def ask(state: State) -> dict[str, Values]:
    """Return the request of the next exchange, the same for all sites."""
    last = np.array([float(state.left == 1)])
    return {"noisy_low": state.low, "noisy_high": state.high, "noisy_means": state.means, "noisy_last": last}


def answer(asked: Mapping[str, Values], vectors: ArrayLike, patients: Sequence[str]) -> dict[str, Values]:
    """Return a site's answer before noise: sums over its patients, which one patient changes by at most 1 in length.

    Args:
        asked: Request of the server.
        vectors: Features of the site's cases, one row per case.
        patients: Patient of every case.
    """
    low, high, means = asked["noisy_low"], asked["noisy_high"], asked["noisy_means"]
    points = _points(np.nan_to_num(checked(vectors, low.size)), low, high)
    which = np.unique(np.asarray(patients), return_inverse=True)[1]
    share = np.eye(which.max() + 1)[which]
    points = (share / share.sum(0)).T @ points
    member = np.eye(len(means))[squared_distances(points, means).argmin(1)]
    last = bool(asked["noisy_last"][0])
    sums = {"counts": member.sum(0), "sums": member.T @ points}
    if last:
        sums["squares"] = np.array([np.square(points).sum()])
    return {name: array / _bound(last) for name, array in sums.items()}


def learn(state: State, answers: Sequence[Mapping[str, Values]]) -> State:
    """Return the state after an exchange."""
    last = state.left == 1
    wanted = {"counts": (len(state.means),), "sums": state.means.shape} | ({"squares": (1,)} if last else {})
    if any({k: v.shape for k, v in each.items()} != wanted for each in answers):
        raise DataError("a site answers with other sums than it was asked for")
    total = {name: _bound(last) * np.sum([each[name] for each in answers], axis=0) for name in wanted}
    least = SURE * state.noise * _bound(last) * np.sqrt(len(answers))  # one answer if they were added up in secret
    moved = total["sums"] / np.maximum(total["counts"], least)[:, None]
    moved /= np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1.0)
    means = np.where((total["counts"] > least)[:, None], moved, state.means)
    state = replace(state, means=means, left=state.left - 1, exchanges=state.exchanges + 1)
    cases = max(float(np.rint(total["counts"].sum())), 0.0)
    return replace(state, cases=cases, mixture=_mixture(state, total)) if last else state


def _mixture(state: State, total: Mapping[str, Values]) -> Mixture:
    counts, dims = np.maximum(total["counts"], 0.5), state.means.shape[1]
    within = float(total["squares"][0] - (counts * np.square(state.means).sum(1)).sum())
    variance = np.clip(within / (counts.sum() * dims), LEAST, 1.0 / dims)
    chosen = np.flatnonzero(state.high > state.low)
    axes = np.zeros((dims, state.low.size))
    axes[np.arange(dims), chosen] = 2 / np.sqrt(dims)
    centre = np.where(state.high > state.low, 0.5, 0.0)
    return Mixture(
        low=state.low, high=state.high, centre=centre, axes=axes, weights=counts / counts.sum(), means=state.means,
        covariance=variance * np.eye(dims),
    )  # fmt: skip


def _points(rows: Values, low: Values, high: Values) -> Values:
    """Return the points of cases, in the unit ball."""
    chosen = high > low
    return (scaled(rows, low, high)[:, chosen] - 0.5) * (2 / np.sqrt(chosen.sum()))  # type: ignore[no-any-return]


def _bound(last: bool) -> float:
    return float(np.sqrt(3.0 if last else 2.0))
