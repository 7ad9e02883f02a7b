"""Directions of the sites' changes of a model, compared without holding the models.

A change is kept as a sketch: every parameter is multiplied by a random sign and added to one of WIDTH numbers. Inner
products of sketches estimate those of the changes (Charikar, Chen and Farach-Colton, ICALP 2002); the error of a cosine
is about 1 / sqrt(WIDTH). The signs come from a secret of the server: a site that knew them could hide a direction.

For every site, ``compare`` gives four numbers:

    cosine       the median cosine of the site's change with those of the others
    coherence    how much the others agree without it: the median cosine of all pairs of them
    persistence  cosine between what sets its direction apart from the others' now and in the round before
    usual        the median persistence of the others

A site that opposes others who agree is suspicious. Where the others do not agree among themselves, as in late rounds, a
small or negative cosine says nothing. Medians, since several hostile sites may agree with each other. A site that
differs from the others by the same direction in every round, when the differences of the others are random or persist
less, pulls the model somewhere; hospitals whose data differ do so late, all of them alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polysite.payload import SiteId, plain
from polysite.tree import Tree

WIDTH = 4096  # numbers in a sketch
BLOCK = 1 << 16  # parameters that are compared at a time, a multiple of 8
SIGNS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)  # of every byte, one for each bit
FEWEST = 3  # sites that can be compared: of two that disagree, either may be wrong

Sketch = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Signs:
    """Random signs of all parameters, drawn from a secret."""

    secret: int

    def measure(self, value: Tree, base: Tree) -> tuple[float, Sketch]:
        """Return the Euclidean length and the sketch of the change from ``base`` to ``value``.

        Both are summed block by block: in an order that does not depend on the number of threads, and in little memory.
        """
        squares, total, at = 0.0, np.zeros(WIDTH), 0
        for place, name in enumerate(sorted(value)):
            new, old = plain(value[name]).reshape(-1), plain(base[name]).reshape(-1)
            bits = np.frombuffer(np.random.default_rng([self.secret, place]).bytes(-(-new.size // 8)), np.uint8)
            for start in range(0, new.size, BLOCK):
                here = slice(start, start + BLOCK)
                change = new[here].astype(np.float64) - old[here]
                squares += float(np.square(change).sum())
                signs = SIGNS[bits[start // 8 : (start + BLOCK) // 8]].reshape(-1)
                padded = np.zeros(-(-(at + change.size) // WIDTH) * WIDTH)
                np.multiply(change, signs[: change.size], out=padded[at : at + change.size])
                total += padded.reshape(-1, WIDTH).sum(0)
                at = (at + change.size) % WIDTH
        return float(np.sqrt(squares)), total


@dataclass(frozen=True, slots=True)
class Direction:
    """Direction of a site's change in one round, compared with the others."""

    cosine: float
    coherence: float
    apart: Sketch  # what sets it apart from the others
    persistence: float | None = None  # None in the first round
    usual: float | None = None


def compare(
    sketches: Mapping[SiteId, Sketch], factors: Mapping[SiteId, float], before: Mapping[SiteId, Sketch]
) -> dict[SiteId, Direction]:
    """Return the direction of every site; empty for fewer than ``FEWEST`` sites.

    Args:
        sketches: Sketches of the changes.
        factors: Weight of every site in the direction of the others.
        before: What set sites apart from the others in the round before.
    """
    names = sorted(sketches)
    if len(names) < FEWEST:
        return {}
    rows = np.stack([_unit(sketches[i]) for i in names])
    weight, cosines = np.array([factors[i] for i in names]), rows @ rows.T
    others = (weight @ rows - weight[:, None] * rows) / np.maximum(weight.sum() - weight, 1e-9)[:, None]
    apart = {i: rows[k] - others[k] for k, i in enumerate(names)}
    again = {i: float(_unit(apart[i]) @ _unit(plain(before[i]))) for i in names if i in before}
    found = {}
    for k, i in enumerate(names):
        theirs = [again[j] for j in names if j != i and j in again]
        usual = float(np.median(theirs)) if theirs and i in again else None
        rest = _others(k, weight)
        cosine, pairs = float(np.median(cosines[k, rest])), cosines[np.ix_(rest, rest)][np.triu_indices(len(rest), 1)]
        found[i] = Direction(cosine, float(np.median(pairs)), apart[i], again.get(i), usual)
    return found


def _others(k: int, weight: NDArray[np.float64]) -> list[int]:
    """Return the other sites: those with full weight, if there are at least two."""
    others = [j for j in range(len(weight)) if j != k]
    trusted = [j for j in others if weight[j] == 1]
    return trusted if len(trusted) > 1 else others


def _unit(sketch: Sketch) -> Sketch:
    length = float(np.sqrt(np.square(sketch).sum()))
    return sketch / length if length > 0 else sketch
