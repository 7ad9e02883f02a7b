"""HD95 and Dice of three labels of 240 × 240 × 155 voxels, against MONAI on the same masks.

Three kinds of masks: tumours and a fair prediction of them; masks of the whole brain; and a bad prediction, whose
surface lies far from the true one. Runs are interleaved; MONAI gets floating-point tensors, which it is fastest with.
Prints medians, the ratio run by run, the largest difference, and the floor: the time to read all masks once, at the
bandwidth of a copy.
"""

import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance
from scipy.ndimage import gaussian_filter, zoom

from polysite.metrics.overlap import overlap
from polysite.metrics.surface import surfaces

SHAPE, SPACING, REPEATS = (240, 240, 155), (1.0, 1.0, 1.0), 7


def lump(centre: tuple[float, ...], radii: tuple[float, ...], rough: float, seed: int) -> np.ndarray:
    """An ellipsoid with a wavy surface."""
    coarse = gaussian_filter(np.random.default_rng(seed).normal(size=[n // 5 for n in SHAPE]), 1.5)
    waves = zoom(coarse / coarse.std(), [n / (n // 5) for n in SHAPE], order=1)
    grid = np.ogrid[tuple(slice(0, n) for n in SHAPE)]
    return sum(((x - c) / r) ** 2 for x, c, r in zip(grid, centre, radii, strict=True)) + rough * waves < 1


def labels(centre: tuple[float, ...], radii: tuple[float, ...], shrink: float, rough: float, seed: int) -> np.ndarray:
    """Three labels, each within the one before."""
    return np.stack([lump(centre, tuple(r * shrink**k for r in radii), rough, seed + k) for k in range(3)])


CASES = {
    "tumour": (
        labels((101, 141, 79), (29, 26, 22), 0.75, 0.15, 0),
        labels((100, 140, 80), (30, 25, 22), 0.75, 0.15, 10),
    ),
    "whole brain": (
        labels((121, 119, 78), (68, 84, 66), 0.95, 0.05, 0),
        labels((120, 120, 78), (68, 85, 65), 0.95, 0.05, 10),
    ),
    "bad prediction": (
        labels((60, 60, 40), (20, 22, 20), 0.75, 0.15, 0),
        labels((150, 170, 110), (25, 25, 22), 0.75, 0.15, 10),
    ),
}


def compared(name: str, reference: Callable[[], np.ndarray], ours: Callable[[], np.ndarray]) -> None:
    off = np.abs(reference() - ours()).max()  # also warms both up
    times: list[list[float]] = [[], []]
    for _ in range(REPEATS):
        for run, seconds in zip((reference, ours), times, strict=True):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    ratios = [a / b for a, b in zip(*times, strict=True)]
    theirs, mine = map(statistics.median, times)
    print(
        f"{name:22} MONAI {theirs * 1e3:7.1f} ms, polysite {mine * 1e3:5.1f} ms: {statistics.median(ratios):.1f} times "
        f"({min(ratios):.1f} to {max(ratios):.1f}); differ by at most {off:.1e}"
    )


def bandwidth(block: np.ndarray) -> float:
    """Bytes read and written in a second by a copy."""
    copy, seconds = np.empty_like(block), []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        np.copyto(copy, block)
        seconds.append(time.perf_counter() - began)
    return 2 * block.nbytes / statistics.median(seconds[1:])


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # MONAI's own
    print(f"threads: MONAI (torch) {torch.get_num_threads()}, polysite 1; median of {REPEATS} interleaved runs")
    for name, (predicted, truth) in CASES.items():
        p, t = (torch.from_numpy(m)[None].float() for m in (predicted, truth))
        pairs = list(zip(predicted, truth, strict=True))
        compared(
            f"HD95 {name}",
            lambda p=p, t=t: compute_hausdorff_distance(
                p, t, include_background=True, percentile=95, spacing=SPACING
            ).numpy()[0],
            lambda pairs=pairs: np.array([surfaces(a, b, SPACING).hausdorff() for a, b in pairs]),
        )
        compared(
            f"Dice {name}",
            lambda p=p, t=t: compute_dice(p, t).numpy()[0],
            lambda pairs=pairs: np.array([overlap(a, b).dice for a, b in pairs]),
        )
    speed, read = bandwidth(np.stack(CASES["tumour"])), 2 * 3 * np.prod(SHAPE)
    print(f"floor: {read / 1e6:.0f} MB of masks read once at {speed / 1e9:.0f} GB/s: {read / speed * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
