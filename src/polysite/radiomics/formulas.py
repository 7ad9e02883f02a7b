"""Formulas of the 93 features from their matrices, with the names and definitions of PyRadiomics 3.0.1.

Haralick et al. 1973, Textural features for image classification (GLCM); Galloway 1975 (GLRLM); Thibault et al. 2009
(GLSZM); Amadasun and King 1989 (NGTDM); Sun and Wee 1983 (GLDM); van Griethuysen et al. 2017, Computational radiomics
system to decode the radiographic phenotype, Cancer Research 77 (all of them as implemented).

Levels are counted from 1; row and column 0 of a matrix stand for voxels outside the mask. GLCM and GLRLM features are
means over the directions in which the mask has pairs (GLCM) or lines of two or more voxels (GLRLM); without such a
direction they are NaN, as in PyRadiomics.

If PyRadiomics' code differs from its documentation, this module follows the code:

* IMC2 of a direction is documented as 0 if rounding makes HXY exceed HXY2; it is NaN and left out of the mean.
* Voxels without any neighbour are documented not to count in the NGTDM; they do, with a difference of 0.
* MCC has an ε in its denominators, which shifts it if levels are rare among millions of voxels.

This module does not follow one error: the mean of many equal values may be off by a rounding error, and PyRadiomics
then gives a flat region a skewness of ±1 and a kurtosis of 1; here both are 0, as PyRadiomics documents.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polysite.compiled import compiled
from polysite.radiomics.kernels import second_eigenvalue

Floats = NDArray[np.float64]
Counts = NDArray[np.integer]

EPS = float(np.spacing(1))
BLOCKED = 512  # rows of a matrix from which LAPACK is faster
PERCENTILES = (10, 25, 50, 75, 90)

FIRST_ORDER = [
    "10Percentile",
    "90Percentile",
    "Energy",
    "Entropy",
    "InterquartileRange",
    "Kurtosis",
    "Maximum",
    "MeanAbsoluteDeviation",
    "Mean",
    "Median",
    "Minimum",
    "Range",
    "RobustMeanAbsoluteDeviation",
    "RootMeanSquared",
    "Skewness",
    "TotalEnergy",
    "Uniformity",
    "Variance",
]
GLCM = [
    "Autocorrelation",
    "ClusterProminence",
    "ClusterShade",
    "ClusterTendency",
    "Contrast",
    "Correlation",
    "DifferenceAverage",
    "DifferenceEntropy",
    "DifferenceVariance",
    "Id",
    "Idm",
    "Idmn",
    "Idn",
    "Imc1",
    "Imc2",
    "InverseVariance",
    "JointAverage",
    "JointEnergy",
    "JointEntropy",
    "MCC",
    "MaximumProbability",
    "SumAverage",
    "SumEntropy",
    "SumSquares",
]


def _of_size(small: str, large: str, number: str, of: str, level: str) -> list[str]:
    """Return the names of the features of grey level × size, in one order for three matrices: the size is that of runs,
    zones or dependences."""
    return [
        f"{small}Emphasis",
        f"{large}Emphasis",
        "GrayLevelNonUniformity",
        "GrayLevelNonUniformityNormalized",
        f"{number}NonUniformity",
        f"{number}NonUniformityNormalized",
        f"{of}Percentage",
        "GrayLevelVariance",
        f"{of}Variance",
        f"{of}Entropy",
        f"LowGrayLevel{level}Emphasis",
        f"HighGrayLevel{level}Emphasis",
        *(f"{size}{grey}GrayLevelEmphasis" for size in (small, large) for grey in ("Low", "High")),
    ]


GLRLM = _of_size("ShortRun", "LongRun", "RunLength", "Run", "Run")
GLSZM = _of_size("SmallArea", "LargeArea", "SizeZone", "Zone", "Zone")
GLDM = _of_size("SmallDependence", "LargeDependence", "Dependence", "Dependence", "")
LEFT_OUT = {("gldm", "GrayLevelNonUniformityNormalized"), ("gldm", "DependencePercentage")}  # as another, or always 1
NGTDM = ["Busyness", "Coarseness", "Complexity", "Contrast", "Strength"]

NAMES = tuple(
    f"{family}_{name}"
    for family, names in {
        "firstorder": FIRST_ORDER,
        "glcm": GLCM,
        "gldm": GLDM,
        "glrlm": GLRLM,
        "glszm": GLSZM,
        "ngtdm": NGTDM,
    }.items()
    for name in names
    if (family, name) not in LEFT_OUT
)


@dataclass(frozen=True)
class Values:
    """Sums over the values x of the mask, for the first-order features."""

    least: float
    largest: float
    mean: float
    percentiles: Mapping[int, float]
    energy: float  # Σ x²
    absolute: float  # Σ |x − mean|
    powers: tuple[float, float, float]  # Σ (x − mean)², ³, ⁴
    robust: float  # mean |x − mean| of the values from the 10th to the 90th percentile
    volume: float  # of a voxel, in mm³


@dataclass(frozen=True, eq=False)
class Direction:
    """Counts along one direction: how often level b follows level a, and runs of n ≥ 2 voxels of level a."""

    pairs: Counts
    runs: Counts
    lined: bool  # whether any line holds two voxels, adjacent or not


@dataclass(frozen=True, eq=False)
class Zones:
    """Numbers of zones by level and size; only combinations that occur."""

    level: Counts
    size: Counts
    count: Counts


def places(voxels: int) -> list[int]:
    """Return the positions, among the sorted values, of those that the percentiles are interpolated from."""
    at = [q / 100 * (voxels - 1) for q in PERCENTILES]
    return sorted({place for a in at for place in (int(a), min(int(a) + 1, voxels - 1))})


def percentiles(found: Mapping[int, float], voxels: int) -> dict[int, float]:
    """Return the percentiles, interpolated as in NumPy from the values at these places.

    >>> percentiles({0: 1.0, 1: 2.0}, 2)[90] == float(np.percentile([1, 2], 90))
    True
    """
    result = {}
    for q in PERCENTILES:
        at = q / 100 * (voxels - 1)
        low, high = found[int(at)], found[min(int(at) + 1, voxels - 1)]
        t = at - int(at)
        result[q] = high - (high - low) * (1 - t) if t >= 0.5 else low + (high - low) * t
    return result


def central(about: Sequence[float], voxels: int) -> tuple[float, float, float]:
    """Return Σ (x − mean)ᵏ for k = 2 to 4, from Σ (x − c)ᵏ for k = 1 to 4 about the mean c as computed.

    A computed mean is rounded: at an offset of 1e8 by 1e-8, which would show in the skewness. Σ (x − c) holds the rest.

    >>> central([3 * 0.5, 2.75, 3.375, 5.1875], 3)  # of 0, 1 and 2 about 0.5
    (2.0, 0.0, 2.0)
    """
    first, second, third, fourth = about
    d = first / voxels
    return (
        second - d * first,
        third - 3 * d * second + 2 * d * d * first,
        fourth - 4 * d * third + 6 * d * d * second - 3 * d * d * d * first,
    )


def all_features(
    values: Values, directions: Iterable[Mapping[str, float]], zones: Zones, dependence: Counts, apart: Counts
) -> dict[str, float]:
    """Return all 93 features by name; directions are the results of `along`."""
    voxels = dependence.sum(1)
    present = np.flatnonzero(voxels)
    level, size = np.nonzero(dependence)
    gldm = by_size(Zones(level, size + 1, dependence[level, size]))
    found = {
        **_named("firstorder", first_order(values, voxels[present])),
        **_mean(list(directions)),
        **_named("gldm", dict(zip(GLDM, gldm, strict=True))),
        **_named("glszm", dict(zip(GLSZM, by_size(zones), strict=True))),
        **_named("ngtdm", ngtdm(voxels[present], differences(apart)[present], present)),
    }
    return {name: float(found[name]) for name in NAMES}


def along(direction: Direction, voxels: Counts) -> dict[str, float]:
    """Return the GLCM and GLRLM features of one direction that are defined; ``voxels`` counts each level."""
    found: dict[str, float] = {}
    pairs, runs = direction.pairs, direction.runs.astype(np.int64)
    present = np.flatnonzero(voxels)
    held = pairs[np.ix_(present, present)]
    if held.any():
        found |= _named("glcm", glcm(held, present, len(voxels) - 1))
    if direction.lined:
        # a voxel that does not follow its equal begins a run
        runs[:, 1] = voxels - np.diagonal(pairs) - runs[:, 2:].sum(1)
        runs[0] = 0
        level, size = np.nonzero(runs)
        found |= _named("glrlm", dict(zip(GLRLM, by_size(Zones(level, size, runs[level, size])), strict=True)))
    return found


def first_order(values: Values, histogram: Counts) -> dict[str, float]:
    """Return the first-order features; entropy and uniformity come from the voxels of each level."""
    voxels = int(histogram.sum())
    p = histogram / voxels
    at = values.percentiles
    m2, m3, m4 = (power / voxels for power in values.powers)
    flat = values.least == values.largest
    return {
        "10Percentile": at[10],
        "90Percentile": at[90],
        "Energy": values.energy,
        "Entropy": _entropy(p),
        "InterquartileRange": at[75] - at[25],
        "Kurtosis": 0.0 if flat else m4 / m2**2,
        "Maximum": values.largest,
        "Mean": values.mean,
        "MeanAbsoluteDeviation": 0.0 if flat else values.absolute / voxels,
        "Median": at[50],
        "Minimum": values.least,
        "Range": values.largest - values.least,
        "RobustMeanAbsoluteDeviation": 0.0 if flat else values.robust,
        "RootMeanSquared": float(np.sqrt(values.energy / voxels)),
        "Skewness": 0.0 if flat else m3 / m2**1.5,
        "TotalEnergy": values.energy * values.volume,
        "Uniformity": float(p @ p),
        "Variance": 0.0 if flat else m2,
    }


def glcm(pairs: Counts, levels: Counts, top: int) -> dict[str, float]:
    """Return the GLCM features of one symmetric direction; the highest level of all normalises IDN and IDMN."""
    p = (pairs + pairs.T) / (2 * pairs.sum(dtype=np.int64))
    x, level = p.sum(1), levels.astype(np.float64)
    both = _gathered(np.add.outer(levels, levels), p)
    apart = _gathered(np.abs(np.subtract.outer(levels, levels)), p)
    total, k = np.arange(len(both), dtype=np.float64), np.arange(len(apart), dtype=np.float64)
    mean = x @ level
    away, spread = level - mean, total - 2 * mean
    variance = x @ away**2
    product = np.multiply.outer(x, x)
    log = np.log2(product + EPS)
    joint, crossed, independent = _entropy(p), -float((p * log).sum()), -float((product * log).sum())
    single = _entropy(x)
    information = independent - joint
    difference = k @ apart
    return {
        "Autocorrelation": (p * level).sum(1) @ level,
        "ClusterProminence": spread**4 @ both,
        "ClusterShade": spread**3 @ both,
        "ClusterTendency": spread**2 @ both,
        "Contrast": k**2 @ apart,
        "Correlation": (p * away).sum(1) @ away / (variance + EPS) if variance else 1.0,
        "DifferenceAverage": difference,
        "DifferenceEntropy": _entropy(apart),
        "DifferenceVariance": (k - difference) ** 2 @ apart,
        "Id": apart @ (1 / (1 + k)),
        "Idm": apart @ (1 / (1 + k**2)),
        "Idmn": apart @ (1 / (1 + k**2 / top**2)),
        "Idn": apart @ (1 / (1 + k / top)),
        "Imc1": (joint - crossed) / single if single else 0.0,
        "Imc2": float(np.sqrt(1 - np.exp(-2 * information))) if information >= 0 else np.nan,
        "InverseVariance": apart[1:] @ (1 / k[1:] ** 2),
        "JointAverage": mean,
        "JointEnergy": (p * p).sum(),
        "JointEntropy": joint,
        "MCC": maximal_correlation(p, product),
        "MaximumProbability": p.max(),
        "SumAverage": total @ both,
        "SumEntropy": _entropy(both),
        "SumSquares": variance,
    }


def maximal_correlation(p: Floats, product: Floats) -> float:
    """Return √ of the second eigenvalue of Q(i, j) = Σ_k p(i, k) p(j, k) / (x(i) x(k) + ε); 1 if there is one level.

    Without ε, Q has the eigenvalues of S², where S(i, k) = p(i, k) / √(x(i) x(k)) is symmetric: much the faster to
    solve. With it, Q ~ (S − Δ) S, which has those of (S − Δ/2)² but for terms of the second order in Δ; where these
    could matter, Q itself is solved.
    """
    if len(p) < 2:
        return 1.0
    s = np.divide(p, np.sqrt(product), out=np.zeros_like(p), where=product > 0)
    delta = s * (EPS / (product + EPS))
    if float((delta * delta).sum()) < 1e-7:
        if 4 <= len(p) <= BLOCKED:
            return float(compiled(second_eigenvalue)(s - delta / 2))
        return float(np.sort(np.abs(np.linalg.eigvalsh(s - delta / 2)))[-2])
    second = np.sort(np.linalg.eigvals((p / (product + EPS)) @ p.T))[-2]
    return float(np.sqrt(complex(second)).real)


def by_size(zones: Zones) -> list[float]:
    """Return the 16 features of grey level × size, in the order of their names, for runs, zones or dependences."""
    i, j, count = zones.level, zones.size, zones.count.astype(np.float64)
    total = count.sum()
    p = count / total
    of_level = _gathered(i, p)
    sizes, where = np.unique(j, return_inverse=True)
    of_size = _gathered(where, p)
    low, high = 1 / i.astype(np.float64) ** 2, i.astype(np.float64) ** 2
    small, large = 1 / j.astype(np.float64) ** 2, j.astype(np.float64) ** 2
    level = np.arange(len(of_level))
    return [
        p @ small,
        p @ large,
        of_level @ of_level * total,
        of_level @ of_level,
        of_size @ of_size * total,
        of_size @ of_size,
        1 / (p @ j),
        of_level @ (level - of_level @ level) ** 2,
        of_size @ (sizes - of_size @ sizes) ** 2,
        _entropy(p),
        p @ low,
        p @ high,
        p @ (low * small),
        p @ (high * small),
        p @ (low * large),
        p @ (high * large),
    ]


def differences(apart: Counts) -> Floats:
    """Return Σ |level − mean of the neighbours| of each level, from Σ |n · level − sum of n neighbours| for each n."""
    return apart[:, 1:] @ (1 / np.arange(1, apart.shape[1]))


def ngtdm(voxels: Counts, differs: Floats, levels: Counts) -> dict[str, float]:
    """Return the NGTDM features, from the voxels of each level and their differences from the neighbours."""
    p, i = voxels / voxels.sum(), levels.astype(np.float64)
    n, weighted, total = len(p), p * differs, differs.sum()
    coarse = weighted.sum()
    apart = np.subtract.outer(i, i) ** 2
    busy = np.abs(np.subtract.outer(i * p, i * p)).sum()
    sums = np.add.outer(p, p)
    return {
        "Busyness": coarse / busy if busy else 0.0,
        "Coarseness": 1 / coarse if coarse else 1e6,
        "Complexity": (np.sqrt(apart) * np.add.outer(weighted, weighted) / sums).sum() / voxels.sum(),
        "Contrast": (p * apart).sum(1) @ p * total / voxels.sum() / (n * (n - 1)) if n > 1 else 0.0,
        "Strength": (sums * apart).sum() / total if total else 0.0,
    }


def _gathered(index: Counts, p: Floats) -> Floats:
    """Return the sum of p at every index."""
    return np.bincount(index.ravel(), p.ravel()).astype(np.float64, copy=False)


def _entropy(p: Floats) -> float:
    p = p[p > 0]
    return -float(p @ np.log2(p + EPS))


def _named(family: str, found: Mapping[str, float]) -> dict[str, float]:
    return {f"{family}_{name}": value for name, value in found.items()}


def _mean(directions: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over the directions with a feature; NaN if there are none."""
    result = {}
    for name in NAMES:
        if name.startswith(("glcm_", "glrlm_")):
            found = [d[name] for d in directions if name in d and not np.isnan(d[name])]
            result[name] = sum(found) / len(found) if found else np.nan
    return result
