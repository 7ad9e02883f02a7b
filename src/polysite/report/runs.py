"""Run folders as tables and figures read them. Only means are computed here.

A ``Summary`` is one run. A ``Method`` is one row of a table: the runs that differ only in their seed or fold. A case
that several runs of a method evaluate counts once, with the mean of its scores.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from polysite.data.split import SPLIT
from polysite.engines.phases import SHARED
from polysite.engines.record import RoundRecord, measure_of, round_seconds
from polysite.engines.run_folder import RunFolder
from polysite.errors import ConfigError, RunError
from polysite.foreign import parse_json, parse_toml
from polysite.metrics import averages
from polysite.metrics.measures import EmptyMaskPolicy
from polysite.report.evaluations import Evaluation, Key, matrix, read_evaluation, read_table
from polysite.site import CaseScore, Counts, Scores

T = TypeVar("T")
Table = tuple[str, EmptyMaskPolicy, str | None]  # measure, policy and label of a table of values


@dataclass(frozen=True)
class Summary:
    """One run, finished or in progress."""

    path: Path
    name: str
    config: str
    versions: Mapping[str, Any]
    records: Sequence[RoundRecord]
    split: str = ""  # split that the scores are of; empty while the run is in progress
    scores: Mapping[str, Scores] = field(default_factory=dict)  # by site and case
    best_round: int = -1
    evaluation: Evaluation | None = None
    like: "Summary | None" = None  # the run whose sites hold the cases here (`axes.regrouped`)

    @cached_property
    def ensemble(self) -> Sequence[Mapping[str, str]]:
        """Name and folder of every member of an ensemble; empty for any other run."""
        path = self.path / "ensemble.json"
        if not path.is_file():
            return ()
        try:
            return tuple(parse_json(path.read_text(encoding="utf-8"))["members"])
        except (OSError, ValueError, KeyError) as problem:
            raise RunError(f"{path} cannot be read: {problem}; make the ensemble again") from problem

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self.split)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The configuration as nested mappings."""
        return parse_toml(self.config, str(self.path / "config.toml"))

    @property
    def guarded(self) -> bool:
        """Whether the guard was on (``run.guard``)."""
        return bool(self.settings["run"].get("guard", {}).get("use") == "on")

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """Groups of sites that train together, in the last phase that has groups."""
        phases = (self.settings, *self.settings.get("then", ()))
        chosen = (p["algorithm"] for p in phases if isinstance(p.get("algorithm"), dict))
        return next((a["groups"] for a in reversed(list(chosen)) if a.get("groups")), {})

    @property
    def sites(self) -> list[str]:
        """Sites with scored cases; while the run is in progress, sites that train."""
        return sorted(s for s, cases in self.scores.items() if cases) or sorted(self.trained)

    @property
    def trained(self) -> set[str]:
        """Sites that took part in a training round."""
        return {site for r in self.records for site in r.sites}

    @property
    def unseen(self) -> set[str]:
        """Sites with scored cases that did not train; empty if no site with scored cases trained (pooled training)."""
        return set(self.sites) - self.trained if self.trained & set(self.sites) else set()

    @property
    def measure(self) -> str:
        """Name of the main measure: Dice, or accuracy in a classification."""
        return measure_of(self.scores) if self.scores else next((r.measure for r in self.records if r.measure), "")

    @property
    def labels(self) -> list[str]:
        """Labels of a segmentation; a classification has one entry, accuracy."""
        return next((list(case.labels) for cases in self.scores.values() for case in cases.values()), [])

    def values(
        self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> Mapping[Key, float]:
        """Return a measure of every case: of one label, or the mean over the labels by the policy."""
        names = [label] if label else self.labels
        if self.evaluation and self.measure == "Dice":
            own = self.evaluation.own
            values = {key: [policy.value(labels[k], measure) for k in names] for key, labels in own.items()}
        elif measure in ("dice", "accuracy"):
            flat = ((s, c, case) for s, cases in self.scores.items() for c, case in cases.items())
            values = {(s, c): [case.labels[k] for k in names] for s, c, case in flat}
        else:
            return {}
        means = {key: policy.mean(numbers, measure) for key, numbers in sorted(values.items())}
        return {key: mean for key, mean in means.items() if not isnan(mean)}

    def named(self, values: Mapping[Key, T]) -> Mapping[Key, T]:
        """Return the values with the seed added to the names of phantoms: with another seed they are other patients."""
        other = self.evaluation and self.evaluation.about["data"]
        if not str(self.settings["data"]["name"]).startswith("phantom") or other:
            return values
        return {(site, f"{case}, seed {self.settings['seed']}"): value for (site, case), value in values.items()}

    @cached_property
    def held(self) -> Mapping[str, Mapping[str, int]]:
        """Cases of every site by split, from ``split.csv``; empty where the cases are elsewhere."""
        counts: dict[str, dict[str, int]] = {}
        try:
            for row in read_table((self.like or self).path / "split.csv"):
                splits = counts.setdefault(row["Site"], {})
                splits[row[SPLIT]] = splits.get(row[SPLIT], 0) + 1
        except (OSError, ValueError, KeyError):
            return {}
        return counts

    @property
    def sliced(self) -> bool:
        """Whether cases are slices of volumes."""
        return bool(self.settings.get("slices", {}).get("axis"))

    @property
    def exchanged(self) -> bool:
        """Whether any site was sent something; without that every site trains alone."""
        return any(record.bytes_down for record in self.records)

    def under(self, owner: str) -> "Summary | None":
        """Return the run as if all hospitals used the model of one; None if it was not evaluated on the others' cases.

        Records keep the work of that hospital alone.
        """
        if self.evaluation is None or self.measure != "Dice":
            return None
        rows = [replace(row, model=SHARED) for row in self.evaluation.rows if row.model == owner]
        if len({row.site for row in rows}) < max(2, len(self.sites)):
            return None
        counts = {(SHARED, s, c): v for (model, s, c), v in self.evaluation.counts.items() if model == owner}
        one = replace(self.evaluation, rows=rows, counts=counts)

        def only(of: Mapping[str, T]) -> dict[str, T]:
            return {site: value for site, value in of.items() if site == owner}

        records = [
            replace(
                r,
                sites=only(r.sites),
                validation=only(r.validation),
                shares=only(r.shares),
                bytes_down=only(r.bytes_down),
                bytes_up=only(r.bytes_up),
            )
            for r in self.records
        ]
        return replace(self, records=records, scores=_scores_of(one), evaluation=one)

    @property
    def begins(self) -> list[int]:
        """First rounds of the second and later phases, counted from one."""
        return sorted({r.phase: r.round + 1 for r in reversed(self.records) if r.phase}.values())

    @cached_property
    def counts(self) -> Mapping[str, Counts]:
        """Counts of all cases of every site together, by label or class; empty unless known for all sites."""
        evaluated = _scores_of(self.evaluation) if self.evaluation else {}
        for scores in (self.scores, evaluated):  # results of 0.1.0 have no counts; a later evaluation has
            counts = {site: averages.of_cases(cases) for site, cases in scores.items() if cases}
            if counts and all(counts.values()):
                return counts
        return {}

    @property
    def round_seconds(self) -> list[float]:
        """Seconds of every round; breaks before the run was resumed do not count."""
        return round_seconds(self.records)

    @property
    def curve(self) -> tuple[list[int], list[float]]:
        """Rounds, and the mean validation score in each."""
        seen = [(r.round + 1, r.mean_score) for r in self.records if r.mean_score is not None]
        return [r for r, _ in seen], [d for _, d in seen]

    def site_curve(self, site: str) -> tuple[list[int], list[float]]:
        """Return the rounds and the validation score of one hospital in each."""
        known = [(r.round + 1, r.validation[site].score) for r in self.records if site in r.validation]
        seen = [(r, fmean(score.values())) for r, score in known if score]
        return [r for r, _ in seen], [d for _, d in seen]


@dataclass(frozen=True)
class Method:
    """Runs that differ only in their seed or fold."""

    name: str
    runs: tuple[Summary, ...]
    owner: str = ""  # hospital whose model all hospitals use here, in a row beside that of the method itself

    @property
    def first(self) -> Summary:
        """The first run."""
        return self.runs[0]

    @property
    def sites(self) -> list[str]:
        """Sites of all runs."""
        return sorted({s for run in self.runs for s in run.sites})

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of cases of every site in all splits; evaluated cases where the others are not known."""
        known: dict[str, int] = {}
        for site, splits in ((s, splits) for run in self.runs for s, splits in run.held.items()):
            known[site] = max(known.get(site, 0), sum(splits.values()))
        return {site: known.get(site) or len({c for s, c in self.keys if s == site}) for site in self.sites}

    def under(self, owner: str) -> "Method | None":
        """Return the method as if all hospitals used the model of one; None if this was not evaluated."""
        runs = [run.under(owner) for run in self.runs]
        if self.owner or not all(runs):
            return None
        return Method(f"{self.name}, model of {owner}", tuple(run for run in runs if run), owner)

    @property
    def evaluated(self) -> bool:
        """Whether all measures of a segmentation are known, not only Dice."""
        return self.first.measure == "Dice" and all(run.evaluation for run in self.runs)

    @cached_property
    def _tables(self) -> dict[Table, Mapping[Key, float]]:
        return {}

    def values(
        self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> Mapping[Key, float]:
        """Return a measure of every case, from all folds; the mean over seeds."""
        asked = measure, policy, label
        if asked not in self._tables:
            self._tables[asked] = _mean_by_key([run.named(run.values(*asked)) for run in self.runs])
        return self._tables[asked]

    @cached_property
    def keys(self) -> set[Key]:
        """All cases with a score."""
        main = "dice" if self.first.measure == "Dice" else "accuracy"
        return set(self.values(main))

    @cached_property
    def subgroups(self) -> dict[Key, str]:
        """Subgroup of every case whose subgroup is known."""
        known = [run.named(run.evaluation.subgroups) for run in self.runs if run.evaluation]
        return {key: group for groups in known for key, group in groups.items()}

    @cached_property
    def in_several_folds(self) -> list[Key]:
        """Cases that runs on different folds tested, as two published folds may; their values are means."""
        folds: dict[Key, set[int]] = {}
        for run in self.runs:
            for site, cases in run.scores.items():
                for case in cases:
                    folds.setdefault((site, case), set()).add(run.settings["split"].get("fold", 0))
        return sorted(key for key, numbers in folds.items() if len(numbers) > 1)

    def of(
        self, site: str | None, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> list[float]:
        """Return the values of one hospital, or of all with None."""
        values = self.values(measure, policy, label)
        return [value for (owner, _), value in values.items() if site in (None, owner)]

    def site_means(
        self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy(), label: str | None = None
    ) -> list[float]:
        """Return the mean of every hospital that has a value."""
        each = (self.of(site, measure, policy, label) for site in self.sites)
        return [fmean(values) for values in each if values]

    def spread(self, measure: str, policy: EmptyMaskPolicy = EmptyMaskPolicy()) -> list[float]:
        """Return the mean over all cases for every seed."""
        seeds: dict[int, list[Summary]] = {}
        for run in self.runs:
            seeds.setdefault(run.settings["seed"], []).append(run)
        return [fmean(_mean_by_key([r.values(measure, policy) for r in runs]).values()) for runs in seeds.values()]

    def curve(self, of: Callable[[Summary], tuple[list[int], list[float]]]) -> tuple[list[int], list[float]]:
        """Return the mean over the runs of a curve, in the rounds that all runs have."""
        lines = [dict(zip(*of(run), strict=True)) for run in self.runs]
        shared = sorted(set.intersection(*map(set, lines)))  # a run that stopped early would make the mean jump
        return shared, [fmean(line[at] for line in lines) for at in shared]

    def matrix(self) -> dict[str, dict[str, float]]:
        """Return the mean Dice of every hospital's model on every hospital's cases; empty if all use the same model."""
        known = [run.evaluation for run in self.runs if run.evaluation and run.measure == "Dice"]
        dice = matrix([row for evaluation in known for row in evaluation.rows]) if known else {}
        return {} if SHARED in dice or len(dice) < 2 else dice


def read(path: Path, name: str | None = None, evaluation: str | None = None) -> Summary:
    """Read a run folder and one of its evaluations: by default that of the split which the result is reported on."""
    folder = RunFolder.open(path)
    try:
        versions, records = parse_json((path / "versions.json").read_text()), folder.records()
        bare = Summary(path, name or title(path), folder.config, versions, records)
        _ = bare.settings["algorithm"]
        if not folder.finished:
            return bare
        result = folder.result
        split, best = result.split, result.best_round
        scores: Mapping[str, Scores] = {site: cases for site, cases in result.scores.items() if cases}
        if records:
            records[-1] = records[-1].with_traffic(result.bytes_down, result.bytes_up)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as problem:
        raise RunError(f"the run folder {path} is damaged and cannot be read: {problem!r}") from problem
    measured = read_evaluation(path, evaluation or split)
    if evaluation and measured is None:
        raise RunError(f"{path} has no evaluation {evaluation!r}; 'polysite evaluate {path}' makes one")
    if evaluation and measured:
        scores, split = _scores_of(measured), evaluation
    return Summary(path, bare.name, folder.config, versions, records, split, scores, best, measured)


def _scores_of(evaluation: Evaluation) -> dict[str, dict[str, CaseScore]]:
    """Return the main measure of every case as a result has it; an evaluation has no losses."""
    scores: dict[str, dict[str, CaseScore]] = {}
    for (site, case), labels in evaluation.own.items():
        dice = {k: row["dice"] for k, row in labels.items() if "dice" in row}
        if dice:
            counts = evaluation.counts.get((site, site, case)) or evaluation.counts.get((SHARED, site, case), {})
            scores.setdefault(site, {})[case] = CaseScore(dice, nan, counts=counts)
        else:
            row = next(iter(labels.values()))
            predicted = row["predicted"] if "predicted" in row else row["said"]  # 0.1.0 wrote "said"
            score = CaseScore({"accuracy": row["accuracy"]}, nan, int(predicted), int(row["true"]))
            scores.setdefault(site, {})[case] = score
    return scores


def title(path: Path) -> str:
    """Return the name of a run: that of its folder, without a leading date.

    >>> title(Path("runs/20261115-201500-fedavg")), title(Path("runs/mine"))
    ('fedavg', 'mine')
    """
    return re.sub(r"^\d{8}-\d{6}-", "", path.resolve().name)


def methods(runs: Iterable[Summary]) -> list[Method]:
    """Group runs whose configurations differ only in seed and fold into methods with distinct names."""
    grouped: dict[str, list[Summary]] = {}
    for run in runs:
        grouped.setdefault(_identity(run), []).append(run)
    named: dict[str, Method] = {}
    for group in grouped.values():
        parents = {run.path.resolve().parent for run in group}
        alike = len({run.name for run in group}) == 1 or len(parents) > 1
        name = group[0].name if alike else parents.pop().name
        names = (name if k == 1 else f"{name} ({k})" for k in range(1, len(grouped) + 1))
        free = next(n for n in names if n not in named)
        named[free] = Method(free, tuple(group))
    return list(named.values())


def _identity(run: Summary) -> str:
    """Return the configuration without seed and fold."""
    chosen = dict(run.settings)
    fold = ("fold", "seed", "file") if run.settings["model"]["name"] == "ensemble" else ("fold", "seed")
    chosen["split"] = {k: v for k, v in chosen["split"].items() if k not in fold}
    return json.dumps({k: v for k, v in chosen.items() if k != "seed"}, sort_keys=True)


def _mean_by_key(tables: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    keys = sorted({key for table in tables for key in table})
    return {key: fmean(table[key] for table in tables if key in table) for key in keys}
