"""Calibration of the probability that a gain is positive (``polysite.metrics.shrinkage``), by simulation.

``null``: no hospital gains. How often is a gain claimed, P(gain > 0) >= the limit, and how often is one claimed at any
hospital of a federation? Gains of cases are normal, heavy-tailed (Student's t with 3 degrees of freedom), with rare
large failures and rescues (one case in ten, ten times the spread), or of another spread in every hospital. The t-test
of every hospital alone stands beside it.

``mixed``: true gains differ between hospitals. Of the hospitals with a claimed probability in each tenth, how many
truly gain?
"""

import argparse
from collections.abc import Callable

import numpy as np
from scipy.stats import ttest_1samp

from polysite.metrics.shrinkage import shrink

Draw = Callable[[np.random.Generator, int], np.ndarray]


def spreads(rng: np.random.Generator, cases: int) -> np.ndarray:
    return rng.normal(size=cases) * np.exp(rng.normal(0, 0.7))


def rare(rng: np.random.Generator, cases: int) -> np.ndarray:
    return rng.normal(size=cases) * np.where(rng.random(cases) < 0.1, 10.0, 1.0) / np.sqrt(10.9)


KINDS: dict[str, Draw] = {
    "normal": lambda rng, cases: rng.normal(size=cases),
    "heavy tails": lambda rng, cases: rng.standard_t(3, size=cases) / np.sqrt(3),
    "rare failures": rare,
    "unequal spreads": spreads,
}


def claims(kind: str, sites: int, cases: int, sd: float, repeats: int, limit: float, seed: int = 0) -> np.ndarray:
    """Return whether a gain was claimed, per repeat and hospital, if no hospital gains."""
    rng = np.random.default_rng([seed, sites, cases])
    found = []
    for _ in range(repeats):
        gains = {str(k): sd * KINDS[kind](rng, cases) for k in range(sites)}
        found.append([gain.positive >= limit for gain in shrink(gains).sites.values()])
    return np.array(found)


def t_tests(kind: str, sites: int, cases: int, sd: float, repeats: int, limit: float, seed: int = 0) -> float:
    """Return the share of the same hospitals at which a one-sided t-test claims a gain."""
    rng = np.random.default_rng([seed, sites, cases])
    gains = np.array([[sd * KINDS[kind](rng, cases) for _ in range(sites)] for _ in range(repeats)])
    return float((ttest_1samp(gains, 0, axis=2, alternative="greater").pvalue <= 1 - limit).mean())


def null(given: argparse.Namespace) -> None:
    print(f"claims of P(gain > 0) >= {given.limit:g} if no hospital gains, {given.repeats} federations a line")
    print(f"{'gains':<16}{'sites':>6}{'cases':>6}{'sd':>6}{'hospitals':>11}{'federations':>12}{'t-test':>8}")
    for kind in KINDS:
        for sites, cases, sd in ((3, 4, 0.05), (4, 10, 0.1), (8, 2, 0.1), (23, 5, 0.05), (4, 30, 0.02)):
            found = claims(kind, sites, cases, sd, given.repeats, given.limit)
            alone = t_tests(kind, sites, cases, sd, given.repeats, given.limit)
            print(
                f"{kind:<16}{sites:6d}{cases:6d}{sd:6.2f}{found.mean():11.1%}{found.any(1).mean():12.1%}{alone:8.1%}",
                flush=True,
            )


def mixed(given: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    claimed, true = [], []
    for _ in range(given.repeats):
        sites, cases = int(rng.integers(3, 12)), rng.integers(1, 12, size=12)
        mean, spread, sd = rng.normal(0, 0.03), abs(rng.normal(0, 0.04)), np.exp(rng.normal(np.log(0.06), 0.5))
        truth = rng.normal(mean, spread, size=sites)
        gains = {str(k): rng.normal(truth[k], sd, size=cases[k]) for k in range(sites)}
        claimed += [gain.positive for gain in shrink(gains).sites.values()]
        true += list(truth > 0)
    bins = np.minimum((10 * np.array(claimed)).astype(int), 9)
    print("claimed probability: share of hospitals that truly gain (hospitals)")
    for b in range(10):
        here = np.array(true)[bins == b]
        print(f"{b / 10:.1f} to {(b + 1) / 10:.1f}: {here.mean():6.1%} ({here.size})")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["null", "mixed"])
    options.add_argument("--repeats", type=int, default=300)
    options.add_argument("--limit", type=float, default=0.95)
    given = options.parse_args()
    {"null": null, "mixed": mixed}[given.what](given)


if __name__ == "__main__":
    main()
