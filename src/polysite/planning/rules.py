"""Rules that turn statistics of the sites into settings, each with its reason.

Medians over sites are weighted by their numbers of cases. ``STEP`` is the number of voxels of all patches of a step:
what a laptop, or a GPU of 16 GB, computes in about a second.

=================  ===================================================================================================
prepare.           "RAS" if the axes of volumes differ, else as stored
  orientation
prepare.spacing    the median voxel size, if sizes differ by more than 10 % and are known; where voxels are more than
                   3 times as long as wide, their long side is not made longer than at the finest site (nnU-Net)
train.patch        the median size, its largest sides halved in small steps until two patches fill a step; sides are
                   multiples of what the network needs; at least ``SMALLEST``
train.batch        patches that fill a step, 2 to ``MOST_PATCHES``
train.patches      patches of a case in an epoch: as many as cover it, but so many that a site of median size takes
                   ``LEAST`` to ``MOST`` steps in a round
train.foreground   a third of the patches on a label, in a segmentation (nnU-Net)
train.lr           0.1 for a step of ``STEP`` voxels of plain SGD, and in proportion to the square root of their number
run.               so seldom that validation takes at most half the time of training, if a pass forward takes a third
  validate_every   of a training step
=================  ===================================================================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod, sqrt
from typing import Any

import numpy as np

from polysite.errors import DataError
from polysite.planning.statistics import SiteStatistics

STEP = {("cpu", 2): 1 << 17, ("cpu", 3): 1 << 17, ("cuda", 2): 1 << 21, ("cuda", 3): 1 << 22}
SMALLEST = {2: 64, 3: 32}  # of a side of a patch
MOST_PATCHES = 12  # per step
LEAST, MOST = 10, 50  # steps of a site in a round
SPREAD = 1.1  # of voxel sizes that need no resampling
FLAT = 3.0  # times that a voxel is longer than wide
FOREGROUND = 0.33
RATE = 0.1
SHARE = 0.5  # of the time of training that validation may take
BACKWARD = 3.0  # time of a training step over that of a forward pass


@dataclass(frozen=True)
class DataPlan:
    """Settings with their reasons.

    Args:
        values: Value of every planned setting, by its key, such as ``train.patch``.
        reasons: A sentence for each.
    """

    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        width = max(map(len, self.values))
        return [f"{key:{width}} = {_shown(value)}  ({self.reasons[key]})" for key, value in self.values.items()]


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else repr(value)


@dataclass(frozen=True)
class Frame:
    """What a study has decided already, and the machine.

    Args:
        divisor: Factor that the sides of a patch must be multiples of.
        device: ``cpu`` or ``cuda``.
        slices: Direction of 2D slices of volumes; empty for whole images.
        orientation: The study's own orientation, if it has one.
        spacing: The study's own spacing, if it has one.
        train: Share of the cases that train.
        validation: Share of the cases that validate.
    """

    divisor: int = 8
    device: str = "cpu"
    slices: str = ""
    orientation: str = ""
    spacing: tuple[float, ...] = ()
    train: float = 0.6
    validation: float = 0.2


def make_plan(sites: Sequence[SiteStatistics], frame: Frame = Frame()) -> DataPlan:
    """Return the plan for these sites."""
    first = sites[0]
    odd = next((s for s in sites if (s.dims, s.task, s.channels) != (first.dims, first.task, first.channels)), None)
    if odd is not None:
        raise DataError(
            f"site {odd.site!r} has {odd.channels} modalities of {odd.dims}D images for {odd.task}, and site "
            f"{first.site!r} {first.channels} of {first.dims}D for {first.task}; one plan needs equal ones"
        )
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def put(key: str, value: Any, reason: str) -> None:
        values[key], reasons[key] = value, reason

    axes = sorted({a for s in sites for a in s.axes})
    turned = bool(frame.orientation) or len(axes) > 1
    if len(axes) > 1 and not frame.orientation and not frame.slices:
        put("prepare.orientation", "RAS", f"the axes of the volumes differ: {', '.join(axes)}")
    shape, spacing = _median(sites, turned), _spacing(sites, turned)
    target = () if frame.slices else frame.spacing or _target(sites, spacing, turned)
    if target and not frame.spacing:
        put("prepare.spacing", target, f"voxel sizes differ by a factor of {_spread(sites):.2g}; this is their median")
    if target and spacing:
        shape = tuple(max(1, round(n * a / b)) for n, a, b in zip(shape, spacing, target, strict=True))
    if frame.slices:
        shape = _slice(_median(sites, True), frame.slices)
    dims, size = len(shape), " × ".join(map(str, shape))
    unit = "pixels" if dims == 2 else "voxels"
    step = STEP[frame.device, dims]
    patch = _patch(shape, step // 2, frame.divisor)
    put("train.patch", patch, f"the median {'slice' if frame.slices else 'image'} has {size} {unit}")
    batch = max(2, min(MOST_PATCHES, step // prod(patch)))
    put("train.batch", batch, f"{batch * prod(patch)} {unit} per step on a {'CPU' if frame.device == 'cpu' else 'GPU'}")
    cases = max(1.0, frame.train * float(np.median([s.cases for s in sites])))
    patches = _patches(shape, patch, batch, cases)
    put("train.patches", patches, f"{ceil(cases * patches / batch)} steps in a round at a site of {cases:.0f} cases")
    if first.task == "segmentation":
        put("train.foreground", FOREGROUND, "of the patches, this share is centred on a label")
    rate = float(f"{RATE * sqrt(batch * prod(patch) / STEP['cpu', dims]):.2g}")
    put("train.lr", rate, f"for plain SGD; it grows with the square root of the {unit} per step")
    ratio = _validation(shape, patch, patches, frame) if first.task == "segmentation" else 0.0
    every = max(1, ceil(ratio / SHARE))
    if every > 1:
        put("run.validate_every", every, f"a validation takes about {ratio:.1f} times as long as a round of training")
    return DataPlan(values, reasons)


def _weighted(rows: Sequence[Sequence[float]], sites: Sequence[SiteStatistics]) -> list[float]:
    """Return the median of every column, where a site counts once for each of its cases."""
    weights = [s.cases for s in sites]
    found = []
    for column in zip(*rows, strict=True):
        order = np.argsort(column)
        at = np.cumsum(np.array(weights)[order])
        found.append(float(np.array(column)[order][np.searchsorted(at, at[-1] / 2)]))
    return found


def _median(sites: Sequence[SiteStatistics], turned: bool) -> tuple[int, ...]:
    return tuple(int(v) for v in _weighted([s.turned_shape if turned else s.shape for s in sites], sites))


def _spacing(sites: Sequence[SiteStatistics], turned: bool) -> tuple[float, ...]:
    """Return the median voxel size; empty if a site does not know it."""
    if not all(s.spacing for s in sites):
        return ()
    return tuple(_weighted([s.turned_spacing if turned else s.spacing for s in sites], sites))


def _spread(sites: Sequence[SiteStatistics]) -> float:
    """Return by which factor voxel sizes differ, within and between sites."""
    sizes = np.array([s.turned_spacing for s in sites if s.turned_spacing])
    between = float((sizes.max(0) / sizes.min(0)).max()) if len(sizes) else 1.0
    return max(between, *(s.spread for s in sites))


def _target(sites: Sequence[SiteStatistics], spacing: tuple[float, ...], turned: bool) -> tuple[float, ...]:
    """Return the voxel size to resample to; empty if the voxels are alike or of unknown size."""
    if not spacing or _spread(sites) <= SPREAD:
        return ()
    longest = int(np.argmax(spacing))
    others = max(v for k, v in enumerate(spacing) if k != longest)
    found = list(spacing)
    if spacing[longest] > FLAT * others:
        finest = min((s.turned_spacing if turned else s.spacing)[longest] for s in sites)
        found[longest] = max(finest, others)
    return tuple(float(f"{v:.4g}") for v in found)


def _slice(turned: tuple[int, ...], axis: str) -> tuple[int, ...]:
    """Return rows and columns of a slice of a volume with axes right, anterior, superior."""
    x, y, z = turned
    return {"axial": (y, x), "coronal": (z, x), "sagittal": (z, y)}[axis]


def _patch(shape: Sequence[int], most: int, divisor: int) -> tuple[int, ...]:
    """Return the largest patch of at most so many voxels with the proportions of the image, as far as that goes.

    >>> _patch((600, 600), 1 << 16, 8), _patch((140, 172, 140), 1 << 16, 8), _patch((512, 512, 20), 1 << 16, 8)
    ((256, 256), (40, 40, 40), (48, 56, 24))
    """
    least = [min(ceil(n / divisor) * divisor, max(SMALLEST[len(shape)], divisor)) for n in shape]
    sides = [ceil(n / divisor) * divisor for n in shape]
    while prod(sides) > most:
        excess = [side / n if side > low else 0.0 for side, n, low in zip(sides, shape, least, strict=True)]
        if not any(excess):
            break
        largest = max(range(len(sides)), key=lambda k: (excess[k] > 0, sides[k]))
        sides[largest] -= divisor
    return tuple(sides)


def _patches(shape: Sequence[int], patch: Sequence[int], batch: int, cases: float) -> int:
    """Return the patches of a case in an epoch."""
    cover = ceil(prod(shape) / prod(patch))
    low, high = (ceil(steps * batch / cases) for steps in (LEAST, MOST))
    return int(max(1, low, min(cover, high)))


def _validation(shape: Sequence[int], patch: Sequence[int], patches: int, frame: Frame) -> float:
    """Return the time of a validation over that of a round of training."""
    starts = [max(1, ceil((n - p) / (p // 2)) + 1) if n > p else 1 for n, p in zip(shape, patch, strict=True)]
    return frame.validation * prod(starts) / (frame.train * patches * BACKWARD)
