"""What the tables and figures read out of run folders. Nothing is computed here but means.

A ``Summary`` is one run. A ``Method`` is what a table has a line for: the runs that differ in nothing but their seed or
fold. A case that several of them examine, with other seeds, counts once, with the mean.
"""

import csv
import json
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import BadZipFile

import numpy as np

from polysite.engines.phases import SHARED
from polysite.engines.record import RoundRecord, mean_score, measure_of
from polysite.engines.run_folder import RunFolder
from polysite.errors import RunError
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.site import CaseScore, Scores

Key = tuple[str, str]  # site and case
MEND = "'polysite evaluate --again' makes it anew, and a page does without it with --no-scans"
WORDS = ("model", "site", "case", "label")  # columns of an evaluation that hold no number


@dataclass(frozen=True)
class Evaluation:
    """What ``polysite evaluate`` wrote about a run."""

    path: Path
    about: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]  # a model on a label of a case

    @cached_property
    def own(self) -> Mapping[Key, Mapping[str, Mapping[str, float]]]:
        """Every case under the model that its hospital uses: label -> measure -> value."""
        found: dict[Key, dict[str, Mapping[str, float]]] = {}
        for row in self.rows:
            if row["model"] in (SHARED, row["site"]):
                found.setdefault((row["site"], row["case"]), {})[row["label"]] = row
        return found

    def answer(self, site: str, case: str) -> np.ndarray | None:
        """What the hospital's model answered, on the grid of the prepared case; None if it was not kept."""
        return self._kept("predictions.npz", f"{site}/{case}")

    def scan(self, site: str, case: str) -> tuple[np.ndarray, np.ndarray]:
        """Image (modality, slice, row, column) and truth (slice, row, column) of a case that was kept to look at."""
        image, truth = (self._kept("scans.npz", f"{site}/{case}/{what}") for what in ("image", "truth"))
        if image is None or truth is None:
            raise RunError(f"{self.path / 'scans.npz'} does not hold case {case!r} of site {site!r}; {MEND}")
        return image, truth[0]

    @cached_property
    def clusters(self) -> list[dict[str, str]]:
        """A row for every case: its hospital, its cluster, where it lies, what is labelled; none without clusters."""
        path = self.path / "clusters.csv"
        if not path.is_file():
            return []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        except (OSError, ValueError) as problem:
            raise RunError(f"{path} cannot be read: {problem}; 'polysite evaluate --again' makes it anew") from problem

    def _kept(self, file: str, name: str) -> np.ndarray | None:
        if not (self.path / file).exists():  # nothing was kept, as in a deployed run
            return None
        try:
            with np.load(self.path / file, allow_pickle=False) as kept:
                return kept[name] if name in kept.files else None
        except (OSError, ValueError, BadZipFile, zlib.error) as problem:
            raise RunError(f"{self.path / file} cannot be read: {problem}; {MEND}") from problem


@dataclass(frozen=True)
class Summary:
    """One run, finished or under way, as a reader wants it."""

    path: Path
    name: str
    config: str
    versions: Mapping[str, Any]
    records: Sequence[RoundRecord]
    split: str = ""  # which patients the scores are of; empty while it is under way
    scores: Mapping[str, Scores] = field(default_factory=dict)  # by site and case
    best_round: int = -1
    evaluation: Evaluation | None = None

    @property
    def finished(self) -> bool:
        return bool(self.split)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return tomllib.loads(self.config)

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """The groups of sites that train together, of the last phase that has some."""
        phases = (self.settings, *self.settings.get("then", ()))
        chosen = (p["algorithm"] for p in phases if isinstance(p.get("algorithm"), dict))
        return next((a["groups"] for a in reversed(list(chosen)) if a.get("groups")), {})

    @property
    def sites(self) -> list[str]:
        """Those whose patients are examined; while it is under way, those that train."""
        return sorted(s for s, cases in self.scores.items() if cases) or sorted(self.trained)

    @property
    def trained(self) -> set[str]:
        return {site for r in self.records for site in r.sites}

    @property
    def unseen(self) -> set[str]:
        """Hospitals that judge a model which others trained; none where all judges are strangers to the training."""
        return set(self.sites) - self.trained if self.trained & set(self.sites) else set()

    @property
    def measure(self) -> str:
        return measure_of(self.scores) if self.scores else next((r.measure for r in self.records if r.measure), "")

    @property
    def labels(self) -> list[str]:
        """The labels of a segmentation; a classification has one number a case, its accuracy."""
        return next((list(case.labels) for cases in self.scores.values() for case in cases.values()), [])

    def values(
        self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> dict[Key, float]:
        """A measure of every case, of one label or the mean over those labels for which it is defined."""
        names = [label] if label else self.labels
        if self.evaluation and self.measure == "Dice":
            own = self.evaluation.own
            found = {key: [policy.value(labels[k], measure) for k in names] for key, labels in own.items()}
        elif measure in ("dice", "accuracy"):
            flat = ((s, c, case) for s, cases in self.scores.items() for c, case in cases.items())
            found = {(s, c): [case.labels[k] for k in names] for s, c, case in flat}
        else:
            return {}
        return {key: mean for key, numbers in sorted(found.items()) if not isnan(mean := _mean(numbers))}

    def named(self, values: Mapping[Key, float]) -> Mapping[Key, float]:
        """The same; phantoms that another seed draws are other patients, although they have the same names."""
        other = self.evaluation and self.evaluation.about["data"]
        if not str(self.settings["data"]["name"]).startswith("phantom") or other:
            return values
        return {(site, f"{case}, seed {self.settings['seed']}"): value for (site, case), value in values.items()}

    @property
    def begins(self) -> list[int]:
        """The rounds that later phases began with, counted from one."""
        found = {r.phase: r.round + 1 for r in reversed(self.records) if r.phase}
        return sorted(found.values())

    @property
    def mean_of_hospitals(self) -> float:
        """Every hospital counts once, with the mean over its cases."""
        return mean_score(self.scores, "site")

    @property
    def best_mean(self) -> float:
        """The highest that the mean over hospitals reached on test patients in any round; NaN if nobody looked."""
        looks = [r.peeked.values() for r in self.records if r.peeked]
        return max((fmean(fmean(found.score.values()) for found in sites) for sites in looks), default=nan)

    @property
    def curve(self) -> tuple[list[int], list[float]]:
        """The measure on validation patients by round."""
        seen = [(r.round + 1, r.mean_score) for r in self.records if r.mean_score is not None]
        return [r for r, _ in seen], [d for _, d in seen]

    def site_curve(self, site: str) -> tuple[list[int], list[float]]:
        """The same of one hospital."""
        known = [(r.round + 1, r.validation[site].score) for r in self.records if site in r.validation]
        seen = [(r, fmean(score.values())) for r, score in known if score]
        return [r for r, _ in seen], [d for _, d in seen]


@dataclass(frozen=True)
class Method:
    """The runs that differ in nothing but their seed or fold."""

    name: str
    runs: tuple[Summary, ...]

    @property
    def first(self) -> Summary:
        return self.runs[0]

    @property
    def sites(self) -> list[str]:
        return sorted({s for run in self.runs for s in run.sites})

    @property
    def evaluated(self) -> bool:
        """Whether all measures are known, not Dice alone."""
        return self.first.measure == "Dice" and all(run.evaluation for run in self.runs)

    def values(
        self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> dict[Key, float]:
        """A measure of every case: of whichever fold examined it, the mean over seeds."""
        return _mean_by_key([run.named(run.values(measure, policy, label)) for run in self.runs])

    @cached_property
    def keys(self) -> set[Key]:
        """All cases that were examined."""
        main = "dice" if self.first.measure == "Dice" else "accuracy"
        return set(self.values(main))

    def of(
        self, site: str | None, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> list[float]:
        """The numbers alone, of one hospital or of all."""
        return [v for (s, _), v in self.values(measure, policy, label).items() if site in (None, s)]

    def spread(self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy()) -> list[float]:
        """The mean over all cases once for every seed, so that what chance in training does can be seen."""
        seeds: dict[int, list[Summary]] = {}
        for run in self.runs:
            seeds.setdefault(run.settings["seed"], []).append(run)
        return [fmean(_mean_by_key([r.values(measure, policy) for r in runs]).values()) for runs in seeds.values()]

    def curve(self, of: Callable[[Summary], tuple[list[int], list[float]]]) -> tuple[list[int], list[float]]:
        """The mean over the runs of a curve by round."""
        lines = [dict(zip(*of(run), strict=True)) for run in self.runs]
        shared = sorted(set.intersection(*map(set, lines)))  # a run that stopped early would make the mean jump
        return shared, [fmean(line[at] for line in lines) for at in shared]

    def matrix(self) -> dict[str, dict[str, float]]:
        """Whose model on whose patients, mean Dice; empty where everyone uses the same model or nothing is known."""
        known = [run.evaluation for run in self.runs if run.evaluation and run.measure == "Dice"]
        found = matrix([row for evaluation in known for row in evaluation.rows]) if known else {}
        return {} if SHARED in found or len(found) < 2 else found


def matrix(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean Dice of every model on the patients of every hospital; whose model -> whose patients."""
    cells: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["site"]), []).append(row["dice"])
    models, sites = (sorted({key[k] for key in cells}) for k in (0, 1))
    return {m: {s: _mean(cells.get((m, s), ())) for s in sites} for m in models}


def read(path: Path, name: str | None = None, evaluation: str | None = None) -> Summary:
    """The summary of a run folder, with the evaluation of that name, or else that of the part its scores are of."""
    folder = RunFolder.open(path)
    try:
        versions, records = json.loads((path / "versions.json").read_text()), folder.records()
        bare = Summary(path, name or title(path), folder.config, versions, records)
        _ = bare.settings["algorithm"]
        if not folder.finished:
            return bare
        result = folder.result
        split, best = result.split, result.best_round
        scores: Mapping[str, Scores] = {site: cases for site, cases in result.scores.items() if cases}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RunError(f"the run folder {path} is damaged and cannot be read: {problem!r}") from problem
    found = read_evaluation(path, evaluation or split)
    if evaluation and found is None:
        raise RunError(f"{path} has no evaluation {evaluation!r}; 'polysite evaluate {path}' makes one")
    if evaluation and found:
        scores, split = _scores_of(found), evaluation
    return Summary(path, bare.name, folder.config, versions, records, split, scores, best, found)


def _scores_of(evaluation: Evaluation) -> dict[str, dict[str, CaseScore]]:
    """Return the main measure alone, as a result has it; an evaluation has no losses."""
    scores: dict[str, dict[str, CaseScore]] = {}
    for (site, case), labels in evaluation.own.items():
        dice = {k: row["dice"] for k, row in labels.items() if "dice" in row}
        if dice:
            scores.setdefault(site, {})[case] = CaseScore(dice, nan)
        else:
            row = next(iter(labels.values()))
            predicted = row["predicted"] if "predicted" in row else row["said"]  # 0.1.0 wrote "said"
            score = CaseScore({"accuracy": row["accuracy"]}, nan, int(predicted), int(row["true"]))
            scores.setdefault(site, {})[case] = score
    return scores


def read_evaluation(path: Path, name: str) -> Evaluation | None:
    place = path / "evaluation" / name
    if not (place / "about.json").is_file():
        return None
    try:
        with (place / "cases.csv").open(newline="", encoding="utf-8") as file:
            rows = [{k: v if k in WORDS else float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        about = json.loads((place / "about.json").read_text(encoding="utf-8"))
        told, there = sum(about["cases"].values()), len({(row["site"], row["case"]) for row in rows})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise RunError(f"the evaluation {place} cannot be read ({problem!r}); 'polysite evaluate --again'") from problem
    if there != told:
        raise RunError(
            f"{place / 'cases.csv'} holds {there} cases of {told}; 'polysite evaluate --again' makes it anew"
        )
    return Evaluation(place, about, rows)


def title(path: Path) -> str:
    """The name of a run: that of its folder, without the date that may stand before it.

    >>> title(Path("runs/20261115-201500-fedavg")), title(Path("runs/mine"))
    ('fedavg', 'mine')
    """
    return re.sub(r"^\d{8}-\d{6}-", "", path.resolve().name)


def methods(runs: Iterable[Summary]) -> list[Method]:
    """Runs whose configurations differ only in seed and fold are one method; names are made to differ."""
    grouped: dict[str, list[Summary]] = {}
    for run in runs:
        grouped.setdefault(_identity(run), []).append(run)
    found: dict[str, Method] = {}
    for group in grouped.values():
        parents = {run.path.resolve().parent for run in group}
        alike = len({run.name for run in group}) == 1 or len(parents) > 1
        name = group[0].name if alike else parents.pop().name
        names = (name if k == 1 else f"{name} ({k})" for k in range(1, len(grouped) + 1))
        free = next(n for n in names if n not in found)
        found[free] = Method(free, tuple(group))
    return list(found.values())


def _identity(run: Summary) -> str:
    """The configuration without what may differ within a method."""
    chosen = dict(run.settings)
    chosen["split"] = {k: v for k, v in chosen["split"].items() if k not in ("fold", "seed")}
    return json.dumps({k: v for k, v in chosen.items() if k != "seed"}, sort_keys=True)


def _mean_by_key(tables: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    keys = sorted({key for table in tables for key in table})
    return {key: fmean(table[key] for table in tables if key in table) for key in keys}


def _mean(numbers: Iterable[float]) -> float:
    """Of those that are defined; NaN where none is."""
    known = [x for x in numbers if not isnan(x)]
    return fmean(known) if known else nan
