"""The model of a scan chosen by its features: routed as in the run, with the same predictions; far scans are global."""

import csv
from dataclasses import replace

import nibabel
import numpy as np
import pytest

import polysite as ps
from polysite.cluster.federated_mixture import mixture_of
from polysite.cluster.mixture import Settings
from polysite.cluster.pooled_mixture import pooled
from polysite.data import layouts, manifest
from polysite.data.phantom import draw, write
from polysite.data.unlabelled import find
from polysite.errors import RunError
from polysite.export.serve import serve_model
from polysite.prediction.predictor import Predictor
from polysite.prediction.routing import GLOBAL, distances, limits, outside, route
from polysite.report.runs import read

SIDE = (24, 24, 24)
LABELS = "WT=1,2,4; TC=1,4; ET=4"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A finished run with two scanners inside each of two hospitals, and its scans."""
    root = tmp_path_factory.mktemp("routed")
    hospital = ps.Hospital(cases=10, scanner=5, second=11, contrast=1.0)
    for site in ("east", "north"):
        write((draw(hospital, site=site, index=k, seed=0, shape=SIDE) for k in range(10)), root / "scans")
    found = layouts.scan(root / "scans", labels=manifest.parse_labels(LABELS)).manifest
    manifest.write(found, root / "manifest.csv")
    own = {"name": "cfft", "components": 2, "rounds": 2, "dimensions": 3, "bin_width": 0.15}
    study = ps.Study(
        model=ps.UNet(filters=(2, 4, 4)),
        data=ps.Files(path=str(root / "manifest.csv")),
        train=ps.Train(patch=(16, 16, 16), batch=4, device="cpu", augment="none", lr=0.1),
        run=ps.Plan(rounds=1),
        then=({"algorithm": own, "run": {"rounds": 80}},),
    )
    ps.train(study, root / "run")
    return root


def routes_in(folder):
    with (folder / "routes.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_test_cases_take_the_same_model_as_in_the_run_and_get_the_same_masks(root, tmp_path):
    evaluation, checked = read(root / "run").evaluation, 0
    predictor = Predictor(root / "run", device="cpu")
    clusters = {(row["site"], row["case"]): row for row in evaluation.clusters}
    assert {row["cluster"] for row in clusters.values()} == {"0", "1"}
    for site in ("east", "north"):
        ps.predict(root / "run", root / "scans" / site, tmp_path / site, preview=0)
        routes = routes_in(tmp_path / site)
        scans = find(root / "scans" / site, predictor.modalities)
        for row in scans.rows:
            assert routes[row.case]["cluster"] == clusters[site, row.case]["cluster"]
            assert routes[row.case]["model"] == f"cluster {routes[row.case]['cluster']}"
            assert float(routes[row.case]["distance"]) < 1
            expected = evaluation.prediction(site, row.case)
            if expected is not None:
                case, place = predictor.prepared(scans.open(row, (), False)[0])
                labels = np.stack([expected >> label & 1 for label in range(3)])
                assert np.array_equal(predictor.predict(case, place).masks, place.restore(labels))
                checked += 1
    assert checked >= 4


def test_a_far_scan_takes_the_global_model(root, tmp_path):
    """A ball of noise is no head; the global model is the one that the clusters began from."""
    first = sorted((root / "scans" / "east").iterdir())[0]
    (tmp_path / "scans" / "odd").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for file in sorted(first.glob("*.nii.gz")):
        image = nibabel.load(file)
        ball = sum((i - 11.5) ** 2 for i in np.indices(SIDE)) < 64
        noise = (rng.exponential(1.0, SIDE) ** 4 * ball).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(noise, image.affine), tmp_path / "scans" / "odd" / file.name)
    ps.predict(root / "run", tmp_path / "scans", tmp_path / "masks")
    (odd,) = routes_in(tmp_path / "masks").values()
    assert odd["model"] == "global" and float(odd["distance"]) > 1


def test_a_bundle_with_one_model_is_refused(root, tmp_path):
    with pytest.raises(RunError, match=r"a model for every cluster of patients, so it cannot be a bundle: .*predict"):
        serve_model(root / "run", out=tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_one_new_case_in_a_thousand_is_far():
    """Of cases that the clusters were not fitted to; far ones keep their most probable cluster, too."""
    rng = np.random.default_rng(0)
    kind = np.repeat([0, 1], [40, 30])
    draws = [rng.normal(size=(n, 5)) @ rng.normal(size=(5, 5)) for n in (70, 4000)]
    x = draws[0] + 30.0 * kind[:, None]
    mixture = mixture_of(pooled(x, Settings(components=2, dimensions=4, percentiles=(0, 100))))
    wide = limits(mixture, 70)
    assert (wide > 18.5).all() and wide[mixture.weights.argmin()] == wide.max()  # above chi-square's quantile
    assert (limits(mixture, 1e9) < 18.5).all() and np.isinf(limits(mixture, 5)).all()
    middle = mixture.low + 0.5 * (mixture.high - mixture.low)
    assert route(mixture, 70, x[0]).model == mixture.assign(x[:1])[0]
    near = (distances(mixture, x) / wide).min(1)
    assert near.max() < 1
    strange = np.where(np.arange(5) < 3, mixture.high + 1.0, middle)  # three features of five
    assert outside(mixture, strange) == 0.6 and route(mixture, 70, strange).model == GLOBAL
    assert outside(mixture, x[0]) <= 0.4
    narrow = replace(mixture, covariance=mixture.covariance / 1e6)
    far = route(narrow, 70, middle)
    assert far.model == GLOBAL and far.cluster in (0, 1) and far.distance > 1
