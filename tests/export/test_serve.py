"""What a hospital takes home: a MONAI bundle that answers as polysite does, with the model that is served there."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import nibabel
import numpy as np
import pytest
import torch
from monai.bundle import ConfigWorkflow, verify_net_in_out
from monai.data.meta_tensor import MetaTensor
from PIL import Image as Pillow
from safetensors.torch import load_file
from typer.testing import CliRunner

import polysite as ps
from consortium import wanted
from polysite import ensembles
from polysite.algorithms import ALGORITHMS
from polysite.algorithms.base import serving_payloads
from polysite.cli import app
from polysite.config import parse
from polysite.data.federation import HideModalities, Iid, LeaveOut, Natural, Steps
from polysite.engines.phases import Phase, find_best
from polysite.engines.run_folder import RunFolder
from polysite.engines.simulator import Simulator
from polysite.errors import ConfigError, RunError
from polysite.export import serve
from polysite.export.masks import CleanMasks
from polysite.export.serve import serve_model
from polysite.models.names import canonical
from polysite.report.runs import read
from polysite.study import build_sites
from polysite.training.cleaning import Clean, cleaned
from studies import SMALL

pytestmark = [
    pytest.mark.filterwarnings("ignore:parsing config_file"),  # MONAI says that a bundle is code
    pytest.mark.filterwarnings("ignore:.*non-tuple sequence for multidimensional indexing:UserWarning"),
]
AFFINE = np.array([[-1.1, 0, 0.1, 30], [0, 0, 1.7, -9], [0.1, -0.9, 0, 4], [0, 0, 0, 1]])  # oblique, axes exchanged


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Two hospitals with volumes as files, of two modalities and several types; two labels."""
    root, rng = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    rows = ["site,case,t1,flair,label,labels"]
    for k in range(10):
        site, case = ("east", "north")[k % 2], f"p.{k}"
        (root / site / case).mkdir(parents=True)
        head = np.zeros((25, 22, 19 + k % 3), bool)
        head[3:-2, 2:-4, 1:-2] = True
        truth = np.zeros(head.shape, np.uint8)
        truth[6:14, 5:12, 4:9], truth[8:11, 6:9, 5:8] = 1, 2
        for name, kind in (("t1", np.int16), ("flair", np.float64), ("seg", np.uint8)):
            array = truth if name == "seg" else head * (rng.normal(300, 40, head.shape) + 200 * truth)
            image = nibabel.nifti1.Nifti1Image(array.astype(kind), AFFINE, dtype=kind)
            image.header.set_xyzt_units("mm")
            nibabel.save(image, root / site / case / f"scan_{name}.nii.gz")
        files = [f"{site}/{case}/scan_{name}.nii.gz" for name in ("t1", "flair", "seg")]
        rows.append(",".join([site, case, *files, '"whole=1,2; in side=2"']))
    (root / "manifest.csv").write_text("\n".join(rows) + "\n")
    return root


def study_of(scans, **changes):
    study = ps.Study(
        model=ps.UNet(filters=(2, 4, 4)),
        data=ps.Files(path=str(scans / "manifest.csv")),
        train=ps.Train(patch=(16, 16, 16), batch=4, device="cpu", augment="light"),
        run=ps.Plan(rounds=1),
    )
    return replace(study, **changes)


def opened(bundle, **changes):
    """The bundle as MONAI opens it."""
    where = {"bundle_root": str(bundle), **{k: str(v) for k, v in changes.items()}}
    workflow = ConfigWorkflow(str(bundle / "configs" / "inference.json"), workflow_type="infer", **where)
    workflow.initialize()
    return workflow


def bits(masks):
    return sum(np.asarray(mask).astype(int) << k for k, mask in enumerate(masks))


def nearest(answer, affine, scan):
    """For every voxel of a scan, that of the answer which lies nearest to it; 0 beyond."""
    voxels = np.indices(scan.shape).reshape(3, -1)
    at = np.linalg.inv(affine) @ scan.affine @ np.vstack([voxels, np.ones(voxels.shape[1])])
    at = at[:3].round().astype(int)
    inside = ((at >= 0) & (at < np.array(answer.shape)[:, None])).all(0)
    found = np.zeros(voxels.shape[1], int)
    found[inside] = answer[tuple(at[:, inside])]
    return found.reshape(scan.shape)


def same_files(answers, masks, count):
    """What 'polysite predict' writes is what a bundle answers, but for rounding; pictures have 255 instead of 1."""
    written = [f for f in sorted(answers.rglob("*")) if f.name.endswith((".nii.gz", ".png"))]
    assert len(written) == count
    for file in written:
        mine = masks / file.relative_to(answers)
        a, b = (np.asarray(Pillow.open(f) if f.suffix == ".png" else nibabel.load(f).dataobj) for f in (file, mine))
        odd = int((a != (b > 0 if file.suffix == ".png" else b)).sum())
        assert a.shape == b.shape and odd <= 2, (file, odd)  # a logit within rounding of zero
        if file.suffix != ".png":
            assert np.array_equal(nibabel.load(file).affine, nibabel.load(mine).affine)


def answered(run, data, folder, count, site=None):
    """Let the bundle of a run answer for a folder of scans, and 'polysite predict', which writes the same files. Return
    the bundle as MONAI opens it, and of every tested case its name, its prepared image and the run's own prediction."""
    flow = opened(serve_model(run, site, folder / "home"), dataset_dir=data, output_dir=folder / "answers")
    flow.run()
    ps.predict(run, data, folder / "masks", site=site, preview=0)
    same_files(folder / "answers", folder / "masks", count)
    evaluation, name = read(run).evaluation, flow.parser.get_parsed_content("case_of")
    images = {name(case["image"].meta): case["image"] for case in flow.dataset}
    return flow, [
        (w, i, known) for w, i in images.items() if (known := evaluation.prediction(data.name, w)) is not None
    ]


def said_by(flow, image):
    return flow.parser.get_parsed_content("predict")(image)


PADDED_WINDOW = ps.Train(patch=(24, 24, 24), window=(16, 20, 16), overlap=0.25, device="cpu")
VARIANTS = {
    "z-scores of padding": {"prepare": ps.Prepare(normalise="padded"), "train": PADDED_WINDOW},
    "mirrored, deeply supervised, a modality hidden": {
        "model": ps.UNet(filters=(2, 4, 4, 4), deep_supervision=2),
        "train": ps.Train(patch=(16, 16, 16), mirror=True, foreground=0.5, device="cpu"),
        "federation": Steps((Natural(), HideModalities(1))),
    },
    "resampled": {"prepare": ps.Prepare(orientation="RAS", spacing=(1.0, 1.2, 0.8))},
    "turned": {"prepare": ps.Prepare(orientation="SPL", crop=False, normalise="all", clip=(50, 400))},
    "plain": {"prepare": ps.Prepare(normalise="none", clip=(100.0, 400.0)), "seed": 3},
    "resized": {"prepare": ps.Prepare(normalise="padded", size=(0, 24, 16))},
    "resized, dark": {"prepare": ps.Prepare(normalise="all", clip=(50, 400), size=(24, 16, 0))},
    "a network of our own": {"model": ps.UNetSub(filters=(2, 4, 4)), "prepare": ps.Prepare(normalise="all")},
}
PADDED = ("z-scores of padding", "resized")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_bundle_answers_voxel_for_voxel_as_polysite_does(name, scans, tmp_path):
    study = study_of(scans, **VARIANTS[name])
    ps.train(study, tmp_path / "run")
    flow, tested = answered(tmp_path / "run", scans / "east", tmp_path, 10, "east")
    site = build_sites(study)["east"]
    for who, image, expected in tested:
        assert torch.equal(image.as_tensor(), site._volumes[who][0])
        said = bits(said_by(flow, image) > 0)
        assert np.array_equal(said, expected) and 0 < (said > 0).mean() < 1
        written = [nibabel.load(tmp_path / "answers" / who / f"{who}_{label}.nii.gz") for label in ("whole", "in_side")]
        scan = nibabel.load(scans / "east" / who / "scan_t1.nii.gz")
        assert all(w.shape == scan.shape and np.allclose(w.affine, scan.affine, atol=1e-6) for w in written)
        there = np.asarray(scan.dataobj) > 0 if name in PADDED else True  # padding is no part of a scan
        right = bits(w.dataobj for w in written) == nearest(said, np.asarray(image.affine), scan) * there
        assert right.mean() > 0.99 if name == "resampled" else right.all()
    assert tested
    needed = json.loads((tmp_path / "home" / "configs" / "metadata.json").read_text())["required_packages_version"]
    assert ("polysite" in needed) == (name == "a network of our own")


def test_where_a_voxel_has_one_label_the_answer_is_one_label_map(scans, tmp_path):
    study = study_of(scans)
    data = replace(study.data, labels={"rim": (1,), "core": (2,)})
    ps.train(replace(study, data=data, train=replace(study.train, exclusive=True)), tmp_path / "run")
    flow, tested = answered(tmp_path / "run", scans / "east", tmp_path, 5)
    for who, image, expected in tested:
        said = said_by(flow, image).argmax(0)
        assert np.array_equal(bits([said == 1, said == 2]), expected)
        written = np.asarray(nibabel.load(tmp_path / "answers" / who / f"{who}_labels.nii.gz").dataobj)
        assert [(written == k).sum() for k in (1, 2)] == [int((said == k).sum()) for k in (1, 2)]
    assert tested


def test_a_network_for_slices_segments_whole_scans(scans, tmp_path):
    """Every slice of a volume gets the mask that it got as a case of the run."""
    train = ps.Train(patch=(16, 16), device="cpu", augment="none", mirror=True)
    ps.train(study_of(scans, slices=ps.Slices("coronal", every=3), train=train), tmp_path / "run")
    flow, _ = answered(tmp_path / "run", scans / "east", tmp_path, 10)
    evaluation, checked = read(tmp_path / "run").evaluation, 0
    for case in flow.dataset:
        who = flow.parser.get_parsed_content("case_of")(case["image"].meta)
        said = bits(said_by(flow, case["image"]) > 0)
        for k in range(0, len(said), 3):
            expected = evaluation.prediction("east", f"{who}/y{k:03d}")
            assert expected is None or np.array_equal(said[k], expected)
            checked += expected is not None
        scan = nibabel.load(scans / "east" / who / "scan_t1.nii.gz")
        assert nibabel.load(tmp_path / "answers" / who / f"{who}_whole.nii.gz").shape == scan.shape
    assert checked


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """RGB pictures that are wider than high, with masks and classes."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    segment, classify = ["site,case,red,blue,label,labels"], ["site,case,red,green,blue,class"]
    for k in range(12):
        site, kind = ("A", "B")[k % 2], ("dark", "bright")[k // 2 % 2]
        (root / site).mkdir(exist_ok=True)
        mask = np.zeros((20, 27), np.uint8)
        mask[4:9, 8:20] = 1
        colours = rng.integers(1, 60, (20, 27, 3)) + 80 * mask[..., None] + 60 * (kind == "bright")
        Pillow.fromarray(colours.astype(np.uint8)).save(root / site / f"p{k}.png")
        Pillow.fromarray(mask).save(root / f"mask{k}.png")
        file = f"{site}/p{k}.png"
        segment.append(f"{site},p{k},{file}#0,{file}#2,mask{k}.png,ulcer=1")
        classify.append(f"{site},p{k},{file}#0,{file}#1,{file}#2,{kind}")
    (root / "segment.csv").write_text("\n".join(segment) + "\n")
    (root / "classify.csv").write_text("\n".join(classify) + "\n")
    return root


def test_pictures_are_segmented(pictures, tmp_path):
    study = ps.Study(
        model=ps.UNet(filters=(2, 4, 4), bias=False),
        data=ps.Files(path=str(pictures / "segment.csv")),
        prepare=ps.Prepare(normalise="all", spacing=(0.8, 1.25)),
        train=ps.Train(patch=(16, 16), batch=4, device="cpu"),
        run=ps.Plan(rounds=1),
    )
    ps.train(study, tmp_path / "run")
    flow, tested = answered(tmp_path / "run", pictures / "A", tmp_path, 6)
    for who, image, expected in tested:
        assert np.array_equal(said_by(flow, image)[0] > 0, expected)
        with Pillow.open(tmp_path / "answers" / who / f"{who}_ulcer.png") as written:
            assert written.size == (27, 20) and abs(np.asarray(written).mean() - expected.mean()) < 0.1
    assert tested


@pytest.mark.parametrize("model", [ps.DenseNet, ps.DenseNetSub])
def test_pictures_are_classified(model, pictures, tmp_path):
    study = ps.Study(
        model=model(blocks=(2, 2), growth=4, features=8),
        data=ps.Files(path=str(pictures / "classify.csv")),
        train=ps.Train(patch=(16, 16), batch=4, device="cpu", mirror=model is ps.DenseNetSub),
        run=ps.Plan(rounds=2),
    )
    ps.train(study, tmp_path / "run")
    bundle = serve_model(tmp_path / "run", "B")
    flow = opened(bundle, dataset_dir=pictures / "B", output_dir=tmp_path / "answers")
    flow.run()
    with (tmp_path / "answers" / "probabilities.csv").open() as file:
        found = {row.pop("case"): row for row in csv.DictReader(file)}
    predicted = {row["case"]: row for row in ps.predict(tmp_path / "run", pictures / "B", tmp_path / "classes").table}
    for who, row in found.items():
        mine = {k: float(predicted[who][k]) for k in row}
        assert mine == pytest.approx({k: float(v) for k, v in row.items()}, abs=1e-5)
        assert predicted[who]["class"] == max(mine, key=mine.get)
    site = build_sites(study)["B"]
    best = load_file(tmp_path / "run" / "models" / "best.safetensors")
    for who, logits, _ in site.predictions(best, site.cases("test")):
        assert list(found[who]) == ["bright", "dark"]
        assert [float(p) for p in found[who].values()] == pytest.approx(logits.softmax(0).tolist(), abs=1e-6)
    assert set(found) == {f"p{k}" for k in range(1, 12, 2)}
    needs = json.loads((bundle / "configs" / "metadata.json").read_text())["required_packages_version"]
    assert set(needs) == {"pillow", *(["polysite"] if model is ps.DenseNetSub else [])}


def test_an_ensemble_with_cleaned_masks_goes_home(scans, tmp_path):
    train = ps.Train(patch=(16, 16, 16), batch=4, device="cpu", augment="light", clean=Clean(largest=True, fill=True))
    study = study_of(scans, train=train)
    ps.train(study, tmp_path / "shared", evaluate=False)
    other = replace(study, algorithm=ps.Local(), model=ps.UNet(filters=(4, 4, 4), bias=False))
    ps.train(other, tmp_path / "own", evaluate=False)
    made = ensembles.ensemble([tmp_path / "shared", tmp_path / "own"], tmp_path / "both")
    flow, tested = answered(tmp_path / "both", scans / "east", tmp_path, 10, "east")
    readme = (tmp_path / "home" / "docs" / "README.md").read_text()
    assert "ensemble of 2 networks" in readme and "largest component kept, holes filled" in readme
    for who, image, expected in tested:
        written = [nibabel.load(tmp_path / "answers" / who / f"{who}_{k}.nii.gz") for k in ("whole", "in_side")]
        there = nearest(expected, np.asarray(image.affine), nibabel.load(scans / "east" / who / "scan_t1.nii.gz"))
        assert np.array_equal(bits(w.dataobj for w in written), there)
        assert not np.array_equal(bits(said_by(flow, image) > 0), expected)
    assert tested and {who for who, *_ in tested} == {*made.result.test["east"]}


WITHOUT = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("polysite", "safetensors", "PIL"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refused())
from monai.bundle import run
bundle, scans, out = sys.argv[1:]
run(config_file=bundle + "/configs/inference.json", bundle_root=bundle, dataset_dir=scans, output_dir=out)
"""


def test_a_bundle_of_volumes_runs_where_polysite_safetensors_and_pillow_are_not_installed(scans, tmp_path):
    """An ensemble of a plain and a deeply supervised U-Net, in a process that cannot import these packages."""
    study = study_of(scans)
    ps.train(study, tmp_path / "one", evaluate=False)
    deep = replace(study, model=ps.UNet(filters=(2, 4, 4, 4), deep_supervision=1), seed=1, split=ps.Split(seed=0))
    ps.train(deep, tmp_path / "two", evaluate=False)
    ensembles.ensemble([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    bundle = serve_model(tmp_path / "both", out=tmp_path / "home")
    assert set(json.loads((bundle / "configs" / "metadata.json").read_text())["required_packages_version"]) == {
        "nibabel"
    }
    words = [bundle, scans / "east", tmp_path / "answers"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ps.predict(tmp_path / "both", scans / "east", tmp_path / "masks", preview=0)
    same_files(tmp_path / "answers", tmp_path / "masks", 10)
    ps.predict([tmp_path / "one", tmp_path / "two"], scans / "east", tmp_path / "again", preview=0)
    same_files(tmp_path / "answers", tmp_path / "again", 10)


def test_slices_and_label_maps_are_cleaned_as_cases_are():
    rng = np.random.default_rng(0)
    image = MetaTensor(torch.zeros(1, 5, 9, 9), affine=np.diag([3.0, 1.0, 0.5, 1.0]))
    clean = {"smallest": 2.0, "unit": "mm", "fill": True}
    masks = rng.random((2, 5, 9, 9)) < 0.3
    found = CleanMasks(2, 2, False, **clean)({"image": image, "pred": torch.tensor(masks).float()})["pred"]
    for k in range(5):
        assert np.array_equal(found[:, k].bool(), cleaned(masks[:, k], Clean(**clean), (1.0, 0.5)))
    numbers = torch.tensor(rng.integers(0, 3, (1, 5, 9, 9))).float()
    found = CleanMasks(2, 3, True, **clean)({"image": image, "pred": numbers})["pred"]
    parts = np.stack([numbers[0].numpy() == k for k in (1, 2)])
    expected = cleaned(parts, Clean(**clean), (3.0, 1.0, 0.5), exclusive=True)
    assert found.dtype == numbers.dtype and np.array_equal(np.stack([found[0] == k for k in (1, 2)]), expected)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A shared model and personal ones."""
    root = tmp_path_factory.mktemp("runs")
    for algorithm in (ps.FedAvg(), ps.Ditto(), ps.FedPer()):
        ps.train(replace(SMALL, algorithm=algorithm), root / type(algorithm).__name__.lower())
    return root


def weights_of(bundle):
    return {canonical(k): v for k, v in load_file(bundle / "models" / "model.safetensors").items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], torch.as_tensor(other[k])) for k in one)


@pytest.mark.parametrize("name", ["ditto", "fedper"])
def test_every_hospital_gets_its_own_model(name, runs, tmp_path):
    study = parse((runs / name / "config.toml").read_text())
    folder, sites = RunFolder.open(runs / name), build_sites(study)
    only = Phase(study.algorithm, Simulator(study.algorithm, sites), study.run)
    phase, best = find_best(folder, [only], folder.result.best_round)
    sent = serving_payloads(phase.algorithm, best.state, sorted(sites))
    served = phase.transport.serve(best.round, sent).models
    found = {site: weights_of(serve_model(runs / name, site, tmp_path / site)) for site in served}
    assert set(found) == {"east", "north", "west"}
    assert all(same(found[site], served[site][0]) for site in served)
    assert not same(found["east"], found["north"]) and not same(found["east"], found["west"])
    text = (tmp_path / "east" / "docs" / "README.md").read_text()
    assert "trained on patients of this hospital, for this hospital, and belongs there" in text and "north" not in text


def test_a_shared_model_needs_no_name(runs, tmp_path):
    all_of_them = serve_model(runs / "fedavg")
    assert all_of_them == runs / "fedavg" / "bundles" / "shared"
    own = serve_model(runs / "fedavg", "north", tmp_path / "north")
    assert same(weights_of(all_of_them), weights_of(own))
    assert same(weights_of(own), load_file(runs / "fedavg" / "models" / "best.safetensors"))
    assert "belongs" not in (own / "docs" / "README.md").read_text()


def test_a_bundle_says_what_it_is(runs, tmp_path):
    bundle = serve_model(runs / "ditto", "west", tmp_path / "west")
    about = json.loads((bundle / "configs" / "metadata.json").read_text())
    content = (bundle / "models" / "model.safetensors").read_bytes()
    assert about["weights"] == {"file": "models/model.safetensors", "sha256": sha256(content).hexdigest()}
    image, pred = (about["network_data_format"][k] for k in ("inputs", "outputs"))
    assert list(image["image"]["channel_def"].values()) == ["t1", "t1ce", "t2", "flair"]
    assert list(pred["pred"]["channel_def"].values()) == ["WT", "TC", "ET"]
    run = read(runs / "ditto")
    cases = run.scores["west"].values()
    assert about["eval_metrics"]["test_WT"] == pytest.approx(np.mean([c.labels["WT"] for c in cases]))
    assert f"{about['eval_metrics']['test_mean']:.3f}" in (bundle / "docs" / "README.md").read_text()
    assert "polysite" not in about["required_packages_version"]
    where = {"meta_file": str(bundle / "configs" / "metadata.json"), "bundle_root": str(bundle), "device": "cpu"}
    verify_net_in_out("network_def", config_file=str(bundle / "configs" / "inference.json"), **where)
    (tmp_path / "none").mkdir()
    assert opened(bundle, dataset_dir=tmp_path / "none").check_properties() == []


# one of each kind of model in every full run
SLICE = ("cfft", "ditto", "fedavg", "fedbn", "feddiv", "fedper", "fine_tune")
EVERY = [pytest.param(name, marks=() if name in SLICE else pytest.mark.soak) for name in ALGORITHMS]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_has_a_model_to_take_home(name, tmp_path):
    ps.train(wanted(name), tmp_path / "run")
    bundle = serve_model(tmp_path / "run", "a")
    models = tmp_path / "run" / "models"
    files = [f for own in (".a", "") if (f := models / f"best{own}.safetensors").exists()]
    assert same(weights_of(bundle), load_file(files[0])) if files else (models / "best.group-1.safetensors").exists()
    shown = (tmp_path / "none").mkdir() or opened(bundle, dataset_dir=tmp_path / "none")
    network = shown.parser.get_parsed_content("network")
    assert same({canonical(k): v for k, v in network.named_parameters()}, weights_of(bundle))


def test_a_hospital_that_never_trained_gets_the_shared_model_or_a_sentence(tmp_path):
    ps.train(replace(SMALL, algorithm=ps.Ditto(), federation=LeaveOut("west")), tmp_path / "left")
    models = tmp_path / "left" / "models"
    bundle = serve_model(tmp_path / "left", "west")
    assert same(weights_of(bundle), load_file(models / "best.west.safetensors"))
    text = (bundle / "docs" / "README.md").read_text()
    assert "The model that the hospital 'west' uses, which did not train" in text and "belongs" not in text
    ps.train(replace(SMALL, algorithm=ps.Local(), run=ps.Plan(rounds=1, share=0.34)), tmp_path / "local")
    (asked,) = read(tmp_path / "local").trained
    serve_model(tmp_path / "local", asked)
    for other in {"east", "north", "west"} - {asked}:
        with pytest.raises(RunError, match=f"'{other}' did not train .*, and local has no model for such a hospital"):
            serve_model(tmp_path / "local", other)


def test_what_cannot_be_taken_home_is_refused_in_a_sentence(runs, tmp_path):
    before = sorted(runs.rglob("*"))
    with pytest.raises(ConfigError, match=r"there is no site 'nroth' in .*; did you mean 'north'\?"):
        serve_model(runs / "ditto", "nroth")
    with pytest.raises(ConfigError, match="models of their own; choose whose with --site: east, north, west"):
        serve_model(runs / "ditto")
    with pytest.raises(RunError, match="exists already; no bundle overwrites"):
        serve_model(runs / "ditto", "north", tmp_path)
    ps.train(replace(SMALL, algorithm=ps.Ditto(), federation=Iid(2), run=ps.Plan(rounds=1)), tmp_path / "iid")
    serve_model(tmp_path / "iid")
    with pytest.raises(
        ConfigError, match="'iid-1' is no hospital but was made to train; choose one of east, north, west"
    ):
        serve_model(tmp_path / "iid", "iid-1")
    with pytest.raises(RunError, match="not a run folder"):
        serve_model(tmp_path, "north")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"the bundle .* could not be written"):
        serve_model(runs / "ditto", "north", tmp_path / "file" / "home")
    result = CliRunner().invoke(app, ["serve-model", str(runs / "ditto")])
    assert isinstance(result.exception, ConfigError)
    assert sorted(runs.rglob("*")) == before


def test_a_run_under_way_several_models_and_damage_are_refused(tmp_path):
    ps.train(replace(SMALL, algorithm=ps.Local(), run=ps.Plan(rounds=1)), tmp_path / "run")
    models = tmp_path / "run" / "models"
    (models / "best.north.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"the model .*best.north.safetensors cannot be read"):
        serve_model(tmp_path / "run", "north")
    for k in (0, 1):
        (models / f"best.west.group-{k}.safetensors").write_bytes((models / "best.west.safetensors").read_bytes())
    (models / "best.west.safetensors").unlink()
    with pytest.raises(RunError, match="local serves several models to 'west', each to some of its patients"):
        serve_model(tmp_path / "run", "west")
    config = tmp_path / "run" / "result.json"
    config.write_text(config.read_text().replace('"WT"', '"$WT"'))
    with pytest.raises(ConfigError, match=r"'\$WT' cannot be the name of a modality or label"):
        serve_model(tmp_path / "run", "east")
    config.unlink()
    with pytest.raises(RunError, match="has not finished; 'polysite train --resume"):
        serve_model(tmp_path / "run", "east")


def test_a_full_disk_leaves_nothing_behind(runs, tmp_path, monkeypatch):
    def full(self, content):
        raise OSError("no space left")

    monkeypatch.setattr(serve.Path, "write_bytes", full)
    with pytest.raises(RunError, match="could not be written: no space left"):
        serve_model(runs / "ditto", "east", tmp_path / "home")
    assert not list(tmp_path.iterdir())


def test_the_command_tells_where_it_is(runs, tmp_path):
    command = ["serve-model", str(runs / "fedper"), "--site", "east", "--out", str(tmp_path / "east")]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0 and "docs/README.md" in said.output
    said = CliRunner().invoke(app, [*command[:-1], str(tmp_path / "again"), "--json"])
    assert json.loads(said.output)["weights"]["file"] == "models/model.safetensors"
