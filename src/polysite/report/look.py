"""Cases to look at, out of the evaluations of one or several methods."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polysite.report.preview import turned
from polysite.report.runs import Evaluation, Method
from polysite.report.viewer import Shown

METHODS = 5  # that are shown beside one another


def cases(methods: Sequence[Method], reference: str) -> list[Shown]:
    """The worst, median and best case of every hospital by the first method, as every method sees them.

    Of many methods the reference is shown and those of highest mean Dice; of a method, the first run that examined a
    case.
    """
    chosen = _chosen(methods, reference)
    first = next((run.evaluation for run in chosen[0].runs if run.evaluation and run.evaluation.about["shown"]), None)
    if first is None or len(first.about["labels"]) > 8:
        return []
    return [_case(first, place, chosen) for place in first.about["shown"]]


def _chosen(methods: Sequence[Method], reference: str) -> list[Method]:
    able = [m for m in methods if any(run.evaluation and run.evaluation.about["shown"] for run in m.runs)]
    if not able:
        return list(methods[:1])
    ranked = sorted(able, key=lambda m: (m.name != reference, -fmean(m.of(None, "dice") or [0.0])))
    kept = {m.name for m in ranked[:METHODS]}
    return [m for m in able if m.name in kept]


def _case(first: Evaluation, place: Mapping[str, Any], methods: Sequence[Method]) -> Shown:
    site, case = str(place["site"]), str(place["case"])
    image, truth = first.scan(site, case)
    predicted, scores = {}, {}
    for method in methods:
        for found in (run.evaluation for run in method.runs if run.evaluation):
            answer = found.answer(site, case)
            if answer is not None:
                predicted[method.name] = _cut(answer, place)
                scores[method.name] = {label: row["dice"] for label, row in found.own[site, case].items()}
                break
    height, width = place["pixel"]
    about = first.about
    return Shown(
        site, case, str(place["why"]), tuple(about["modalities"]), tuple(about["labels"]), image, truth, predicted,
        scores, (float(height), float(width)), bool(place["sides"]),
    )  # fmt: skip


def _cut(answer: np.ndarray, place: Mapping[str, Any]) -> np.ndarray:
    """An answer on the grid of the case as it is kept to look at."""
    step: int = place["step"]
    upright = turned(answer[None], str(place["axes"]))[0]
    return np.ascontiguousarray(upright[place["slices"]][:, ::step, ::step].astype(np.uint8))
