"""What every hospital gets from a finished run: every model that is served, on everyone's patients, by all measures.

::

    RUN/evaluation/NAME/       NAME is the part that was examined (test), or that of other data
        cases.csv              a row per model, hospital, case and label; cases.parquet beside it if wanted
        about.json             what was examined and how, and which cases are kept to look at
        predictions.npz        what each hospital's model answers to its own patients: bit k of a voxel is label k
        scans.npz              the worst, median and best case of every hospital to look at
        clusters.csv           where the method has models for clusters of patients: whose case is of which

A model is that of the hospital it is served to, or ``*`` where everyone uses the same. The folder stays where the
patients are: the last two files are pictures of them.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from polysite import config, study
from polysite.algorithms.base import offered
from polysite.algorithms.cfft import Cfft
from polysite.cluster.mixture import Mixture, agreement, pooled
from polysite.config import Study
from polysite.data.cache import Cache, place
from polysite.data.case import PARTS, Case, Patient
from polysite.data.files import Files
from polysite.data.split import Parts, table
from polysite.engines import rounds
from polysite.engines.folder import RunFolder, file_name, versions
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, DataError, RunError
from polysite.payload import Payload, SiteId, plain
from polysite.report.preview import axes_of, turned, turned_size, widest
from polysite.report.publish import drafted
from polysite.report.runs import SHARED
from polysite.site import Examined
from polysite.train.torch_site import TorchSite, packed

SLICES, SIDE = 64, 192  # most that is kept of a scan to look at: slices, and pixels of a side
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is examined: whose patients, under which name, with which study."""

    study: Study
    dealt: Mapping[SiteId, Parts]
    part: str
    name: str


def evaluate(
    run: Path | str,
    part: str = "test",
    on: Path | str | None = None,
    *,
    tolerance: float = 1.0,
    others: bool = True,
    pictures: bool = True,
    parquet: bool = False,
    again: bool = False,
    watch: rounds.Watch = rounds.Watch(),
) -> Path:
    """Examine the best model of a finished run on one of its parts, or on all cases of other data; returns the folder.

    ``tolerance``: how far apart surfaces may lie and still agree, in the unit of the voxels. ``others``: every
    hospital's own model also on the patients of all others. ``pictures``: keep answers and scans to look at.
    """
    folder = RunFolder.open(Path(run))
    if not folder.finished:
        raise RunError(f"{folder.path} has not finished; 'polysite train --resume {folder.path}' brings it to its end")
    if not 0 <= tolerance < np.inf:
        raise ConfigError(f"the tolerance {tolerance} must be a distance, 0 or more")
    subject = _subject(folder, part, on)
    target = folder.path / "evaluation" / subject.name
    if target.exists() and not again:
        raise RunError(f"{target} exists already; --again examines once more and replaces it")
    sites = study.hospitals(subject.study, subject.dealt, watch)
    with drafted(target, "evaluation") as draft:
        models = Models(subject, folder, sites)
        rows = list(_examine(models, subject, draft, tolerance, others, pictures))
        _write(draft / "cases.csv", rows)
        if parquet:
            _parquet(draft / "cases.parquet", rows)
        shown = list(_keep(draft, subject, rows)) if pictures and subject.study.data.task == "segmentation" else []
        units = {unit for site in sites.values() for _, unit in site.grids.values()}
        about = {
            "part": subject.part,
            "data": str(Path(on).resolve()) if on else "",
            "cases": {site: len(found) for site, parts in subject.dealt.items() if (found := parts[subject.part])},
            "trained": models.trained,
            "tolerance": tolerance,
            "unit": units.pop() if len(units) == 1 else "",
            "labels": subject.study.data.label_names,
            "modalities": subject.study.data.modality_names,
            "versions": versions(),
            "shown": shown,
            **_clusters(draft / "clusters.csv", models, subject, sites),
        }
        (draft / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        if target.exists() and not again:
            raise RunError(f"{target} was written meanwhile by another process; it is left as it is")
    return target


def _subject(folder: RunFolder, part: str, on: Path | str | None) -> Subject:
    """The cases of a part of the run's own data, or all of others."""
    chosen = config.parse(folder.config, where=str(folder.path / "config.toml"))
    if on is None and part not in PARTS:
        raise ConfigError(f"there is no part {part!r}; choose {', '.join(PARTS)}")
    dealt = study.federation(chosen)
    if table(dealt) != folder.split:
        raise RunError(
            f"the data are not those that {folder.path} was trained with: its split.csv names other cases or parts; "
            "bring them back"
        )
    if on is not None:
        return _elsewhere(chosen, dealt, Path(on))
    if not any(parts[part] for parts in dealt.values()):
        raise RunError(f"no case of {folder.path} is in the part {part!r}; choose another with --split")
    return Subject(chosen, dealt, part, part)


def _elsewhere(chosen: Study, dealt: Mapping[SiteId, Parts], path: Path) -> Subject:
    """All cases of other data, as far as they are of the same kind; hospitals of the run keep what they trained on, by
    which they may choose a model."""
    mine = chosen.data
    plain = mine if isinstance(mine, Files) else Files(str(path))
    files = replace(plain, path=str(path), modalities=mine.modality_names, format="auto", tables=(), exclude=())
    for what in ("task", "dims", "label_names"):
        wanted, found = getattr(mine, what), getattr(files, what)
        if wanted != found:
            raise DataError(f"{path} does not fit this run: its {what.replace('_', ' ')}: {found}; the run's: {wanted}")
    others: dict[SiteId, list[Patient]] = dict(files.patients(chosen.seed))
    joined = {
        site: {**dealt.get(site, {"train": [], "validation": []}), "test": others.get(site, [])}
        for site in (*dealt, *(s for s in others if s not in dealt))
    }
    name = file_name(path.stem if path.is_file() else path.resolve().name)
    return Subject(chosen, joined, "test", f"on {name}" if name in PARTS else name)


class Models:
    """The models of a run's best round, and whose they are."""

    def __init__(self, subject: Subject, folder: RunFolder, sites: Mapping[SiteId, TorchSite]):
        stages = config.stages(subject.study)
        engines = [Simulator(s.algorithm, {i: site.under(s.train) for i, site in sites.items()}) for s in stages]
        phases = [rounds.Phase(s.algorithm, e, s.run) for s, e in zip(stages, engines, strict=True)]
        central = subject.study.run.pooled
        self.trained = [study.POOLED] if central else sorted(s for s, p in subject.dealt.items() if p["train"])
        strangers = all(s.algorithm.strangers for s in stages)  # a phase goes on from what those before it serve
        known = sorted(sites) if strangers else [s for s in self.trained if s in sites]
        phase, best = rounds.find_best(folder, phases, folder.result["best_round"], known)
        algorithm, self.engine, self.round = phase.algorithm, engines[best.phase], best.round
        self.algorithm = algorithm
        served = [s for s in known if sites[s].cases(subject.part)]
        self.sent = dict(offered(algorithm, best.state, served)) if served else {}
        alone = [s for s in self.trained if s not in served and s != study.POOLED]
        self.elsewhere = dict(offered(algorithm, best.state, alone)) if alone else {}
        self.shared = self._shared()

    def _shared(self) -> bool:
        """Whether everyone uses the same model, or the same models for the same patients."""
        return self.engine.serve(self.round, {**self.sent, **self.elsewhere}).shared is not None

    def examine(self, part: str, tolerance: float, others: bool) -> Iterator[tuple[SiteId, SiteId, Examined]]:
        """(Whose model, whose patient, what came out)."""
        across = others and not self.shared
        sent = {**self.sent, **self.elsewhere} if across else self.sent
        for owner, site, found in self.engine.examine(self.round, sent, part, tolerance, across):
            yield SHARED if self.shared else owner, site, found


def _clusters(
    path: Path, models: Models, subject: Subject, sites: Mapping[SiteId, TorchSite]
) -> dict[str, dict[str, Any]]:
    """Writes down which case is of which cluster of patients, and where it lies; returns how the clusters were fitted,
    and how alike those are that all features in one place would have given."""
    algorithm, got = models.algorithm, next(iter(models.sent.values()), Payload())
    if not isinstance(algorithm, Cfft) or "mixture" not in got:
        return {}
    mixture = Mixture.of({k: plain(v) for k, v in got["mixture"].items()})
    everyone = [(s, part, name) for s, site in sites.items() for part in PARTS for name in site.cases(part)]
    vectors = np.array([sites[s].radiomics((name,), algorithm.bin_width)[0] for s, _, name in everyone])
    labels, sure, points = mixture.assign(vectors), mixture.probabilities(vectors).max(1), mixture.transform(vectors)
    rows: list[Row] = []
    for k, (s, part, name) in enumerate(everyone):
        shares = sites[s].shares(name)
        row = {"site": s, "case": name, "part": part, "cluster": int(labels[k]), "probability": f"{sure[k]:.4f}"}
        row |= {f"component {j + 1}": f"{x:.6g}" for j, x in enumerate(points[k])}
        rows.append(row | {f"share {n}": f"{x:.6g}" for n, x in zip(sites[s].labels, shares, strict=False)})
    _write(path, rows)
    trained = vectors[[part == "train" for _, part, _ in everyone]]
    alike = agreement(mixture, pooled(trained, algorithm.settings), trained)
    return {"clusters": {"fit": algorithm.fit, "components": len(mixture.weights), **alike}}


def _examine(
    models: Models, subject: Subject, draft: Path, tolerance: float, others: bool, pictures: bool
) -> Iterator[Row]:
    """The rows of the table; what a hospital's own model answers is kept beside it."""
    with ZipFile(draft / "predictions.npz", "w", ZIP_DEFLATED) as kept:
        for owner, site, found in models.examine(subject.part, tolerance, others):
            if pictures and found.answer is not None and owner in (SHARED, site):
                _add(kept, f"{site}/{found.case}", found.answer)
            for label, measures in found.measures.items():
                yield {"model": owner, "site": site, "case": found.case, "label": label, **measures}


def _add(archive: ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: Path, rows: Sequence[Row]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as problem:
        raise ConfigError(
            "Parquet takes pyarrow: pip install 'polysite[parquet]'; cases.csv needs nothing"
        ) from problem
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def _keep(draft: Path, subject: Subject, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """The worst, median and best case of every hospital, by the mean Dice of its own model; returns where they lie."""
    dice: dict[SiteId, dict[str, list[float]]] = {}
    for row in rows:
        if row["model"] in (SHARED, row["site"]):
            dice.setdefault(row["site"], {}).setdefault(row["case"], []).append(row["dice"])
    cache = Cache(place())
    with ZipFile(draft / "scans.npz", "w", ZIP_DEFLATED) as kept:
        for site, cases in dice.items():
            patients = {p.name: p for p in subject.dealt[site][subject.part]}
            ranked = sorted(cases, key=lambda name: (fmean(cases[name]), name))
            chosen = {"worst": ranked[0], "median": ranked[(len(ranked) - 1) // 2], "best": ranked[-1]}
            for why, name in chosen.items():
                if name in list(chosen.values())[: list(chosen).index(why)]:
                    continue  # one of few
                case = cache.get(patients[name], subject.study.prepare, subject.study.train.patch)
                yield {
                    "site": site,
                    "case": name,
                    "why": why,
                    **_scan(kept, case, _axes(subject.study, patients[name])),
                }


def _axes(chosen: Study, patient: Patient) -> str:
    """Where the axes of the prepared case point."""
    return chosen.prepare.orientation or axes_of(patient.open())


def _scan(archive: ZipFile, case: Case, axes: str) -> dict[str, Any]:
    """Puts scan and truth, upright and not too large, into the archive; returns how they were cut."""
    image, label = turned(case.image, axes), turned(case.label, axes)
    step = max(1, ceil(max(image.shape[2:]) / SIDE))
    slices = _slices(label)
    for what, array in (("image", _grey(image)), ("truth", packed(label)[None])):
        _add(archive, f"{case.site}/{case.name}/{what}", array[:, slices, ::step, ::step])
    _, height, width = turned_size(case.spacing, axes)
    return {"axes": axes, "slices": slices, "step": step, "pixel": [height, width], "sides": bool(axes and case.unit)}


def _slices(label: np.ndarray) -> list[int]:
    """All slices, or as many as are kept: half of them evenly over the whole scan, half over what is labelled and a
    quarter more, with the widest."""
    count = label.shape[1]
    if count <= SLICES:
        return list(range(count))
    (labelled,) = np.nonzero(label.any((0, 2, 3)))
    low, high = (labelled[0], labelled[-1]) if len(labelled) else (0, count - 1)
    margin = (high - low) // 4 + 2
    low, high = max(0, low - margin), min(count - 1, high + margin)
    half = SLICES // 2
    within = np.linspace(low, high, min(half - 1, high - low + 1)).round()
    everywhere = np.linspace(0, count - 1, half).round()  # what is found where nothing is labelled must be seen, too
    return sorted({int(k) for k in (*within, *everywhere)} | {widest(label)})


def _grey(image: np.ndarray) -> np.ndarray:
    """Every modality as 0 to 255, between the 1st and the 99.5th percentile; background, which is zero, is black."""
    grey = np.zeros(image.shape, np.uint8)
    for k, volume in enumerate(image):
        inside = volume[volume != 0]
        low, high = np.percentile(inside, (1, 99.5)) if len(inside) else (0.0, 1.0)
        grey[k] = (255 * np.clip((volume - low) / max(high - low, 1e-9), 0, 1)).round() * (volume != 0)
    return grey
