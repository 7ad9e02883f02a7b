"""Predictions of unlabelled scans: which model, how, in which format, and what is refused.

That masks equal those of a bundle is tested in ``tests/export``; every format of scans in ``tests/cli/test_formats``.
"""

import json
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from typer.testing import CliRunner

import polysite as ps
from polysite import machine
from polysite.cli import app
from polysite.data import images
from polysite.data.unlabelled import find
from polysite.errors import ConfigError, DataError, RunError
from polysite.machine import Memory
from polysite.prediction import Options, Predictor
from polysite.prediction import predictor as module
from polysite.training.predict import mirror_axes

TURN = [[-np.cos(0.2), 0, np.sin(0.2)], [np.sin(0.2), 0, np.cos(0.2)], [0, -1, 0]]  # oblique, axes exchanged
AFFINE = np.block([[np.array(TURN) * [1.1, 0.9, 1.7], np.array([[30.0], [-9], [4]])], [np.zeros(3), 1]])
SHAPE = (21, 18, 17)


def scan(file, number, shape=SHAPE):
    rng = np.random.default_rng(number)
    file.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(rng.normal(100, 20, shape).astype(np.float32), AFFINE)
    image.header.set_xyzt_units("mm")
    image.set_sform(AFFINE, 1)
    nibabel.save(image, file)
    return file


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two hospitals with two modalities; the manifest names a third file of every case as label map."""
    root = tmp_path_factory.mktemp("data")
    rows = ["site,case,t1,flair,label,labels"]
    for k in range(8):
        site, case = ("east", "north")[k % 2], f"p{k}"
        names = {m: scan(root / site / case / f"{m}.nii.gz", 10 * k + j) for j, m in enumerate(("t1", "flair"))}
        truth = np.zeros(SHAPE, np.uint8)
        truth[5:12, 4:12, 3:11] = 1
        nibabel.save(nibabel.Nifti1Image(truth, AFFINE), root / site / case / "seg.nii.gz")
        cells = [str(f.relative_to(root)) for f in names.values()]
        rows.append(",".join([site, case, *cells, f"{site}/{case}/seg.nii.gz", "whole=1"]))
    (root / "manifest.csv").write_text("\n".join(rows) + "\n")
    return root


def study(data, **changes):
    return replace(
        ps.Study(
            model=ps.UNet(filters=(2, 4, 4)),
            data=ps.Files(path=str(data / "manifest.csv")),
            train=ps.Train(patch=(16, 16, 16), batch=2, device="cpu", augment="none"),
            run=ps.Plan(rounds=1),
            split=ps.Split(seed=0),
        ),
        **changes,
    )


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    ps.train(study(data), root / "shared", evaluate=False)
    ps.train(study(data, algorithm=ps.Local(), seed=3), root / "own", evaluate=False)
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


def test_a_scan_needs_neither_labels_nor_the_data_of_the_run(runs, clinic, tmp_path, data, monkeypatch):
    hidden = data / "manifest.csv"
    text = hidden.read_text()
    hidden.unlink()
    try:
        done = ps.predict(runs / "shared", clinic, tmp_path / "masks")
    finally:
        hidden.write_text(text)
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


def test_overlap_mirror_and_batch_are_those_that_were_asked_for(runs, clinic, tmp_path):
    plain = Predictor([runs / "shared"])
    case, _ = plain.prepared(find(clinic, plain.modalities).open(find(clinic, plain.modalities).rows[0])[0])
    assert plain.count(case) == 8 and plain.batch == 4
    assert Predictor([runs / "shared"], Options(overlap=0.0)).count(case) == 8  # 20 x 18 x 17 in windows of 16
    tight = Predictor([runs / "shared"], Options(overlap=0.9))
    assert tight.count(case) == 5 * 3 * 2 and tight.overlap == 0.9
    x = torch.from_numpy(case.image)[None, :, :16, :16, :16]
    mirrored = Predictor([runs / "shared"], Options(mirror=True)).logits(x)
    flips = mirror_axes(3)
    expected = sum(plain.logits(x.flip(axes)).flip(axes) for axes in flips) / len(flips)
    assert torch.allclose(mirrored, expected, atol=1e-6) and not torch.allclose(mirrored, plain.logits(x), atol=1e-4)
    seen = []
    for batch in (1, 3):
        ps.predict(
            runs / "shared", clinic, tmp_path / f"{batch}", batch=batch, preview=0, watch=lambda *a: seen.append(a)
        )
    one, three = masks(tmp_path / "1"), masks(tmp_path / "3")
    assert all((one[k] != three[k]).sum() <= 2 for k in one)
    assert seen[0] == (0.0, 3, "scan0") and seen[-1] == (3.0, 3, "scan2") and (0.125, 3, "scan0") in seen


def test_fewer_windows_per_pass_where_memory_is_short(runs, monkeypatch):
    plenty = Predictor([runs / "shared"])
    window = plenty._bytes
    assert window > 4 * 16**3 * 4  # more than the outputs of the first layer
    monkeypatch.setattr(machine, "memory", lambda: Memory(1 << 40, int(window * 2 / module.SHARE)))
    assert Predictor([runs / "shared"]).batch == 2
    monkeypatch.setattr(machine, "memory", lambda: Memory(1 << 40, 10))
    assert Predictor([runs / "shared"]).batch == 1
    assert Predictor([runs / "shared"], Options(batch=7)).batch == 7


def test_the_model_of_a_hospital_and_an_ensemble_of_runs(runs, clinic, tmp_path):
    with pytest.raises(ConfigError, match="models of their own; choose whose with --site: east, north"):
        ps.predict(runs / "own", clinic, tmp_path / "masks")
    with pytest.raises(ConfigError, match=r"there is no site 'nroth' in .*; did you mean 'north'\?"):
        ps.predict(runs / "own", clinic, tmp_path / "masks", site="nroth")
    both = Predictor([runs / "shared", runs / "own"], Options(site="north"))
    alone = [Predictor([runs / name], Options(site="north")) for name in ("shared", "own")]
    x = torch.randn(2, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(both.logits(x), (alone[0].logits(x) + alone[1].logits(x)) / 2, atol=1e-6)
    east = Predictor([runs / "own"], Options(site="east"))
    assert not torch.allclose(east.logits(x), alone[1].logits(x), atol=1e-5)


def test_runs_that_do_not_go_together_are_refused(runs, data, clinic, tmp_path):
    other = replace(study(data), prepare=ps.Prepare(normalise="all"))
    ps.train(other, tmp_path / "other", evaluate=False)
    with pytest.raises(ConfigError, match=r"other differs from .*shared in its preparation"):
        ps.predict([runs / "shared", tmp_path / "other"], clinic, tmp_path / "masks")
    assert not (tmp_path / "masks").exists()


def test_masks_in_another_format(runs, clinic, tmp_path):
    for kind, end in (("nrrd", ".nrrd"), ("npy", ".npy")):
        ps.predict(runs / "shared", clinic, tmp_path / kind, format=kind, preview=0)
        assert (tmp_path / kind / "scan1" / f"scan1_whole{end}").is_file()
    ps.predict(runs / "shared", clinic, tmp_path / "nifti", preview=0)
    for k in range(3):
        here, there = (
            SimpleITK.ReadImage(str(tmp_path / kind / f"scan{k}" / f"scan{k}_whole{end}"))
            for kind, end in (("nrrd", ".nrrd"), ("nifti", ".nii.gz"))
        )
        assert np.array_equal(SimpleITK.GetArrayFromImage(here), SimpleITK.GetArrayFromImage(there))
        assert np.array_equal(
            np.load(tmp_path / "npy" / f"scan{k}" / f"scan{k}_whole.npy"),
            images.read(tmp_path / "nrrd" / f"scan{k}" / f"scan{k}_whole.nrrd").array,
        )
        for what in ("GetSpacing", "GetOrigin", "GetDirection"):
            assert getattr(here, what)() == pytest.approx(getattr(there, what)(), abs=1e-4)
    with pytest.raises(ConfigError, match="--format mha: choose auto, nifti, nrrd, png, npy, dicom-seg"):
        ps.predict(runs / "shared", clinic, tmp_path / "none", format="mha")
    with pytest.raises(ConfigError, match="--format dicom-seg is for folders of DICOM slices"):
        ps.predict(runs / "shared", clinic, tmp_path / "none", format="dicom-seg")
    with pytest.raises(ConfigError, match="--format png holds 2D images"):
        ps.predict(runs / "shared", clinic, tmp_path / "none", format="png")


def test_an_unreadable_scan_is_left_out_and_named(runs, clinic, tmp_path):
    (clinic / "scan1" / "head_T1.nii.gz").write_bytes(b"nothing")
    words = ["predict", str(runs / "shared"), str(clinic), "--out", str(tmp_path / "masks")]
    found = CliRunner().invoke(app, [*words, "--quiet"])
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
    with pytest.raises(RunError, match="exists already"):
        ps.predict(shared, clinic, tmp_path)
    with pytest.raises(RunError, match="not a run folder"):
        ps.predict(tmp_path / "nothing", clinic, out)
    with pytest.raises(DataError, match="nowhere does not exist"):
        ps.predict(shared, tmp_path / "nowhere", out)
    with pytest.raises(ConfigError, match=r"overlap 1\.0 must lie in"):
        ps.predict(shared, clinic, out, overlap=1.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no scan was found in .*empty"):
        ps.predict(shared, tmp_path / "empty", out)
    (clinic / "scan1" / "head_FLAIR.nii.gz").unlink()
    with pytest.raises(DataError, match="case 'scan1' has no flair, and the model was trained with t1, flair"):
        ps.predict(shared, clinic, out)
    (tmp_path / "list.csv").write_text("case,t1\nx,clinic/scan0/head_T1.nii.gz\n")
    with pytest.raises(DataError, match="has no column 'flair'"):
        ps.predict(shared, tmp_path / "list.csv", out)
    joint = np.ones((18, 18, 18, 3), np.float32)
    nibabel.save(nibabel.Nifti1Image(joint * np.arange(18)[:, None, None, None], AFFINE), tmp_path / "one.nii.gz")
    with pytest.raises(DataError, match=r"one\.nii\.gz has 3 channels, and the model was trained with t1, flair"):
        ps.predict(shared, tmp_path / "one.nii.gz", out)
    found = CliRunner().invoke(app, ["predict", str(shared), "--out", str(out)])
    assert isinstance(found.exception, ConfigError) and "name a run and the scans" in str(found.exception)
    assert not out.exists()


def test_a_manifest_may_lack_site_and_label_and_a_file_may_hold_all_channels(runs, clinic, tmp_path):
    rows = [f"s{k},clinic/scan{k}/head_T1.nii.gz,clinic/scan{k}/head_FLAIR.nii.gz" for k in range(3)]
    (tmp_path / "list.csv").write_text("\n".join(["case,t1,flair", *rows]))
    ps.predict(runs / "shared", tmp_path / "list.csv", tmp_path / "listed", preview=0)
    ps.predict(runs / "shared", clinic, tmp_path / "found", preview=0)
    one, two = masks(tmp_path / "listed"), masks(tmp_path / "found")
    assert [*one] == [f"s{k}_whole.nii.gz" for k in range(3)]
    assert all(np.array_equal(a, b) for a, b in zip(one.values(), two.values(), strict=True))
    parts = [nibabel.load(clinic / "scan0" / f"head_{m}.nii.gz") for m in ("T1", "FLAIR")]
    whole = np.stack([np.asarray(p.dataobj) for p in parts], -1)
    nibabel.save(nibabel.Nifti1Image(whole, AFFINE), tmp_path / "both.nii.gz")
    ps.predict(runs / "shared", tmp_path / "both.nii.gz", tmp_path / "joint", preview=0)
    assert np.array_equal(masks(tmp_path / "joint")["both_whole.nii.gz"], one["s0_whole.nii.gz"])
    numbered = tmp_path / "nnunet"
    numbered.mkdir()
    for k in range(3):
        for j, m in enumerate(("T1", "FLAIR")):
            (numbered / f"n{k}_000{j}.nii.gz").write_bytes((clinic / f"scan{k}" / f"head_{m}.nii.gz").read_bytes())
    ps.predict(runs / "shared", numbered, tmp_path / "numbered", preview=0)
    assert np.array_equal(masks(tmp_path / "numbered")["n2_whole.nii.gz"], one["s2_whole.nii.gz"])


def test_the_command_prints_tables_or_json(runs, clinic, tmp_path):
    words = ["predict", str(runs / "shared"), str(clinic), "--out", str(tmp_path / "masks")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0 and "3 scans predicted" in found.stdout and "preview.png" in found.stdout
    found = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "again"), "--json", "--preview", "0"])
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    assert [line["case"] for line in lines] == ["scan0", "scan1", "scan2"] and lines[0].keys() >= {"voxels", "ml"}
    assert not (tmp_path / "again" / "preview.png").exists()
