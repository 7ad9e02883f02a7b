"""The folder of an evaluation: every model that is served, on the cases of one split, by all measures.

::

    RUN/evaluation/NAME/       NAME is the split that was examined (test), or that of other data
        cases.csv              a row per model, hospital, case and label
        counts.csv             voxels of every label and of the background: tp, fp, fn, tn (segmentation)
        about.json             what was examined and how, and which cases are kept to look at
        predictions.npz        predictions of each hospital's model on its own cases: bit k of a voxel is label k
        scans.npz              the worst, median and best case of every hospital to look at
        clusters.csv           the cluster of every case, where the method has models for clusters of cases
        mixture.npz            scaling, principal components and mixture, which assign a new case to its cluster

The owner of a model is the hospital that uses it, or ``*`` where all use the same. ``predictions.npz`` and
``scans.npz`` are images of patients: they are written only where the images are, so a deployed run has neither.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, Self
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from polysite.cluster.federated_mixture import mixture_of
from polysite.cluster.mixture import CaseClusters, agreement
from polysite.cluster.pooled_mixture import pooled
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import SPLITS
from polysite.data.split import SiteSplit
from polysite.engines.phases import SHARED
from polysite.engines.run_folder import versions
from polysite.payload import SiteId
from polysite.report.orientation import axes_of
from polysite.site import Cases, Examined
from polysite.spreadsheets import mappings_text
from polysite.storage import draft_folder

Row = dict[str, Any]
COUNTS = ("tp", "fp", "fn", "tn")  # columns of counts.csv


class ExaminedSite(Protocol):
    """A site as its evaluation is written: in this process, or in a worker of the Ray engine."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels, or classes."""
        ...

    @property
    def grids(self) -> Mapping[str, tuple[tuple[float, ...], str]]:
        """Voxel size and unit of every case."""
        ...

    def cases(self, split: str) -> Cases:
        """Return the names of the cases of a split."""
        ...

    def radiomics(self, cases: Collection[str], bin_width: float) -> np.ndarray:
        """Return the radiomic features of these cases, one row per case."""
        ...

    def shares(self, case: str) -> np.ndarray:
        """Return the share of the head that every label occupies; in a classification, the one-hot class."""
        ...


@dataclass(eq=False)
class EvaluationFolder(ExitStack):
    """Writer of an evaluation folder. As a context manager it leaves the whole folder, or none after an error.

    Args:
        target: The folder to write; replaced if it exists.
        study: The study.
        split: The split that is examined.
        trained: Names of the sites that trained.
        clusters: Clusters of cases by which models are chosen, if any.
        dealt: Cases of every site; none where the images are elsewhere.
        sites: The sites themselves; none where the images are elsewhere.
        tolerance: Distance of surfaces that still agree, in the unit of the voxels.
        pictures: Keep predictions and scans to look at.
        data: Path of the data, where they are not those of the run.
    """

    target: Path
    study: Study
    split: str
    trained: Sequence[SiteId]
    clusters: CaseClusters | None = None
    _: KW_ONLY
    dealt: Mapping[SiteId, SiteSplit] = field(default_factory=dict)
    sites: Mapping[SiteId, ExaminedSite] = field(default_factory=dict)
    tolerance: float = 1.0
    pictures: bool = True
    data: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.pictures = self.pictures and bool(self.sites)
        self._rows: list[Row] = []
        self._counts: list[Row] = []
        self._units: set[str] = set()
        self._predictions: ZipFile | None = None

    def __enter__(self) -> Self:
        self._draft = self.enter_context(draft_folder(self.target, "evaluation"))
        if self.pictures:
            self._predictions = self.enter_context(ZipFile(self._draft / "predictions.npz", "w", ZIP_DEFLATED))
        self.push(self._write)
        return self

    def add(self, owner: SiteId, site: SiteId, examined: Examined) -> None:
        """Add a case of a site, predicted with the model of an owner."""
        if self._predictions and examined.prediction is not None and owner in (SHARED, site):
            _add(self._predictions, f"{site}/{examined.case}", examined.prediction)
        subject = {"model": owner, "site": site, "case": examined.case}
        for label, measures in examined.measures.items():
            self._rows.append({**subject, "label": label, **measures})
        for label, count in examined.score.counts.items():
            self._counts.append({**subject, "label": label, **dict(zip(COUNTS, count, strict=True))})
        self._units.add(examined.unit)

    def _write(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the tables, the scans to look at, and what was examined, unless an error ended the evaluation."""
        if kind is not None:
            return
        _write_csv(self._draft / "cases.csv", self._rows)
        if self._counts:
            _write_csv(self._draft / "counts.csv", self._counts)
        shown = list(self._scans()) if self.pictures and self.study.data.task == "segmentation" else []
        cases: dict[SiteId, set[str]] = {}
        for row in self._rows:
            cases.setdefault(row["site"], set()).add(row["case"])
        about = {
            "split": self.split,
            "data": self.data,
            "cases": {site: len(names) for site, names in sorted(cases.items())},
            "groups": {site: self._groups(site) for site in sorted(self.dealt)},
            "subgroups": {site: self._subgroups(site, names) for site, names in sorted(cases.items())},
            "voxel": {
                s: {c: prod(self.sites[s].grids[c][0]) for c in sorted(cases[s])} for s in cases if s in self.sites
            },
            "trained": list(self.trained),
            "tolerance": self.tolerance,
            "unit": self._units.pop() if len(self._units) == 1 else "",
            "labels": self.study.data.label_names,
            "modalities": self.study.data.modality_names,
            "versions": versions(),
            "shown": shown,
            **self._clusters(),
        }
        (self._draft / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    def _groups(self, site: SiteId) -> dict[str, int]:
        """Return the number of cases of every group (grade, scanner) of a site, in all splits; "" if not known."""
        counts = Counter(ref.group for split in SPLITS for ref in self.dealt[site].get(split, ()))
        return dict(sorted(counts.items()))

    def _subgroups(self, site: SiteId, cases: Collection[str]) -> dict[str, str]:
        """Return the group of every examined case of a site, as far as it is known here."""
        refs = self.dealt.get(site, {}).get(self.split, ())
        return {ref.name: ref.group for ref in refs if ref.group and ref.name in cases}

    def _clusters(self) -> dict[str, dict[str, Any]]:
        """Write the cluster and coordinates of every case; return how the clusters were fitted, and how well they agree
        with those fitted to the features of all cases in one place."""
        if self.clusters is None or not self.sites:
            return {}
        known, sites = self.clusters, self.sites
        cases = [(s, split, name) for s, site in sites.items() for split in SPLITS for name in site.cases(split)]
        vectors = np.array([sites[s].radiomics((name,), known.bin_width)[0] for s, _, name in cases])
        mixture = known.mixture
        labels, sure = mixture.assign(vectors), mixture.probabilities(vectors).max(1)
        points = mixture.transform(vectors)
        rows: list[Row] = []
        for k, (s, split, name) in enumerate(cases):
            shares = sites[s].shares(name)
            row = {"site": s, "case": name, "split": split, "cluster": int(labels[k]), "probability": f"{sure[k]:.4f}"}
            row |= {f"component {j + 1}": f"{x:.6g}" for j, x in enumerate(points[k])}
            rows.append(row | {f"share {n}": f"{x:.6g}" for n, x in zip(sites[s].labels, shares, strict=False)})
        _write_csv(self._draft / "clusters.csv", rows)
        fitted = vectors[[split in known.splits for _, split, _ in cases]]
        alike = agreement(mixture, mixture_of(pooled(fitted, known.settings)), fitted)
        np.savez(self._draft / "mixture.npz", **mixture.arrays())  # type: ignore[arg-type]
        how = {"fit": known.fit, "components": len(mixture.weights), "bin_width": known.bin_width, "cases": len(fitted)}
        return {"clusters": {**how, "bic": mixture.bic(fitted), **alike}}

    def _scans(self) -> Iterator[dict[str, Any]]:
        """Keep the worst, median and best case of every hospital, by the mean Dice of its own model."""
        from polysite.report.scans import is_oriented, upright_scan  # it draws, which a run without pictures need not

        dice: dict[SiteId, dict[str, list[float]]] = {}
        for row in self._rows:
            if row["model"] in (SHARED, row["site"]):
                dice.setdefault(row["site"], {}).setdefault(row["case"], []).append(row["dice"])
        cache = Cache(place())
        with ZipFile(self._draft / "scans.npz", "w", ZIP_DEFLATED) as kept:
            for site, cases in dice.items():
                refs = {ref.name: ref for ref in self.dealt[site][self.split]}
                ranked = sorted(cases, key=lambda name: (fmean(cases[name]), name))
                chosen = {ranked[0]: "worst"}
                chosen.setdefault(ranked[(len(ranked) - 1) // 2], "median")
                chosen.setdefault(ranked[-1], "best")
                for name, why in chosen.items():
                    case = cache.get(refs[name], self.study.prepare, self.study.train.patch)
                    axes = self.study.prepare.orientation or axes_of(refs[name].open())
                    scan = upright_scan(case, axes, is_oriented(refs[name]))
                    for what, array in (("image", scan.image), ("truth", scan.truth[None])):
                        _add(kept, f"{site}/{name}/{what}", array)
                    yield {"site": site, "case": name, "why": why, **scan.crop}


def _add(archive: ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(mappings_text(rows, "\r\n"), encoding="utf-8", newline="")
