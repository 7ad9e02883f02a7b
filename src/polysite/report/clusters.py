"""Clusters of cases on a page: maps coloured by hospital and by cluster, cases per hospital, volumes of labels.

Functions take plain arrays, so that a run with clusters of cases shows them as ``polysite radiomics`` does. No case is
named, so that a page can go to every hospital. t-SNE: van der Maaten and Hinton, Journal of Machine Learning Research
2008; unlike the clusters, it needs the vectors of all cases in one place.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import NDArray

from polysite.data.manifest import natural
from polysite.report.drawing import DOTS, WIDE, colour, marker, strip, unformatted
from polysite.report.figure_files import draw
from polysite.report.grid import Cell, Grid, Line, name, number, spread
from polysite.report.names import joined
from polysite.report.page import Folded, Page, Picture, Section, layout

Values = NDArray[np.float64]

FEW = 3  # a hospital with fewer cases in a cluster, or fewer than a tenth of its cases, is not said to be in it
PERPLEXITY = 35.0  # of t-SNE, as in Manthe et al. 2023
AGREED = 0.8  # adjusted Rand index below which the federated and the pooled clusters disagree
TITLE = "Clusters of scans that look alike"


@dataclass(frozen=True, eq=False)
class Shown:
    """Cases with their hospital, cluster, coordinates and label volumes."""

    sites: Sequence[str]
    clusters: Sequence[str]
    points: Values  # cases x dimensions: principal components, the first two for the map
    labels: Sequence[str] = ()
    shares: Values | None = None  # cases x labels: volume of a label as a fraction of the head

    @property
    def site_names(self) -> list[str]:
        """Names of the hospitals, in order of appearance."""
        return list(dict.fromkeys(self.sites))

    @property
    def cluster_names(self) -> list[str]:
        """Names of the clusters, sorted."""
        return natural(set(self.clusters))

    def held(self, site: str) -> dict[str, int]:
        """Return the clusters in which a hospital has more than a few cases, with their numbers, the largest first."""
        own = Counter(c for s, c in zip(self.sites, self.clusters, strict=True) if s == site)
        least = max(FEW, own.total() / 10)
        return {c: n for c, n in own.most_common() if n >= least}


def tsne(vectors: Values, seed: int = 0) -> Values | None:
    """Return t-SNE coordinates in the plane; None for fewer than five vectors. Few vectors lower the perplexity."""
    from sklearn.manifold import TSNE

    if len(vectors) < 5:
        return None
    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    start = vectors[:, :2] if vectors.shape[1] > 1 else np.hstack([vectors, np.zeros_like(vectors)])
    start = start / (start[:, 0].std() or 1.0) * 1e-4  # principal components, scaled as scikit-learn does
    points: Values = TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(vectors)
    return points


def maps(points: Values, shown: Shown, axes_names: tuple[str, str] | None = None) -> str:
    """Draw a dot per case, coloured by hospital on the left and by cluster on the right; return SVG."""
    sides = [("by hospital", shown.sites, {s: s for s in shown.site_names})]
    sides.append(("by cluster", shown.clusters, {c: f"cluster {c}" for c in shown.cluster_names}))
    columns = [max(1, min(len(of), 44 // (max(map(len, of.values())) + 4))) for _, _, of in sides]
    rows = max(ceil(len(of) / count) for (_, _, of), count in zip(sides, columns, strict=True))
    figure = Figure((WIDE, 3.4 + 0.19 * rows))
    figure.set_layout_engine("constrained", wspace=0.06)
    flat = np.hstack([points, np.zeros((len(points), 1))])[:, :2]
    for k, (title, groups, names) in enumerate(sides):
        axes = figure.add_subplot(1, 2, k + 1)
        _dots(axes, flat, groups, names, title)
        if k:
            _numbers(axes, flat, shown)
        if axes_names:
            axes.set_xlabel(axes_names[0], fontsize=9)
            axes.set_ylabel(axes_names[1], fontsize=9)
        else:
            axes.set(xticks=[], yticks=[])
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17 if axes_names else -0.02), "ncols": columns[k]}
        axes.legend(frameon=False, fontsize=8, handletextpad=0.1, columnspacing=0.9, markerscale=1.1, **place)
    return draw(figure)


def shares(shown: Shown) -> str | None:
    """Draw the volumes of the labels, a panel per label and a row per cluster; return SVG."""
    if shown.shares is None or not shown.labels:
        return None
    names, columns = shown.cluster_names, min(3, len(shown.labels))
    rows = ceil(len(shown.labels) / columns)
    figure = Figure((WIDE, rows * (0.28 * len(names) + 1.0)), layout="constrained")
    of = np.array(shown.clusters)
    for k, label in enumerate(shown.labels):
        axes = figure.add_subplot(rows, columns, k + 1)
        for row, cluster in enumerate(names):
            strip(axes, row, 100 * shown.shares[of == cluster, k], colour(row), len(of) > DOTS)
        axes.set_yticks(range(len(names)), [f"cluster {c}" if k % columns == 0 else "" for c in names], fontsize=8)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_title(unformatted(label), fontsize=10, loc="left")
        axes.set_xlabel("% of the head", fontsize=8.5)
        axes.tick_params(labelsize=8, axis="x")
        axes.tick_params(length=0, axis="y")
        axes.spines[["top", "right", "left"]].set_visible(False)
    return draw(figure)


def by_site(shown: Shown) -> Grid:
    """Return the number of cases per hospital and cluster."""
    counts = Counter(zip(shown.sites, shown.clusters, strict=True))
    columns = shown.cluster_names

    def line(title: str, sites: Sequence[str], kind: str = "") -> Line:
        own = [sum(counts[s, c] for s in sites) for c in columns]
        return Line((name(title), number(sum(own), "d"), *(_count(n) for n in own)), kind)

    lines = [line(site, [site]) for site in shown.site_names]
    total = line("all", shown.site_names, "total")
    head = ("hospital", "cases", *(f"cluster {c}" for c in columns))
    note = "Cases of every hospital in every cluster."
    return Grid("cluster_sites", "Cases per hospital and cluster", head, (*lines, total), note)


def by_label(shown: Shown) -> Grid:
    """Return the mean volume of every label in each cluster, and how many hospitals have cases in it."""
    of, table = np.array(shown.clusters), shown.shares
    lines = []
    for cluster in [*shown.cluster_names, None]:
        held = of == cluster if cluster else np.ones(len(of), bool)
        sites = {s for s, inside in zip(shown.sites, held, strict=True) if inside}
        cells = [spread((100 * column).tolist(), 1) for column in table[held].T] if table is not None else []
        counts = number(int(held.sum()), "d"), number(len(sites), "d")
        first, kind = (f"cluster {cluster}", "") if cluster else ("all", "total")
        lines.append(Line((name(first), *counts, *cells), kind))
    head = ("cluster", "cases", "hospitals", *(f"{label} (%)" for label in (shown.labels if table is not None else ())))
    note = (
        "Mean and standard deviation of the labelled fraction of the head, in per cent; for a class, the fraction of "
        "the cases. Clusters that differ little here separate scanners rather than diseases."
    )
    return Grid("cluster_labels", "Labels per cluster", head, tuple(lines), note)


def words(shown: Shown) -> list[str]:
    """Return what the clusters show about the hospitals, as sentences."""
    held = {site: shown.held(site) for site in shown.site_names}
    sentences = []
    for site, clusters in held.items():
        if len(clusters) > 1:
            where = joined([f"{n} cases in cluster {c}" for c, n in clusters.items()])
            many = "two" if len(clusters) == 2 else "several"
            sentences.append(
                f"The scans of {site} are of {len(clusters)} kinds: {where}. This suggests {many} scanners or "
                "protocols in one hospital; or groups of patients, if the labels differ, too."
            )
    for cluster in shown.cluster_names:
        sites = [site for site, clusters in held.items() if cluster in clusters]
        if len(sites) > 1:
            sentences.append(f"Cluster {cluster} holds scans of {joined(sites)}, which look alike.")
    own = [next(iter(clusters)) for clusters in held.values() if len(clusters) == 1]
    if len(own) == len(held) > 1 and len(set(own)) == len(own):
        sentences.append(
            "Every hospital has its own cluster: its scans resemble each other and differ from all others."
        )
    return sentences


def fit(fitted: Mapping[str, Any]) -> Grid:
    """Return how well the federated and the pooled fit agree; ``fitted`` is ``clusters`` of ``radiomics.json``."""
    agreed = fitted["agreement"]
    lines = [
        ("agreement of the clusters: adjusted Rand index (1: identical, 0: chance)", number(agreed["rand"])),
        ("explained variance of the principal components, federated", _percent(agreed["explained"])),
        ("explained variance of the principal components, pooled", _percent(agreed["other_explained"])),
        ("largest difference of a percentile, as a share of its feature's range", _percent(agreed["percentiles"])),
        ("principal components", number(fitted["dimensions"], "d")),
        ("exchanges with every hospital", number(fitted["exchanges"], "d")),
        ("agreement of the best restarts: adjusted Rand index", number(fitted["restarts"])),
    ]
    varied = fitted["variability"] or {}
    titles = {"seeds": "with other seeds", "bootstraps": "fitted to bootstrap samples of the cases"}
    lines += [
        (f"agreement of {len(found)} clusterings {titles[how]}: mean and lowest adjusted Rand index", _spread(found))
        for how, found in varied.items()
    ]
    lines += [
        (
            f"BIC of {_clusters(int(count))}, federated and pooled (lower is better)",
            Cell(f"{score:.0f} / {fitted['pooled_bic'][count]:.0f}", score, int(count) == fitted["components"]),
        )
        for count, score in fitted["bic"].items()
    ]
    note = (
        "Federated: percentiles, principal components and mixture are fitted to sums over the cases of a hospital, so "
        "that only sums leave it. Pooled: fitted to the features of all cases in one place, from the "
        "same starts. The clusters shown here are the federated ones."
    )
    return Grid("cluster_fit", "Federated and pooled", ("", "value"), tuple(Line((name(n), c)) for n, c in lines), note)


def sections(shown: Shown, seed: int = 0) -> Iterator[Section]:
    """Yield the sections of a page about clusters."""
    explained = (
        "A dot is a case. Scans of neighbouring cases have similar grey values and textures. The colour is the "
        "hospital on the left, the cluster on the right."
    )
    pictures = [Picture("Principal components", maps(shown.points, shown, ("first", "second")), explained)]
    near = tsne(shown.points, seed)
    if near is not None:
        caption = (
            "The same cases by t-SNE, which keeps neighbours together; distances between groups have no meaning. It "
            "was computed from the features of all cases in one place."
        )
        pictures.append(Picture("t-SNE", maps(near, shown), caption))
    yield Section("map", "Cases that look alike", (*words(shown), *pictures))
    yield Section("sites", "Cases per hospital and cluster", (by_site(shown),))
    drawn = shares(shown)
    caption = "A dot is a case; the line spans the middle half of a cluster, the vertical mark is the median."
    figure = (Picture("", drawn, caption),) if drawn else ()
    yield Section("labels", "Labels per cluster", (by_label(shown), *figure))


def page(shown: Shown, about: Mapping[str, Any]) -> Page:
    """Return the page of ``polysite radiomics``, which names no case; ``about`` is ``radiomics.json``."""
    parts = [*sections(shown, about["seed"])]
    parts.append(Section("fit", "Federated and pooled", (fit(about["clusters"]),)))
    parts.append(Section("far", "Outliers", (_outlying(about),)))
    made = {k: about[k] for k in ("region", "settings", "prepare", "seed")} | {"mixture": about["clusters"]["settings"]}
    settings = "\n".join(f"{k}: {v}" for k, v in made.items())
    versions = "\n".join(f"{k}: {v}" for k, v in about["versions"].items())
    files = "Every number is in features.csv, clusters.csv and radiomics.json."
    made_with = files, Folded("Settings", settings), Folded("Versions", versions)
    parts.append(Section("made", "Settings and versions", made_with))
    tried = list(about["clusters"]["bic"])
    why = "the number that was set" if len(tried) == 1 else f"the number among {joined(tried)} with the lowest BIC"
    empty = about["clusters"]["components"] - len(shown.cluster_names)
    lead = (
        f"{len(shown.sites)} cases of {len(shown.site_names)} hospitals, clustered by 93 radiomic features of every "
        f"modality into {_clusters(about['clusters']['components'])}, {why}{f'; {empty} hold no case' * (empty > 0)}."
    )
    rand = about["clusters"]["agreement"]["rand"]
    if rand < AGREED:
        lead = (
            "The clusters that the hospitals found together are not those of their pooled features (adjusted Rand "
            f"index {rand:.2f}, where 1 is identical), so read them with care. {lead}"
        )
    return layout(TITLE, lead, parts, about["versions"]["polysite"], remarks=about["remarks"])


def _outlying(about: Mapping[str, Any]) -> Grid:
    cases, far = about["cases"], about["outlying"]
    lines = [Line((name(site), number(count, "d"), _count(far[site]))) for site, count in cases.items()]
    note = (
        "Cases with a feature that lies outside the range from the 2nd to the 98th percentile by more than a hundred "
        "times its width: check these scans. Their names are only in their own hospital's sites/NAME/outliers.csv."
    )
    return Grid("outlying", "Outliers", ("hospital", "cases", "outliers"), tuple(lines), note)


def _dots(axes: Axes, at: Values, groups: Sequence[str], names: Mapping[str, str], title: str) -> None:
    of = np.array(groups)
    for k, group in enumerate(names):
        x, y = at[of == group].T
        look: dict[str, Any] = {"color": colour(k), "marker": marker(k), "ls": "", "mec": "white", "mew": 0.4}
        look |= {"ms": 6 if len(of) <= 300 else 4, "alpha": 0.9}
        axes.plot(x, y, label=unformatted(names[group]), rasterized=len(of) > DOTS, **look)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8, length=2)
    axes.spines[:].set_color("#c9d0d8")


def _numbers(axes: Axes, at: Values, shown: Shown) -> None:
    """Write the number of every cluster in its middle, since hospitals use the same colours and markers."""
    of, around = np.array(shown.clusters), [Stroke(linewidth=2, foreground="white"), Normal()]
    for cluster in shown.cluster_names:
        x, y = np.median(at[of == cluster], axis=0)
        axes.text(x, y, cluster, fontsize=11, fontweight="bold", ha="center", va="center", path_effects=around)


def _clusters(count: int) -> str:
    return f"{count} cluster{'s' * (count > 1)}"


def _count(n: int) -> Cell:
    return Cell(str(n) if n else "–", float(n))


def _percent(value: float) -> Cell:
    return Cell(f"{100 * value:.1f} %", value)


def _spread(found: Sequence[float]) -> Cell:
    return Cell(f"{fmean(found):.2f}, {min(found):.2f}", fmean(found))
