"""Cleaning of predicted masks (`train.clean`) against the same steps in plain SciPy: three labels, 140 x 172 x 140.

Masks are nested balls with a hole and 40 false islands each. The results are compared first. One thread.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import ndimage

from polysite.training.cleaning import Clean, cleaned

SHAPE, REPEATS = (140, 172, 140), 5


def masks() -> np.ndarray:
    rng, grid = np.random.default_rng(0), np.indices(SHAPE).astype(np.float32)

    def ball(centre: Any, radius: float) -> np.ndarray:
        return sum((axis - c) ** 2 for axis, c in zip(grid, centre, strict=True)) < radius**2

    found = np.stack([ball((70, 80, 70), radius) for radius in (35, 25, 15)])
    for label in found:
        for _ in range(40):
            label |= ball(rng.integers(5, 130, 3), rng.integers(1, 4))
        label &= ~ball((70, 80, 70), 5)
    return found


def largest(mask: np.ndarray) -> np.ndarray:
    marks, _ = ndimage.label(mask, np.ones((3, 3, 3)))
    sizes = np.bincount(marks.reshape(-1))
    return marks == 1 + sizes[1:].argmax()


def seconds(work: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def main() -> None:
    given = masks()
    ways = {
        "largest component": (Clean(largest=True), largest),
        "holes filled": (Clean(fill=True), ndimage.binary_fill_holes),
        "both": (Clean(largest=True, fill=True), lambda mask: ndimage.binary_fill_holes(largest(mask))),
    }
    print(f"{'':20}{'polysite ms':>12}{'SciPy ms':>10}{'ratio':>8}")
    for name, (clean, plain) in ways.items():
        assert (cleaned(given, clean, (1, 1, 1)) == np.stack([plain(mask) for mask in given])).all()
        ours = seconds(lambda clean=clean: cleaned(given, clean, (1, 1, 1)))
        theirs = seconds(lambda plain=plain: [plain(mask) for mask in given])
        print(f"{name:20}{1e3 * ours:12.0f}{1e3 * theirs:10.0f}{ours / theirs:8.2f}")


if __name__ == "__main__":
    main()
