"""Clusters of cases: the federated fit against the pooled one and against scikit-learn's.

``phantom``: two scanners inside every hospital, 3 hospitals of 12 cases and 8 of 6, ten seeds. ``tcga``: real scans of
five hospitals (TCGA-LGG; --data names the folder), 2, 3 and 4 clusters, five seeds; BIC curves. ``planted``: the mean
log-likelihood of shared starts against scikit-learn's k-means starts, on Gaussian clusters that overlap more or less.

``choose STUDY --out FOLDER --components 2 4 8``: the number of clusters by validation Dice, as the paper chose ten: the
phases before CFFT are trained once, then CFFT for every number; the BIC of the same clusters is printed beside it.

Every agreement is an adjusted Rand index. "other seed" is the agreement of scikit-learn with itself for another seed:
where it is low, the cases have no clear clusters of that number.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from polysite import config, extract
from polysite.algorithms.cfft import Cfft
from polysite.cluster.federated_mixture import federated, mixture_of
from polysite.cluster.mixture import Settings, agreement_of
from polysite.cluster.pooled_mixture import pooled
from polysite.cluster.variability import variability
from polysite.config import Study
from polysite.data.files import Files
from polysite.data.phantom import Hospital
from polysite.data.sources import Phantom
from polysite.engines.record import mean_score
from polysite.radiomics import Settings as Features
from polysite.radiomics import comparable
from polysite.study import train

SIZES = (240, 160, 100, 70, 50, 40)
HEAD = f"{'pooled':>8}{'sklearn':>9}{'other seed':>12}{'hospital':>10}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("what", choices=["phantom", "tcga", "planted", "choose"])
    options.add_argument("study", type=Path, nargs="?", help="for choose: a study whose last phase is cfft")
    options.add_argument("--out", type=Path, help="for choose: new folder of the runs")
    options.add_argument("--components", type=int, nargs="+", default=[2, 4, 8], help="for choose")
    options.add_argument("--data", type=Path, default=Path("../shared/data/tcga_lgg"), help="for tcga")
    options.add_argument("--dimensions", type=int, default=10)
    options.add_argument("--restarts", type=int, default=20, help="for tcga")
    given = options.parse_args()
    {"phantom": phantom, "tcga": tcga, "planted": planted, "choose": choose}[given.what](given)


def phantom(given: argparse.Namespace) -> None:
    print(f"{'':28}{HEAD}{'scanner':>9}")
    for sites, cases in ((3, 12), (8, 6)):
        rows = []
        for seed in range(10):
            hospital = Hospital(cases, scanner=5, second=11, contrast=1.0)
            data = Phantom((24, 24, 24), {f"site {k}": hospital for k in range(sites)})
            table = extract.extract(Study(data=data, seed=seed), Features(bin_width=0.15))
            x, homes = comparable(table.values), np.array(table.sites)
            kind = np.array([int(case.rpartition("-")[2]) % 2 for case in table.cases])
            rows.append(compared(x, homes, Settings(components=2, dimensions=given.dimensions, seed=seed), kind))
        for name, of in (("mean of ten seeds", fmean), ("lowest", min), ("highest", max)):
            print(
                f"{sites} x {cases}, {name:<20}" + "".join(f"{of(column):10.2f}" for column in zip(*rows, strict=True))
            )


def compared(x: np.ndarray, homes: np.ndarray, settings: Settings, kind: np.ndarray | None = None) -> list[float]:
    """Agreement of the federated clusters with pooled, scikit-learn's (and these with themselves), hospitals, truth."""
    found = mixture_of(federated({home: x[homes == home] for home in np.unique(homes)}, settings)).assign(x)
    whole, theirs, again = (
        mixture_of(pooled(x, chosen)).assign(x)
        for chosen in (
            settings,
            replace(settings, starts="kmeans"),
            replace(settings, starts="kmeans", seed=settings.seed + 1),
        )
    )
    numbered = np.unique(homes, return_inverse=True)[1]
    rows = [agreement_of(found, whole), agreement_of(found, theirs), agreement_of(theirs, again)]
    return [*rows, agreement_of(found, numbered), *([] if kind is None else [agreement_of(found, kind)])]


def tcga(given: argparse.Namespace) -> None:
    table = extract.extract(Study(data=Files(str(given.data))))
    x, homes = comparable(table.values), np.array(table.sites)
    base = Settings(components=(1, 2, 3, 4), dimensions=given.dimensions, restarts=given.restarts)
    print(f"{len(x)} cases, {given.dimensions} principal components, {given.restarts} restarts, seeds 0 to 4")
    print(f"{'':12}{HEAD}   (means over seeds)")
    for count in (2, 3, 4):
        rows = [compared(x, homes, replace(base, components=count, seed=seed)) for seed in range(5)]
        print(f"K = {count:<8}" + "".join(f"{fmean(column):10.2f}" for column in zip(*rows, strict=True)))
    sites = {home: x[homes == home] for home in np.unique(homes)}
    print("BIC, seed 0: federated, pooled, scikit-learn")
    curves = [federated(sites, base), pooled(x, base), pooled(x, replace(base, starts="kmeans"))]
    for rows in zip(*(curve.bic for curve in curves), strict=True):
        mine, whole, theirs = (score for _, score in rows)
        apart = [f"{abs(mine - other) / abs(other):.2%}" for other in (whole, theirs)]
        print(f"K = {rows[0][0]}: {mine:.0f} {whole:.0f} {theirs:.0f}; federated differs by {' and '.join(apart)}")
    print(
        f"variance kept: {curves[0].kept:.2%} federated, {curves[1].kept:.2%} pooled; {curves[0].exchanges} exchanges"
    )
    for count in (2, 3, 4):
        varied = variability(x, replace(base, components=count), 10)
        print(
            f"K = {count}: agreement of ten seeds {fmean(varied.seeds):.2f}, bootstraps {fmean(varied.bootstraps):.2f}"
        )


def planted(given: argparse.Namespace) -> None:
    gaps = []
    for apart in (5.0, 8.0, 12.0):
        for x, components in cases_of(apart):
            chosen = Settings(components=components)
            mine, theirs = (
                mixture_of(pooled(x, replace(chosen, starts=starts))).likelihood(x) / len(x)
                for starts in ("shared", "kmeans")
            )
            gaps.append(mine - theirs)
            print(f"apart {apart:g}, K = {components}: shared {mine:.3f}, scikit-learn {theirs:.3f}")
    print(f"shared - scikit-learn: mean {fmean(gaps):+.3f}, lowest {min(gaps):+.3f}, highest {max(gaps):+.3f}")


def cases_of(apart: float) -> Iterator[tuple[np.ndarray, int]]:
    """Six clusters of 660 cases in 93 correlated features, some log-normal, of four seeds; to fit with 6 and 10."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        truth = np.repeat(np.arange(len(SIZES)), SIZES)
        centres = rng.normal(size=(len(SIZES), 10)) * apart / np.sqrt(20)
        hidden = centres[truth] + rng.normal(size=(len(truth), 10))
        x = hidden @ rng.normal(size=(10, 93)) / np.sqrt(10) + 0.15 * rng.normal(size=(len(truth), 93))
        x[:, ::3] = np.exp(0.5 * x[:, ::3])
        for components in (6, 10):
            yield x, components


def choose(given: argparse.Namespace) -> None:
    if given.study is None or given.out is None:
        raise SystemExit("choose takes a study and --out, a new folder for its runs")
    study = config.load(given.study)
    last = config.phases(study)[-1].algorithm
    if not isinstance(last, Cfft):
        raise SystemExit(f"the last phase of {given.study} is not cfft")
    before = train(replace(study, then=study.then[:-1]), given.out / "before", evaluate=False)
    found = {}
    for count in given.components:
        phase = replace(study.then[-1], algorithm=replace(last, components=(count,)))
        chosen = replace(study, then=(*study.then[:-1], phase))
        run = train(chosen, given.out / f"{count}-clusters", after=before.folder.path)
        found[count] = mean_score(run.result.validation, "case")
        fitted = json.loads(next((run.folder.path / "evaluation").glob("*/about.json")).read_text())["clusters"]
        print(f"K = {count}: validation {found[count]:.4f}, BIC {fitted['bic']:.0f}", flush=True)
    print(f"best by validation: {max(found, key=lambda count: found[count])} clusters")


if __name__ == "__main__":
    main()
