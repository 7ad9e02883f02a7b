"""What the tables and figures read out of run folders. Nothing is computed here but means."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from polysite.engines.folder import RunFolder
from polysite.engines.rounds import examined, measure
from polysite.site import ASIDE


@dataclass(frozen=True)
class Summary:
    """One finished run, as a reader wants it."""

    name: str
    config: str
    versions: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    split: str  # which patients the scores are of
    scores: Mapping[str, Mapping[str, Mapping[str, float]]]  # site -> case -> label -> Dice, or accuracy
    best_round: int

    @property
    def sites(self) -> list[str]:
        return sorted(self.scores)

    @property
    def unseen(self) -> set[str]:
        """Hospitals that judge a model which others trained; none where all judges are strangers to the training."""
        trained = {site for r in self.records for site in r["sites"]}
        return set(self.scores) - trained if trained & set(self.scores) else set()

    @property
    def measure(self) -> str:
        return measure(self.scores)

    @property
    def labels(self) -> list[str]:
        first = next(case for cases in self.scores.values() for case in cases.values())
        return [k for k in first if k not in ASIDE]

    def cases(self, site: str | None = None, label: str | None = None) -> list[float]:
        """The measure of every test case: of one site or all, of one label or the mean over the labels."""
        chosen = [s for name, s in self.scores.items() if site in (None, name)]
        labels = [label] if label else self.labels
        return [fmean(case[k] for k in labels) for cases in chosen for case in cases.values()]

    @property
    def curve(self) -> tuple[list[int], list[float]]:
        """The measure on validation patients by round."""
        seen = [(r["round"] + 1, r["mean_score"]) for r in self.records if "mean_score" in r]
        return [r for r, _ in seen], [d for _, d in seen]

    @property
    def megabytes(self) -> float:
        """Sent and received by all sites over the whole run."""
        return float(sum(s["bytes_up"] + s["bytes_down"] for r in self.records for s in r["sites"].values()) / 1e6)

    @property
    def steps(self) -> int:
        """Training steps of all sites over the whole run."""
        return sum(s["steps"] for r in self.records for s in r["sites"].values())

    @property
    def sites_trained(self) -> int:
        return len({s for r in self.records for s in r["sites"]})


def read(path: Path, name: str | None = None) -> Summary:
    """The summary of a finished run folder."""
    folder = RunFolder.open(path)
    result = folder.result
    versions = json.loads((path / "versions.json").read_text())
    split = examined(result)
    return Summary(
        name or path.name, folder.config, versions, folder.records(), split, result[split], result["best_round"]
    )


def mean_std(values: Sequence[float]) -> str:
    """``0.812 ± 0.034``; one value has no deviation, no value is a dash."""
    if not values:
        return "–"
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
