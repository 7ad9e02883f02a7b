"""Every format of scans from the folder to predictions: scan, check, preview, two rounds of training, predict."""

import csv
import json
import shutil
from pathlib import Path

import h5py
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
AXES = (DIRECTION[0], DIRECTION[3], DIRECTION[6], DIRECTION[1], DIRECTION[4], DIRECTION[7])
# of these axes: voxels to millimetres in RAS
AFFINE = np.diag([-1, -1, 1, 1]) @ np.block(
    [[np.reshape(DIRECTION, (3, 3)) * SPACING, np.array(ORIGIN)[:, None]], [np.zeros(3), 1]]
)
LABEL = "label_1"  # what a value without a name is called
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


def cases(root):
    """The folder of every case, its scan and its label map."""
    for site, names in CASES.items():
        for name in names:
            yield root / site / name, *volume(int(name[1:]) + 10 * (site == "south"))


def dicom(root):
    for folder, image, label in cases(root):
        place = folder.with_name("Jane_DOE n1") if folder.name == "n1" else folder
        foreign.dicom_series(place / "ct", image, spacing=SPACING, origin=ORIGIN, axes=AXES)
        itk(place / "seg.nrrd", label)


def nrrd(root):
    for folder, image, label in cases(root):
        itk(folder / "t1.nrrd", image)
        itk(folder / "seg.nhdr", label)


def hdf5(root):
    for folder, image, label in cases(root):
        folder.mkdir(parents=True)
        with h5py.File(folder / "mri_norm2.h5", "w") as file:
            file.create_dataset("image", data=image.astype(np.float32), compression="gzip")
            file.create_dataset("label", data=label, compression="gzip")


def pictures(root):
    """RGB files, and masks of 0 and 255 or of one bit."""
    for folder, image, label in cases(root):
        for kind in ("images", "masks"):
            (folder.parent / kind).mkdir(parents=True, exist_ok=True)
        mask = label[..., 3] * 255 if folder.parent.name == "north" else label[..., 3].astype(bool)
        Pillow.fromarray((image[..., 2:5] // 3).astype(np.uint8)).save(folder.parent / "images" / f"{folder.name}.tif")
        Pillow.fromarray(mask).save(folder.parent / "masks" / f"{folder.name}.png")


@pytest.fixture
def trained(tmp_path, polysite, monkeypatch):
    """Take a folder the whole way; return the manifest, what was printed, and the folder of all that was written."""

    def run(build):
        build(tmp_path / "scans")
        patch = "[8,8]" if build is pictures else "[8,8,8]"
        made = tmp_path / "made"
        made.mkdir()
        monkeypatch.setenv("POLYSITE_CACHE", str(made / "cache"))
        table, key, printed = tmp_path / "manifest.csv", tmp_path / "key.csv", []
        for command in (
            ("data", "scan", tmp_path / "scans", "--out", table),
            ("data", "check", table),
            ("data", "check", table, "--json"),
            ("data", "preview", table, "--out", made / "preview"),
            ("train", table, "--out", made / "run", *SETTINGS, "--set", f"train.patch={patch}"),
            ("predict", made / "run", table, "--out", made / "masks"),
            ("predict", made / "run", unlabelled(tmp_path / "scans"), "--out", made / "unlabelled", "--key", key),
        ):
            code, out, err = polysite(*command)
            assert code == 0, (command, out, err)
            printed.append(out + err)
        (made / "printed.txt").write_text("\n".join(printed))
        assert len((made / "run" / "rounds.jsonl").read_text().splitlines()) == 2
        same_predictions(made / "masks", made / "unlabelled")
        return table, printed, made

    return run


def unlabelled(scans):
    """Return a copy without label maps, as scans come from a clinic; arrays of keyed files stay."""
    scans = Path(shutil.copytree(scans, scans.parent / "clinic"))
    for file in sorted(scans.rglob("*")):
        if file.is_file() and (file.name.startswith("seg.") or file.parent.name == "masks"):
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


def scans_and_masks(table, made, end):
    for row in manifest.read(table).rows:
        (scan,) = row.images.values()
        yield Path(scan), made / "masks" / row.case / f"{row.case}_{LABEL}.{end}"


def test_dicom_and_a_folder_that_is_called_after_its_patient(trained, tmp_path):
    """No identifier of a DICOM file, nor the name of a folder that holds one, reaches anything that is written."""
    table, printed, made = trained(dicom)
    rows = manifest.read(table).rows
    assert [*rows[1].images] == ["ct"] and rows[1].images["ct"].endswith("scans/north/n2/ct/")
    same_geometry(table)
    assert [s for s in foreign.SECRETS if s in table.read_text()] == []
    everything = foreign.written(made).lower()
    assert [s for s in (*foreign.SECRETS, "jane") if s.lower().encode() in everything] == [] and b"n2" in everything
    report = json.loads(printed[2])
    assert report["sites"][0]["unit"] == "mm" and report["sites"][0]["orientation"] == ["LPS"]
    for scan, mask in scans_and_masks(table, made, "nii.gz"):
        same_grid(scan, mask)
    (pseudonym,) = [row.case for row in rows if row.case.startswith("scan-")]
    assert (tmp_path / "key.csv").read_text() == f"pseudonym,name\n{pseudonym},Jane_DOE n1\n"
    assert (tmp_path / "key.csv").stat().st_mode & 0o077 == 0
    assert f"are called {pseudonym}" in printed[0] and "1 DICOM scan was called after the patient" in printed[-1]


def test_nrrd(trained):
    table, _, made = trained(nrrd)
    same_geometry(table)
    for both in scans_and_masks(table, made, "nrrd"):
        same_grid(*both)
        heads = [file.read_bytes().split(b"\n\n")[0].split(b"\n") for file in both]
        one, other = ([line for line in head if line.startswith(b"space")] for head in heads)
        assert sorted(one) == sorted(other) and len(one) == 3


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
    row, plain = manifest.read(table).rows[0], Files(str(table)).case_refs(0)["north"][0]
    assert row.images["image"].endswith("mri_norm2.h5#image") and row.case == "n1" and plain.open().unit == ""
    lines = table.read_text().splitlines()
    spaced = table.with_name("spaced.csv")
    spaced.write_text("\n".join([f"{lines[0]},spacing", *(f"{line},0.7 0.8 2.5" for line in lines[1:])]))
    opened = Files(str(spaced)).case_refs(0)["north"][0]
    assert opened.open().spacing == (0.7, 0.8, 2.5) and opened.open().unit == "mm"
    assert opened.recipe != plain.recipe
    assert (opened.open().image[0] == volume(1)[0]).all()


def test_pictures(trained):
    """RGB files are one modality of three channels; 0/255 and 1-bit masks are one label, which is said once."""
    table, printed, made = trained(pictures)
    with Pillow.open(made / "masks" / "s2" / "s2_mask.png") as mask:
        assert mask.size == (10, 12) and set(np.unique(mask)) <= {0, 255}
    assert "layout: pairs" in printed[0] and printed[0].count("0 and 1 or 0 and 255") == 1
    files = Files(str(table))
    assert files.modality_names == ("red", "green", "blue") and files.label_names == ("mask",)
    assert all(case.open().label.sum() > 9 for cases in files.case_refs(0).values() for case in cases)
    assert Files(str(table), modalities=("image",)).modality_names == ("red", "green", "blue")
    assert Files(str(table), modalities=("green",)).modality_names == ("green",)


def test_dicom_segmentations_lie_on_their_slices_and_name_no_patient(tmp_path):
    """Read back by highdicom: the masks, slice by slice; of the series only its UIDs are in the file."""
    highdicom = pytest.importorskip("highdicom", reason="DICOM-SEG needs the optional package highdicom")
    image, label = volume(1)
    folder = foreign.dicom_series(tmp_path / "ct", image, spacing=SPACING, origin=ORIGIN, axes=AXES)
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
