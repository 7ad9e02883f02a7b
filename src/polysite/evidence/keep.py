"""Add the line of a finished run, or of a finished assessment, to the local table. A failure costs a warning only."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import stdev
from typing import Any

import numpy as np

from polysite.config import Study
from polysite.engines.record import Result, RoundRecord, finite, mean_score, measure_of
from polysite.evidence import table
from polysite.evidence.anonymous import Dealt, data_digest, is_drawn, method_settings, split_digest, training_settings
from polysite.evidence.lines import DistanceLine, RunLine, Spans
from polysite.heterogeneity.assessment import TESTED, Assessment, remoteness
from polysite.heterogeneity.verdict import differ
from polysite.tree import Tree

KEPT = ("emd", "euclidean", "energy")  # distances of a line


def keep_run(
    study: Study, method: str, dealt: Dealt, start: Tree, records: Sequence[RoundRecord], result: Result
) -> None:
    """Add a finished run to the local table.

    Args:
        study: The study.
        method: Title of its algorithms.
        dealt: The cases of every hospital.
        start: The initial parameters, which are counted.
        records: The records of all rounds.
        result: The result.
    """
    with _harmless("run"):
        if not table.is_off():
            table.append(_run_line(study, method, dealt, start, records, result, table.secret()))


def keep_assessment(study: Study, assessment: Assessment) -> None:
    """Add the distances of a finished assessment to the local table."""
    with _harmless("assessment"):
        if not table.is_off():
            table.append(distance_line(data_digest(study, table.secret()), assessment, **_made()))


@contextmanager
def _harmless(what: str) -> Iterator[None]:
    """Turn any failure into a warning: what is finished and on disk must not be lost for a line about it."""
    try:
        yield
    except Exception as problem:
        logging.getLogger("polysite").warning(
            "this %s adds nothing to the evidence bank (%s: %s); its own results are complete. %s names another "
            "folder for the bank, or 'off'", what, type(problem).__name__, problem, table.VARIABLE,
        )  # fmt: skip


def _run_line(
    study: Study,
    method: str,
    dealt: Dealt,
    start: Tree,
    records: Sequence[RoundRecord],
    result: Result,
    key: bytes,
) -> RunLine:
    order = sorted(dealt, key=lambda site: -train_size(dealt, site))
    scores = [finite(case.mean) for cases in result.scores.values() for case in cases.values()]
    known = [x for x in scores if x is not None]
    steps, sent = effort(study, records)
    return RunLine(
        data=data_digest(study, key),
        cases=split_digest(study, dealt, key),
        **about(study, start),
        sizes=tuple(train_size(dealt, site) for site in order),
        method=method,
        settings=method_settings(study),
        training=training_settings(study),
        rounds=result.rounds,
        steps=steps,
        bytes=sent,
        split=result.split,
        measure=measure_of(result.scores),
        score=mean_score(result.scores, "case"),
        by_site=tuple(_site_mean(result, site) for site in order),
        spread=stdev(known) if len(known) > 1 else None,
        tested=len(scores),
        **_made(),
    )


def about(study: Study, start: Tree) -> dict[str, Any]:
    """Return the task, whether the cases are drawn, and the network with its number of trained and running values."""
    return {
        "task": study.data.task,
        "dims": study.dims,
        "modalities": len(study.data.modality_names),
        "labels": len(study.data.label_names),
        "network": type(study.model).__name__,
        "drawn": is_drawn(study),
        "parameters": int(sum(np.prod(tuple(x.shape), dtype=np.int64) for x in start.values())),
    }


def train_size(dealt: Dealt, site: str) -> int:
    """Return the number of training cases of a site; slices of a volume are one case."""
    return len({case.source for case in dealt[site]["train"]})


def effort(study: Study, records: Sequence[RoundRecord]) -> tuple[int, int]:
    """Return the local steps and the bytes of all sites and rounds; pooled training sends nothing."""
    steps = sum(site.steps for record in records for site in record.sites.values())
    shared = [record for record in records if not (record.pooled or study.run.pooled)]
    sent = sum(site.bytes_down + site.bytes_up for record in shared for site in record.sites.values())
    return steps, sent + sum(sum(record.handed.values()) for record in shared)


def _site_mean(result: Result, site: str) -> float | None:
    cases = result.scores.get(site)
    return finite(mean_score({site: cases}, "site")) if cases else None


def distance_line(data: str, assessment: Assessment, **more: str) -> DistanceLine:
    """Return the distances of an assessment as a line; ``data`` is the digest of the cases."""
    differing = differ(assessment)
    tested = [assessment.distances[name].matrix for name in TESTED if name in assessment.distances]
    far = [remoteness(matrix, assessment.index(site)) for site in differing for matrix in tested]
    return DistanceLine(
        data=data,
        sizes=tuple(sorted((assessment.cases[site] for site in assessment.sites), reverse=True)),
        distances={name: _spans(assessment, name) for name in KEPT if name in assessment.distances},
        differing=len(differing),
        remoteness=finite(max(far)) if far else None,
        **more,
    )


def _spans(assessment: Assessment, name: str) -> Spans:
    distance = assessment.distances[name]
    upper = np.triu_indices(len(assessment.sites), 1)
    pairs, chance = distance.matrix[upper], distance.chance[upper]
    values = (pairs.mean(), pairs.max(), chance.mean(), distance.silhouette)
    mean, largest, expected, silhouette = (finite(float(f"{x:.6g}")) for x in values)
    return Spans(mean or 0.0, largest, expected, silhouette)


def _made() -> dict[str, Any]:
    """Return the version of polysite and today's date."""
    try:
        release = version("polysite")
    except PackageNotFoundError:
        release = ""
    return {"version": release, "date": date.today().isoformat()}
