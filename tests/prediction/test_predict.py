"""Predictions of unlabelled scans: which model, how, in which format, and what is refused.

That masks equal those of a bundle is tested in ``tests/export``; every format of scans in ``tests/cli/test_formats``.
"""

import json
import shutil
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from typer.testing import CliRunner

import polysite as ps
from export.test_serve import study_of, write_scans
from polysite import machine
from polysite.cli import app
from polysite.data import images
from polysite.data.unlabelled import find
from polysite.errors import ConfigError, DataError, RunError
from polysite.machine import Memory
from polysite.prediction import Predictor
from polysite.prediction import predictor as module
from polysite.training.predict import mirror_axes

TURN = [[-np.cos(0.2), 0, np.sin(0.2)], [np.sin(0.2), 0, np.cos(0.2)], [0, -1, 0]]  # oblique, axes exchanged
AFFINE = np.block([[np.array(TURN) * [1.1, 0.9, 1.7], np.array([[30.0], [-9], [4]])], [np.zeros(3), 1]])


def scan(file, number, shape):
    rng = np.random.default_rng(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(rng.normal(100, 20, shape).astype(np.float32), AFFINE)
    image.header.set_xyzt_units("mm")
    image.set_sform(AFFINE, 1)
    nibabel.save(image, file)
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_scans(tmp_path_factory.mktemp("data"), "whole=1,2")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    root, shared = tmp_path_factory.mktemp("runs"), study_of(data, split=ps.Split(seed=0))
    ps.train(shared, root / "shared", evaluate=False)
    ps.train(replace(shared, algorithm=ps.Local(), seed=3), root / "own", evaluate=False)
    return root


@pytest.fixture
def clinic(tmp_path):
    """Three scans without labels, one folder each, with files named as a clinic does."""
    for k in range(3):
        for j, m in enumerate(("T1", "FLAIR")):
            scan(tmp_path / "clinic" / f"scan{k}" / f"head_{m}.nii.gz", 100 + 10 * k + j, (20 + k, 18, 17))
    return tmp_path / "clinic"


def masks(folder):
    return {f.name: np.asarray(nibabel.load(f).dataobj) for f in sorted(folder.rglob("*.nii.gz"))}


def test_a_scan_needs_neither_labels_nor_the_data_of_the_run(runs, clinic, tmp_path, data):
    listed = (data / "manifest.csv").rename(data / "hidden.csv")
    try:
        done = ps.predict(runs / "shared", clinic, tmp_path / "masks")
    finally:
        listed.rename(data / "manifest.csv")
    assert [line["case"] for line in done.table] == ["scan0", "scan1", "scan2"] and not done.failed
    for k, (name, mask) in enumerate(masks(done.folder).items()):
        source = nibabel.load(clinic / f"scan{k}" / "head_T1.nii.gz")
        written = nibabel.load(done.folder / f"scan{k}" / name)
        assert name == f"scan{k}_whole.nii.gz" and mask.shape == (20 + k, 18, 17) and set(np.unique(mask)) <= {0, 1}
        for what in ("sform_code", "qform_code", "xyzt_units"):
            assert written.header[what] == source.header[what]
        assert np.array_equal(written.affine, source.affine)
        voxel = abs(np.linalg.det(AFFINE[:3, :3]))
        assert done.table[k]["voxels"] == mask.sum()
        assert float(done.table[k]["ml"]) == pytest.approx(mask.sum() * voxel / 1000, rel=1e-4)
    about = json.loads((done.folder / "predictions.json").read_text())
    assert about["runs"] == ["shared"] and about["overlap"] == 0.5 and about["cases"] == 3 and not about["mirror"]
    assert str(clinic) not in json.dumps(about)
    assert all(f.stat().st_mode & 0o077 == 0 for f in (done.folder, *done.folder.rglob("*")))


def test_overlap_mirror_and_batch_are_those_that_were_asked_for(runs, clinic, tmp_path, monkeypatch):
    def shared(**options):
        return Predictor(runs / "shared", **options)

    plain = shared()
    found = find(clinic, plain.modalities)
    case, _ = plain.prepared(found.open(found.rows[0])[0])
    assert plain.count(case) == 8 and plain.batch == 4
    assert shared(overlap=0.0).count(case) == 8  # 20 x 18 x 17 in windows of 16
    tight = shared(overlap=0.9)
    assert tight.count(case) == 5 * 3 * 2 and tight.overlap == 0.9
    x = torch.from_numpy(case.image)[None, :, :16, :16, :16]
    mirrored = shared(mirror=True).logits(x)
    flips = mirror_axes(3)
    expected = sum(plain.logits(x.flip(axes)).flip(axes) for axes in flips) / len(flips)
    assert torch.allclose(mirrored, expected, atol=1e-6) and not torch.allclose(mirrored, plain.logits(x), atol=1e-4)
    seen = []
    for batch in (1, 3):
        options = {"batch": batch, "preview": 0, "watch": lambda *state: seen.append(state)}
        ps.predict(runs / "shared", clinic, tmp_path / f"{batch}", **options)
    one, three = masks(tmp_path / "1"), masks(tmp_path / "3")
    assert all((one[k] != three[k]).sum() <= 2 for k in one)
    assert seen[0] == (0.0, 3, "scan0") and seen[-1] == (3.0, 3, "scan2") and (0.125, 3, "scan0") in seen
    assert plain._bytes > 4 * 16**3 * 4  # of a window: more than the outputs of the first layer
    for free, batch in ((int(plain._bytes * 2 / module.SHARE), 2), (10, 1)):
        monkeypatch.setattr(machine, "memory", lambda free=free: Memory(1 << 40, free))
        assert shared().batch == batch and shared(batch=7).batch == 7


def test_hospitals_have_models_of_their_own(runs):
    x = torch.randn(2, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    north, east = (Predictor(runs / "own", site=site).logits(x) for site in ("north", "east"))
    assert not torch.allclose(north, east, atol=1e-5)


def test_masks_in_another_format(runs, clinic, tmp_path):
    ends = {"nrrd": ".nrrd", "npy": ".npy", "nifti": ".nii.gz"}
    for kind in ends:
        ps.predict(runs / "shared", clinic, tmp_path / kind, format=kind, preview=0)
    for k in range(3):
        files = {kind: tmp_path / kind / f"scan{k}" / f"scan{k}_whole{end}" for kind, end in ends.items()}
        here, there = (SimpleITK.ReadImage(str(files[kind])) for kind in ("nrrd", "nifti"))
        assert np.array_equal(SimpleITK.GetArrayFromImage(here), SimpleITK.GetArrayFromImage(there))
        assert np.array_equal(np.load(files["npy"]), images.read(files["nrrd"]).array)
        for what in ("GetSpacing", "GetOrigin", "GetDirection"):
            assert getattr(here, what)() == pytest.approx(getattr(there, what)(), abs=1e-4)


def test_the_command_prints_tables_or_json_and_names_an_unreadable_scan(runs, clinic, tmp_path):
    def shown(out, *more):
        return CliRunner().invoke(app, ["predict", str(runs / "shared"), str(clinic), "--out", str(out), *more])

    found = shown(tmp_path / "whole")
    assert found.exit_code == 0 and "3 scans predicted" in found.stdout and "preview.png" in found.stdout
    (clinic / "scan1" / "head_T1.nii.gz").write_bytes(b"nothing")
    found = shown(tmp_path / "masks", "--json", "--preview", "0")
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["scan0", "scan2", "scan1"] and lines[2].keys() == {"case", "failed"}
    assert lines[0].keys() >= {"voxels", "ml"}
    assert found.exit_code == 1 and "scan1 was left out" in found.stderr and "head_T1.nii.gz" in found.stderr
    assert sorted(f.name for f in (tmp_path / "masks").iterdir() if f.is_dir()) == ["scan0", "scan2"]
    assert list(json.loads((tmp_path / "masks" / "predictions.json").read_text())["failed"]) == ["scan1"]
    for k in (0, 2):
        (clinic / f"scan{k}" / "head_T1.nii.gz").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"head_T1\.nii\.gz cannot be read"):
        ps.predict(runs / "shared", clinic, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_what_can_be_refused_is_refused_before_anything_is_predicted(runs, clinic, tmp_path):
    shared, out = runs / "shared", tmp_path / "masks"

    def refused(kind, words, run=shared, scans=clinic, out=out, **options):
        with pytest.raises(kind, match=words):
            ps.predict(run, scans, out, **options)

    refused(RunError, "exists already", out=tmp_path)
    refused(RunError, "not a run folder", run=tmp_path / "nothing")
    refused(ConfigError, "models of their own; choose whose with --site: east, north", run=runs / "own")
    refused(ConfigError, r"there is no site 'nroth' in .*; did you mean 'north'\?", run=runs / "own", site="nroth")
    refused(ConfigError, r"overlap 1\.0 must lie in", overlap=1.0)
    refused(ConfigError, "--format mha: choose auto, nifti, nrrd, png, npy, dicom-seg", format="mha")
    refused(ConfigError, "--format dicom-seg is for folders of DICOM slices", format="dicom-seg")
    refused(ConfigError, "--format png holds 2D images", format="png")
    refused(DataError, "nowhere does not exist", scans=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused(DataError, r"no scan was found in .*empty", scans=tmp_path / "empty")
    (clinic / "scan1" / "head_FLAIR.nii.gz").unlink()
    refused(DataError, "case 'scan1' has no flair, and the model was trained with t1, flair")
    (tmp_path / "list.csv").write_text("case,t1\nx,clinic/scan0/head_T1.nii.gz\n")
    refused(DataError, "has no column 'flair'", scans=tmp_path / "list.csv")
    one = scan(tmp_path / "one.nii.gz", 1, (18, 18, 18, 3))
    refused(DataError, r"one\.nii\.gz has 3 channels, and the model was trained with t1, flair", scans=one)
    found = CliRunner().invoke(app, ["predict", str(shared), "--out", str(out)])
    assert found.exit_code == 2 and "Missing argument 'SCANS'" in found.stderr
    assert not out.exists()


def test_a_manifest_may_lack_site_and_label_and_a_file_may_hold_all_channels(runs, clinic, tmp_path):
    def predicted(name, scans):
        ps.predict(runs / "shared", scans, tmp_path / name, preview=0)
        return masks(tmp_path / name)

    rows = [f"s{k},clinic/scan{k}/head_T1.nii.gz,clinic/scan{k}/head_FLAIR.nii.gz" for k in range(3)]
    (tmp_path / "list.csv").write_text("\n".join(["case,t1,flair", *rows]))
    one, two = predicted("listed", tmp_path / "list.csv"), predicted("found", clinic)
    assert [*one] == [f"s{k}_whole.nii.gz" for k in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))
    parts = [nibabel.load(clinic / "scan0" / f"head_{m}.nii.gz") for m in ("T1", "FLAIR")]
    whole = np.stack([np.asarray(p.dataobj) for p in parts], -1)
    nibabel.save(nibabel.Nifti1Image(whole, AFFINE), tmp_path / "both.nii.gz")
    joint = predicted("joint", tmp_path / "both.nii.gz")
    assert np.array_equal(joint["both_whole.nii.gz"], one["s0_whole.nii.gz"])
    (tmp_path / "nnunet").mkdir()
    for k in range(3):
        for j, m in enumerate(("T1", "FLAIR")):
            shutil.copy(clinic / f"scan{k}" / f"head_{m}.nii.gz", tmp_path / "nnunet" / f"n{k}_000{j}.nii.gz")
    assert np.array_equal(predicted("numbered", tmp_path / "nnunet")["n2_whole.nii.gz"], one["s2_whole.nii.gz"])
