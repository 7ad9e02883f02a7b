"""Outlying cases of a federation, found at their own sites from numbers that all sites share.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization in brain tumor segmentation, MIDL
2023, appendix E, which pools the features and names a case with a feature two orders of magnitude above that of any
other volume.

Two readings, of which either makes a case an outlier. ``above``: its feature is more than 100 times as large as that of
any other case. ``times``: its feature lies outside the range from the 2nd to the 98th percentile of all cases by more
than 100 times the width of that range. Percentiles are values of cases, the 2nd rounded up and the 98th down, so that
the smallest and the largest value are always outside: interpolated percentiles would let one extreme case among fifty
widen the range.

The sites share four numbers of every feature (`Shared`), each a value with a given rank among all cases, and the server
finds it by counting. Doubles have the order of 64-bit integers. In each of eight exchanges the server sends the leading
bytes that it knows, and every site counts its values that begin with them by their next byte. Only the sums of these
counts are needed, so they may go through secure aggregation. The result is exact. No value is sent, but a number with a
rank is a value of some case, without its owner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polysite.payload import SiteId
from polysite.radiomics.formulas import NAMES, Floats

Keys = NDArray[np.uint64]
Counts = NDArray[np.int64]

MAGNITUDES = 100.0  # two orders of magnitude
MIN_CASES = 10  # with fewer there are no outliers
ROUNDING = 1e-5  # smallest relative width of a range; less is rounding, as in the mean of z-scores
BYTES = 8


@dataclass(frozen=True, eq=False)
class Shared:
    """Numbers of every feature that all sites know."""

    cases: Counts  # in which the feature is defined
    low: Floats  # 2nd percentile
    high: Floats  # 98th percentile
    second: Floats  # second largest magnitude
    size: Floats  # median magnitude; of a mean, that of the root mean square


@dataclass(frozen=True)
class Extreme:
    """A feature of a case that makes it an outlier."""

    row: int  # of the case, at its site
    column: int
    value: float
    low: float
    high: float
    times: float  # distance from the range, in widths of the range
    above: float  # magnitude, in units of the largest magnitude of any other case


def share(sites: Mapping[SiteId, Floats]) -> Shared:
    """Return the shared numbers of sites that are all in this process: cases x features each, NaN if undefined."""
    rows = [np.asarray(values, np.float64) for values in sites.values()]
    sizes = [np.abs(values) for values in rows]
    cases = np.sum([np.isfinite(values).sum(0) for values in rows], axis=0)
    last = np.maximum(cases - 1, 0)
    low, high = np.ceil(last * 0.02).astype(np.int64), np.floor(last * 0.98).astype(np.int64)
    median = _selected(sizes, last // 2)
    return Shared(
        cases=cases,
        low=_selected(rows, low),
        high=_selected(rows, high),
        second=_selected(sizes, np.maximum(last - 1, 0)),
        size=median[_scale(len(median))],
    )


def find(values: Floats, shared: Shared) -> list[Extreme]:
    """Return what makes cases of one site outliers, the farthest of each case first."""
    width = np.maximum(shared.high - shared.low, ROUNDING * shared.size)
    other = np.maximum(shared.second, ROUNDING * shared.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.maximum(shared.low - values, values - shared.high) / width
        above = np.abs(values) / other
    far = ((times > MAGNITUDES) | (above > MAGNITUDES)) & (shared.cases >= MIN_CASES) & np.isfinite(values)
    found = []
    for row, column in np.argwhere(far).tolist():
        numbers = (values[row, column], shared.low[column], shared.high[column], times[row, column], above[row, column])
        found.append(Extreme(row, column, *map(float, numbers)))
    return sorted(found, key=lambda e: (e.row, -max(e.times, e.above)))


def counted(values: Floats, prefix: Keys, step: int) -> Counts:
    """Return at a site, for each feature, how many values begin with the prefix, by their byte number ``step``."""
    counts = np.zeros((values.shape[1], 256), np.int64)
    for column, keys in enumerate(_keys(values).T):
        known = keys[np.isfinite(values[:, column])]
        rest = np.uint64(8 * (BYTES - step))
        if step:
            known = known[known >> rest == prefix[column]]
        digits = (known >> (rest - np.uint64(8))) & np.uint64(255)
        counts[column] = np.bincount(digits.astype(np.int64), minlength=256)
    return counts


def _selected(sites: Sequence[Floats], ranks: Counts) -> Floats:
    """Return for each feature the value with this rank (from 0) among the cases of all sites; NaN without any case."""
    prefix, left = np.zeros(len(ranks), np.uint64), ranks.copy()
    some = np.zeros(len(ranks), np.bool_)
    for step in range(BYTES):
        until = np.cumsum(np.sum([counted(values, prefix, step) for values in sites], axis=0), axis=1)
        some = until[:, -1] > 0
        digit = np.minimum((until <= left[:, None]).sum(1), 255)
        below = np.where(digit > 0, until[np.arange(len(digit)), digit - 1], 0)
        left, prefix = left - below, (prefix << np.uint64(8)) | digit.astype(np.uint64)
    return np.where(some, _values(prefix), np.nan)


def _keys(values: Floats) -> Keys:
    """Return integers in the order of the values: negative numbers with all bits reversed, others with the first."""
    bits = np.ascontiguousarray(values + 0.0).view(np.uint64)  # -0 becomes 0
    return np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))


def _values(keys: Keys) -> Floats:
    bits = np.where(keys >> np.uint64(63), keys & np.uint64((1 << 63) - 1), ~keys)
    return bits.view(np.float64)


def _scale(columns: int) -> NDArray[np.intp]:
    """Return the column that gives each feature its size: a mean of z-scores is rounding, so the root mean square."""
    mean, root = (NAMES.index(f"firstorder_{name}") for name in ("Mean", "RootMeanSquared"))
    own = np.arange(columns)
    return np.where(own % len(NAMES) == mean, own - mean + root, own)
