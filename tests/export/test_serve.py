"""What a hospital takes home: a MONAI bundle that answers as polysite does, with the model that is served there."""

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
from PIL import Image as Pillow
from safetensors.torch import load_file
from typer.testing import CliRunner

import polysite as ps
from consortium import wanted
from polysite import ensembles
from polysite.algorithms import ALGORITHMS
from polysite.cli import app
from polysite.data.federation import HideModalities, Iid, LeaveOut, Natural, Steps
from polysite.errors import ConfigError, RunError
from polysite.export.serve import serve_model
from polysite.models.names import canonical
from polysite.report.runs import read
from polysite.study import build_sites
from polysite.training.cleaning import Clean
from studies import SMALL, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:parsing config_file"),  # MONAI says that a bundle is code
    pytest.mark.filterwarnings("ignore:.*non-tuple sequence for multidimensional indexing:UserWarning"),
]
AFFINE = np.array([[-1.1, 0, 0.1, 30], [0, 0, 1.7, -9], [0.1, -0.9, 0, 4], [0, 0, 0, 1]])  # oblique, axes exchanged


def write_scans(root, labels="whole=1,2; in side=2"):
    """Two hospitals with volumes as files, of two modalities and several types, and their manifest."""
    rng, rows = np.random.default_rng(0), ["site,case,t1,flair,label,labels"]
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
        rows.append(",".join([site, case, *files, f'"{labels}"']))
    (root / "manifest.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    return write_scans(tmp_path_factory.mktemp("scans"))


def study_of(folder, manifest="manifest.csv", **changes):
    study = tiny({"none": 1}, train={"batch": 4, "augment": "light"}, run={"rounds": 1})
    return replace(study, data=ps.Files(path=str(folder / manifest)), **changes)


def opened(bundle, **changes):
    """The bundle as MONAI opens it."""
    where = {name: str(value) for name, value in {"bundle_root": bundle, **changes}.items()}
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


def answered(study, data, folder, count, site=None):
    """Train; let the bundle of the run answer for a folder of scans, and 'polysite predict', which writes the same."""
    run = ps.train(study, folder / "run").folder.path
    flow = opened(serve_model(run, site, folder / "home"), dataset_dir=data, output_dir=folder / "answers")
    flow.run()
    ps.predict(run, data, folder / "masks", site=site, preview=0)
    same_files(folder / "answers", folder / "masks", count)
    return flow


def known_of(flow, run, site):
    """Of every tested case that a bundle opens: its name, its prepared image and the run's own prediction."""
    name = flow.parser.get_parsed_content("case_of")
    images = {name(case["image"].meta): case["image"] for case in flow.dataset}
    found = {who: read(run).evaluation.prediction(site, who) for who in images}
    assert any(expected is not None for expected in found.values())
    return [(who, images[who], expected) for who, expected in found.items() if expected is not None]


def written_for(who, answers):
    """The masks of a case."""
    return [nibabel.load(answers / who / f"{who}_{label}.nii.gz") for label in ("whole", "in_side")]


def needed(bundle):
    """The packages that the bundle says that it needs."""
    return set(json.loads((bundle / "configs" / "metadata.json").read_text())["required_packages_version"])


def said_by(flow, image):
    return flow.parser.get_parsed_content("predict")(image)


PADDED_WINDOW = ps.Train(patch=(24, 24, 24), window=(16, 20, 16), overlap=0.25, device="cpu")
VARIANTS = {
    "z-scores of padding": {"prepare": ps.Prepare(normalise="padded"), "train": PADDED_WINDOW},
    "mirrored, deeply supervised, a modality hidden": {
        "model": ps.UNet(filters=(2, 4, 4, 4), deep_supervision=2),
        "train": ps.Train(patch=(16, 16, 16), mirror=True, foreground=0.5, device="cpu"),
        "federation": Steps((Natural(), HideModalities(1))),
        "prepare": ps.Prepare(normalise="none", clip=(100.0, 400.0)),
    },
    "resampled": {"prepare": ps.Prepare(orientation="RAS", spacing=(1.0, 1.2, 0.8))},
    "turned": {
        "prepare": ps.Prepare(orientation="SPL", crop=False, normalise="all", clip=(50, 400)),
    },
    "resized": {"prepare": ps.Prepare(normalise="padded", size=(0, 24, 16))},
    "resized, dark": {"prepare": ps.Prepare(normalise="all", clip=(50, 400), size=(24, 16, 0))},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_bundle_answers_voxel_for_voxel_as_polysite_does(name, scans, tmp_path):
    study = study_of(scans, **VARIANTS[name])
    flow = answered(study, scans / "east", tmp_path, 10, "east")
    site = build_sites(study)["east"]
    for who, image, expected in known_of(flow, tmp_path / "run", "east"):
        assert torch.equal(image.as_tensor(), site._volumes[who][0])
        said = bits(said_by(flow, image) > 0)
        assert np.array_equal(said, expected) and 0 < (said > 0).mean() < 1
        written = written_for(who, tmp_path / "answers")
        scan = nibabel.load(scans / "east" / who / "scan_t1.nii.gz")
        assert all(w.shape == scan.shape and np.allclose(w.affine, scan.affine, atol=1e-6) for w in written)
        padded = study.prepare.normalise == "padded"  # padding is no part of a scan
        there = np.asarray(scan.dataobj) > 0 if padded else True
        right = bits(w.dataobj for w in written) == nearest(said, np.asarray(image.affine), scan) * there
        assert right.mean() > 0.99 if name == "resampled" else right.all()
    assert needed(tmp_path / "home") == {"nibabel"}


def test_where_a_voxel_has_one_label_the_answer_is_one_label_map(scans, tmp_path):
    study = study_of(scans)
    data = replace(study.data, labels={"rim": (1,), "core": (2,)})
    study = replace(study, data=data, train=replace(study.train, exclusive=True))
    flow = answered(study, scans / "east", tmp_path, 5)
    for who, image, expected in known_of(flow, tmp_path / "run", "east"):
        said = said_by(flow, image).argmax(0)
        assert np.array_equal(bits([said == 1, said == 2]), expected)
        written = np.asarray(nibabel.load(tmp_path / "answers" / who / f"{who}_labels.nii.gz").dataobj)
        assert [(written == k).sum() for k in (1, 2)] == [int((said == k).sum()) for k in (1, 2)]


def test_a_network_for_slices_segments_whole_scans(scans, tmp_path):
    """Every slice of a volume gets the mask that it got as a case of the run."""
    train = ps.Train(patch=(16, 16), device="cpu", augment="none", mirror=True)
    study = study_of(scans, slices=ps.Slices("coronal", every=3), train=train)
    flow = answered(study, scans / "east", tmp_path, 10)
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


FLAT = ps.Train(patch=(16, 16), batch=4, device="cpu")


def test_pictures_are_segmented(pictures, tmp_path):
    prepare = ps.Prepare(normalise="all", spacing=(0.8, 1.25))
    study = study_of(pictures, "segment.csv", model=ps.UNet(filters=(2, 4, 4), bias=False), prepare=prepare, train=FLAT)
    flow = answered(study, pictures / "A", tmp_path, 6)
    for who, image, expected in known_of(flow, tmp_path / "run", "A"):
        assert np.array_equal(said_by(flow, image)[0] > 0, expected)
        with Pillow.open(tmp_path / "answers" / who / f"{who}_ulcer.png") as written:
            assert written.size == (27, 20) and abs(np.asarray(written).mean() - expected.mean()) < 0.1


def test_a_classifier_is_refused(pictures, tmp_path):
    network = ps.DenseNet(blocks=(2, 2), growth=4, features=8)
    ps.train(study_of(pictures, "classify.csv", model=network, train=FLAT), tmp_path / "run", evaluate=False)
    refused(RunError, "classifies images, so it cannot be a bundle: 'polysite predict .* predicts", tmp_path / "run")


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


def test_an_ensemble_runs_where_polysite_safetensors_and_pillow_are_not_installed(scans, tmp_path):
    """Two deeply supervised U-Nets of each hospital, in a process that cannot import these packages."""
    deep = ps.UNet(filters=(2, 4, 4, 4), deep_supervision=1)
    both = tmp_path / "both"
    ensembles.train_ensemble(study_of(scans, algorithm=ps.Local(), model=deep), both, trainings=2)
    bundle, answers = serve_model(both, "east", tmp_path / "home"), tmp_path / "answers"
    assert needed(bundle) == {"nibabel"} and "ensemble of 2 networks" in (bundle / "docs" / "README.md").read_text()
    words = [sys.executable, "-c", WITHOUT, bundle, scans / "east", answers]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ps.predict(both, scans / "east", tmp_path / "masks", site="east", preview=0)
    same_files(answers, tmp_path / "masks", 10)


def test_a_run_that_cleans_masks_is_left_to_predict(scans, tmp_path):
    study = study_of(scans)
    run = ps.train(replace(study, train=replace(study.train, clean=Clean(fill=True))), tmp_path / "run").folder.path
    refused(RunError, r"cleans its masks \(train.clean\), so it cannot be a bundle: 'polysite predict", run)


def test_a_network_of_our_own_is_left_to_predict(tmp_path):
    study = replace(SMALL, run=ps.Plan(rounds=1), model=ps.UNetSub(filters=(2, 4, 4)))
    ps.train(study, tmp_path / "run", evaluate=False)
    why = "has a network that is not of MONAI, so it cannot be a bundle: 'polysite predict .* predicts with it"
    refused(RunError, why, tmp_path / "run")
    assert not (tmp_path / "run" / "bundles").exists()


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
    found = {site: weights_of(serve_model(runs / name, site, tmp_path / site)) for site in ("east", "north", "west")}
    for site, weights in found.items():
        assert same(weights, load_file(runs / name / "models" / f"best.{site}.safetensors"))
        assert site == "east" or not same(weights, found["east"])
    text = (tmp_path / "east" / "docs" / "README.md").read_text()
    assert "trained on patients of this hospital, for this hospital, and belongs there" in text and "north" not in text


def test_a_shared_model_needs_no_name(runs, tmp_path):
    shared, own = serve_model(runs / "fedavg"), serve_model(runs / "fedavg", "north", tmp_path / "north")
    assert shared == runs / "fedavg" / "bundles" / "shared"
    for bundle in (shared, own):
        assert same(weights_of(bundle), load_file(runs / "fedavg" / "models" / "best.safetensors"))
    assert "belongs" not in (own / "docs" / "README.md").read_text()


def test_a_bundle_and_the_command_say_what_it_is(runs, tmp_path):
    bundle = tmp_path / "west"
    command = ["serve-model", str(runs / "ditto"), "--site", "west", "--out"]
    said = CliRunner().invoke(app, [*command, str(bundle)])
    assert said.exit_code == 0 and "docs/README.md" in said.output
    said = CliRunner().invoke(app, [*command, str(tmp_path / "again"), "--json"])
    assert json.loads(said.output)["weights"]["file"] == "models/model.safetensors"
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


# one of each kind of model in every full run, besides those above
SLICE = ("fedbn", "fine_tune")
BEYOND = ("cfft", "feddiv")  # more than a network of MONAI
EVERY = [pytest.param(n, marks=() if n in SLICE else pytest.mark.soak) for n in ALGORITHMS if n not in BEYOND]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_algorithm_has_a_model_to_take_home(name, tmp_path):
    ps.train(wanted(name), tmp_path / "run")
    bundle = serve_model(tmp_path / "run", "a")
    models = tmp_path / "run" / "models"
    file = next(f for own in (".a", "") if (f := models / f"best{own}.safetensors").exists())
    assert same(weights_of(bundle), load_file(file))
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
        words = f"'{other}' did not train .*, and local has no model for such a hospital"
        refused(RunError, words, tmp_path / "local", other)


def refused(kind, words, *given):
    with pytest.raises(kind, match=words):
        serve_model(*given)


def test_what_cannot_be_taken_home_is_refused_in_a_sentence(runs, tmp_path):
    before, ditto, iid = sorted(runs.rglob("*")), runs / "ditto", tmp_path / "iid"
    refused(ConfigError, r"there is no site 'nroth' in .*; did you mean 'north'\?", ditto, "nroth")
    refused(ConfigError, "models of their own; choose whose with --site: east, north, west", ditto)
    refused(RunError, "exists already; no bundle overwrites", ditto, "north", tmp_path)
    refused(RunError, "not a run folder", tmp_path, "north")
    (tmp_path / "file").touch()
    refused(RunError, r"the bundle .* could not be written", ditto, "north", tmp_path / "file" / "home")
    assert isinstance(CliRunner().invoke(app, ["serve-model", str(ditto)]).exception, ConfigError)
    assert sorted(runs.rglob("*")) == before
    ps.train(replace(SMALL, algorithm=ps.Ditto(), federation=Iid(2), run=ps.Plan(rounds=1)), iid)
    serve_model(iid)
    words = "'iid-1' is no hospital but was made to train; choose one of east, north, west"
    refused(ConfigError, words, iid, "iid-1")


def test_a_run_under_way_several_models_and_damage_are_refused(tmp_path):
    run = tmp_path / "run"
    ps.train(replace(SMALL, algorithm=ps.Local(), run=ps.Plan(rounds=1)), run)
    (run / "models" / "best.north.safetensors").write_bytes(b"nothing")
    refused(RunError, r"the model .*best.north.safetensors cannot be read", run, "north")
    west = run / "models" / "best.west.safetensors"
    for k in (0, 1):
        west.with_name(f"best.west.group-{k}.safetensors").write_bytes(west.read_bytes())
    west.unlink()
    refused(RunError, "local serves several models to 'west', each to some of its patients", run, "west")
    result = run / "result.json"
    result.write_text(result.read_text().replace('"WT"', '"$WT"'))
    refused(ConfigError, r"'\$WT' cannot be the name of a modality or label", run, "east")
    result.unlink()
    refused(RunError, "has not finished; 'polysite train --resume", run, "east")
