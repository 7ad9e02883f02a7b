"""Clusters of phantoms with two scanners inside every hospital: found again across hospitals, federated as pooled."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import polysite as ps
from polysite import extract
from polysite.cluster.federated_mixture import federated
from polysite.cluster.mixture import Settings
from polysite.cluster.pooled_mixture import pooled
from polysite.radiomics import Settings as Features
from polysite.radiomics import comparable


def planted(sites, cases, seed):
    """Features, hospital and scanner of every case: every other patient is scanned by the second scanner."""
    hospital = ps.Hospital(cases, scanner=5, second=11, contrast=1.0)
    data = ps.Phantom((24, 24, 24), {f"site {k}": hospital for k in range(sites)})
    table = extract.extract(ps.Study(data=data, seed=seed), Features(bin_width=0.15), jobs=1)
    scanners = np.array([int(case.rpartition("-")[2]) % 2 for case in table.cases])
    return comparable(table.values), np.array(table.sites), scanners


def agreements(sites, cases, seed):
    """Adjusted Rand index of the federated clusters with pooled ones, scikit-learn's, scanners and hospitals."""
    x, homes, scanners = planted(sites, cases, seed)
    chosen = Settings(components=2, dimensions=10, seed=seed)
    found = federated({home: x[homes == home] for home in np.unique(homes)}, chosen).mixture.assign(x)
    others = (pooled(x, replace(chosen, starts=starts)).mixture.assign(x) for starts in ("shared", "kmeans"))
    return [adjusted_rand_score(found, other) for other in (*others, scanners, homes)]


def test_clusters_are_scanners_and_not_hospitals():
    whole, scikit_learn, scanner, home = agreements(3, 12, 0)
    assert min(whole, scikit_learn, scanner) >= 0.9 and home <= 0.2


@pytest.mark.soak
@pytest.mark.parametrize(("sites", "cases"), [(3, 12), (8, 6)])
def test_clusters_are_scanners_and_not_hospitals_in_nine_of_ten_seeds(sites, cases):
    found = np.array([agreements(sites, cases, seed) for seed in range(10)])
    assert ((found[:, :3] >= 0.9).sum(0) >= 9).all() and ((found[:, 3] <= 0.2).sum() >= 9)


@pytest.mark.soak
def test_real_scans_have_the_same_clusters_federated_and_pooled():
    """55 scans of five hospitals without clear clusters of more than two; BIC by number of clusters within 5 %."""
    folder = Path(__file__).parents[3] / "shared" / "data" / "tcga_lgg"
    if not folder.is_dir():
        pytest.skip(f"TCGA-LGG is not in {folder}")
    table = extract.extract(ps.Study(data=ps.Files(str(folder))))
    x, homes = comparable(table.values), np.array(table.sites)
    sites = {home: x[homes == home] for home in np.unique(homes)}
    base = Settings(components=(2, 3, 4), dimensions=10, restarts=20)
    curves = [
        dict(fit.bic) for fit in (federated(sites, base), pooled(x, base), pooled(x, replace(base, starts="kmeans")))
    ]
    for count in (2, 3, 4):
        mine, whole, theirs = (curve[count] for curve in curves)
        assert mine == pytest.approx(whole, rel=0.01) and mine == pytest.approx(theirs, rel=0.05)
        chosen = replace(base, components=count)
        found, reference = (fit.mixture.assign(x) for fit in (federated(sites, chosen), pooled(x, chosen)))
        assert adjusted_rand_score(found, reference) >= 0.9 and adjusted_rand_score(found, homes) <= 0.25
