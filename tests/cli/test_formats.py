"""Every format of scans from the folder to predictions: scan, check, preview, two rounds of training, predict."""

import csv
import json
import re
import shutil
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK
from PIL import Image as Pillow

import foreign_scans as foreign
from polysite.data import dicom as dicom_reader
from polysite.data import dicom_seg, images, manifest
from polysite.data.files import Files

SETTINGS = (
    "--set", "train.device=cpu", "--set", "train.batch=1", "--set", "train.steps=1", "--set", "run.rounds=2",
    "--set", "model.filters=[2,4,4]", "--set", "split.test=0.34", "--set", "split.validation=0.34",
)  # fmt: skip
SHAPE, SPACING, ORIGIN = (12, 10, 8), (0.7, 0.8, 2.5), (-10.0, 20.0, 30.0)
TURN = np.deg2rad(20)
DIRECTION = (np.cos(TURN), -np.sin(TURN), 0, np.sin(TURN), np.cos(TURN), 0, 0, 0, 1)
# of these axes: voxels to millimetres in RAS
AFFINE = np.diag([-1, -1, 1, 1]) @ np.block(
    [[np.reshape(DIRECTION, (3, 3)) * SPACING, np.array(ORIGIN)[:, None]], [np.zeros(3), 1]]
)
LABEL = "label_1"  # what a value without a name is called
TRUTHS = ("1st_manual", "mask", "labels-ah")
CASES = {"north": ("n1", "n2", "n3"), "south": ("s1", "s2", "s3")}


def volume(number):
    """Return a scan and its label map."""
    generator = np.random.default_rng(number)
    label = np.zeros(SHAPE, np.uint8)
    label[3 : 6 + number % 3, 3:7, 2:6] = 1
    return (generator.integers(0, 200, SHAPE) + 300 * label.astype(int)).astype(np.int16), label


def itk(file, array):
    image = SimpleITK.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing(SPACING)
    image.SetOrigin(ORIGIN)
    image.SetDirection(DIRECTION)
    file.parent.mkdir(parents=True, exist_ok=True)
    SimpleITK.WriteImage(image, str(file))


def cases():
    for site, names in CASES.items():
        for name in names:
            yield site, name, *volume(int(name[1:]) + 10 * (site == "south"))


def dicom(root):
    axes = (DIRECTION[0], DIRECTION[3], DIRECTION[6], DIRECTION[1], DIRECTION[4], DIRECTION[7])
    for site, name, image, label in cases():
        folder = root / site / name
        foreign.dicom_series(folder / "ct", image, spacing=SPACING, origin=ORIGIN, axes=axes)
        itk(folder / "seg.nrrd", label)


def nrrd(root):
    for site, name, image, label in cases():
        itk(root / site / name / "t1.nrrd", image)
        itk(root / site / name / "seg.nhdr", label)


def hdf5(root):
    for site, name, image, label in cases():
        (root / site / name).mkdir(parents=True)
        with h5py.File(root / site / name / "mri_norm2.h5", "w") as file:
            file.create_dataset("image", data=image.astype(np.float32), compression="gzip")
            file.create_dataset("label", data=label, compression="gzip")


def npz(root):
    for site, name, image, label in cases():
        (root / site).mkdir(parents=True, exist_ok=True)
        np.savez_compressed(root / site / f"{name}.npz", image=image, label=label)


def npy(root):
    for site, name, image, label in cases():
        (root / site / name).mkdir(parents=True)
        np.save(root / site / name / "t1.npy", image)
        np.save(root / site / name / "seg.npy", label)


def retina(root):
    """Three sites as of DRIVE (GIF masks of 0 and 255), CHASE (1 bit, one folder) and STARE (PPM, packed)."""
    for number in range(21, 25):
        image, mask = picture(number)
        part = root / "DRIVE" / ("training" if number < 23 else "test")
        kind = "training" if number < 23 else "test"
        save(part / "images" / f"{number}_{kind}.tif", image)
        save(part / "1st_manual" / f"{number}_manual1.gif", mask * 255)
        save(part / "mask" / f"{number}_{kind}_mask.gif", np.full_like(mask, 255))
    for number in range(1, 5):
        image, mask = picture(number)
        save(root / "CHASE" / f"Image_0{number}L.jpg", image)
        save(root / "CHASE" / f"Image_0{number}L_1stHO.png", mask.astype(bool))
        save(root / "CHASE" / f"Image_0{number}L_2ndHO.png", mask.astype(bool))
        image, mask = picture(100 + number)
        save(root / "STARE" / "stare-images" / f"im000{number}.ppm", image)
        save(root / "STARE" / "labels-ah" / f"im000{number}.ah.pgm", mask * 255)


def picture(number):
    generator = np.random.default_rng(number)
    mask = np.zeros((24, 20), np.uint8)
    mask[4 : 8 + number % 5, 5:9] = 1
    return (generator.integers(0, 90, (24, 20, 3)) + 100 * mask[..., None]).astype(np.uint8), mask


def save(file, array):
    file.parent.mkdir(parents=True, exist_ok=True)
    Pillow.fromarray(array).save(file)


@pytest.fixture
def trained(tmp_path, polysite, monkeypatch):
    """Take a folder the whole way; return the manifest, what was printed, and the folder of all that was written."""

    def run(build, *options, patch="[8,8,8]"):
        build(tmp_path / "scans")
        made = tmp_path / "made"
        made.mkdir()
        monkeypatch.setenv("POLYSITE_CACHE", str(made / "cache"))
        table = made / "manifest.csv"
        printed = []
        for command in (
            ("data", "scan", tmp_path / "scans", "--out", table, *options),
            ("data", "check", table),
            ("data", "check", table, "--json"),
            ("data", "preview", table, "--out", made / "preview"),
            ("train", table, "--out", made / "run", *SETTINGS, "--set", f"train.patch={patch}"),
        ):
            code, out, err = polysite(*command)
            assert code == 0, (command, out, err)
            printed.append(out + err)
        assert len((made / "run" / "rounds.jsonl").read_text().splitlines()) == 2
        for name, scans in (("masks", table), ("unlabelled", unlabelled(tmp_path / "scans"))):
            code, out, err = polysite("predict", made / "run", scans, "--out", made / name)
            assert code == 0 and "predicted" in out, (out, err)
            printed.append(out + err)
        same_predictions(made / "masks", made / "unlabelled")
        (made / "printed.txt").write_text("\n".join(printed))
        return table, printed, made

    return run


def unlabelled(scans):
    """Return a copy without label maps, as scans come from a clinic; arrays of keyed files stay."""
    scans = Path(shutil.copytree(scans, scans.parent / "clinic"))
    for file in sorted(scans.rglob("*")):
        truth = re.fullmatch(r"seg|.*_(1st|2nd)HO", file.name.partition(".")[0]) or file.parent.name in TRUTHS
        if file.is_file() and truth:
            file.unlink()
    return scans


def same_predictions(one, other):
    """Predictions do not depend on how the scans were listed; there is one mask of every case, and a table."""
    files = [f.relative_to(one) for f in sorted(one.rglob("*")) if f.is_file()]
    assert files == [f.relative_to(other) for f in sorted(other.rglob("*")) if f.is_file()]
    assert {str(f) for f in files} >= {"preview.png", "volumes.csv", "predictions.json"}
    masks = [f for f in files if len(f.parts) == 2]
    rows = list(csv.DictReader((one / "volumes.csv").read_text().splitlines()))
    assert len(masks) == len(rows) and {f.parts[0] for f in masks} == {r["case"] for r in rows}
    for file in masks:
        assert (one / file).read_bytes() == (other / file).read_bytes()
        mask = images.read(one / file)
        (row,) = [r for r in rows if r["case"] == file.parts[0]]
        assert int(row["voxels" if mask.dims == 3 else "pixels"]) == int((mask.array > 0).sum())
        if mask.dims == 3 and row["ml"]:
            assert float(row["ml"]) == pytest.approx(int(row["voxels"]) * np.prod(SPACING) / 1000, rel=1e-4)


def same_grid(scan, mask):
    """SimpleITK sees a scan and its mask on one grid."""
    if scan.is_dir():
        reader = SimpleITK.ImageSeriesReader()
        reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(scan)))
        one = reader.Execute()
    else:
        one = SimpleITK.ReadImage(str(scan))
    other = SimpleITK.ReadImage(str(mask))
    assert one.GetSize() == other.GetSize()
    for what in ("GetSpacing", "GetOrigin", "GetDirection"):
        assert getattr(one, what)() == pytest.approx(getattr(other, what)(), abs=1e-4), what


def test_dicom(trained):
    table, printed, made = trained(dicom)
    row = manifest.read(table).rows[0]
    assert [*row.images] == ["ct"] and row.images["ct"].endswith("scans/north/n1/ct/")
    same_geometry(table)
    everything = foreign.written(made)
    assert [s for s in foreign.SECRETS if s.encode() in everything] == [] and b"n1" in everything
    report = json.loads(printed[2])
    assert report["sites"][0]["unit"] == "mm" and report["sites"][0]["orientation"] == ["LPS"]
    for site, names in CASES.items():
        for name in names:
            scan = made.parent / "scans" / site / name / "ct"
            same_grid(scan, made / "masks" / name / f"{name}_{LABEL}.nii.gz")


def test_nrrd(trained):
    table, _, made = trained(nrrd)
    same_geometry(table)
    for site, names in CASES.items():
        for name in names:
            scan, mask = (
                made.parent / "scans" / site / name / "t1.nrrd", made / "masks" / name / f"{name}_{LABEL}.nrrd",
            )  # fmt: skip
            same_grid(scan, mask)
            fields = [
                [w for w in f.read_bytes().split(b"\n\n")[0].split(b"\n") if w[:5] == b"space"] for f in (scan, mask)
            ]
            assert sorted(fields[0]) == sorted(fields[1]) and len(fields[0]) == 3


def same_geometry(table):
    files = Files(str(table))
    for cases in files.case_refs(0).values():
        for case in cases:
            opened = case.open()
            assert opened.affine == pytest.approx(AFFINE, abs=1e-4) and opened.unit == "mm"
            assert opened.spacing == pytest.approx(SPACING)
    image, label = volume(1)
    first = files.case_refs(0)["north"][0].open()
    assert (first.image[0] == image).all() and (first.label[0] == label).all()


def test_hdf5_with_a_spacing_from_the_manifest(trained):
    table, printed, made = trained(hdf5)
    assert np.load(made / "masks" / "n1" / f"n1_{LABEL}.npy").shape == SHAPE
    assert "layout: keyed" in printed[0]
    rows = manifest.read(table)
    assert rows.rows[0].images["image"].endswith("mri_norm2.h5#image") and rows.rows[0].case == "n1"
    assert Files(str(table)).case_refs(0)["north"][0].open().unit == ""
    lines = table.read_text().splitlines()
    spaced = table.with_name("spaced.csv")
    spaced.write_text("\n".join([f"{lines[0]},spacing", *(f"{line},0.7 0.8 2.5" for line in lines[1:])]))
    opened = Files(str(spaced)).case_refs(0)["north"][0]
    assert opened.open().spacing == (0.7, 0.8, 2.5) and opened.open().unit == "mm"
    assert opened.recipe != Files(str(table)).case_refs(0)["north"][0].recipe
    assert (opened.open().image[0] == volume(1)[0]).all()


@pytest.mark.soak
@pytest.mark.parametrize("build", [npz, npy])
def test_arrays_of_numpy(trained, build):
    table, printed, made = trained(build)
    assert np.load(made / "masks" / "s3" / f"s3_{LABEL}.npy").shape == SHAPE
    assert f"layout: {'keyed' if build is npz else 'tree'}" in printed[0]
    assert (Files(str(table)).case_refs(0)["south"][0].open().label[0] == volume(11)[1]).all()


def test_retinas_of_three_sites(trained):
    """RGB files are one modality of three channels; 0/255 and 1-bit masks are one label, which is said once."""
    table, printed, made = trained(retina, patch="[16,16]")
    with Pillow.open(made / "masks" / "Image_02L" / "Image_02L_mask.png") as mask:
        assert mask.size == (20, 24) and set(np.unique(mask)) <= {0, 255}
    assert "layout: pairs" in printed[0] and printed[0].count("0 and 1 or 0 and 255") == 1
    assert "nothing was taken from DRIVE/test/mask, DRIVE/training/mask" in " ".join(printed[0].split())
    rows = {(r.site, r.case): r for r in manifest.read(table).rows}
    assert len(rows) == 12 and {s for s, _ in rows} == {"DRIVE", "CHASE", "STARE"}
    drive = rows["DRIVE", "21_training"]
    assert drive.images.keys() == {"image"} and drive.label.endswith("training/1st_manual/21_manual1.gif")
    assert drive.split == "train" and rows["DRIVE", "24_test"].split == "test"
    assert rows["CHASE", "Image_02L"].label.endswith("Image_02L_1stHO.png")
    files = Files(str(table))
    assert files.modality_names == ("red", "green", "blue") and files.label_names == ("mask",)
    for cases in files.case_refs(0).values():
        assert all(c.open().label.sum() > 9 for c in cases)
    assert Files(str(table), modalities=("image",)).modality_names == ("red", "green", "blue")
    assert Files(str(table), modalities=("green",)).modality_names == ("green",)


def test_one_case_is_a_dataset(tmp_path, polysite):
    image, label = volume(1)
    for name, array in (("t1", image), ("seg", label)):
        file = tmp_path / "patient" / f"{name}.nii.gz"
        file.parent.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), file)
    code, out, _ = polysite("data", "scan", tmp_path / "patient", "--out", tmp_path / "m.csv")
    assert code == 0 and "layout: tree" in out
    assert [r.case for r in manifest.read(Path(tmp_path / "m.csv")).rows] == ["patient"]


def test_folders_that_are_called_after_patients_get_pseudonyms(tmp_path, polysite, monkeypatch):
    """No identifier of a DICOM file, nor the name of a folder that holds one, reaches anything that is written."""
    scans, made = tmp_path / "scans", tmp_path / "made"
    for site, name, image, label in cases():
        folder = scans / site / (f"Jane_DOE {name}" if name == "n1" else name)
        foreign.dicom_series(folder / "ct", image, spacing=SPACING, origin=ORIGIN)
        itk_plain(folder / "seg.nrrd", label)
    made.mkdir()
    monkeypatch.setenv("POLYSITE_CACHE", str(made / "cache"))
    printed = []
    for command in (
        ("data", "scan", scans, "--out", tmp_path / "manifest.csv"),
        ("data", "preview", tmp_path / "manifest.csv", "--out", made / "preview"),
        ("train", tmp_path / "manifest.csv", "--out", made / "run", *SETTINGS, "--set", "train.patch=[8,8,8]"),
        ("predict", made / "run", unlabelled(scans), "--out", made / "masks", "--key", tmp_path / "key.csv"),
        ("predict", made / "run", tmp_path / "manifest.csv", "--out", made / "again"),
    ):
        code, out, err = polysite(*command)
        assert code == 0, (command, out, err)
        printed.append(out + err)
    (made / "printed.txt").write_text("\n".join(printed))
    everything = foreign.written(made).lower()
    assert [s for s in (*foreign.SECRETS, "jane") if s.lower().encode() in everything] == []
    rows = manifest.read(tmp_path / "manifest.csv").rows
    (pseudonym,) = [r.case for r in rows if r.case.startswith("scan-")]
    assert (made / "masks" / pseudonym).is_dir() and (made / "masks" / "n2").is_dir()
    assert (tmp_path / "key.csv").read_text() == f"pseudonym,name\n{pseudonym},Jane_DOE n1\n"
    assert (tmp_path / "key.csv").stat().st_mode & 0o077 == 0
    assert f"are called {pseudonym}" in printed[0] and "1 DICOM scan was called after the patient" in printed[3]
    same_predictions(made / "masks", made / "again")


def itk_plain(file, array):
    image = SimpleITK.GetImageFromArray(array.transpose(2, 1, 0))
    image.SetSpacing(SPACING)
    image.SetOrigin(ORIGIN)
    SimpleITK.WriteImage(image, str(file))


def test_dicom_segmentations_lie_on_their_slices_and_name_no_patient(tmp_path):
    """Read back by highdicom: the masks, slice by slice; of the series only its UIDs are in the file."""
    highdicom = pytest.importorskip("highdicom", reason="DICOM-SEG needs the optional package highdicom")
    axes = (DIRECTION[0], DIRECTION[3], DIRECTION[6], DIRECTION[1], DIRECTION[4], DIRECTION[7])
    image, label = volume(1)
    folder = foreign.dicom_series(tmp_path / "ct", image, spacing=SPACING, origin=ORIGIN, axes=axes)
    masks = np.stack([label, np.zeros_like(label)])
    masks[1, 1, 2, 5] = 1
    content = dicom_seg.content(masks, ["tumour", "edge"], folder, "scan-1234")
    (tmp_path / "seg.dcm").write_bytes(content)
    assert [s for s in foreign.SECRETS if s.encode() in content] == [] and b"scan-1234" in content
    made = highdicom.seg.segread(tmp_path / "seg.dcm")
    assert [d.SegmentLabel for d in made.SegmentSequence] == ["tumour", "edge"]
    files = dicom_reader.ordered(folder)
    uids = [pydicom.dcmread(f, specific_tags=["SOPInstanceUID"]).SOPInstanceUID for f in files]
    found = made.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
    assert np.array_equal(found.transpose(3, 2, 1, 0), masks)
    places = [pydicom.dcmread(f).ImagePositionPatient[2] for f in files]
    assert places == sorted(places)


def test_one_site_of_arrays_is_counted_once_and_has_no_axes(tmp_path, polysite):
    for k in range(2):
        for name, array in zip(("images", "labels"), volume(k), strict=True):
            file = tmp_path / "cubes" / name / f"cube{k}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, array)
    table = tmp_path / "m.csv"
    code, out, _ = polysite("data", "scan", tmp_path / "cubes", "--out", table)
    assert code == 0 and [line.split()[1] for line in out.splitlines() if line.startswith("│")] == ["all"]
    assert "--table FILE, a CSV with the columns case and site" in out
    code, out, _ = polysite("data", "check", table)
    assert code == 0 and "RAS" not in out  # an array does not say which side is left
