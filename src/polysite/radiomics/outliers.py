"""Outlying cases of a federation, from numbers that all sites share.

Paper: Manthe et al., Whole-brain radiomics for clustered federated personalization in brain tumor segmentation, MIDL
2023, appendix E, which pools the features and names a case with a feature two orders of magnitude above that of any
other volume.

Two readings, of which either makes a case an outlier. ``above``: its feature is more than 100 times as large as that of
any other case. ``times``: its feature lies outside the range from the 2nd to the 98th percentile of all cases by more
than 100 times the width of that range. Percentiles are values of cases, the 2nd rounded up and the 98th down, so that
the smallest and the largest value are always outside: interpolated percentiles would let one extreme case among fifty
widen the range.

All cases are measured by four numbers of every feature (`Shared`), each the value with a given rank among all cases. A
number with a rank is a value of some case, without its owner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polysite.radiomics.formulas import NAMES, Floats

Counts = NDArray[np.int64]

MAGNITUDES = 100.0  # two orders of magnitude
MIN_CASES = 10  # with fewer there are no outliers
ROUNDING = 1e-5  # smallest relative width of a range; less is rounding, as in the mean of z-scores


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


def share(values: Floats) -> Shared:
    """Return the shared numbers of all cases: cases x features, NaN if undefined."""
    sizes = np.abs(values)
    cases = np.isfinite(values).sum(0)
    last = np.maximum(cases - 1, 0)
    median = _ranked(sizes, last // 2)
    return Shared(
        cases=cases,
        low=_ranked(values, np.ceil(last * 0.02).astype(np.int64)),
        high=_ranked(values, np.floor(last * 0.98).astype(np.int64)),
        second=_ranked(sizes, np.maximum(last - 1, 0)),
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


def _ranked(values: Floats, ranks: Counts) -> Floats:
    """Return for each feature the value with this rank (from 0) among the cases; NaN without any case."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.nan), axis=0)  # NaN comes last
    found: Floats = np.take_along_axis(ordered, ranks[None], axis=0)[0]
    return found


def _scale(columns: int) -> NDArray[np.intp]:
    """Return the column that gives each feature its size: a mean of z-scores is rounding, so the root mean square."""
    mean, root = (NAMES.index(f"firstorder_{name}") for name in ("Mean", "RootMeanSquared"))
    own = np.arange(columns)
    return np.where(own % len(NAMES) == mean, own - mean + root, own)
