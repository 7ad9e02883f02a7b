"""Methods over several federations: scores, distances between the sites, and whether distance predicts loss.

distance   mean over the pairs of sites, as in paper A (Alekseenko et al., MIDL 2024, Table 1): EMD_maxI and EMD_maxL of
           the modality and the label that differ most, EMD of both combined, EUC of the mean embeddings, and the
           other distances of the assessment
loss       score of the reference minus score of the method, on the cases that both test, for every seed. The
           reference is pooled training in the same federation or, without any, the method in the first federation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from polysite.data.split import PARTITION, SUBJECT
from polysite.engines.run_folder import RunFolder
from polysite.metrics.correlation import FEWEST, Kind, correlation, interval
from polysite.metrics.measures import about
from polysite.report.compare import Comparison
from polysite.report.evaluations import Key
from polysite.report.grid import Cell, Grid, Line, mark_best, name, number, spread
from polysite.report.runs import Method, Summary
from polysite.report.site_distances import over_pairs
from polysite.report.site_distances import read as read_distances
from polysite.site import Scores
from polysite.spreadsheets import rows as csv_rows

ENOUGH = 5  # fewest federations with an interval; resamples of fewer are too similar


@dataclass(frozen=True)
class FederationResult:
    """The comparison of the methods in one federation, and the distances between its sites."""

    title: str
    comparison: Comparison
    distances: Mapping[str, float] = field(default_factory=dict)  # name -> mean over pairs; empty if not assessed

    @property
    def pooled(self) -> Method | None:
        """The method with pooled training; None if there is none."""
        return next((m for m in self.comparison.trained if m.first.settings["run"]["pooled"]), None)

    def find(self, method: str) -> Method | None:
        """Return a method by name; None if it did not run here."""
        return next((m for m in self.comparison.trained if m.name == method), None)

    def by_seed(self, method: Method) -> dict[int, dict[Key, float]]:
        """Return the main score of every case, by its site and name in the data, for every seed of a method."""
        seeds: dict[int, dict[Key, list[float]]] = {}
        for run in method.runs:
            source = sources(run)
            cases = seeds.setdefault(int(run.settings["seed"]), {})
            for key, value in run.values(self.comparison.main, self.comparison.policy).items():
                cases.setdefault(source.get(key, key), []).append(value)
        return {seed: {key: fmean(values) for key, values in cases.items()} for seed, cases in seeds.items()}


def sources(run: Summary) -> dict[Key, Key]:
    """Return the site and name in the data of every scored case of a run; a federation may have moved and renamed it.

    A slice ``NAME/z077`` belongs to the case ``NAME``.
    """
    known: dict[Key, Key] = {}
    for row in csv_rows(RunFolder((run.like or run).path).split.splitlines()):
        source = row[PARTITION], row[SUBJECT]
        known |= {(row["Site"], row[SUBJECT]): source, (row["Site"], ".".join(source)): source}
    found: dict[Key, Key] = {}
    for site, cases in run.scores.items():
        for case in cases:
            whole, mark, part = case.partition("/")
            if (site, case) in known:
                found[site, case] = known[site, case]
            elif (site, whole) in known:
                there, named = known[site, whole]
                found[site, case] = there, f"{named}{mark}{part}"
    return found


def regrouped(run: Summary, like: Summary) -> Summary:
    """Return a run as if its cases were at the sites of another run; cases that the other does not score are left out.

    Pooled training is the same for all federations of the same cases. Scans and predictions stay under the old names.
    """
    there = {source: key for key, source in sources(like).items()}
    moved = {key: there[source] for key, source in sources(run).items() if source in there}

    def scores(of: Mapping[str, Scores]) -> dict[str, Scores]:
        found: dict[str, dict[str, Any]] = {}
        for site, cases in of.items():
            for case, score in cases.items():
                if (site, case) in moved:
                    at, named = moved[site, case]
                    found.setdefault(at, {})[named] = score
        return {**found}

    evaluation = run.evaluation
    if evaluation is not None:
        places = [(row, moved.get((row.site, row.case))) for row in evaluation.rows]
        rows = [replace(row, site=at[0], case=at[1]) for row, at in places if at is not None]
        evaluation = replace(evaluation, rows=rows, about={**evaluation.about, "shown": []})
    return replace(run, scores=scores(run.scores), evaluation=evaluation, like=like)


def distances(folders: Iterable[Path]) -> dict[str, float]:
    """Return every distance, averaged over the pairs of sites and over the folders of assessments."""
    found: dict[str, list[float]] = {}
    for folder in folders:
        for kind, matrix in read_distances(folder).items():
            found.setdefault(kind, []).append(over_pairs(matrix))
    return {kind: fmean(values) for kind, values in found.items()}


def losses(results: Sequence[FederationResult]) -> dict[str, dict[str, list[float]]]:
    """Return the loss of every method in every federation, one value per seed: method -> federation -> losses."""
    found: dict[str, dict[str, list[float]]] = {}
    central = any(r.pooled for r in results)
    for result in results:
        for method in result.comparison.trained:
            other = result if central else results[0]
            reference = other.pooled if central else other.find(method.name)
            if reference is None or (central and reference is method):
                continue
            lost = _lost(other.by_seed(reference), result.by_seed(method))
            if lost:
                found.setdefault(method.name, {})[result.title] = lost
    return found


def _lost(reference: Mapping[int, Mapping[Key, float]], method: Mapping[int, Mapping[Key, float]]) -> list[float]:
    """Return the mean difference over the cases that both score, for every seed that both have.

    >>> _lost({0: {("a", "1"): 0.9, ("a", "2"): 0.5}}, {0: {("a", "1"): 0.7}, 1: {}})
    [0.2]
    """
    lost = []
    for seed in sorted(reference.keys() & method.keys()):
        shared = sorted(reference[seed].keys() & method[seed].keys())
        if shared:
            lost.append(round(fmean(reference[seed][key] - method[seed][key] for key in shared), 12))
    return lost


def overview(results: Sequence[FederationResult]) -> Grid:
    """Return the main score of every method in every federation."""
    main = about(results[0].comparison.main).title
    names = list(dict.fromkeys(m.name for r in results for m in r.comparison.trained))
    lines = [Line((name(method), *(_score(r, r.find(method)) for r in results))) for method in names]
    marked = mark_best(lines, [0, *[1] * len(results)])
    seeds = max(len(m.runs) for r in results for m in r.comparison.trained) > 1
    note = f"Mean {main} over all {results[0].comparison.methods[0].first.split} cases of a federation"
    note += " ± standard deviation over the seeds; " if seeds else "; "
    note += "the best method of each federation is marked."
    return Grid("federations", f"{main} in every federation", ("method", *(r.title for r in results)), marked, note)


def _score(result: FederationResult, method: Method | None) -> Cell:
    if method is None:
        return Cell("–")
    return spread(method.spread(result.comparison.main, result.comparison.policy))


def distance_table(results: Sequence[FederationResult]) -> Grid:
    """Return every federation with its distances, and the loss of every method."""
    kinds = _kinds(results)
    lost = losses(results)
    head = ("federation", "sites", *kinds, *(f"loss {method}" for method in lost))
    lines = []
    for result in results:
        cells = [name(result.title), number(_sites(result), "d")]
        cells += [number(result.distances.get(kind)) for kind in kinds]
        cells += [spread(by_title.get(result.title, [])) for by_title in lost.values()]
        lines.append(Line(tuple(cells)))
    note = (
        "Distances: means over the pairs of sites that train. EMD_maxI and EMD_maxL: EMD of the modality and of the "
        "label that differ most; EMD: all combined; EUC: Euclidean distance of the mean embeddings. "
        f"{_words(results)}"
    )
    return Grid("distance", "Distances and losses", head, tuple(lines), note)


def _words(results: Sequence[FederationResult]) -> str:
    """Return a sentence that defines the loss."""
    main = about(results[0].comparison.main).title
    pooled = next((r.pooled.name for r in results if r.pooled), None)
    against = f"of {pooled}" if pooled else f"in the federation {results[0].title!r}"
    return f"Loss: mean {main} {against} minus that of the method, on the cases that both test; ± over the seeds."


def _kinds(results: Sequence[FederationResult]) -> list[str]:
    """Return the names of the distances that every assessed federation has."""
    known = [list(r.distances) for r in results if r.distances]
    return [kind for kind in known[0] if all(kind in each for each in known)] if known else []


def _sites(result: FederationResult) -> int:
    """Return the number of sites that train; in pooled training alone, of those with scored cases."""
    trained = [m for m in result.comparison.trained if m is not result.pooled]
    return len(trained[0].first.trained if trained else result.comparison.sites)


@dataclass(frozen=True)
class Related:
    """A distance and the losses of a method over the federations that have both."""

    method: str
    distance: str
    titles: tuple[str, ...]
    x: tuple[float, ...]
    y: tuple[tuple[float, ...], ...]  # losses of every seed

    @property
    def means(self) -> list[float]:
        """Mean loss of every federation."""
        return [fmean(values) for values in self.y]


def related(results: Sequence[FederationResult]) -> list[Related]:
    """Return every pair of method and distance that at least two federations have."""
    found = []
    for method, by_title in losses(results).items():
        for kind in _kinds(results):
            both = [r for r in results if r.title in by_title and kind in r.distances]
            if len(both) > 1:
                x, y = (r.distances[kind] for r in both), (tuple(by_title[r.title]) for r in both)
                found.append(Related(method, kind, tuple(r.title for r in both), tuple(x), tuple(y)))
    return found


def correlations(results: Sequence[FederationResult]) -> Grid | None:
    """Return the correlation of every distance with the loss of every method; None below three federations."""
    pairs = [pair for pair in related(results) if len(pair.x) >= FEWEST]
    if not pairs:
        return None
    lines = []
    kinds: tuple[Kind, ...] = ("spearman", "pearson")
    for pair in pairs:
        cells = [name(pair.method), name(pair.distance), number(len(pair.x), "d")]
        for kind in kinds:
            value = correlation(pair.x, pair.means, kind)
            low, high = interval(pair.x, pair.means, kind)
            sure = not isnan(low) and len(pair.x) >= ENOUGH
            cells += [number(None if isnan(value) else value, "+.2f")]
            cells += [Cell(f"{low:+.2f} to {high:+.2f}" if sure else "–")]
        lines.append(Line(tuple(cells)))
    head = ("method", "distance", "federations", "Spearman", "95 % interval", "Pearson", "95 % interval")
    note = (
        "Correlation of the distance with the loss over the federations: positive if methods lose more in federations "
        "with larger distances. Interval: bootstrap over federations, for each correlation by itself. With few "
        f"federations, or ones made in the same way, it is approximate; below {ENOUGH} federations none is shown. "
        + _words(results)
    )
    return Grid("correlation", "Does distance predict loss?", head, tuple(lines), note)
