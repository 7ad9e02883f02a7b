"""Scans to look at: a prepared case, upright and small enough for a page, from its evaluation or from the data.

``predictions.npz`` of an evaluation holds the predictions of all cases, ``scans.npz`` the scans of a few. The scan of
any other case is prepared again from the data of the run.
"""

from math import ceil

import numpy as np

from polysite import config
from polysite.data.cache import Cache, place
from polysite.data.case import Case, CaseRef
from polysite.data.images import BARE, suffix
from polysite.data.slices import volume_of
from polysite.errors import RunError
from polysite.report.example_cases import Scan
from polysite.report.orientation import axes_of, turned, turned_size
from polysite.report.preview import widest
from polysite.report.runs import Summary
from polysite.training.torch_site import packed

SLICES, SIDE = 64, 192  # largest scan that is kept to look at: slices, and pixels of a side


def is_oriented(ref: CaseRef) -> bool:
    """Whether the files of a case state which side is left; arrays and pictures do not, even with a spacing."""
    return not any(suffix(str(file)) in BARE for file in ref.files)


def upright_scan(case: Case, axes: str, oriented: bool = True) -> Scan:
    """Return image and ground truth of a prepared case, upright and at most SLICES x SIDE x SIDE.

    Args:
        case: The prepared case.
        axes: Directions of its axes.
        oriented: Whether its files state these directions.
    """
    image, label = turned(case.image, axes), turned(case.label, axes)
    step = max(1, ceil(max(image.shape[2:]) / SIDE))
    slices = _slices(label)
    grey, truth = _grey(image)[:, slices, ::step, ::step], packed(label)[slices, ::step, ::step]
    depth, height, width = turned_size(case.spacing, axes)
    sides = bool(axes and case.unit and oriented)
    crop = {"axes": axes, "slices": slices, "step": step, "pixel": [height, width], "depth": depth, "sides": sides}
    return Scan(grey, truth, crop)


def read_scan(run: Summary, site: str, case: str) -> Scan:
    """Return the scan of any evaluated case: as it was kept, or prepared again from the data of the run."""
    evaluation = run.evaluation
    for kept in evaluation.about["shown"] if evaluation else ():
        if evaluation and (kept["site"], kept["case"]) == (site, case):
            return Scan(*evaluation.scan(site, case), kept)
    study = config.parse(run.config, where=str(run.path / "config.toml"))
    refs, volume = study.data.case_refs(study.seed), volume_of(case) if study.slices.axis else case
    found = [ref for ref in refs.get(site, ()) if ref.name == volume]
    found += [ref for each in refs.values() for ref in each if ref.name == volume]
    found = [ref for cases in study.cut(found[:1]).values() for ref in cases if ref.name == case]
    if not found:
        raise RunError(f"case {case!r} of site {site!r} is not in the data of {run.path} any more, so it is not shown")
    axes = study.prepare.orientation or axes_of(found[0].open())
    prepared = Cache(place()).get(found[0], study.prepare, study.train.patch)
    return upright_scan(prepared, axes, is_oriented(found[0]))


def _slices(label: np.ndarray) -> list[int]:
    """Return the slices to keep: all, or half of SLICES spread over the scan and half over the labelled part, extended
    by a quarter on each side, with the widest."""
    count = label.shape[1]
    if count <= SLICES:
        return list(range(count))
    (labelled,) = np.nonzero(label.any((0, 2, 3)))
    low, high = (labelled[0], labelled[-1]) if len(labelled) else (0, count - 1)
    margin = (high - low) // 4 + 2
    low, high = max(0, low - margin), min(count - 1, high + margin)
    half = SLICES // 2
    within = np.linspace(low, high, min(half - 1, high - low + 1)).round()
    everywhere = np.linspace(0, count - 1, half).round()  # shows false positives elsewhere
    return sorted({int(k) for k in (*within, *everywhere)} | {widest(label)})


def _grey(image: np.ndarray) -> np.ndarray:
    """Return every modality as 0 to 255, between its 1st and 99.5th percentile; zero stays black."""
    grey = np.zeros(image.shape, np.uint8)
    for k, volume in enumerate(image):
        inside = volume[volume != 0]
        low, high = np.percentile(inside, (1, 99.5)) if len(inside) else (0.0, 1.0)
        grey[k] = (255 * np.clip((volume - low) / max(high - low, 1e-9), 0, 1)).round() * (volume != 0)
    return grey
