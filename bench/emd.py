"""All Earth Mover's distances of a large federation against the least that NumPy can do for them.

100 hospitals of 1000 cases and 8 quantities: every hospital sorts its lists and cuts them to 256 quantiles, the server
compares all 4950 pairs. The bound sorts the same lists and subtracts them pair by pair, in full. Prints the ratio
(``exact``: without cutting, so that both compute the same numbers), and how far the cut distances are off.
"""

import statistics
import time

import numpy as np

from polysite.heterogeneity.distances import earth_movers, slices

SITES, CASES, QUANTITIES, LEVELS, REPEATS = 100, 1000, 8, 256, 9


def bound(values: np.ndarray) -> np.ndarray:
    """Sort, subtract, take the mean: no more than that."""
    ordered = np.sort(values, -1)
    found = np.zeros((QUANTITIES, SITES, SITES))
    for i in range(SITES):
        found[:, i, i + 1 :] = np.abs(ordered[i + 1 :] - ordered[i]).mean(-1).T
    return found + found.transpose(0, 2, 1)


def ours(values: np.ndarray, levels: int) -> np.ndarray:
    return earth_movers([np.stack([slices(row, levels) for row in site]) for site in values])


def main() -> None:
    rng = np.random.default_rng(0)
    values = rng.lognormal(rng.normal(0, 0.5, (SITES, QUANTITIES, 1)), 0.6, (SITES, QUANTITIES, CASES))
    times: dict[str, list[float]] = {"bound": [], "cut": [], "exact": []}
    for _ in range(REPEATS):
        for name, run in (
            ("bound", lambda: bound(values)),
            ("cut", lambda: ours(values, LEVELS)),
            ("exact", lambda: ours(values, CASES)),
        ):
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    full, cut = bound(values), ours(values, LEVELS)
    allowed = (np.ptp(values, -1)[:, None] + np.ptp(values, -1)[None]).transpose(2, 0, 1) / (2 * LEVELS)
    assert np.allclose(ours(values, CASES), full, rtol=1e-12)
    assert (np.abs(cut - full) <= allowed + 1e-12).all()
    for name in ("cut", "exact"):
        ratios = [a / b for a, b in zip(times[name], times["bound"], strict=True)]
        print(f"{name}: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(
        f"bound {statistics.median(times['bound']):.3f} s; cut is off by {np.abs(cut - full).max() / full.max():.1e}"
        f" of the largest distance, {(np.abs(cut - full) / allowed).max():.1e} of what is allowed"
    )


if __name__ == "__main__":
    main()
