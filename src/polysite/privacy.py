"""Differential privacy: its settings, and what all releases of a site cost together.

Papers: Dwork and Roth, The Algorithmic Foundations of Differential Privacy, 2014; Abadi et al., Deep Learning with
Differential Privacy, CCS 2016 (DP-SGD); Mironov et al., Renyi Differential Privacy of the Sampled Gaussian Mechanism,
2019

    unit = "patient"     every step of training draws each patient with probability ``rate``, shortens the gradient of
                         every patient to ``clip``, and adds noise N(0, (noise clip)^2) to their sum (``training/``)
    unit = "hospital"    the change of the model that leaves is shortened to ``clip``, and noise N(0, (noise clip)^2) is
                         added (``engines/noise.py``)
    sums                 statistics of which every patient changes at most 1, with noise N(0, noise^2)

Two data sets are neighbours if one has one unit more. The cost is computed by dp-accounting from Renyi divergences.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log10
from typing import Any, Literal

from polysite.errors import ConfigError, RunError

# orders of the divergences of sampled releases; below 2 their series may not converge
ORDERS = (*(k / 10 for k in range(20, 110)), *range(11, 64), 80, 96, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Private:
    """Settings of differential privacy.

    Args:
        unit: What is protected: nothing, each training patient of a hospital, or each hospital.
        clip: Longest gradient of a patient in a step, or longest change of the model by a hospital in a round, more
            than 0.
        noise: Standard deviation of the noise, as a multiple of ``clip``, 0.1 to 1000.
        delta: Probability with which the guarantee may fail, for which epsilon is reported; below one over the number
            of patients.
    """

    unit: Literal["none", "patient", "hospital"] = "none"
    clip: float = 1.0
    noise: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 < self.clip < 1e6:
            raise ConfigError(f"train.private.clip = {self.clip} must be more than 0 and less than 1e6")
        if not 0.1 <= self.noise <= 1000:
            raise ConfigError(f"train.private.noise = {self.noise} must lie between 0.1 and 1000")
        check_delta("train.private", self.delta)

    @property
    def on(self) -> bool:
        """Whether noise is added."""
        return self.unit != "none"


@dataclass(frozen=True, order=True)
class Release:
    """One use of a site's data under noise.

    Args:
        noise: Standard deviation of the noise, as a multiple of what one unit can change.
        rate: Probability with which a unit takes part in a step; 1 for all.
        steps: Number of steps.
        delta: Probability with which the guarantee may fail.
    """

    noise: float
    rate: float = 1.0
    steps: int = 1
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (0 < self.noise < 1e6 and 0 < self.rate <= 1 and 0 <= self.steps < 1e9 and 0 < self.delta < 1):
            raise ValueError(f"{self} is no release under noise")


def check_limits(section: str, target: float, delta: float) -> None:
    """Refuse an epsilon or a delta that promises nothing; ``section`` is the place of both in a study."""
    if not 0 <= target < 1e9:
        raise ConfigError(f"{section}.epsilon = {target} must be at least 0 and less than 1e9")
    check_delta(section, delta)


def check_delta(section: str, delta: float) -> None:
    """Refuse a delta that promises nothing; ``section`` is its place in a study."""
    if not 0 < delta < 0.1:
        raise ConfigError(f"{section}.delta = {delta} must be more than 0 and less than 0.1")


def require() -> None:
    """Refuse to continue without the package that computes epsilon."""
    try:
        import dp_accounting  # noqa: F401
    except ImportError as problem:
        raise RunError("differential privacy needs dp-accounting: pip install 'polysite[private]'") from problem


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Return epsilon of all these releases together, at this delta.

    >>> round(epsilon([Release(noise=4.0, rate=0.01, steps=10_000)], 1e-5), 2)
    1.04
    """
    counted = Counter[tuple[float, float]]()
    for release in releases:
        counted[release.noise, release.rate] += release.steps
    return _epsilon(tuple(sorted((key, steps) for key, steps in counted.items() if steps)), delta)


@lru_cache(maxsize=64)
def noise_for(target: float, delta: float) -> float:
    """Return the least noise, rounded up to four digits, at which one release of sums costs at most this epsilon."""
    return least_noise(lambda noise: epsilon([Release(noise)], delta), target, 1e-5)


def least_noise(cost: Callable[[float], float], target: float, low: float = 0.1) -> float:
    """Return the least noise from ``low`` to 1000, rounded up to four digits, at which the cost is at most the target.

    Args:
        cost: Epsilon by noise, which falls.
        target: The epsilon that is wanted.
        low: Least noise that is tried.
    """
    high = 1000.0
    if cost(low) <= target:
        return low
    if cost(high) > target:
        raise ConfigError(f"epsilon = {target:g} is so small that no noise up to {high:g} is enough: raise it")
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    step = 10.0 ** (floor(log10(high)) - 3)
    return float(f"{ceil(high / step) * step:.4g}")


@lru_cache(maxsize=4096)
def _epsilon(uses: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    return float(accountant(uses).get_epsilon(delta)) if uses else 0.0


def accountant(uses: Iterable[tuple[tuple[float, float], int]]) -> Any:
    """Return the accountant of dp-accounting after so many steps of every noise and rate."""
    require()
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    uses = list(uses)
    found = RdpAccountant(ORDERS) if any(rate < 1 for (_, rate), _ in uses) else RdpAccountant()
    for (noise, rate), steps in uses:
        event: Any = dp_accounting.GaussianDpEvent(noise)
        found.compose(event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event), steps)
    return found
