"""Manifests, and the cases they list."""

import json

import nibabel
import numpy as np
import pytest
from PIL import Image as Pillow

from polysite.data import manifest
from polysite.data.files import Files
from polysite.data.manifest import Manifest, Row
from polysite.errors import ConfigError, DataError

LABELS = {"WT": (1, 2, 4), "ET": (4,)}


def save(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4) if affine is None else affine), path)


def files(folder, *lines, **settings):
    """The source of a manifest with these lines."""
    (folder / "m.csv").write_text("\n".join(lines) + "\n")
    return Files(path=str(folder / "m.csv"), **settings)


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "deep/er/m.csv"])
def test_what_is_written_is_read_back(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    images, labels = {"t1": "n/t1.nii.gz", "t2": ""}, {"WT": (1, 2, 4), "ET": (4,)}
    north = Row("north", "1", images, "n/seg.nii.gz", labels, group="HGG")
    south = Row("south", "1", {"t1": "n/t1.nii.gz", "t2": "n/t2.nii.gz#1"}, "n/seg.nii.gz", labels, split="test")
    listed = Manifest((north, south), tmp_path)
    manifest.write(listed, tmp_path / name)
    back = manifest.read(tmp_path / name)
    assert back.modalities == ("t1", "t2") and back.label_names == ("WT", "ET") and back.task == "segmentation"
    for mine, theirs in zip(listed.rows, back.rows, strict=True):
        for field in ("site", "case", "labels", "group", "split"):
            assert getattr(mine, field) == getattr(theirs, field)
        files = zip((*mine.images.values(), mine.label), (*theirs.images.values(), theirs.label), strict=True)
        assert all((listed.file(a) == back.file(b)) if a else not b for a, b in files)
    assert back.rows[0].images["t2"] == ""


def test_a_table_from_a_spreadsheet_and_lists_in_json_lines_are_read(tmp_path):
    text = "\ufeffsite;case;ct;class;box;age\nA;1;a.mhd;nodule;1 2 3 50 50 50;54\nB;1;b.mhd;other;;\n"
    (tmp_path / "m.csv").write_bytes(text.encode())
    found = manifest.read(tmp_path / "m.csv")
    assert found.task == "classification" and found.label_names == ("nodule", "other") and found.modalities == ("ct",)
    assert found.rows[0].box == (1, 2, 3, 50, 50, 50) and not found.rows[1].box
    row = {"site": "A", "case": 7, "t1": "a.nii", "label": "s.nii", "labels": {"x": 1, "y": [2, 3]}, "group": None}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    (found,) = manifest.read(tmp_path / "m.jsonl").rows
    assert found.case == "7" and found.labels == {"x": (1,), "y": (2, 3)} and found.group == ""


HEAD, CLASSED, ONE = "site,case,t1,label,labels\n", "site,case,t1,class", "A,1,a.nii,s.nii,L=1\n"
BAD = {
    "no file": (None, "cannot be read"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "no case": (HEAD, "holds no case"),
    "no site": (HEAD + ",1,a.nii,s.nii,L=1\n", "line 2: the row has no site"),
    "twice": (HEAD + ONE + "A,1,b.nii,s.nii,L=1\n", "case '1' of site 'A' is there twice"),
    "no images": ("site,case,label,labels\nA,1,s.nii,L=1\n", "no column of the manifest names image files"),
    "an odd image": (HEAD + ONE + "A,2,b.txt,s.nii,L=1\n", "line 3: 'b.txt' in column 't1' is no image file"),
    "another ending": (HEAD + ONE + "A,2,b.mgz,s.nii,L=1\n", "is no image file"),
    "only another ending": (HEAD + "A,1,a.mgz,s.mgz,L=1\n", ".mgz as in 'a.mgz' is not"),
    "no truth": ("site,case,t1\nA,1,a.nii\n", "needs either a label map"),
    "no meaning": ("site,case,t1,label\nA,1,a.nii,s.nii\n", "declares the labels none"),
    "a name of two lines": (HEAD + ONE + 'A,2,b.nii,s.nii,"L\nM=1"\n', "declares the labels L M; others"),
    "other names": (HEAD + ONE + "A,2,b.nii,s.nii,M=1\n", "declares the labels M; others declare L"),
    "labels of no form": (HEAD + "A,1,a.nii,s.nii,L:1\n", "line 2: labels = 'L:1' is not of the form"),
    "long row": (HEAD + "A,1,a.nii,s.nii,L=1,9\n", "line 2: the row has more or fewer cells"),
    "short row": (HEAD + "A,1,a.nii\n", "line 2: the row has more or fewer cells"),
    "two columns": ("site,case,t1,t1,label,labels\nA,1,a.nii,a.nii,s.nii,L=1\n", "same name"),
    "a strange split": (CLASSED + ",split\nA,1,a.nii,x,tomorrow\n", "split = 'tomorrow'"),
    "a short box": (CLASSED + ",box\nA,1,a.nii,x,1 2 3\n", "box of 3 numbers"),
    "a box at infinity": (CLASSED + ",box\nA,1,a.nii,x,0 0 inf 1 1 1\n", "box of 6 numbers"),
    "a box of words": (CLASSED + ",box\nA,1,a.nii,x,left lung\n", "line 2"),
    "a spacing of zero": (CLASSED + ",spacing\nA,1,a.nii,x,0 1 1\n", "it is the size of a voxel"),
    "an endless cell": (CLASSED + "\nA,1,a.nii," + "x" * 200000 + "\n", "field larger than"),
    "a reserved name": (CLASSED + "\nA,1,a.nii#99999,x\n", "no column of the manifest names image files"),
    "half an object": ('{"site": "A"', "line 1: not a JSON object"),
    "a list": ("[1, 2]", "line 1: not a JSON object"),
    "no text": ('{"site": "\\ud800", "case": "1", "t1": "a.nii", "class": "x"}', "a name that is not valid text"),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_manifest_is_one_sentence(tmp_path, text, says):
    path = tmp_path / ("m.jsonl" if str(text).startswith(("{", "[")) else "m.csv")
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=r"m\.csv|m\.jsonl|case '") as refusal:
        manifest.read(path)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.fixture
def federation(tmp_path):
    """Two sites that write the same label with different values; one channel of a file; one modality missing."""
    rng = np.random.default_rng(0)
    image = rng.random((5, 6, 7, 2)).astype(np.float32)
    truth = np.zeros((5, 6, 7), np.uint8)
    truth[1:3, 2, 2:5], truth[1, 2, 2] = 1, 3
    affine = np.diag([1.0, 2.0, 2.0, 1.0])
    for site, enhancing in (("A", 4), ("B", 3)):
        save(tmp_path / site / "both.nii.gz", image, affine)
        save(tmp_path / site / "seg.nii.gz", np.where(truth == 3, enhancing, truth).astype(np.uint8), affine)
    lines = (
        "site,case,t1,t2,label,labels,group",
        'A,1,A/both.nii.gz#0,A/both.nii.gz#1,A/seg.nii.gz,"WT=1,4; ET=4",HGG',
        'B,1,B/both.nii.gz#1,,B/seg.nii.gz,"WT=1,3; ET=3",LGG',
    )
    return files(tmp_path, *lines, allow=("missing",)), image, truth


def test_cases_are_read_as_the_manifest_says(federation):
    source, image, truth = federation
    (a,), (b,) = source.case_refs(0).values()
    assert (a.site, a.name, a.group, a.modalities, len(a.files)) == ("A", "1", "HGG", 2, 2)
    first, second = a.open(), b.open()
    assert (first.image == np.moveaxis(image, -1, 0)).all() and first.spacing == (1.0, 2.0, 2.0)
    assert (second.image[0] == image[..., 1]).all() and not second.image[1].any()
    for case in (first, second):
        assert (case.label == np.stack([truth > 0, truth == 3])).all()
    assert a.volumes() == b.volumes() == pytest.approx({"WT": 6 * 4 / 1000, "ET": 4 / 1000})


def test_a_missing_modality_is_refused_unless_allowed(federation):
    source = Files(path=federation[0].path)
    (_,), (b,) = source.case_refs(0).values()
    with pytest.raises(DataError, match=r"case '1' of site 'B' has no t2; .* data.allow = \['missing'\]"):
        b.open()
    chosen = Files(path=source.path, modalities=("t1",))
    assert [p.open().image.shape[0] for (p,) in chosen.case_refs(0).values()] == [1, 1]
    for wrong, says in (({"modalities": ("t9",)}, "'t9'"), ({"exclude": ("Z",)}, "'Z'"), ({"path": ""}, "data.path")):
        with pytest.raises(ConfigError, match=says):
            _ = Files(**{"path": source.path, **wrong}).manifest


def test_a_box_is_cut_where_it_says_in_any_orientation(tmp_path):
    """A bright voxel at a point of the patient is found in the middle of the box around it."""
    for k, axes in enumerate(([0, 1, 2], [2, 0, 1])):
        affine = np.eye(4)
        affine[:3, :3] = (np.eye(3) * [-1, 1, -1])[:, axes] * [0.5, 1.0, 2.0]
        affine[:3, 3] = [30, -20, 10]
        array = np.zeros((40, 30, 20), np.int16)
        array[20, 15, 10] = 100
        save(tmp_path / f"{k}.nii.gz", array, affine)
        x, y, z = (affine @ [20, 15, 10, 1])[:3]
        lines = "site,case,ct,class,box", f"A,1,{k}.nii.gz,n,{x} {y} {z} 9 9 9", f"A,2,{k}.nii.gz,o,"
        case, _ = (p.open() for p in files(tmp_path, *lines).case_refs(0)["A"])
        assert case.image.shape[1:] == (18, 9, 4) and case.label.tolist() == [1, 0]
        at = np.argwhere(case.image[0] == 100)[0]
        assert (abs(at - np.array([18, 9, 4]) / 2) <= 1).all()
        assert case.affine @ [*at, 1] == pytest.approx([x, y, z, 1])


def test_a_box_beyond_the_image_is_padded_and_one_outside_refused(tmp_path):
    save(tmp_path / "a.nii.gz", np.arange(64, dtype=np.int16).reshape(4, 4, 4))
    save(tmp_path / "flat.nii.gz", np.full((4, 4, 4), 7, np.int16))

    def first(scan, box):
        lines = "site,case,ct,class,box,patient", f"A,1,{scan},n,{box},", "A,2,a.nii.gz,o,,Ms X"
        case, other = files(tmp_path, *lines).case_refs(0)["A"]
        assert case.patient.endswith(scan) == bool(box) and other.patient == "Ms X"  # of one scan, one patient
        assert case.volumes() == {"n": 1.0, "o": 0.0}
        return case

    assert first("a.nii.gz", "0 0 0 6 6 6").open().image.shape == (1, 6, 6, 6)
    for scan, box, says in (
        ("a.nii.gz", "99 0 0 6 6 6", "case '1' of site 'A': its box lies outside"),
        ("a.nii.gz", "0 0 0 9e3 9e3 9e3", "case '1' of site 'A': its box is too large"),
        ("flat.nii.gz", "", r"flat\.nii\.gz: every voxel is 7; .* data.allow = \['missing'\]"),
    ):
        with pytest.raises(DataError, match=says):
            first(scan, box).open()


def test_colours_of_flat_images_are_channels(tmp_path):
    colours = np.random.default_rng(0).integers(0, 255, (6, 5, 3)).astype(np.uint8)
    Pillow.fromarray(colours).save(tmp_path / "a.png")
    Pillow.fromarray((colours[..., 0] > 100).astype(np.uint8) * 255).save(tmp_path / "s.png")
    flat = files(tmp_path, "site,case,red,blue,label,labels", "A,1,a.png#0,a.png#2,s.png,L=255")
    case = flat.case_refs(0)["A"][0].open()
    assert flat.dims == 2 and (case.image == colours[..., [0, 2]].transpose(2, 0, 1)).all()
    assert (case.label[0] == (colours[..., 0] > 100)).all() and case.spacing == (1.0, 1.0)


def test_keys_folders_and_spacings_survive_a_manifest(tmp_path):
    rows = "A,1,a.h5#x/t1#2,ct/,a.h5#7,L=1,0.5 0.5 2", "A,2,b.h5#3,,b.npy#1,L=1,"
    read = files(tmp_path, "site,case,t1,ct,label,labels,spacing", *rows).manifest
    first, second = read.rows
    assert read.file(first.images["t1"]) == (tmp_path / "a.h5#x/t1", 2) and read.file(first.label)[1] is None
    assert first.spacing == (0.5, 0.5, 2.0) and second.spacing == ()
    assert read.file(second.label) == (tmp_path / "b.npy", 1)
    manifest.write(read, tmp_path / "again.csv")
    assert manifest.read(tmp_path / "again.csv") == read
