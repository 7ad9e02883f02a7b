"""Extract radiomic features: a table with a row per case and 93 columns per modality.

::

    FOLDER/
        features.csv           site, case, then MODALITY_FEATURE; a feature that is undefined is an empty cell
        outliers.csv           a row per feature that makes a case an outlier, see ``radiomics.outliers``
        sites/NAME/outliers.csv   the rows of one site, to be sent to it
        clusters.csv           cluster, probability and two principal components of every case (--clusters)
        cluster_sites.csv, cluster_labels.csv   cases per site, and mean share of every label, in each cluster
        mixture.npz            scaling, principal components and mixture of the federated fit
        index.html, figures/   maps and tables of the clusters; name no case
        radiomics.json         settings, agreement of the federated and the pooled fit, versions

Cases are prepared as for training, but padded only if ``prepare.normalise = "padded"``, whose z-scores depend on it.
The region is the brain, as ``Prepare.brain`` finds it, or a label; the features of the brain are those of CFFT in the
same study. A modality that was not acquired has no features, nor has a case with fewer than two voxels of the label.

Features are cached under a digest of the files, the preparation and the settings: a second run opens no scan, and an
interrupted run continues. The folder is written as a whole or not at all.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polysite.cluster.federated_mixture import State, federated, mixture_of
from polysite.cluster.mixture import Mixture, agreement
from polysite.cluster.mixture import Settings as MixtureSettings
from polysite.cluster.pooled_mixture import pooled
from polysite.cluster.remarks import remarks
from polysite.cluster.variability import Variability, variability
from polysite.config import Study
from polysite.data.cache import Arrays, Cache, place
from polysite.data.case import SPLITS, Case, CaseRef
from polysite.data.federation import Natural
from polysite.data.files import Files
from polysite.engines.run_folder import RunFolder, file_name, versions
from polysite.engines.watch import Watch
from polysite.errors import ConfigError, DataError, nearest
from polysite.machine import cores
from polysite.payload import SiteId
from polysite.radiomics import NAMES, Settings, comparable, features
from polysite.radiomics import outliers as far
from polysite.radiomics.outliers import MIN_CASES
from polysite.report import clusters as clusters_page
from polysite.report.grid import Grid, Line, name, number
from polysite.spreadsheets import csv_text
from polysite.storage import draft_folder, vacant
from polysite.study import deal_cases
from polysite.study.cases import in_parallel

Values = NDArray[np.float64]

VERSION = 2  # of the extraction; a new version invalidates the cache
PAPER = Settings(bin_width=0.09)  # Manthe et al. 2023, for z-scored brains; 0.15 on CC359


@dataclass(frozen=True, eq=False)
class Table:
    """Features and label volumes of all cases."""

    modalities: tuple[str, ...]
    labels: tuple[str, ...]  # or classes
    sites: tuple[SiteId, ...]  # of the cases
    cases: tuple[str, ...]
    values: Values  # cases x (modalities x 93); NaN if undefined
    shares: Values  # cases x labels: labelled fraction of the brain; for a class, 1 or 0

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of ``values``."""
        return tuple(f"{modality}_{feature}" for modality in self.modalities for feature in NAMES)

    def only(self, rows: Iterable[int]) -> "Table":
        """Return the table of some cases."""
        kept = list(rows)
        sites, cases = (tuple(each[i] for i in kept) for each in (self.sites, self.cases))
        return Table(self.modalities, self.labels, sites, cases, self.values[kept], self.shares[kept])


@dataclass(frozen=True)
class Outlier:
    """A feature of a case that lies far outside the range of all cases, or far above that of any other case."""

    site: SiteId
    case: str
    feature: str  # MODALITY_FEATURE
    value: float
    low: float
    high: float
    times: float  # distance from the range, in widths of the range
    above: float  # magnitude, in units of the largest magnitude of any other case


@dataclass(frozen=True, eq=False)
class Clusters:
    """Clusters of cases by the federated mixture, with the pooled one for comparison."""

    table: Table  # cases that have features
    mixture: Mixture
    pooled: Mixture
    agreement: Mapping[str, float]
    fit: State  # of the federated fit
    pooled_fit: State
    settings: MixtureSettings
    variability: Variability | None = None

    @property
    def remarks(self) -> list[str]:
        """Remarks on the clusters that a user should read."""
        counts = {site: Counter[str]() for site in dict.fromkeys(self.table.sites)}
        for site, cluster in zip(self.table.sites, self.names, strict=True):
            counts[site][str(int(cluster) - 1)] += 1
        return remarks(counts, len(self.mixture.weights), self.fit.agreement)

    @property
    def vectors(self) -> Values:
        """Features with zeros for undefined values, as in CFFT: a missing modality separates cases."""
        return comparable(self.table.values)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the cluster of every case: 1, 2, ..."""
        return tuple(str(k + 1) for k in self.mixture.assign(self.vectors))


@dataclass(frozen=True, eq=False)
class Extracted:
    """A finished extraction."""

    folder: Path
    table: Table
    outliers: tuple[Outlier, ...]
    clusters: Clusters | None
    about: Mapping[str, Any]


def run(
    study: Study,
    out: Path | str | None = None,
    *,
    settings: Settings = PAPER,
    label: str | None = None,
    clusters: MixtureSettings | None = None,
    jobs: int | None = None,
    repeats: int = 0,
    watch: Watch = Watch(),
) -> Extracted:
    """Extract features, find outliers, cluster the cases if wanted, and write a new folder.

    Args:
        study: The study whose cases are described.
        out: The new folder.
        settings: How features are extracted.
        label: Region of the features; None for the whole brain.
        clusters: How cases are clustered; None for no clusters.
        jobs: Cases that are processed in parallel; None for one per core.
        repeats: Number of fits with other seeds, and of fits to bootstrap samples, that show how much the clusters
            vary; 0 for none.
        watch: Observer of the progress.
    """
    path = vacant(Path(out) if out else RunFolder.fresh(Path("radiomics"), "radiomics"), "table")
    table = extract(study, settings, label, jobs, watch)
    extremes, groups = outliers(table), cluster(table, clusters, repeats) if clusters else None
    about = {
        "region": label or "brain",
        "settings": asdict(settings),
        "prepare": asdict(study.prepare),
        "seed": study.seed,
        "cases": {site: table.sites.count(site) for site in dict.fromkeys(table.sites)},
        "outlying": {site: len({o.case for o in extremes if o.site == site}) for site in dict.fromkeys(table.sites)},
        "remarks": [*_remarks(table, label), *(f"{r[0].upper()}{r[1:]}." for r in (groups.remarks if groups else ()))],
        "clusters": _plain(groups) if groups else None,
        "versions": versions(),
    }
    done = Extracted(path, table, extremes, groups, about)
    with draft_folder(path, "table of radiomics") as draft:
        _publish(draft, done)
    return done


def extract(
    study: Study, settings: Settings = PAPER, label: str | None = None, jobs: int | None = None, watch: Watch = Watch()
) -> Table:
    """Return the features of all cases of a study, of the whole brain or of a label; ``jobs`` cases in parallel."""
    if isinstance(study.data, Files):
        study = replace(study, data=replace(study.data, allow=("missing", "empty")))
    data, refs = study.data, _all_cases(study)
    if label is not None and (data.task == "classification" or label not in data.label_names):
        known = nearest(label, data.label_names) if data.task == "segmentation" else "these images have classes only"
        raise ConfigError(f"there is no label {label!r} to take as the region: {known}")
    if study.prepare.normalise == "padded" and len(study.train.patch) != study.dims:
        raise ConfigError(
            f"train.patch = {list(study.train.patch)} has {len(study.train.patch)} sides for {study.dims}D data; "
            "prepare.normalise = 'padded' pads to it"
        )
    at_once = max(1, min(jobs or cores(), len(refs)))
    threads, cache = max(1, cores() // at_once), Cache(place())
    padded = study.prepare.normalise == "padded"
    patch = study.train.patch if padded else [1] * study.dims
    recipe = [asdict(study.prepare), list(patch), asdict(settings), label, data.modality_names]
    how = ["radiomics", VERSION, version("monai"), *recipe]

    def described(ref: CaseRef) -> Arrays:
        known = cache.recall(ref, how)
        if known is None:
            known = _described(study, settings, label, threads, study.prepare.apply(ref.open(), patch))
            cache.keep(ref, how, known)
        return known

    rows = in_parallel(described, refs, at_once, isinstance(data, Files), watch)
    names = tuple(ref.site for ref in refs), tuple(ref.name for ref in refs)
    values, shares = (np.stack([row[what] for row in rows]) for what in ("features", "shares"))
    return Table(data.modality_names, data.label_names, *names, values.reshape(len(rows), -1), shares)


def _all_cases(study: Study) -> list[CaseRef]:
    """Return all cases of all sites, in the order of the sites.

    With the federation ``natural`` no split is computed, so that a site may have too few cases for a split.
    """
    if isinstance(study.federation, Natural):
        volumes = [case for cases in study.data.case_refs(study.seed).values() for case in cases]
        return [case for cases in study.cut(volumes).values() for case in cases]
    return [case for splits in deal_cases(study).values() for split in SPLITS for case in splits[split]]


def _described(study: Study, settings: Settings, label: str | None, threads: int, case: Case) -> Arrays:
    """Return the features of a prepared case, and the shares of its labels."""
    modalities, names = study.data.modality_names, study.data.label_names
    inside = study.prepare.brain(case.image, modalities)
    if not inside.any():
        raise DataError(f"case {case.name!r} of site {case.site!r}: every voxel of every modality is background")
    region = inside if label is None else case.label[names.index(label)] > 0
    table = np.full((len(case.image), len(NAMES)), np.nan)
    for k, (modality, image) in enumerate(zip(modalities, case.image, strict=True)):
        if np.ptp(image) and np.count_nonzero(region) > 1:
            try:
                values = features(image, region, spacing=case.spacing, settings=settings, threads=threads)
            except (ConfigError, DataError) as problem:
                who = f"case {case.name!r} of site {case.site!r}, {modality}"
                raise type(problem)(f"{who}: {problem}") from problem
            table[k] = list(values.values())
    whole = case.label.ndim > 1
    shares = case.label.reshape(len(case.label), -1).sum(1) / inside.sum() if whole else case.label
    return {"features": table, "shares": np.asarray(shares, np.float64)}


def outliers(table: Table) -> tuple[Outlier, ...]:
    """Return the features that make cases outliers, as every site finds its own: see ``radiomics.outliers``."""
    sites = {site: table.only(np.flatnonzero([s == site for s in table.sites])) for site in dict.fromkeys(table.sites)}
    shared = far.share(np.asarray(table.values, np.float64))
    found = []
    for site, own in sites.items():
        for each in far.find(own.values, shared):
            numbers = (each.value, each.low, each.high, each.times, each.above)
            found.append(Outlier(site, own.cases[each.row], table.columns[each.column], *numbers))
    order = {at: n for n, at in enumerate(zip(table.sites, table.cases, strict=True))}
    return tuple(sorted(found, key=lambda o: order[o.site, o.case]))


def cluster(table: Table, settings: MixtureSettings = MixtureSettings(), repeats: int = 0) -> Clusters:
    """Cluster the cases: scaling, principal components and mixture, fitted federated and pooled.

    ``repeats`` further fits with other seeds, and as many to bootstrap samples, show how much the clusters vary.
    """
    some = table.only(np.flatnonzero(np.isfinite(table.values).any(1)))
    vectors, sites = comparable(some.values), np.array(some.sites)
    state = federated({site: vectors[sites == site] for site in dict.fromkeys(some.sites)}, settings)
    whole = pooled(vectors, settings)
    fitted, together = mixture_of(state), mixture_of(whole)
    order = np.argsort(fitted.means[:, 0])  # numbered from left to right on the map, independent of rounding
    fitted = replace(fitted, weights=fitted.weights[order], means=fitted.means[order])
    agreed = agreement(fitted, together, vectors)
    chosen = replace(settings, components=len(fitted.weights))
    varied = variability(vectors, chosen, repeats) if repeats and len(fitted.weights) > 1 else None
    return Clusters(some, fitted, together, agreed, state, whole, settings, varied)


def _remarks(table: Table, label: str | None) -> Iterable[str]:
    empty = np.isnan(table.values).reshape(len(table.cases), len(table.modalities), -1)
    blank: NDArray[np.bool_] = np.all(empty, axis=2)
    nothing: NDArray[np.bool_] = np.all(blank, axis=1)
    if nothing.any():
        yield f"{_cases(int(nothing.sum()))} with fewer than two voxels of {label}: empty cells."
    for modality, missing in zip(table.modalities, blank.T, strict=True):
        sites = dict.fromkeys(np.array(table.sites)[missing & ~nothing].tolist())
        if sites:
            count = _cases(int((missing & ~nothing).sum()))
            yield f"{modality} was not acquired in {count} of {', '.join(sites)}: empty cells."
    if len(table.cases) < MIN_CASES:
        yield f"{_cases(len(table.cases))}: too few to find outliers; that takes {MIN_CASES}."


def tables(done: Extracted) -> list[Grid]:
    """Return the tables for the terminal: outliers by name, and the clusters."""
    grids = []
    if done.outliers:
        lines = []
        for at in dict.fromkeys((o.site, o.case) for o in done.outliers):
            own = [o for o in done.outliers if (o.site, o.case) == at]  # the farthest first
            worst = (name(own[0].feature), number(own[0].value, ".4g"), name(f"{own[0].low:.4g} to {own[0].high:.4g}"))
            apart = number(own[0].times, ".4g"), number(own[0].above, ".4g")
            lines.append(Line((name(at[0]), name(at[1]), number(len(own), "d"), *worst, *apart)))
        head = ("site", "case", "features", "farthest", "value", "2-98 % of all cases", "widths outside", "x any other")
        note = (
            "Farther outside the range of all cases than 100 times its width, or more than 100 times as large as in "
            "any other case: check these scans."
        )
        grids.append(Grid("outliers", "Outliers", head, tuple(lines), note))
    if done.clusters:
        shown = shown_clusters(done.clusters)
        fit = clusters_page.fit(done.about["clusters"])
        grids += [clusters_page.by_site(shown), clusters_page.by_label(shown), fit]
    return grids


def words(done: Extracted) -> list[str]:
    """Return the results as sentences."""
    table, cases, count = done.table, done.about["cases"], len(done.table.modalities)
    sites = f"{len(cases)} site{'s' * (len(cases) > 1)}"
    sentences = [f"{_cases(len(table.cases))} of {sites}, {count} x {len(NAMES)} features each."]
    sentences += done.about["remarks"]
    if not done.outliers and len(table.cases) >= MIN_CASES:
        sentences.append("There are no outliers.")
    if done.clusters:
        sentences += [
            *clusters_page.words(shown_clusters(done.clusters)),
            f"Page with maps: {done.folder / 'index.html'}",
        ]
    return [*sentences, f"Table: {done.folder / 'features.csv'}"]


def shown_clusters(groups: Clusters) -> clusters_page.Shown:
    """Return what pages and tables show of clusters."""
    some, points = groups.table, groups.mixture.transform(groups.vectors)
    return clusters_page.Shown(some.sites, groups.names, points, some.labels, some.shares)


def _publish(draft: Path, done: Extracted) -> None:
    table = done.table
    head = ["site", "case", *table.columns]
    rows = [[s, c, *map(_cell, v)] for s, c, v in zip(table.sites, table.cases, table.values.tolist(), strict=True)]
    (draft / "features.csv").write_text(csv_text(head, rows), encoding="utf-8")
    _write_outliers(draft, done.outliers)
    for site in dict.fromkeys(table.sites):
        _write_outliers(draft / "sites" / file_name(site), [o for o in done.outliers if o.site == site])
    if done.clusters:
        _publish_clusters(draft, done, done.clusters)
    (draft / "radiomics.json").write_text(json.dumps(done.about, indent=1) + "\n", encoding="utf-8")


def _write_outliers(folder: Path, found: Iterable[Outlier]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = csv_text([f.name for f in fields(Outlier)], (astuple(outlier) for outlier in found))
    (folder / "outliers.csv").write_text(text, encoding="utf-8")


def _publish_clusters(draft: Path, done: Extracted, groups: Clusters) -> None:
    shown, some = shown_clusters(groups), groups.table
    sure = groups.mixture.probabilities(groups.vectors).max(1)
    plane = np.hstack([shown.points, np.zeros((len(some.cases), 1))])[:, :2]  # there may be only one component
    each = zip(some.sites, some.cases, groups.names, sure.tolist(), *plane.T.tolist(), strict=True)
    text = csv_text(["site", "case", "cluster", "probability", "pc1", "pc2"], each)
    (draft / "clusters.csv").write_text(text, encoding="utf-8")
    np.savez(draft / "mixture.npz", **groups.mixture.arrays())  # type: ignore[arg-type]
    for grid in (clusters_page.by_site(shown), clusters_page.by_label(shown)):
        (draft / f"{grid.name}.csv").write_text(grid.csv(), encoding="utf-8")
    clusters_page.page(shown, done.about).write(draft)


def _plain(groups: Clusters) -> dict[str, Any]:
    """Return the clusters as JSON values."""
    return {
        "settings": asdict(groups.settings),
        "cases": len(groups.table.cases),
        "dimensions": int(groups.mixture.means.shape[1]),
        "components": int(groups.mixture.means.shape[0]),
        "exchanges": groups.fit.exchanges,
        "bic": {str(count): score for count, score in groups.fit.bic},
        "pooled_bic": {str(count): score for count, score in groups.pooled_fit.bic},
        "agreement": dict(groups.agreement),
        "restarts": groups.fit.agreement,
        "variability": asdict(groups.variability) if groups.variability else None,
    }


def _cases(count: int) -> str:
    return f"{count} case{'s' * (count != 1)}"


def _cell(value: float) -> str:
    return "" if np.isnan(value) else repr(value)
