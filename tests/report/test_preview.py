"""Sheets for a person to look at: every site has one, the slice is the telling one, left is left; scans on pages."""

from dataclasses import replace

import nibabel
import numpy as np
import pytest
from PIL import Image

import polysite as ps
from polysite.data.case import Case
from polysite.data.files import Files
from polysite.errors import DataError
from polysite.report import scans
from polysite.report.preview import axes_of, draw, file_name, upright, widest

SITES = {"north": ps.Hospital(cases=2), "so/uth": ps.Hospital(cases=2, missing=("t2",))}
RAS = np.diag([1.0, 2.0, 3.0, 1.0])


@pytest.fixture
def study():
    return ps.Study(data=ps.Phantom(shape=(32, 32, 32), sites=SITES))


def pixels(file):
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def red(picture):
    """How many pixels have the colour of a refusal."""
    return int((abs(picture - (0xB0, 0x00, 0x20)).sum(-1) < 30).sum())


def test_every_site_has_a_sheet_and_a_case_that_cannot_be_opened_is_said_in_red(study, tmp_path, monkeypatch):
    files = list(draw(study, tmp_path / "new" / "folder"))
    assert [f.name for f in files] == ["north.png", "so%2Futh.png"] and not red(pixels(files[0]))
    tall = len(pixels(files[0]))
    (one, _) = draw(study, tmp_path / "new" / "folder", cases=1)  # over the old one
    assert tall - len(pixels(one)) > 200

    def broken():
        raise DataError("seg.nii.gz ends early " * 20)

    patients = {site: list(found) for site, found in study.data.case_refs(study.seed).items()}
    patients["north"][0] = replace(patients["north"][0], read=broken)
    patients["so/uth"] = [replace(p, read=broken) for p in patients["so/uth"]]
    monkeypatch.setattr(ps.Phantom, "case_refs", lambda self, seed: patients)
    partly, wholly = (pixels(f) for f in draw(study, tmp_path))
    assert red(partly) > 500 and red(wholly) > 1.5 * red(partly)
    assert (partly.sum(-1) == 0).mean() > 0.1 > (wholly.sum(-1) == 0).mean()  # air around a head that is shown


def test_the_slice_with_the_largest_sum_of_labels_is_shown():
    label = np.zeros((2, 9, 8, 8), np.uint8)
    label[0, 2, :5, :5] = 1  # the largest of one label
    label[:, 6, :4, :4] = 1  # the largest of both
    assert widest(label) == 6
    assert widest(label[:, :5]) == 2
    assert widest(label * 0) == widest(label[:0]) == 4


@pytest.mark.parametrize("affine", [RAS, None])
def test_the_patients_left_is_shown_on_the_right_whatever_the_axes(affine):
    image, label = np.zeros((1, 5, 6, 7), np.float32), np.zeros((1, 5, 6, 7), np.uint8)
    image[0, 0, 5, 6], label[0, 0, 5, 6] = 1, 1  # left, front, top
    one = upright(Case("s", "c", image, label, (1.0, 2.0, 3.0), affine=affine))
    assert np.argwhere(one[0]).tolist() == np.argwhere(one[1]).tolist() == [[0, 6, 0, 4]]  # last slice, up, right
    assert one[2] == (3.0, 2.0, 1.0)

    lps = np.diag([-1.0, -2.0, 3.0, 1.0])
    two = upright(Case("s", "c", image[:, ::-1, ::-1], label[:, ::-1, ::-1], (1.0, 2.0, 3.0), affine=lps))
    sagittal = RAS[:, [1, 2, 0, 3]]  # the axes of the array are y, z, x
    turned = [a.transpose(0, 2, 3, 1) for a in (image, label)]
    three = upright(Case("s", "c", *turned, (2.0, 3.0, 1.0), affine=sagittal))
    for other in (two, three):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1]) and one[2] == other[2]


def test_flat_images_and_classes_are_shown_as_they_are():
    image = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    shown, label, spacing = upright(Case("s", "c", image, np.array([0, 1], np.uint8), (0.5, 0.25)))
    assert np.array_equal(shown[:, 0], image) and label.shape == (0, 1, 2, 3) and spacing == (1.0, 0.5, 0.25)


def test_names_of_files_are_safe_and_differ():
    names = ["a/b", "a_b", "a%2Fb", "..", ".hidden", "Zürich", "a\\b", "c:d"]
    made = [file_name(n) for n in names]
    assert len(set(made)) == len(made) and made[5] == "Zürich"
    assert not any(c in n for n in made for c in "/\\:") and not any(n.startswith(".") for n in made)


@pytest.mark.parametrize(("suffix", "spacing", "sides"), [(".nii.gz", "", True), (".npy", "1 1 2", False)])
def test_sides_are_known_only_from_files_that_state_them(tmp_path, suffix, spacing, sides):
    volume, label = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6), np.ones((4, 5, 6), np.uint8)
    for name, array in (("t1", volume), ("seg", label)):
        np.save(tmp_path / f"{name}.npy", array)
        image = nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 2.0, 1.0]))
        image.header.set_xyzt_units("mm")
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
    rows = f"site,case,t1,label,labels,spacing\nnorth,n01,t1{suffix},seg{suffix},a=1,{spacing}\n"
    (tmp_path / "manifest.csv").write_text(rows)
    (ref,) = Files(path=str(tmp_path / "manifest.csv")).case_refs(0)["north"]
    case = ref.open()
    scan = scans.upright_scan(case, axes_of(case), scans.is_oriented(ref))
    assert case.unit == "mm" and scan.crop["sides"] is sides
    assert scan.crop["depth"] == 2.0 and scan.crop["pixel"] == [1.0, 1.0]


def test_a_large_scan_is_thinned_out_but_seen_everywhere():
    label = np.zeros((1, 200, 8, 8), np.uint8)
    label[0, 150:153, 2:4, 2:4] = 1
    label[0, 151, 1:6, 1:6] = 1
    slices = scans._slices(label)
    assert len(slices) <= scans.SLICES and {150, 151, 152} <= set(slices) and (slices[0], slices[-1]) == (0, 199)
    assert max(np.diff(slices)) <= 8
    grey = scans._grey(np.array([[0.0, 1.0, 2.0, 3.0]]))
    assert grey.tolist()[0][0] == 0 and grey.max() == 255
