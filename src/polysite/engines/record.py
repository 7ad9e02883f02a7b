"""Typed records of a run: the lines of ``rounds.jsonl``, and ``result.json``. Only this module reads and writes them.

Files of 0.1.0 are read, too: they call the numbers of a reply ``said``, the diagnostics of an algorithm ``told``, and
have the scores of a case as one flat mapping.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Literal

from polysite.foreign import parse_json
from polysite.metrics import averages
from polysite.payload import SiteId
from polysite.privacy import Release
from polysite.site import CaseScore, Counts, Scores

Incident = Mapping[str, Any]  # time, what, and perhaps the site


def incident(what: str, site: SiteId = "") -> Incident:
    """Return an incident of this moment."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"time": now, **({"site": site} if site else {}), "what": what}


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """Effort of one site in one round."""

    loss: float | None  # mean over the steps; None if nothing was trained or it is not finite
    steps: int
    lr_sum: float
    seconds: float
    numbers: Mapping[str, float | None] = field(default_factory=dict)  # scalars of the reply: weight, cost, ...
    releases: tuple[Release, ...] = ()  # uses of its data under differential privacy
    epsilon: float | None = None  # that all its rounds of this study cost so far; None without noise


@dataclass(frozen=True, slots=True)
class SiteValidation:
    """Mean scores of one site's cases, and perhaps their counts together."""

    cases: int
    loss: float | None
    score: Mapping[str, float]  # by label
    counts: Counts = field(default_factory=dict)  # of voxels or cases, by label or class; empty if not known

    @classmethod
    def of(cls, scores: Scores, counted: bool = False) -> "SiteValidation":
        """Average the scores of some cases; with their counts if asked."""
        names = next((tuple(s.labels) for s in scores.values()), ())
        mean = {k: math.fsum(s.labels[k] for s in scores.values()) / len(scores) for k in names}
        loss = math.fsum(s.loss for s in scores.values()) / len(scores) if scores else math.nan
        return cls(len(scores), finite(loss), mean, averages.of_cases(scores) if counted else {})


@dataclass(frozen=True, slots=True)
class SiteGuard:
    """What the guard saw of one site in one round, and what it did (``guard.py``). Parts are fields of the reply."""

    lengths: Mapping[str, float]  # of the changes, by part
    longest: Mapping[str, float]  # that was allowed; 0 if there was no limit yet
    clipped: Mapping[str, float] = field(default_factory=dict)  # factor by which a change was shortened, by part
    cosine: float | None = None  # with the changes of the other sites (median); None if it was not compared
    coherence: float | None = None  # how much the other sites agree without it
    persistence: float | None = None  # cosine between what sets it apart now and in the round before
    usual_persistence: float | None = None  # the median of the others
    standing: float | None = None  # over all rounds so far: 1 like the others, 0 noise, -1 reversed
    factor: float = 1.0  # of its weight
    claimed_share: float | None = None  # in the mean, by its own number of cases
    capped_share: float | None = None  # that it was limited to; None if it was not


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One line of ``rounds.jsonl``."""

    round: int  # counted from 0 through all phases
    phase: int
    sites: Mapping[SiteId, SiteRecord]  # sites that replied
    absent: tuple[SiteId, ...] = ()  # sites that were asked and did not reply
    refused: Mapping[SiteId, str] = field(default_factory=dict)  # sites whose reply was not merged, and why
    shares: Mapping[SiteId, float] = field(default_factory=dict)  # weight of each reply in the aggregate
    diagnostics: Mapping[str, float] = field(default_factory=dict)  # numbers that the algorithm reports
    bytes_down: Mapping[SiteId, int] = field(default_factory=dict)  # to every site since the record before: models,
    bytes_up: Mapping[SiteId, int] = field(default_factory=dict)  # and from it: replies, scores, steps of secure sums
    pooled: bool = False  # centralised training
    validation: Mapping[SiteId, SiteValidation] = field(default_factory=dict)
    measure: str = ""  # Dice or accuracy; empty if this round was not validated
    mean_score: float | None = None
    best_round: int | None = None  # up to now
    best_rounds: Mapping[SiteId, int] = field(default_factory=dict)  # of every site, with ``run.best = "own"``
    peeked: Mapping[SiteId, SiteValidation] = field(default_factory=dict)  # test scores, with ``run.peek``
    incidents: tuple[Incident, ...] = ()
    elapsed: float = 0.0  # seconds since the phase began or was resumed
    guard: Mapping[SiteId, SiteGuard] = field(default_factory=dict)  # sites whose replies were merged, with run.guard

    def with_traffic(self, down: Mapping[SiteId, int], up: Mapping[SiteId, int]) -> "RoundRecord":
        """Return the record with more bytes to sites, and from them."""
        down, up = _sum(self.bytes_down, down), _sum(self.bytes_up, up)
        return replace(self, bytes_down=down, bytes_up=up)

    def to_json(self) -> str:
        """Return the line, without the line break."""
        return json.dumps(asdict(self))

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> "RoundRecord":
        """Return the record of a parsed line of ``rounds.jsonl``; raise ValueError if it is none."""
        try:
            found["diagnostics"] = found.pop("told", {}) or found.get("diagnostics", {})
            if "bytes_down" not in found:  # earlier files have them at every site, and those of a phase's start apart
                down, handed = ({i: s["bytes_down"] for i, s in found["sites"].items()}, found.get("handed", {}))
                found["bytes_down"] = {i: down.get(i, 0) + handed.get(i, 0) for i in {**down, **handed}}
                found["bytes_up"] = {i: s["bytes_up"] for i, s in found["sites"].items()}
            found["sites"] = {i: _site_record(s) for i, s in found["sites"].items()}
            for name in ("validation", "peeked"):
                found[name] = {i: _validation(v) for i, v in found.get(name, {}).items()}
            for name in ("absent", "incidents"):
                found[name] = tuple(found.get(name, ()))
            found["guard"] = {i: SiteGuard(**_known(SiteGuard, g)) for i, g in found.get("guard", {}).items()}
            return cls(**_known(cls, found))
        except (TypeError, KeyError, AttributeError, OverflowError) as problem:
            raise ValueError(f"not the record of a round: {problem!r}") from problem


def _sum(some: Mapping[SiteId, int], more: Mapping[SiteId, int]) -> dict[SiteId, int]:
    return {i: some.get(i, 0) + more.get(i, 0) for i in {**some, **more}}


def _known(kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a record still has; those of earlier versions are left out."""
    return {f.name: found[f.name] for f in fields(kind) if f.name in found}


def round_seconds(records: Iterable[RoundRecord]) -> list[float]:
    """Return the seconds of every round; breaks before a run was resumed do not count.

    >>> round_seconds(RoundRecord(k, 0, {}, elapsed=s) for k, s in enumerate((2.0, 5.0, 1.5)))
    [2.0, 3.0, 1.5]
    """
    marks = [0.0, *(record.elapsed for record in records)]  # since the phase began, or was resumed
    return [b - a if b >= a else b for a, b in pairwise(marks)]


def _site_record(found: Mapping[str, Any]) -> SiteRecord:
    moved = ("bytes_down", "bytes_up")
    renamed = {"numbers" if k == "said" else k: v for k, v in found.items() if k not in moved}
    return SiteRecord(**{**renamed, "releases": tuple(Release(**r) for r in renamed.get("releases", ()))})


def _validation(found: Mapping[str, Any]) -> SiteValidation:
    return SiteValidation(**{**found, "counts": _counts(found.get("counts", {}))})


def _counts(found: Mapping[str, Any]) -> Counts:
    return {name: (int(tp), int(fp), int(fn), int(tn)) for name, (tp, fp, fn, tn) in found.items()}


@dataclass(frozen=True, slots=True)
class Result:
    """Content of ``result.json``: the best round and the scores of its model.

    With ``run.best = "own"`` every site uses the model of its own best round. ``validation`` and ``test`` are scores of
    these models, and ``common`` has those of the model of ``best_round``.
    """

    task: str
    labels: tuple[str, ...]
    modalities: tuple[str, ...]
    rounds: int  # how many there were
    best_round: int
    best_phase: int
    validation: Mapping[SiteId, Scores]
    test: Mapping[SiteId, Scores]
    incidents: tuple[Incident, ...] = ()  # since the last round
    best_rounds: Mapping[SiteId, int] = field(default_factory=dict)  # by site; empty if best_round is that of all
    common: Mapping[str, Mapping[SiteId, Scores]] = field(default_factory=dict)  # by split: scores of best_round
    bytes_down: Mapping[SiteId, int] = field(default_factory=dict)  # to every site since the last round
    bytes_up: Mapping[SiteId, int] = field(default_factory=dict)

    def round_of(self, site: SiteId | None) -> int:
        """Return the round whose model a site uses; None stands for the model that all sites share."""
        agreed = {*self.best_rounds.values()}
        common = agreed.pop() if len(agreed) == 1 else self.best_round
        return common if site is None else self.best_rounds.get(site, common)

    @property
    def split(self) -> str:
        """The split that the result is reported on: test, or validation if there are no test cases."""
        return "test" if any(self.test.values()) else "validation"

    @property
    def scores(self) -> Mapping[SiteId, Scores]:
        """Scores of that split."""
        return self.test if self.split == "test" else self.validation

    def to_json(self) -> str:
        """Return the text of ``result.json``."""
        return json.dumps(self.plain(), indent=1) + "\n"

    def plain(self) -> dict[str, Any]:
        """Return the result as mappings, lists and numbers."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("validation", "test"):
            values[name] = _sites_to_plain(values[name])
        values["common"] = {split: _sites_to_plain(sites) for split, sites in self.common.items()}
        return values

    @classmethod
    def from_json(cls, text: str) -> "Result":
        """Parse the text of ``result.json``; raise ValueError if it is not a result."""
        found = parse_json(text)
        try:
            found.pop("cleaning", None)  # of a run that chose how to clean masks
            for name in ("validation", "test"):
                found[name] = _sites_from_plain(found[name])
            found["common"] = {split: _sites_from_plain(sites) for split, sites in found.get("common", {}).items()}
            for name in ("labels", "modalities", "incidents"):
                found[name] = tuple(found.get(name, ()))
            return cls(**{"task": "segmentation", "best_phase": 0, **found})
        except (TypeError, KeyError, AttributeError, OverflowError) as problem:
            raise ValueError(f"not the result of a run: {problem!r}") from problem


def _sites_to_plain(sites: Mapping[SiteId, Scores]) -> dict[SiteId, Any]:
    return {i: scores_to_plain(scores) for i, scores in sites.items()}


def _sites_from_plain(sites: Mapping[SiteId, Any]) -> dict[SiteId, Scores]:
    return {i: scores_from_plain(cases) for i, cases in sites.items()}


def scores_to_plain(scores: Scores) -> dict[str, Any]:
    """Return scores as JSON values; a number that is not finite becomes None."""
    return {case: {k: v for k, v in _plain(s).items() if v is not None or k == "loss"} for case, s in scores.items()}


def _plain(score: CaseScore) -> dict[str, Any]:
    labels = {k: finite(v) for k, v in score.labels.items()}
    classes = {"predicted": score.predicted, "true": score.true}
    return {"labels": labels, "loss": finite(score.loss), **classes, "counts": score.counts or None}


def scores_from_plain(cases: Mapping[str, Mapping[str, Any]]) -> Scores:
    """Parse scores that ``scores_to_plain`` or polysite 0.1.0 wrote."""
    return {case: _score(found) for case, found in cases.items()}


def _score(found: Mapping[str, Any]) -> CaseScore:
    if not isinstance(found.get("labels"), Mapping):  # 0.1.0
        aside = {"labels", "loss", "said", "true"}
        found = {
            "labels": {k: v for k, v in found.items() if k not in aside},
            "loss": found.get("loss"),
            "predicted": found.get("said"),
            "true": found.get("true"),
        }
    labels = {k: math.nan if v is None else float(v) for k, v in found["labels"].items()}
    predicted, true = (None if v is None else int(v) for v in (found.get("predicted"), found.get("true")))
    loss = math.nan if found["loss"] is None else float(found["loss"])
    return CaseScore(labels, loss, predicted, true, _counts(found.get("counts", {})))


def mean_score(scores: Mapping[SiteId, Scores], over: Literal["case", "site"]) -> float:
    """Average over the labels of a case, then over all cases, or over the cases of a site and then over sites.

    >>> a = {"1": CaseScore({"WT": 1.0}, loss=0.0), "2": CaseScore({"WT": 0.8}, loss=0.0)}
    >>> scores = {"a": a, "b": {"3": CaseScore({"WT": 0.3}, loss=0.0)}}
    >>> round(mean_score(scores, "case"), 3), round(mean_score(scores, "site"), 3)
    (0.7, 0.6)
    """
    sites = [[case.mean for case in cases.values()] for cases in scores.values() if cases]
    if over == "case":
        sites = [[d for site in sites for d in site]]
    return math.fsum(math.fsum(s) / len(s) for s in sites) / len(sites)


def measure_of(scores: Mapping[SiteId, Scores]) -> str:
    """Return the name of the main measure: Dice, or accuracy in a classification."""
    classified = any("accuracy" in s.labels for cases in scores.values() for s in cases.values())
    return "accuracy" if classified else "Dice"


def finite(x: float) -> float | None:
    """Return x, or None if it is NaN or infinite: JSON has no word for these."""
    return x if math.isfinite(x) else None
