"""Example cases of one or several methods, from their evaluations."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from polysite.errors import ConfigError, RunError, nearest
from polysite.report.evaluations import Evaluation, Key
from polysite.report.orientation import turned
from polysite.report.runs import Method
from polysite.report.viewer import Shown

MAX_METHODS = 5  # side by side


@dataclass(frozen=True, eq=False)
class Scan:
    """A scan to look at: image (modality, slice, row, column) from 0 to 255, ground truth in bits, and the crop."""

    image: np.ndarray
    truth: np.ndarray  # (slice, row, column), bit k for label k
    crop: Mapping[str, Any]  # axes, slices, step, pixel, sides


def cases(methods: Sequence[Method], reference: str) -> list[Shown]:
    """Return the worst, median and best case of every hospital by the reference, with the predictions of all methods.

    Of more than MAX_METHODS methods, the reference and those with the highest mean Dice are shown; of several seeds,
    the first. If no scans of the reference were kept, the method with the highest mean Dice takes its place. Of several
    folds, the cases of the first are shown.
    """
    able = [m for m in methods if any(run.evaluation and run.evaluation.about["shown"] for run in m.runs)]
    if not able or len(able[0].first.labels) > 8:
        return []
    ranked = sorted(able, key=lambda m: (m.name != reference, -fmean(m.of(None, "dice") or [0.0])))
    beside = {m.name for m in ranked[:MAX_METHODS]}
    chosen = [ranked[0], *(m for m in able if m.name in beside and m is not ranked[0])]
    return [
        _case(evaluation, key, Scan(*evaluation.scan(*key), place), place["why"], chosen)
        for evaluation in [e for e in _evaluations(ranked[0], ranked[0].first.settings["seed"]) if e.about["shown"]][:1]
        for place in evaluation.about["shown"]
        for key in [(place["site"], place["case"])]
    ]


def named(methods: Sequence[Method], names: Sequence[str]) -> list[Shown]:
    """Return cases by name, with the predictions of all methods; the end of a name is enough where only one case fits.

    A scan that no evaluation kept is prepared again from the data of the run.
    """
    from polysite.report.scans import read_scan  # imports torch

    shown = []
    for key in (_find(methods, text) for text in names):
        runs = [
            run for m in methods for run in m.runs if run.evaluation and run.evaluation.prediction(*key) is not None
        ]
        if not runs or runs[0].evaluation is None:
            raise RunError(f"no prediction of case {key[1]!r} was kept; 'polysite evaluate RUN --again' makes it anew")
        shown.append(_case(runs[0].evaluation, key, read_scan(runs[0], *key), "", methods))
    return shown


def _find(methods: Sequence[Method], text: str) -> Key:
    """Return the site and name of the evaluated case that a user means."""
    keys = sorted({key for m in methods for run in m.runs for key in run.values("dice")})
    alike = [k for k in keys if k[1] == text] or [k for k in keys if k[1].endswith(text)]
    if not alike:
        raise ConfigError(f"there is no evaluated case {text!r}; {nearest(text, [case for _, case in keys])}")
    if len(alike) > 1:
        raise ConfigError(f"{text!r} may be any of {', '.join(case for _, case in alike[:4])}; write the whole name")
    return alike[0]


def _evaluations(method: Method, seed: int) -> list[Evaluation]:
    """Return the evaluations of the runs with one seed: phantoms of another seed are other patients."""
    return [run.evaluation for run in method.runs if run.evaluation and run.settings["seed"] == seed]


def _case(first: Evaluation, key: Key, scan: Scan, why: str, methods: Sequence[Method]) -> Shown:
    (site, case), crop = key, scan.crop
    predicted, scores = {}, {}
    for method in methods:
        for evaluation in _evaluations(method, methods[0].first.settings["seed"]):
            prediction = evaluation.prediction(site, case)
            mask = None if prediction is None or (site, case) not in evaluation.own else _cut(prediction, crop)
            if mask is not None and mask.shape == scan.truth.shape:  # another study may prepare cases differently
                predicted[method.name] = mask
                scores[method.name] = {label: row["dice"] for label, row in evaluation.own[site, case].items()}
                break
    about, (height, width) = first.about, crop["pixel"]
    step, slices = crop["step"], len(scan.truth) > 1 and crop.get("depth") and crop.get("slices")
    depths = _depths([k * crop["depth"] / step for k in slices]) if slices else ()
    return Shown(
        site, case, why, tuple(about["modalities"]), tuple(about["labels"]), scan.image, scan.truth, predicted, scores,
        (float(height), float(width)), bool(crop["sides"]), depths,
    )  # fmt: skip


def _depths(places: Sequence[float]) -> tuple[float, ...]:
    """Return how much of the third axis every slice stands for, in the unit of a pixel: up to the middle between two.

    >>> _depths([0.0, 1.0, 3.0])
    (1.0, 1.5, 2.0)
    """
    gaps = [b - a for a, b in itertools.pairwise(places)]
    edges = [gaps[0], *gaps, gaps[-1]]
    return tuple((a + b) / 2 for a, b in itertools.pairwise(edges))


def _cut(prediction: np.ndarray, place: Mapping[str, Any]) -> np.ndarray:
    """Return a prediction on the grid of the kept scan."""
    step = place["step"]
    upright = turned(prediction[None], place["axes"])[0]
    if max(place["slices"]) >= len(upright):
        return np.zeros((0, 0, 0), np.uint8)  # prepared on another grid
    return np.ascontiguousarray(upright[place["slices"]][:, ::step, ::step].astype(np.uint8))
