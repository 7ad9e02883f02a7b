"""A bundle that chooses a model by the scan: routed as in the run, with the same predictions; far scans are global."""

import csv
import json
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import polysite as ps
from export.test_serve import opened
from polysite.cluster.federated_mixture import mixture_of
from polysite.cluster.mixture import Settings
from polysite.cluster.pooled_mixture import pooled
from polysite.data import layouts, manifest
from polysite.data.phantom import draw, write
from polysite.export.routing import GLOBAL, QUANTILE, distances, limits, outside, route
from polysite.export.serve import serve_model
from polysite.report.runs import read
from polysite.training.torch_site import packed

pytestmark = [
    pytest.mark.filterwarnings("ignore:parsing config_file"),  # MONAI says that a bundle is code
    pytest.mark.filterwarnings("ignore:.*non-tuple sequence for multidimensional indexing:UserWarning"),
]
SIDE = (24, 24, 24)
LABELS = "WT=1,2,4; TC=1,4; ET=4"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with two scanners inside each of two hospitals, and the bundle of it."""
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
    return root, serve_model(root / "run", out=root / "home")


def answers(bundle, scans, out):
    """The routes of all scans in a folder, by case, after the bundle ran on them."""
    opened(bundle, dataset_dir=scans, output_dir=out).run()
    return routes_in(out)


def routes_in(folder):
    with (folder / "routes.csv").open(newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def test_test_cases_take_the_same_model_as_in_the_run_and_get_the_same_masks(run, tmp_path):
    root, bundle = run
    evaluation, checked = read(root / "run").evaluation, 0
    clusters = {(row["site"], row["case"]): row for row in evaluation.clusters}
    assert {row["cluster"] for row in clusters.values()} == {"0", "1"}
    for site in ("east", "north"):
        routes = answers(bundle, root / "scans" / site, tmp_path / site)
        ps.predict(root / "run", root / "scans" / site, tmp_path / f"{site}-masks", preview=0)
        assert routes_in(tmp_path / f"{site}-masks") == routes
        for mask in sorted((tmp_path / site).glob("*/*.nii.gz")):
            mine = tmp_path / f"{site}-masks" / mask.relative_to(tmp_path / site)
            assert np.array_equal(nibabel.load(mine).dataobj, nibabel.load(mask).dataobj)
        flow = opened(bundle, dataset_dir=root / "scans" / site)
        for case in flow.dataset:
            who = flow.parser.get_parsed_content("case_of")(case["image"].meta)
            assert routes[who]["cluster"] == clusters[site, who]["cluster"]
            assert routes[who]["model"] == f"cluster {routes[who]['cluster']}" and float(routes[who]["distance"]) < 1
            expected = evaluation.prediction(site, who)
            if expected is not None:
                logits = flow.parser.get_parsed_content("predict")(case["image"])
                assert np.array_equal(packed(logits > 0), expected)
                checked += 1
    assert checked >= 4
    for k in range(2):
        mine = load_file(bundle / "models" / f"cluster_{k}.safetensors")
        served = load_file(root / "run" / "models" / f"best.group-{k}.safetensors")
        sums = (sum(float(x.double().sum()) for x in each.values()) for each in (mine, served))
        assert next(sums) == pytest.approx(next(sums))  # names differ


def test_a_far_scan_takes_the_global_model(run, tmp_path):
    """A ball of noise is no head; the global model is the one that the clusters began from."""
    root, bundle = run
    first = sorted((root / "scans" / "east").iterdir())[0]
    (tmp_path / "scans" / "odd").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for file in sorted(first.glob("*.nii.gz")):
        image = nibabel.load(file)
        ball = sum((i - 11.5) ** 2 for i in np.indices(SIDE)) < 64
        noise = (rng.exponential(1.0, SIDE) ** 4 * ball).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(noise, image.affine), tmp_path / "scans" / "odd" / file.name)
    (odd,) = answers(bundle, tmp_path / "scans", tmp_path / "out").values()
    assert odd["model"] == "global" and float(odd["distance"]) > 1
    ps.predict(root / "run", tmp_path / "scans", tmp_path / "masks")
    assert (tmp_path / "masks" / "routes.csv").read_text() == (tmp_path / "out" / "routes.csv").read_text()
    flow = opened(bundle, dataset_dir=tmp_path / "scans")
    image = flow.dataset[0]["image"]
    router, network = (flow.parser.get_parsed_content(name) for name in ("router", "network"))
    assert router(image) is network
    begun = load_file(bundle / "models" / "model.safetensors")
    assert any(not torch.equal(begun[k], v) for k, v in load_file(bundle / "models" / "cluster_0.safetensors").items())
    about = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert about["routing"]["clusters"] == 2 and about["routing"]["dimensions"] == 3
    assert len(about["routing"]["sha256"]) == 3 and "polysite" in about["required_packages_version"]
    text = (bundle / "docs" / "README.md").read_text()
    assert f"{QUANTILE:.1%} quantile" in text and "routes.csv" in text and "global model" in text


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
